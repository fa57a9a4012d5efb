"""Notes on settings that are possible but have no effect, or not the intended one; shown at the start of a run.

    for line in notices(load("recipes/demo/recipe.yaml")): print("note:", line)

A note is about something that the recipe sets: defaults have none. What is impossible is an error: `hone.recipe.rules`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hone.recipe.recipe import KINDS, kinds_with
from hone.recipe.schedule import Phases, holding, parse_at
from hone.recipe.sections.algo import AlgoConfig
from hone.recipe.sections.rollout import SERVER_ONLY, RolloutConfig, ServerConfig
from hone.recipe.stages import MODELLESS, references, stage_named
from hone.rewards import REWARDS
from hone.rewards.config import RewardConfig

if TYPE_CHECKING:
    from hone.recipe.recipe import (
        DistilStage,
        GenerateStage,
        LoopStage,
        Pipeline,
        Recipe,
        RLStage,
        SFTStage,
        StageSettings,
        TrainedStage,
    )

#: Higher learning rates get a note: an update of AdamW moves every weight by up to the learning rate.
HIGHEST_LR = 0.1


def notices(recipe: Recipe | Pipeline) -> list[str]:
    """One line for each setting that is possible but has no effect, or not the intended one."""
    stages = recipe.stages
    if stages[0] is recipe:
        return [*stage_notices(stages[0]), *_of_all(stages)]
    owners: dict[str, list[str]] = {}  # of each line, because stages inherit settings
    for stage in stages:
        for line in stage_notices(stage, alone=False):
            owners.setdefault(line, []).append(stage.name)
    own = [f"stage{'s' if len(names) > 1 else ''} {', '.join(names)}: {line}" for line, names in owners.items()]
    return [*own, *_of_all(stages), *_unused(stages)]


def stage_notices(stage: Recipe, alone: bool = True) -> list[str]:
    """The notes of one stage. `alone`: it is the whole recipe, not one of a pipeline's stages, which share settings."""
    lines = list(_of_every_kind(stage))
    if stage.stage == "sft":
        lines += _sft(stage, alone)
    if stage.stage == "generate":
        lines += _generate(stage, alone)
    if stage.stage == "distil":
        lines += _distil(stage)
    if stage.stage == "rl":
        lines += _phases(stage)
    if stage.stage != "generate":
        lines += _trained(stage, stage.updates)
    return lines


# --- all stages -------------------------------------------------------------------------------------------------------


def _of_all(stages: Sequence[Recipe]) -> Iterator[str]:
    launch = stages[0].launch
    if launch.kind == "ray" and launch.ray.server.changed() and not any(stage.starts_server for stage in stages):
        yield "launch.ray.server has no effect: hone starts no rollout server in any stage"
    changed = dict.fromkeys(key for stage in stages for key in stage.changed())
    for key in changed:
        if not any(key in KINDS[stage.stage].model_fields for stage in stages):
            yield f"{key} has no effect: it is for stages of kind {' and '.join(kinds_with(key))}, and there is none"


def _unused(stages: Sequence[Recipe]) -> Iterator[str]:
    """Stages of a pipeline whose result no later stage uses."""
    for i, stage in enumerate(stages[:-1]):
        later = stages[i + 1 :]
        used = {stage_named(value) for other in later for _, value, _ in references(other)}
        used |= {other.model.stage for other in later if not (other.stage == "generate" and other.teacher)}
        if stage.name not in used:
            what = "dataset" if stage.stage in MODELLESS else "model"
            yield f"stage {stage.name}: no later stage uses its {what}"


# --- every kind -------------------------------------------------------------------------------------------------------


def _of_every_kind(stage: StageSettings) -> Iterator[str]:
    yield from (f"task.{text}" for text in stage.task.without_effect())
    if stage.model.path != "tiny" and stage.model.tiny.changed():
        yield f"model.tiny has no effect: model.path is {stage.model.path}"
    if stage.prompt.template_args and stage.prompt.style == "raw":
        yield "prompt.template_args has no effect with prompt.style raw, which uses no chat template"
    launch = stage.launch
    for name in ("ray", "slurm"):
        if launch.kind != name and getattr(launch, name).changed():
            yield f"launch.{name} has no effect while launch.kind is {launch.kind}"
    if launch.restarts is not None and launch.kind == "local" and stage.parallel.processes == 1:
        yield (
            "launch.restarts has no effect on a single process, which is not supervised; give parallel, ray or slurm"
        )
    notice, saving = launch.slurm.notice, stage.checkpoint.stop_within_seconds
    if launch.kind == "slurm" and notice <= saving:
        yield (
            f"launch.slurm.notice {notice}: a run may take {saving:g} s to save (checkpoint.stop_within_seconds), so "
            "it may be killed before it has saved; raise the one or lower the other"
        )


