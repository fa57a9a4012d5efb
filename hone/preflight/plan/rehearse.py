"""Runs the longest micro-batch first, so that a lack of memory is noticed in the first seconds, not after hours.

    rehearse(writer, recipe, policy, longest_prompt(problems, renderer))    # before the first rollout
    with explained(stage): ...                                                  # explains an out-of-memory error

This is a forward and a backward pass without an optimizer step, with empty tensors in place of the optimizer's moments.
The run that follows is bit-for-bit the same: no random number is drawn, and no gradient or tensor remains.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hone.base import checksums, sealed
from hone.base.settings import UserError
from hone.base.world import ALONE, World
from hone.learn.forward import fast_layers, to_device
from hone.learn.pack import Packer
from hone.learn.policy import Policy
from hone.model.limits import longest_exact
from hone.model.random_state import own_random_numbers
from hone.preflight.plan import batch as batches
from hone.preflight.plan.memory import GIB, Lengths, Plan, batch_of, stage_plan
from hone.preflight.plan.trace import forward_backward
from hone.recipe.recipe import Recipe
from hone.recipe.schedule import Phases
from hone.recipe.sections.model import ModelConfig
from hone.runs.writer import RunWriter
from hone.types import MicroBatch, Sample

FILE = "memory.json"

#: Part -> what to lower if it is too large.
REMEDIES = {
    "activations": "tokens_per_microbatch, or set model.recompute_activations: true",
    "log-probs": "tokens_per_microbatch",
    "kv cache": "rollout.kv_cache_gib, or rollout.max_sequences",
    "sampling": "rollout.max_sequences",
    "prefill": "rollout.max_sequences",
    "optimizer": "the number of trained weights: set lora, or parallel.shard on more devices",
    "gradients": "the number of trained weights: set lora, or parallel.shard on more devices",
    "data": "task.train, for fewer problems",
    "reference": "the number of copies: set lora, whose reference is the policy itself, or algo.kl.coef: 0",
}
OTHERWISE = "the size of the model: choose a smaller one, or set parallel.shard on more devices"


def rehearse(writer: RunWriter, stage: Recipe, policy: Policy, prompt: int, data: int = 0) -> None:
    """Rehearse a stage that samples, and write the prediction into the run folder. `prompt`: tokens of its longest
    prompt; `data`: bytes of its problems."""
    phases = Phases(stage)
    settings = [phases.merged(lines) for lines in phases.sets()] if stage.stage == "rl" else [stage]
    limit = longest_exact(policy.model.config)

    def answer(one: Recipe) -> int:
        return min(one.rollout_sampling.max_tokens, (limit or sys.maxsize) - prompt)

    if any(answer(one) < 1 for one in settings):
        return  # the engine will report which prompt leaves no room
    micro = [batches.longest(batch_of(one), prompt, answer(one)) for one in settings]
    most = max(range(len(settings)), key=lambda i: len(micro[i].inputs))
    _predict(writer, settings[most], policy, Lengths(prompt, answer(settings[most]), data=data))
    entropy = any(one.algo.entropy_coef for one in settings)
    go_through(policy, micro[most], entropy)


def rehearse_examples(
    writer: RunWriter, recipe: Recipe, model: ModelConfig, policy: Policy, samples: Sequence[Sample]
) -> None:
    """Rehearse supervised training, with the longest examples that can be in one step."""
    stage = recipe.model_copy(update={"model": model})
    chosen = sorted(samples, key=lambda s: len(s.token_ids))[-stage.sft.examples_per_step :]
    packed = Packer(stage.tokens_per_microbatch, stage.share_prompts)(chosen, [1.0] * len(chosen))
    prompt = max(s.prompt_len for s in chosen)
    answer = max(len(s.token_ids) - s.prompt_len for s in chosen)
    _predict(writer, stage, policy, Lengths(prompt, answer))
    go_through(policy, max(packed, key=lambda b: len(b.inputs)), entropy=False)


def go_through(policy: Policy, batch: MicroBatch, entropy: bool) -> None:
    """The forward and backward pass; leaves no trace."""
    moments: list[torch.Tensor] = []
    if not policy.optimizer.state:  # on a CPU untouched memory is not resident, so there this changes nothing
        masters = policy.optimizer.masters
        moments = [torch.empty_like(master, requires_grad=False) for master in masters for _ in range(2)]
    try:
        # The random numbers are for the dropout of an adapter in supervised stages.
        with own_random_numbers(policy.device), fast_layers(policy.model):
            forward_backward(policy.model, to_device(batch, policy.device), entropy)
    finally:
        for p in (*policy.optimizer.masters, *policy.parameters):
            p.grad = None
        del moments
    if policy.device.type == "cuda":
        torch.cuda.empty_cache()


def _predict(writer: RunWriter, stage: Recipe, policy: Policy, lengths: Lengths) -> None:
    try:
        plan = stage_plan(stage, device=policy.device.type, lengths=lengths)
    # a model's code may raise anything on the meta device, and a run does not need the prediction
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        writer.event(
            "memory",
            f"memory could not be predicted ({type(error).__name__}: {first}); the run continues without a prediction",
        )
        return
    if plan.peak_bytes > plan.total_bytes:
        writer.event("memory", f"more memory is needed than is available: {in_words(plan)}; {remedy(plan)}")
    if writer.world.main:
        sealed.put(writer.folder, FILE, json.dumps(as_row(plan), indent=1))


def as_row(plan: Plan) -> dict[str, Any]:
    """The plan for JSON, in bytes."""
    return {"peak_bytes": plan.peak_bytes, "allocated_bytes": plan.allocated_bytes, **asdict(plan)}


def in_words(plan: Plan) -> str:
    """The parts of the peak as text, largest first."""
    parts = sorted(plan.parts.items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts if size >= plan.peak_bytes / 200)
    return (
        f"{plan.peak_bytes / GIB:.2f} GiB predicted in {plan.moment} ({listed}), and {plan.device} has "
        f"{plan.total_bytes / GIB:.2f} GiB"
    )


def remedy(plan: Plan) -> str:
    """The setting that lowers the largest part that depends on a setting."""
    part = max(plan.parts, key=lambda name: plan.parts[name] * (name not in ("base", "allocator")))
    return f"the largest part is {part}: lower {REMEDIES.get(part, OTHERWISE)} (`hone plan` gives values that fit)"


@contextmanager
def explained(stage: Recipe, folder: Path, world: World = ALONE) -> Iterator[None]:
    """Context manager that turns an out-of-memory error into a UserError with the predicted parts and the setting to
    lower.

    `folder`: of the stage's run; the measured memory is added to the prediction there.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _out_of_memory(error):
            raise
        first = (str(error).strip().splitlines() or ["no more memory"])[0]
        raise UserError(f"out of memory in stage {stage.name}: {first}\n{_advice(stage)}") from error
    path, every = folder / FILE, world.gather([measured()], "peaks of memory")
    if world.main and path.exists():
        predicted = checksums.read_json(path, dict, "remove it")
        sealed.put(folder, FILE, json.dumps({**predicted, "measured_bytes": every}, indent=1))


