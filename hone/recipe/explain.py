"""`hone explain`: the formulas of a recipe with its numbers, what they count, and which settings have no effect.

    hone explain recipes/demo/recipe.yaml

    advantage   A_i = (R_i - mean(R)) / (std(R) + 1e-6)
                R: rewards of the 8 answers to a prompt; std divides by 7; every token of answer i
                  gets A_t = A_i

Formulas: `hone.recipe.explain_formulas`. The tests evaluate them: what is printed is what is computed.
"""

from __future__ import annotations

import textwrap

from hone.recipe import explain_stages
from hone.recipe.explain_formulas import ADVANTAGES, CORRECTIONS, ESTIMATORS, LOSSES, REDUCTIONS
from hone.recipe.explain_phases import Entry, count, curriculum, g, has_resets, n, reference, resets, schedule, trained
from hone.recipe.explain_turns import turn_advantage, turns
from hone.recipe.notes import stage_notices
from hone.recipe.recipe import Pipeline, Recipe
from hone.recipe.schedule import Phases
from hone.recipe.sections.algo import WITHIN_GROUP, AlgoConfig

INDENT = 14  # two spaces and the label
WRAP = textwrap.TextWrapper(100, " " * INDENT, " " * (INDENT + 2), break_long_words=False, break_on_hyphens=False)


def explain(recipe: Recipe | Pipeline) -> str:
    """The text of `hone explain`, one section per stage."""
    return "\n\n".join(_section(stage, alone=isinstance(recipe, Recipe)) for stage in recipe.stages)


def _section(stage: Recipe, alone: bool) -> str:
    lines = [f"stage {stage.name}: {_title(stage)}"]
    if stage.stage == "rl":
        body = _reinforcement(Phases(stage).at(0, 0))
    elif stage.stage == "distil":
        body = _on_policy(stage)
    else:
        body = explain_stages.supervised(stage) if stage.stage == "sft" else explain_stages.generated(stage)
    body.append(("sizes", _sizes(stage)))
    body.append(("schedule", schedule(stage) if stage.stage == "rl" else []))
    for label, paragraphs in [*body, ("note", stage_notices(stage, alone))]:
        beside = [line for text in paragraphs for line in WRAP.wrap(text)]
        if beside:
            lines += [f"  {label:<{INDENT - 2}}{beside[0][INDENT:]}", *beside[1:]]
    return "\n".join(lines)


def _title(stage: Recipe) -> str:
    """The kind and length of a stage."""
    if stage.stage == "sft":
        steps = stage.sft.num_steps
        return f"supervised, {count(stage.sft.epochs, 'epoch') if steps is None else count(steps, 'step')}"
    if stage.stage == "generate":
        return "answers of a teacher"
    kind = "reinforcement learning" if stage.stage == "rl" else "on-policy distillation"
    return f"{kind}, {count(stage.steps, 'step')}"


# --- on-policy distillation ---------------------------------------------------------------------


def _on_policy(stage: Recipe) -> list[Entry]:
    return [
        ("rollout", _rollout(stage)),
        ("turns", turns(stage)),
        ("updates", _updates(stage)),
        ("advantage", explain_stages.teacher_advantage(stage)),
        ("loss", _loss(stage)),
        ("clip", clip(stage.algo)),
        ("reduction", _reduction(stage)[:2]),
        ("trained", ["the completion tokens, including the stop token, but not the prompt tokens"]),
        ("passes", explain_stages.teacher_passes(stage)),
        *trained(stage, stage.updates),
        ("curriculum", curriculum(stage)),
    ]


# --- reinforcement learning -----------------------------------------------------------------------


def _reinforcement(stage: Recipe) -> list[Entry]:
    algo = stage.algo
    return [
        ("rollout", _rollout(stage)),
        ("turns", turns(stage)),
        ("updates", _updates(stage)),
        ("reward", [f"R_i = {' + '.join(f'{g(w)} * {name}' for name, w in stage.reward.parts.items() if w)}"]),
        ("advantage", _advantage(stage)),
        ("loss", _loss(stage)),
        ("clip", clip(algo)),
        ("value", _value(algo) if algo.advantage == "gae" else []),
        ("reduction", _reduction(stage)),
        ("trained", _trained(stage)),
        ("passes", _passes(stage)),
        *_rates(stage),
        ("curriculum", curriculum(stage)),
        ("resets", resets(stage)),
    ]