def _trained(stage: TrainedStage, updates: int | None) -> Iterator[str]:
    """Notes on stages that train. `updates`: optimizer updates of the stage; None if their number depends on the
    data."""
    optim = stage.optim
    if optim.lr > HIGHEST_LR:
        yield (
            f"optim.lr {optim.lr:g}: each update of AdamW moves every weight by up to this much, which destroys the "
            "model; usual are 1e-6 (all weights), 1e-5 to 1e-4 (LoRA), and up to 1e-2 (a tiny model from scratch)"
        )
    if updates is not None and optim.warmup_steps >= updates:
        yield (
            f"optim.warmup_steps {optim.warmup_steps}: the stage has at most {updates} updates, so it never reaches "
            "the full learning rate"
        )
    if not stage.has_turns and stage.environment.changed():
        yield "environment has no effect without a name, a program or tools: problems are answered in one turn"
    if stage.layers.train == "all" and stage.layers.count is not None:
        yield "layers.count has no effect with layers.train all; it goes with first and last"


# --- one kind ---------------------------------------------------------------------------------------------------------


def _sft(stage: SFTStage, alone: bool) -> Iterator[str]:
    changed = stage.sft.changed()
    if stage.sft.data is not None:
        for key in ("styles", "examples"):
            if key in changed:
                yield f"sft.{key} has no effect with sft.data, whose rows are all used"
    elif "validation" in changed:
        yield "sft.validation has no effect without sft.data: the task has a validation split"
    if alone and set(stage.watch.changed()) - {"max_skipped"}:
        yield "watch: only max_skipped has an effect in a stage of kind sft"
    if alone and stage.checkpoint.keep_best:
        yield "checkpoint.keep_best has no effect in a stage of kind sft, whose validation measures no accuracy"


def _generate(stage: GenerateStage, alone: bool) -> Iterator[str]:
    for key in stage.checkpoint.changed() if alone else ():
        if key != "stop_within_seconds":
            yield f"checkpoint.{key} has no effect in a stage of kind generate, which keeps every answer"
    if stage.parallel.shard * stage.parallel.tensor > 1:
        yield (
            "parallel.shard and parallel.tensor have no effect in a stage of kind generate: each process holds the "
            "whole teacher"
        )
    if stage.teacher is not None and "://" in stage.teacher:
        for key in stage.prompt.changed():
            if key != "system":
                yield f"prompt.{key} has no effect while teacher is an endpoint, which has its own template"


def _distil(stage: DistilStage) -> Iterator[str]:
    changed = stage.algo.changed()
    for key in ("advantage", "value"):  # which turn rewards into advantages
        if key in changed:
            yield f"algo.{key} has no effect in a stage of kind distil"
    yield from _loop(stage, skip=("value",))


def _phases(stage: RLStage) -> Iterator[str]:
    """Notes on each of the recipes that result from a stage's schedule, each given once."""
    phases = Phases(stage)
    shown = [*_rl(phases.at(0, 0)), *_resets(stage)]
    yield from shown
    for lines in phases.sets():
        for text in _rl(phases.merged(lines)) if set(holding(stage.schedule, 0, 0)) <= set(lines) else ():
            if text not in shown:
                shown.append(text)
                yield f"schedule, from {stage.schedule[lines[-1]]['at']} on: {text}"


def _rl(stage: RLStage) -> Iterator[str]:
    yield from _loop(stage)
    yield from _reward(stage.reward)
    yield from _watch(stage)
    cut = [key for key in ("top_p", "top_k", "min_p") if key in stage.sampling.changed()]
    if stage.rollout.engine == "sglang" and cut:
        yield f"sampling.{cut[0]}: SGLang's log-probs are biased, because they ignore this truncation"
    if stage.rollout.engine == "vllm" and stage.rollout.vllm.serves_adapter and stage.lora is None:
        yield "rollout.vllm.lora has no effect without lora: there is no adapter to send"
    if stage.eval.every > stage.steps:
        yield f"eval.every {stage.eval.every} is more than steps ({stage.steps}), so the only validation is at step 0"
    overlong = stage.reward.overlong
    if stage.reward.parts.get("overlong") and overlong.max_tokens is not None:
        free = overlong.max_tokens - overlong.buffer
        if free >= stage.sampling.max_tokens:
            yield (
                f"reward.parts.overlong has no effect: it begins above {free} tokens, but answers end at "
                f"{stage.sampling.max_tokens} (sampling.max_tokens)"
            )
    if "perplexity" in stage.reward.parts and stage.reward.perplexity.is_server and stage.prompt.style != "raw":
        yield (
            f"prompt.style {stage.prompt.style} has no effect on the questions to reward.perplexity.answerer: it is a "
            "server, so they use prompt.template"
        )


