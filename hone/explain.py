"""What a recipe computes: its formulas with the numbers filled in, what they count, and what can have no effect.

    hone explain recipes/demo/recipe.yaml

    update      1 per rollout, on 32 prompts x 8 answers = 256 samples; 50 in all
    advantage   A_i = (R_i - mean R) / (std R + 1e-6), over the 8 answers to one prompt; std over 7

The formulas are those of `hone.algo`; each is said once, here.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from hone.algo.config import AlgoConfig
from hone.recipe import Pipeline, Recipe, notices, stages

WIDTH = 100

ADVANTAGES = {
    "grpo": "A_i = (R_i - mean R) / (std R + 1e-6), over the {G} answers to one prompt; std over {others}",
    "dr_grpo": "A_i = R_i - mean R, over the {G} answers to one prompt",
    "rloo": "A_i = R_i - mean of the other {others} rewards of its prompt",
    "reinforce_pp": "A_t = sum of rewards from token t on, whitened over all tokens of the step",
    "reinforce_pp_baseline": (
        "A_t = sum of (R_i - mean R of its {G} answers) from token t on, whitened over all tokens of the step"
    ),
    "gae": (
        "A_t = sum over k of ({gamma:g} * {lam:g})^k delta_(t+k), delta_t = r_t + {gamma:g} V_(t+1) - V_t, whitened "
        "over all tokens of the step; r is the reward, at the last token"
    ),
}
LOSSES = {
    "clipped": "-min(rho_t A_t, clip(rho_t, {low:g}, {high:g}) A_t)",
    "gspo": "-min(s A_t, clip(s, {low:g}, {high:g}) A_t)",
    "cispo": "-stop_gradient(clip(rho_t, {low:g}, {high:g})) A_t log p_t",
}
RATIOS = {
    "clipped": "rho_t = p_t / p_old_t",
    "gspo": "s = exp(mean over the sequence of log(p_t / p_old_t))",
    "cispo": "rho_t = p_t / p_old_t",
}
ESTIMATORS = {
    "k1": "log(p_t / ref_t)",
    "k2": "log(p_t / ref_t)^2 / 2",
    "k3": "ref_t / p_t - 1 - log(ref_t / p_t)",
}
CORRECTIONS = {
    "tis": "min(w_t, {cap:g})",
    "mis": "(w_t if w_t <= {cap:g} else 0)",
}
REDUCTIONS = {
    "token_mean": "sum over tokens / all trained tokens of the update",
    "sequence_mean": "mean over a sample's tokens, then mean over the samples of the update",
    "constant": "sum over tokens / (samples of the update x {longest} tokens, the sampling limit)",
}


def explain(recipe: Recipe | Pipeline) -> str:
    """The whole text, one section per stage."""
    sections = [_section(stage) for stage in stages(recipe)]
    warnings = [f"note: {line}" for line in notices(recipe)]
    return "\n\n".join([*sections, *(["\n".join(warnings)] if warnings else [])])


def _section(stage: Recipe) -> str:
    lines = [f"{stage.name} ({stage.stage})"]
    for label, text in _supervised(stage) if stage.stage == "sft" else _reinforcement(stage):
        lines += textwrap.wrap(text, WIDTH, initial_indent=f"  {label:<12}", subsequent_indent=" " * 14)
    return "\n".join(lines)


# --- supervised -------------------------------------------------------------------------------


def _supervised(stage: Recipe) -> Iterator[tuple[str, str]]:
    sft = stage.sft
    total = sum(sft.styles.values())
    styles = ", ".join(f"{name} {100 * share / total:.0f}%" for name, share in sft.styles.items())
    steps = sft.num_steps
    yield (
        "update",
        f"{steps}, of {sft.examples_per_step} examples each; {sft.examples} examples x {sft.epochs} epoch(s)",
    )
    yield "examples", f"worked answers to training problems: {styles}"
    yield "loss", "-log p_t, sum over tokens / all trained tokens of the update"
    yield "trained", "tokens of the answer, its end included; not those of the prompt"
    yield "rate", _rate(stage, steps)
    yield "sizes", _sizes(stage)


# --- reinforcement ----------------------------------------------------------------------------


def _reinforcement(stage: Recipe) -> Iterator[tuple[str, str]]:
    algo, prompts, group = stage.algo, stage.prompts_per_step, stage.samples_per_prompt
    updates = algo.updates_per_rollout
    share = f"{prompts}" if updates == 1 else f"{prompts // updates} of {prompts}"
    yield (
        "rollout",
        (
            f"{prompts} prompts x {group} answers of at most {stage.sampling.max_tokens} tokens: at most "
            f"{prompts * group * stage.sampling.max_tokens} a step, at temperature {stage.sampling.temperature:g}"
        ),
    )
    if algo.refill_rounds:
        yield (
            "refill",
            (
                f"groups whose rewards do not differ are replaced by those of other prompts, at most "
                f"{algo.refill_rounds} times: at most {algo.refill_rounds * prompts} more prompts a step"
            ),
        )
    yield (
        "update",
        (f"{updates} per rollout, each on {share} prompts x {group} answers; {updates * stage.steps} in all"),
    )
    yield "advantage", _advantage(algo, group)
    yield from _loss(algo)
    yield "reduction", REDUCTIONS[algo.reduction].format(longest=stage.sampling.max_tokens)
    yield "counted", _counted(algo)
    yield (
        "trained",
        (
            "tokens of the answer, its end included; not those of the prompt"
            + ("; answers cut at the limit are left out" if algo.mask_truncated else "; answers cut at the limit too")
        ),
    )
    yield "passes", _passes(algo)
    yield "rate", _rate(stage, updates * stage.steps)
    yield "sizes", _sizes(stage)


def _advantage(algo: AlgoConfig, group: int) -> str:
    value = algo.value
    text = ADVANTAGES[algo.advantage].format(G=group, others=group - 1, gamma=value.gamma, lam=value.lam)
    if algo.kl.coef and algo.kl.place == "reward":
        per_token = algo.advantage in ("reinforce_pp", "reinforce_pp_baseline", "gae")
        text += f"; R is less {algo.kl.coef:g} KL {'of each token, where it arises' if per_token else 'of the answer'}"
    return text


def _loss(algo: AlgoConfig) -> Iterator[tuple[str, str]]:
    low, high = clip_range(algo)
    formula, where = LOSSES[algo.loss].format(low=low, high=high), [RATIOS[algo.loss]]
    if algo.dual_clip is not None:
        formula = f"min({formula}, -{algo.dual_clip:g} A_t if A_t < 0)"
    if algo.correction.kind != "none":
        formula = f"{CORRECTIONS[algo.correction.kind].format(cap=algo.correction.cap)} x {formula}"
        where.append("w_t = p_old_t / the sampler's probability")
    if algo.kl.coef and algo.kl.place == "loss":
        formula += f" + {algo.kl.coef:g} KL_t"
    if algo.kl.coef:
        name = algo.kl.estimator
        where.append(f"KL_t = {ESTIMATORS[name]} ({name}), ref the model at the start of the stage")
    if algo.entropy_coef:
        formula += f" {'-' if algo.entropy_coef > 0 else '+'} {abs(algo.entropy_coef):g} H_t"
        where.append("H_t the entropy of the whole distribution")
    yield "loss", formula
    yield "where", "; ".join(where)
    if algo.advantage == "gae":
        acts = algo.value.clip is not None and algo.updates_per_rollout > 1
        clip = "" if not acts else f", or of V within {algo.value.clip:g} of V_old if that is larger"
        yield (
            "value",
            (
                f"(V_t - target_t)^2 / 2{clip}; target_t = A_t + V_t before whitening; trains the head alone, at rate "
                f"{algo.value.lr:g}"
            ),
        )
    yield "clip", _clip(algo, low, high)


def clip_range(algo: AlgoConfig) -> tuple[float, float]:
    """Of the ratio; a weight of `cispo` is never negative."""
    return max(0.0, 1.0 - algo.clip_low), 1.0 + algo.clip_high


def _clip(algo: AlgoConfig, low: float, high: float) -> str:
    if algo.updates_per_rollout == 1:
        return "never acts: the only update of a rollout is on-policy, where the ratio is 1"
    what = {"clipped": "a token's ratio", "gspo": "a sequence's ratio", "cispo": "a token's weight"}[algo.loss]
    acts = f"from the second of {algo.updates_per_rollout} updates on: {what} counts within [{low:g}, {high:g}]"
    if algo.loss == "cispo":
        return f"{acts}; no token loses its gradient"
    return f"{acts}; beyond, a token that moves further the way its advantage says has no gradient"


def _counted(algo: AlgoConfig) -> str:
    out = ["those whose verifier failed", *(["those cut at the limit"] if algo.mask_truncated else [])]
    text = f"every sample of the update except {' and '.join(out)}"
    if algo.needs_every_sample:
        return f"{text}; samples without advantage are computed too, for the sake of the other terms"
    return f"{text}; samples without advantage count, but are not computed: their gradient is 0"


def _passes(algo: AlgoConfig) -> str:
    extra = []
    if algo.updates_per_rollout > 1:
        extra.append("one for the old log-probs")
    elif algo.kl.coef and algo.kl.place == "reward":
        extra.append("one for the policy's log-probs, which the KL in the reward needs")
    if algo.kl.coef:
        extra.append("one of the reference, a second copy of the model")
    if algo.advantage == "gae":
        extra.append("one for the values")
    return f"forward passes beside the update's own: {', '.join(extra) if extra else 'none'}"


# --- both -------------------------------------------------------------------------------------


def _rate(stage: Recipe, updates: int) -> str:
    optim = stage.optim
    parts = [f"AdamW, learning rate {optim.lr:g}"]
    if optim.warmup_steps:
        parts.append(f"reached after {optim.warmup_steps} updates")
    parts.append("then constant" if optim.decay == "constant" else f"then {optim.decay} to 0 at update {updates}")
    return f"{', '.join(parts)}; gradient norm at most {optim.grad_clip:g}"


def _sizes(stage: Recipe) -> str:
    shared = "a prompt once for all its answers" if stage.share_prompts else "a prompt again for every answer"
    recomputed = "; activations computed again on the way back" if stage.model.recompute_activations else ""
    masters = ", float32 master weights" if stage.model.dtype != "float32" else ""
    precision = f"{stage.model.dtype}{masters}{recomputed}"
    return f"micro-batches of at most {stage.tokens_per_microbatch} tokens, {shared}; {precision}"