def _rates(stage: Recipe) -> list[Entry]:
    parts = dict(trained(stage, stage.updates, restarts=has_resets(stage)))
    if stage.algo.advantage == "gae":
        parts["rate"][-1] += ", separately for the value head"
    return list(parts.items())


def _rollout(stage: Recipe) -> list[str]:
    prompts, group, longest = stage.prompts_per_step, stage.samples_per_prompt, stage.rollout_sampling.max_tokens
    lines = [
        f"{count(prompts, 'prompt')} x {count(group, 'answer')} = {n(prompts * group)} per step, each of at most "
        f"{count(longest, 'token')}: at most {n(prompts * group * longest)} completion tokens"
    ]
    rounds = stage.algo.refill_rounds
    if rounds:
        lines.append(
            f"dynamic sampling: groups without a reward difference are replaced, in at most "
            f"{count(rounds, 'more round')}: at most {n(rounds * prompts)} more prompts, "
            f"{n(rounds * prompts * group)} more answers; then the step trains on the groups it has"
        )
    return lines


def _updates(stage: Recipe) -> list[str]:
    updates, prompts, sizes = stage.algo.updates_per_rollout, stage.prompts_per_step, dict.fromkeys(_share(stage))
    answers = " or ".join(n(size * stage.samples_per_prompt) for size in sizes)
    each = f"each on {' or '.join(map(n, sizes))} of the {n(prompts)} prompts"
    if updates == 1:
        each = f"on {'its prompt' if prompts == 1 else f'all {n(prompts)} prompts'}"
    return [
        f"{count(updates, 'optimizer update')} per rollout, {each} ({answers} answers); each answer is in one update",
        f"over the run at most {count(stage.updates or 0, 'update')} on "
        f"{n(stage.steps * stage.prompts_per_step * stage.samples_per_prompt)} answers; updates without a "
        f"gradient are skipped",
    ]


def _share(stage: Recipe) -> tuple[int, int]:
    """Fewest and most prompts of an update; whole groups are dealt out in turn."""
    whole, rest = divmod(stage.prompts_per_step, stage.algo.updates_per_rollout)
    return whole, whole + bool(rest)


def _advantage(stage: Recipe) -> list[str]:
    algo, group = stage.algo, stage.samples_per_prompt
    beta = g(algo.kl.coef) if algo.kl.place == "reward" and algo.kl.coef else ""
    symbols = {
        "answers": group,
        "others": group - 1,
        "gamma": g(algo.value.gamma),
        "lam": g(algo.value.lam),
        "to_go": f" - {beta} * (KL_t + KL_(t+1) + ...)" if beta else "",
        "at_each": f", less {beta} * KL_t at each" if beta else "",
    }
    if algo.credit == "turn" and stage.has_turns:
        return turn_advantage(algo)
    lines = [text.format(**symbols) for text in ADVANTAGES[algo.advantage]]
    if beta and algo.advantage in WITHIN_GROUP:
        lines.append(f"R_i here is the reward less {beta} * (sum of KL_t over answer i)")
    if beta:
        name = algo.kl.estimator
        lines.append(f"KL_t = {ESTIMATORS[name]} ({name}), before the first update; {reference(stage)}")
    return lines


# --- loss ---------------------------------------------------------------------------------------


