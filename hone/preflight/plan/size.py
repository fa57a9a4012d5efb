"""Chooses settings that fit the device: tokens of a micro-batch, and memory for keys and values.

advice = advise(stage, plan, planned, parallel)
advice.settings        # {"tokens_per_microbatch": 12288, "rollout.kv_cache_gib": 20.5}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from hone.base.parallel import ParallelConfig
from hone.preflight.plan.memory import GIB, Plan
from hone.recipe.recipe import LoopStage

StageT = TypeVar("StageT", bound=LoopStage)

#: The share of the device that is used; the rest is reserved for what is not predicted.
USABLE = 0.9

#: Larger micro-batches are not faster: matrices are large enough, and on a CPU caches overflow.
ENOUGH = {"cpu": 8192, "cuda": 32768}
STEP = 512

#: Tried in this order if even the longest sequence alone does not fit.
SHARDS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Advice:
    """Recommended settings."""

    fits: bool  # with these settings
    settings: Mapping[str, float | int | bool]  # dotted key -> value; only what differs from the recipe
    plan: Plan  # with them


def advise(
    stage: StageT, plan: Plan, planned: Callable[[StageT, ParallelConfig], Plan], parallel: ParallelConfig
) -> Advice:
    """The largest micro-batch and cache that fit; if none fit, the smallest change of other settings with which they
    do.


    `plan`: of the stage as it is; `planned`: returns the plan of changed settings on the same device.
    """
    usable, device = int(USABLE * plan.total_bytes), plan.device

    def fitting(one: StageT, split: ParallelConfig) -> StageT | None:
        cached = _with_cache(one, planned(_with_tokens(one, STEP), split), usable)
        return None if cached is None else _with_largest(cached, lambda r: planned(r, split), usable, device)

    ways: list[tuple[dict[str, float | int | bool], StageT, ParallelConfig]] = [({}, stage, parallel)]
    if stage.stage != "generate":
        again = stage.model_copy(update={"model": stage.model.model_copy(update={"recompute_activations": True})})
        extra: dict[str, float | int | bool] = {}
        if not stage.model.recompute_activations:
            extra = {"model.recompute_activations": True}
            ways.append((extra, again, parallel))
        if device == "cuda":
            ways += [
                ({**extra, "parallel.shard": n}, again, parallel.model_copy(update={"shard": n}))
                for n in SHARDS
                if n > parallel.shard
            ]
    for changed, one, split in ways:
        fitted = fitting(one, split)
        if fitted is not None:
            return Advice(True, {**changed, **_differences(stage, fitted)}, planned(fitted, split))
    return Advice(False, {}, plan)


def _with_tokens(stage: StageT, tokens: int) -> StageT:
    return stage.model_copy(update={"tokens_per_microbatch": tokens})


def _with_largest(stage: StageT, planned: Callable[[StageT], Plan], usable: int, device: str) -> StageT | None:
    """The largest micro-batch that fits; None if a single sequence does not."""
    if stage.stage == "generate":
        return stage

    low, high = STEP, ENOUGH[device]
    least, most = (planned(_with_tokens(stage, n)).peak_bytes for n in (low, high))
    if most <= usable:
        return _with_tokens(stage, high)
    if least > usable:
        return None
    tokens = low + (high - low) * (usable - least) / (most - least)  # activations grow with the tokens
    while tokens > low and planned(_with_tokens(stage, _whole(tokens))).peak_bytes > usable:
        tokens *= 0.95
    return _with_tokens(stage, _whole(tokens))


def _whole(tokens: float) -> int:
    return max(STEP, int(tokens) // STEP * STEP)


def _with_cache(stage: StageT, plan: Plan, usable: int) -> StageT | None:
    """The stage with a cache for all rows, or as large as fits; None if not even one row fits."""
    if "generation" not in plan.moments:
        return stage
    parts = plan.moments["generation"]
    free = usable - sum(size for name, size in parts.items() if name not in ("kv cache", "allocator"))
    one = (plan.prompt_tokens + plan.answer_tokens + 32) * plan.kv_bytes_per_token
    if free < one:
        return None
    wanted = min(free, max(one, _all_rows(stage, plan)))
    gib = max(0.01, int(wanted / GIB * 100 + 0.999) / 100) if wanted < free else int(free / GIB * 100) / 100
    return stage.model_copy(update={"rollout": stage.rollout.model_copy(update={"kv_cache_gib": gib})})


def _all_rows(stage: LoopStage, plan: Plan) -> int:
    """Bytes of the cache for all rows of a step, or for as many as can be decoded at once."""
    rows = min(stage.rollout.max_sequences, stage.prompts_per_step * stage.samples_per_prompt)
    positions = -(-rows // stage.samples_per_prompt) * plan.prompt_tokens + rows * (plan.answer_tokens + 32)
    return positions * plan.kv_bytes_per_token


def _differences(stage: LoopStage, changed: LoopStage) -> dict[str, float | int | bool]:
    pairs = {
        "tokens_per_microbatch": (stage.tokens_per_microbatch, changed.tokens_per_microbatch),
        "rollout.kv_cache_gib": (stage.rollout.kv_cache_gib, changed.rollout.kv_cache_gib),
    }
    return {key: new for key, (old, new) in pairs.items() if new is not None and new != old}