def _loop(stage: LoopStage, skip: Sequence[str] = ()) -> Iterator[str]:
    """Notes on stages of the training loop. `skip`: settings of `algo` that already have a note."""
    yield from (f"algo.{text}" for text in _algo(stage.algo, skip))
    yield from (f"rollout.{text}" for text in _engine(stage.rollout))
    yield from (f"curriculum.{text}" for text in _curriculum(stage))
    if not stage.has_turns and stage.algo.credit == "turn":
        yield "algo.credit turn has no effect without environment.name or tools: there is one turn"
    weights = stage.rollout.weights
    if weights != "policy" and stage.rollout.engine == "native":
        if weights == stage.model.dtype:
            yield f"rollout.weights {weights} has no effect: the policy's weights have this type"
        elif stage.algo.correction.kind == "none":
            yield (
                f"rollout.weights {weights}: answers are sampled from rounded weights without a correction; set "
                "algo.correction.kind to tis or mis"
            )


# --- sections ---------------------------------------------------------------------------------------------------------


def _algo(algo: AlgoConfig, skip: Sequence[str] = ()) -> Iterator[str]:
    changed, kl = algo.changed(), algo.kl.changed()
    if "dual_clip" in changed and algo.loss == "cispo":
        yield "dual_clip has no effect with loss cispo, whose weights are bounded already"
    if algo.updates_per_rollout == 1:
        yield from _on_policy(algo)
    elif algo.clip_low >= 1:
        paper = ", as in the CISPO paper" if algo.loss == "cispo" else ""
        yield f"clip_low {algo.clip_low:g}: no ratio is below 0, so there is no lower bound{paper}"
    if "value" in changed and "value" not in skip and algo.advantage != "gae":
        yield f"value has no effect with advantage {algo.advantage}; it goes with gae"
    if algo.kl.coef == 0 and kl:
        keys = " and algo.".join(f"kl.{key}" for key in kl)
        yield f"{keys} {'has' if len(kl) == 1 else 'have'} no effect while kl.coef is 0"
    if algo.kl.coef and algo.kl.place == "loss" and algo.kl.estimator == "k1":
        yield (
            "kl.estimator k1 in the loss: on-policy its gradient is 0 on average (arXiv:2510.01555), so it adds "
            "noise but no penalty; set it to k2 or k3, or kl.place to reward"
        )
    if algo.correction.kind == "none" and "cap" in algo.correction.changed():
        yield "correction.cap has no effect while correction.kind is none"


def _on_policy(algo: AlgoConfig) -> Iterator[str]:
    """With one update per rollout the ratio is 1."""
    clips = [key for key in ("clip_low", "clip_high", "dual_clip") if key in algo.changed()]
    clips = [key for key in clips if key != "dual_clip" or algo.loss != "cispo"]
    if clips:
        have = "has" if len(clips) == 1 else "have"
        yield (
            f"{' and algo.'.join(clips)} {have} no effect with one update per rollout: every token is on-policy, so "
            "the ratio is 1; set algo.updates_per_rollout above 1 for clipping to matter"
        )
    if algo.loss != "clipped":
        yield f"loss {algo.loss} has the same gradient as clipped with one update per rollout, since the ratio is 1"
    if algo.advantage == "gae" and "clip" in algo.value.changed() and algo.value.clip is not None:
        yield "value.clip has no effect with one update per rollout, which still has the old values"


def _engine(rollout: RolloutConfig) -> Iterator[str]:
    changed = rollout.changed()
    servers = [name for name in changed if isinstance(getattr(rollout, name), ServerConfig)]
    idle = [name for name in servers if name != rollout.engine]
    if rollout.engine != "native":
        idle += [name for name in ("kv_cache_gib", "compiled", "weights") if name in changed]
    yield from (f"{name} has no effect while rollout.engine is {rollout.engine}" for name in idle)
    if rollout.engine == "vllm" and rollout.vllm.in_process:
        for key in SERVER_ONLY:
            if key in rollout.vllm.changed():
                yield f"vllm.{key} has no effect with rollout.vllm.in_process, which starts no server"
    elif server := rollout.server:
        for key in ("port", "python", "arguments", "environment"):
            if server.url is not None and key in server.changed():
                yield f"{rollout.engine}.{key} has no effect on the server at {server.url}, which already runs"