def formulas(algo: AlgoConfig) -> dict[str, str]:
    """Symbol -> formula, with the numbers filled in; `L_t` is the loss of a token, defined by the symbols after it."""
    low, high = clip_range(algo)
    surrogate = LOSSES[algo.loss].formula.format(low=g(low), high=g(high))
    parts = {"P_t": surrogate}
    if algo.dual_clip is not None:
        parts = {"P_t": f"min(U_t, -{g(algo.dual_clip)} * A_t) if A_t < 0 else U_t", "U_t": surrogate}
    ratio, definition = LOSSES[algo.loss].ratio
    parts[ratio] = definition
    loss = "P_t"
    if algo.correction.kind != "none":
        loss = f"C_t * {loss}"
        parts["C_t"] = CORRECTIONS[algo.correction.kind].format(cap=g(algo.correction.cap))
    if algo.kl.coef and algo.kl.place == "loss":
        loss += f" + {g(algo.kl.coef)} * KL_t"
        parts["KL_t"] = ESTIMATORS[algo.kl.estimator]
    if algo.entropy_coef:
        loss += f" {'-' if algo.entropy_coef > 0 else '+'} {g(abs(algo.entropy_coef))} * H_t"
    return {"L_t": parts.pop("P_t") if loss == "P_t" else loss} | parts


def _loss(stage: Recipe) -> list[str]:
    algo, sampling = stage.algo, stage.sampling
    on_policy = algo.updates_per_rollout == 1
    meaning = {
        "rho_t": "; its value is 1, because the only update per rollout is on-policy" if on_policy else "",
        "s": " over the answer; each token has the gradient of its own log(p_t)" + ("; s is 1" if on_policy else ""),
        "C_t": f" ({algo.correction.kind}, no gradient), q_t: the sampler's probability",
        "KL_t": f" ({algo.kl.estimator}); {reference(stage)}",
    }
    lines = [f"{symbol} = {formula}{meaning.get(symbol, '')}" for symbol, formula in formulas(algo).items()]
    if algo.entropy_coef:
        lines.append("H_t: exact entropy of the distribution over the whole vocabulary from which token t is drawn")
    filters = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0}
    cut = [f"{name} {g(getattr(sampling, name))}" for name, used in filters.items() if used]
    lines.append(
        f"p_t: probability of token t at temperature {g(sampling.temperature)}"
        + (f", over the whole vocabulary, although answers are sampled with {' and '.join(cut)}" if cut else "")
        + ("" if on_policy else "; p_old_t: before the first update of the rollout")
    )
    return lines


def clip_range(algo: AlgoConfig) -> tuple[float, float]:
    """Lower and upper bound of the ratio, which is never below 0."""
    return max(0.0, 1.0 - algo.clip_low), 1.0 + algo.clip_high


def clip(algo: AlgoConfig) -> list[str]:
    """What the clipping does, in words."""
    if algo.updates_per_rollout == 1:
        return ["never acts: with one update per rollout, the ratio is always 1"]
    low, high = map(g, clip_range(algo))
    lines = [
        f"the {LOSSES[algo.loss].clipped} is clipped to [{low}, {high}]",
        f"it takes effect from the second of the {algo.updates_per_rollout} updates on",
    ]
    if algo.loss == "cispo":
        return [*lines, "no token loses its gradient"]
    below = "" if algo.clip_low >= 1 else f"; for A_t < 0 below {low}"
    far = "" if algo.dual_clip is None else f"{' or' if below else '; for A_t < 0'} above {g(algo.dual_clip)}"
    none = f"the clipped term has no gradient for A_t > 0 above {high}"
    return [*lines, f"{none}{below}{far}{' (dual clip)' if far else ''}"]


def _value(algo: AlgoConfig) -> list[str]:
    value = algo.value
    formula = "(V_t - target_t) ** 2 / 2"
    if value.clip is not None:
        c = g(value.clip)
        near = f"(clip(V_t, V_old_t - {c}, V_old_t + {c}) - target_t) ** 2"
        formula = f"max((V_t - target_t) ** 2, {near}) / 2"
    return [
        f"loss of the value head: {formula}",
        "target_t = E_t + V_old_t; reduced like the policy's loss",
        f"V_t: a linear head on the last hidden states, learning rate {g(value.lr)} with the schedule below; its "
        "gradient does not reach the rest of the model",
    ]


# --- what is counted ----------------------------------------------------------------------------


