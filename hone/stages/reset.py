"""Hard resets: when one is due, and what it leaves in the run folder.

    hone reset runs/mine      # requests one: after the step in progress, or when the run is resumed

    reset.request             written by `hone reset`: {"id": ...}; each request is granted once
    resets/reset_001/         the merged model at the first reset: the reference from then on, and the base of the next
                              adapter, also for a resumed run; with checksums, as a checkpoint

Liu et al., ProRL, arXiv:2505.24864: when validation stagnates, the policy becomes the reference, with a new optimizer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.base import checksums
from hone.recipe.schedule import Phases, settings, stagnation
from hone.recipe.sections.algo import ResetConfig
from hone.runs.layout import read_request, reset_folder

if TYPE_CHECKING:
    from hone.learn.policy import Policy
    from hone.runs.writer import RunWriter
    from hone.types import MicroBatch


#: The largest allowed change of a log-prob in a reset, in float32, in which only the order of sums changes.
TOLERANCE = 1e-3

Why = dict[str, Any]  # {"why": "asked" | "step" | "stagnates" | "declines", ...}


def due(
    config: ResetConfig, step: int, steps: int, writer: RunWriter, resets: Sequence[Mapping[str, Any]]
) -> Why | None:
    """The reason why a reset is due before `step` of `steps`, or None. `resets`: the resets so far.

    One process reads the files and decides for all, since a request may come at any moment.
    """
    if step >= steps:
        return None
    return writer.world.on_main(lambda: _due(config, step, writer, resets), "whether a reset is due")


def _due(config: ResetConfig, step: int, writer: RunWriter, resets: Sequence[Mapping[str, Any]]) -> Why | None:
    request = read_request(writer.folder)
    if request is not None and request not in [r.get("request") for r in resets]:
        return {"why": "asked", "request": request}
    if step in config.at:
        return {"why": "step"}
    rule = config.on_stagnation
    automatic = sum(r["why"] in ("stagnates", "declines") for r in resets)
    if rule is None or (config.limit is not None and automatic >= config.limit):
        return None
    since = resets[-1]["step"] if resets else 0
    rows = [
        row
        for row in writer.rows("evals.jsonl")
        if row["label"] == "validation" and row["step"] >= since and "accuracy" in row
    ]
    how = stagnation([row["accuracy"]["value"] for row in rows], rule)
    return None if how is None else {"why": how}


def reset(
    writer: RunWriter,
    step: int,
    why: Why,
    policy: Policy,
    phases: Phases[Any],
    minibatches: Sequence[Sequence[MicroBatch]],
) -> None:
    """Do a hard reset before `step`. Raises RuntimeError if that changes the log-probs of the step's batch."""

    def probe() -> list[Any]:  # of the first micro-batch, if the step had any
        return policy.logprobs([batch for update in minibatches for batch in update][:1], 1.0)

    number = len(policy.resets) + 1
    now = phases.at(step, number)
    before = probe()
    policy.merge_and_reset(step, now.optim, now.layers, now.lora, why)
    change = max((float(abs(a - b).max()) for a, b in zip(before, probe(), strict=True)), default=0.0)
    if policy.exact and not change <= TOLERANCE:
        raise RuntimeError(f"reset {number} before step {step} changed log-probs by {change:.3g}: the merge went wrong")
    keep_model(policy, reset_folder(writer.folder, number))
    adapter = "" if now.lora is None else f", new adapter of rank {now.lora.rank}"
    writer.event(
        "reset",
        f"hard reset {number} before step {step} ({why['why']}): reference and optimizer are new{adapter}; log-probs "
        f"changed by at most {change:.1g}",
        step,
        number=number,
        why=why["why"],
        max_logprob_change=change if math.isfinite(change) else None,
        model=str(reset_folder(writer.folder, number).relative_to(writer.folder)),
    )


def keep_model(policy: Policy, folder: Path) -> None:
    """Write the base of the next adapter, atomically."""
    from hone.learn.checkpoint import fsync, sync

    aside = folder.with_name(f".{folder.name}")
    if policy.world.main:
        checksums.remove(aside)
    policy.export_base(aside)
    if policy.world.main:
        checksums.write(aside)
        sync(aside)
        checksums.remove(folder)  # left by a run that was interrupted before its checkpoint
        os.replace(aside, folder)
        fsync(folder.parent)
    policy.world.barrier("the model at the reset")
    policy.base = str(folder)


def announce(writer: RunWriter, step: int, phases: Phases[Any], resets: int) -> None:
    """Record each line of the schedule that becomes active in `step`; `writer.history` ends with the step before."""
    before = int(writer.history[-1].get("reset", 0)) if writer.history else 0
    for i in phases.news(step, resets, before):
        line = phases.schedule[i]
        writer.event(
            "phase", f"from step {step} on ({line['at']}): {settings(line)}", step, line=i, settings=dict(line)
        )


# --- by hand --------------------------------------------------------------------------------------------------------