def _advice(stage: Recipe) -> str:
    """The prediction and what to lower; a general remedy if memory cannot be predicted."""
    try:
        plan = stage_plan(stage)
    except Exception as error:  # the run has failed for another reason, which must be shown
        return f"memory cannot be predicted ({type(error).__name__}: {error}); lower {REMEDIES['activations']}"
    return f"{in_words(plan)}; {remedy(plan)}"


#: Messages of the CPU's allocator, of CUDA and of its libraries, each raised as a plain RuntimeError.
NO_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")


def _out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in NO_MEMORY)


def measured() -> int:
    """Peak bytes of this process: resident memory; on a GPU what PyTorch had allocated (for this stage)."""
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else peak_rss_bytes()


def peak_rss_bytes() -> int:
    """The most memory that this process has held, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def compared(folders: Sequence[Path]) -> dict[str, Any] | None:
    """Predicted and measured peak memory over the stages of a run, which share their processes."""
    there = [folder for folder in folders if (folder / FILE).exists()]
    for folder in there:
        sealed.require_file(folder, FILE)
    rows = [checksums.read_json(folder / FILE, dict, "remove it") for folder in there]
    rows = [row for row in rows if row.get("measured_bytes")]
    if not rows:
        return None
    predicted = max(row["allocated_bytes"] for row in rows)
    measured_bytes = [max(sizes) for sizes in zip(*(row["measured_bytes"] for row in rows))]
    return {
        "predicted_bytes": predicted,
        "measured_bytes": measured_bytes,  # of each process
        "error": round(predicted / max(measured_bytes) - 1, 4),
        "stages": {row["stage"]: {"predicted_bytes": row["allocated_bytes"], "parts": row["moments"]} for row in rows},
    }


def line(row: dict[str, Any]) -> str:
    """The result of `compared`, for the terminal."""
    most = max(row["measured_bytes"])
    return (
        f"memory of a process: {row['predicted_bytes'] / GIB:.2f} GiB predicted, {most / GIB:.2f} GiB measured "
        f"({row['error']:+.0%})"
    )