def _reduction(stage: Recipe) -> list[str]:
    algo, longest = stage.algo, stage.rollout_sampling.max_tokens
    samples = _share(stage)[1] * stage.samples_per_prompt
    limit = "sampling.max_tokens" + (" x environment.max_turns" if stage.has_turns else "")
    lines = [f"{algo.reduction}: sum over tokens of {REDUCTIONS[algo.reduction].format(longest=longest)}"]
    lines += {
        "token_mean": [f"N = trained tokens of the update's samples, at most {n(samples * longest)}"],
        "sequence_mean": [f"S = samples of the update, at most {n(samples)}; T_i = trained tokens of the sample"],
        "constant": [f"S = samples of the update, at most {n(samples)}; {longest} is {limit}"],
    }[algo.reduction]
    dull = "; groups without a reward difference are included" if not algo.refill_rounds else ""
    out = ["samples whose verifier failed", *(["truncated samples"] if algo.mask_truncated else [])]
    return [
        *lines,
        f"counted over the whole update, not per micro-batch{dull}; not counted: {', '.join(out)}",
    ]


def _trained(stage: Recipe) -> list[str]:
    algo, longest = stage.algo, stage.sampling.max_tokens
    lines = ["the completion tokens, including the stop token, but not the prompt tokens"]
    if algo.mask_truncated:
        lines.append(
            f"answers cut off at {longest} tokens are left out, but their rewards count in the advantages of the others"
        )
    else:
        lines.append(f"answers cut off at {longest} tokens are trained on, too")
    why = [
        *(["the KL in the loss"] if algo.kl.coef and algo.kl.place == "loss" else []),
        *(["the entropy bonus"] if algo.entropy_coef else []),
        *(["the value head"] if algo.advantage == "gae" else []),
    ]
    dull = "groups without a reward difference"
    if algo.refill_rounds:
        lines.append(f"{dull} are replaced before training")
    elif why:
        lines.append(f"{dull} are computed too: {' and '.join(why)} learn{'' if len(why) > 1 else 's'} from them")
    elif algo.advantage not in WITHIN_GROUP:
        lines.append(f"{dull} are trained on, too: subtracting the mean of the step leaves them an advantage")
    elif algo.kl.coef and algo.kl.place == "reward" and not algo.divides_by_spread:
        lines.append(f"{dull} are trained on, too: the KL in the reward gives them an advantage")
    else:
        lines.append(f"{dull} have A_t = 0 and no gradient: they are counted, but not computed")
    return lines


def _passes(stage: Recipe) -> list[str]:
    """Forward passes over all answers of a step, in addition to those of the updates, and copies of the model."""
    algo = stage.algo
    lines = ["old log-probs: not computed, they equal the current ones"]
    if algo.updates_per_rollout > 1:
        lines = ["old log-probs: one more forward pass before the first update"]
    elif algo.kl.coef and algo.kl.place == "reward":
        lines = ["log-probs of the policy: one more forward pass, for the KL in the reward"]
    if algo.kl.coef:
        what = "a frozen second copy of the model" if stage.lora is None else "the model with its adapter off, no copy"
        lines.append(f"reference log-probs: one more forward pass, of {what}")
    else:
        lines.append("reference log-probs: not computed, there is no KL penalty and no second copy of the model")
    lines += ["values: one more forward pass before the first update"] if algo.advantage == "gae" else []
    return lines + stage.reward.passes()


# --- both ---------------------------------------------------------------------------------------


def _sizes(stage: Recipe) -> list[str]:
    once = "computed once for all answers to a prompt" if stage.share_prompts else "computed for every answer"
    if stage.stage == "generate":
        return [f"{stage.model.dtype}; at most {count(stage.rollout.max_sequences, 'sequence')} decoded at once"]
    masters = " with float32 master weights" if stage.model.dtype == "bfloat16" else ""
    recomputed = "; activations are recomputed in the backward pass" if stage.model.recompute_activations else ""
    return [
        f"micro-batches of at most {count(stage.tokens_per_microbatch, 'packed token')}; a longer sequence has its own",
        f"prompt tokens come on top of completion tokens, {once}; how many depends on the prompts (--dry-run shows "
        "two)",
        f"{stage.model.dtype}{masters}{recomputed}",
    ]
