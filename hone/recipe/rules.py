"""Notes on settings that are possible but have no effect; they are shown at the start of a run.

for line in notices(load("recipes/demo/recipe.yaml")): print("note:", line)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hone.recipe import schedule as schedules
from hone.recipe import stages as chain
from hone.recipe.recipe import Pipeline, Recipe

_SAMPLED, _TRAINED = ("rl", "generate", "distil"), ("sft", "rl", "distil")

#: Setting -> the kinds of stages in which it has an effect; settings not listed have an effect in all.
USED_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("reward", "reset", "schedule"), ("rl",)),
    **dict.fromkeys(("algo", "curriculum", "prompts_per_step", "steps"), ("rl", "distil")),
    **dict.fromkeys(("sampling", "rollout", "samples_per_prompt"), _SAMPLED),
    **dict.fromkeys(("environment", "tools"), _TRAINED),
    **dict.fromkeys(("optim", "lora", "layers", "watch", "checkpoint", "tokens_per_microbatch"), _TRAINED),
    "share_prompts": _TRAINED,
    "sft": ("sft",),
    "teacher": ("generate", "distil"),
    "generate": ("generate",),
}
#: Settings of `algo` that turn rewards into advantages.
NO_REWARD = ("advantage", "value")


def notices(recipe: Recipe | Pipeline) -> list[str]:
    """One line for each setting that is possible but has no effect, or not the intended one."""
    if isinstance(recipe, Recipe):
        return [*stage_notices(recipe), *_server_notices((recipe,))]
    own = [f"stage {stage.name}: {line}" for stage in recipe.stages for line in stage_notices(stage, alone=False)]
    return [*own, *_server_notices(recipe.stages), *chain.notices(recipe.stages)]


def _server_notices(stages: Sequence[Recipe]) -> Iterator[str]:
    launch = stages[0].launch
    if launch.kind == "ray" and launch.ray.server.changed() and not any(stage.starts_server for stage in stages):
        yield "launch.ray.server has no effect: hone starts no rollout server in any stage"


def stage_notices(stage: Recipe, alone: bool = True) -> list[str]:
    """The notices of one stage. `alone`: it is the whole recipe, not a pipeline's, whose stages share settings."""
    lines = []
    if alone:
        kind = stage.stage
        ignored = [key for key in stage.changed() if kind not in USED_BY.get(key, (kind,))]
        lines += [f"{key} has no effect in a stage of kind {kind}" for key in ignored]
        if kind == "sft" and set(stage.watch.changed()) - {"max_skipped"}:
            lines.append("watch: only max_skipped has an effect in a stage of kind sft")
    if stage.stage == "generate" and stage.parallel.shard * stage.parallel.tensor > 1:
        lines.append(
            "parallel.shard and parallel.tensor have no effect in a stage of kind generate: each process holds the "
            "whole teacher"
        )
    lines += [f"launch.{text}" for text in stage.launch.idle_settings(stage.parallel.processes)]
    notice, saving = stage.launch.slurm.notice, stage.checkpoint.stop_within_seconds
    if stage.launch.kind == "slurm" and notice <= saving:
        lines.append(
            f"launch.slurm.notice {notice}: a run may take {saving:g} s to save (checkpoint.stop_within_seconds), so "
            "it may be killed before it has saved; raise the one or lower the other"
        )
    if not stage.has_turns and stage.environment.changed():
        lines.append("environment has no effect without environment.name or tools: problems are answered in one turn")
    if not stage.has_turns and stage.algo.credit == "turn":
        lines.append("algo.credit turn has no effect without environment.name or tools: there is one turn")
    if stage.model.path != "tiny" and stage.model.tiny.changed():
        lines.append(f"model.tiny has no effect: model.path is {stage.model.path}")
    if stage.stage == "generate" and stage.teacher is not None and "://" in stage.teacher and stage.prompt.changed():
        idle = [key for key in stage.prompt.changed() if key != "system"]
        lines += [
            f"prompt.{key} has no effect while teacher is an endpoint, which has its own template" for key in idle
        ]
    if stage.updates is not None and stage.optim.warmup_steps >= stage.updates:
        lines.append(
            f"optim.warmup_steps {stage.optim.warmup_steps}: the stage has at most {stage.updates} updates, so it "
            "never reaches the full learning rate"
        )
    if alone and stage.stage == "sft" and stage.checkpoint.keep_best:
        lines.append("checkpoint.keep_best has no effect in a stage of kind sft, whose validation measures no accuracy")
    if stage.stage == "distil":
        lines += [f"algo.{text}" for text in stage.algo.idle_settings()]
        lines += [
            f"algo.{key} has no effect in a stage of kind distil" for key in stage.algo.changed() if key in NO_REWARD
        ]
        lines += _rollout_notices(stage)
    return lines + (list(schedules.notices(stage, _rl_notices)) if stage.stage == "rl" else [])


def _rollout_notices(stage: Recipe) -> Iterator[str]:
    rollout = stage.rollout
    yield from (f"rollout.{text}" for text in rollout.idle_settings())
    if rollout.weights != "policy" and rollout.engine == "native":
        if rollout.weights == stage.model.dtype:
            yield f"rollout.weights {rollout.weights} has no effect: the policy's weights have this type"
        elif stage.algo.correction.kind == "none":
            yield (
                f"rollout.weights {rollout.weights}: answers are sampled from rounded weights without a correction; "
                "set algo.correction.kind to tis or mis"
            )


def _rl_notices(stage: Recipe) -> Iterator[str]:
    algo, watch, overlong = stage.algo, stage.watch, stage.reward.overlong
    yield from (f"algo.{text}" for text in algo.idle_settings())
    yield from _rollout_notices(stage)
    if stage.rollout.engine == "vllm" and stage.rollout.vllm.serves_adapter and stage.lora is None:
        yield "rollout.vllm.lora has no effect without lora: there is no adapter to send"
    cut = [key for key in ("top_p", "top_k", "min_p") if key in stage.sampling.changed()]
    if stage.rollout.engine == "sglang" and cut:
        yield f"sampling.{cut[0]}: SGLang's log-probs are biased, because they ignore this truncation"
    if stage.eval.every > stage.steps:
        yield f"eval.every {stage.eval.every} is more than steps ({stage.steps}), so the only validation is at step 0"
    if "kl" in watch.changed() and not algo.kl.coef:
        yield "watch.kl has no effect while algo.kl.coef is 0, because no KL is measured"
    if "clip_fraction" in watch.changed() and algo.updates_per_rollout == 1:
        yield "watch.clip_fraction has no effect with one update per rollout, because nothing is clipped"
    if "window" in watch.changed() and 2 * watch.window > stage.steps:
        yield (
            f"watch.window {watch.window}: changes since the start show after two windows, but there are only "
            f"{stage.steps} steps"
        )
    if stage.reward.parts.get("overlong") and overlong.max_tokens is not None:
        free = overlong.max_tokens - overlong.buffer
        if free >= stage.sampling.max_tokens:
            yield (
                f"reward.parts.overlong has no effect: it begins above {free} tokens, but answers end at "
                f"{stage.sampling.max_tokens} (sampling.max_tokens)"
            )

    perplexity = stage.reward.perplexity
    if "perplexity" in stage.reward.parts and perplexity.is_server and stage.prompt.style != "raw":
        yield (
            f"prompt.style {stage.prompt.style} has no effect on the questions to reward.perplexity.answerer: it is a "
            "server, so they use prompt.template"
        )