def _curriculum(stage: LoopStage) -> Iterator[str]:
    owner = {"steps_per_level": "sequential", "weights": "mixture", "floor": "adaptive", "memory": "adaptive"}
    kind = stage.curriculum.kind
    for key in stage.curriculum.changed():
        if owner.get(key, kind) != kind:
            yield f"{key} has no effect with curriculum.kind {kind}; it goes with {owner[key]}"


def _reward(reward: RewardConfig) -> Iterator[str]:
    changed = reward.changed()
    for name in changed:
        if name in REWARDS and name not in reward.parts:
            yield f"reward.{name} has no effect: reward.parts does not name {name}; add it there"
    if "functions" in changed:
        if not any(":" in name or name not in REWARDS for name in reward.parts):
            yield "reward.functions has no effect: reward.parts names no function (path/file.py:function)"
        elif not reward.functions.isolate:
            for name in ("workers", "memory_mb"):
                if name in reward.functions.changed():
                    yield f"reward.functions.{name} has no effect without reward.functions.isolate: true"
    perplexity = reward.perplexity
    if "perplexity" in reward.parts:
        if "alpha" in perplexity.changed() and perplexity.kind != "hybrid":
            yield f"reward.perplexity.alpha has no effect with kind {perplexity.kind}; it goes with hybrid"
        if perplexity.served_model and not perplexity.is_server:
            yield (
                f"reward.perplexity.served_model has no effect: answerer is {perplexity.answerer}, and not the address "
                "of a server, such as http://localhost:8000/v1"
            )
    algebra = reward.linear_algebra
    if "linear_algebra" in reward.parts and "thinking_chars" in algebra.changed() and not algebra.thinking:
        yield "reward.linear_algebra.thinking_chars has no effect while reward.linear_algebra.thinking is 0; set both"


def _watch(stage: RLStage) -> Iterator[str]:
    watch, changed = stage.watch, stage.watch.changed()
    if "kl" in changed and not stage.algo.kl.coef:
        yield "watch.kl has no effect while algo.kl.coef is 0, because no KL is measured"
    if "clip_fraction" in changed and stage.algo.updates_per_rollout == 1:
        yield "watch.clip_fraction has no effect with one update per rollout, because nothing is clipped"
    if "window" in changed and 2 * watch.window > stage.steps:
        yield (
            f"watch.window {watch.window}: changes since the start show after two windows, but there are only "
            f"{stage.steps} steps"
        )


def _resets(stage: RLStage) -> Iterator[str]:
    numbers = [at[1] for line in stage.schedule if (at := parse_at(line.get("at"))) and at[0] == "reset"]
    rule, scheduled = stage.reset.on_stagnation, len(stage.reset.at)
    if stage.reset.limit is not None and rule is None:
        yield "reset.limit has no effect without reset.on_stagnation"
    if numbers and numbers[-1] > scheduled and rule is None:
        resets = f"{scheduled} reset{'' if scheduled == 1 else 's'}"
        yield (
            f"schedule: reset.at has only {resets}, so `reset {numbers[-1]}` applies only if you ask for resets with "
            "`hone reset`"
        )
    if rule is not None:
        first = (rule.window + rule.patience - 1) * stage.eval.every
        if first >= stage.steps:
            yield (
                f"reset.on_stagnation needs {rule.window + rule.patience} validations, the last of them at step "
                f"{first}, but there are only {stage.steps} steps"
            )
        answers = rule.window * stage.eval.problems * stage.eval.samples
        if rule.tolerance < (noise := 0.5 * answers**-0.5):
            yield (
                f"reset.on_stagnation.tolerance {rule.tolerance:g}: the mean of {answers:,} answers has a standard "
                f"deviation of up to {noise:.2g}, so chance can count as an improvement; use more eval.problems, a "
                "wider window or a larger tolerance"
            )
    if stage.lora is not None and stage.lora.path is not None and stage.algo.kl.coef:
        yield "lora.path: the KL penalty is measured against the model without the loaded adapter"
    if stage.layers.lr_decay == 1.0 and stage.layers.train == "last" and stage.model.recompute_activations:
        yield "model.recompute_activations: the backward pass also runs through the frozen layers"
