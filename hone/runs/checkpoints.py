"""When checkpoints are saved, from which one a run continues, and what its folder holds in the end.

    checkpoints = Checkpoints(writer, config)
    step = checkpoints.resume(policy, curriculum)            # 0: there is none yet
    checkpoints.begin(step, policy, curriculum)              # the step begins here
    checkpoints.save()                                       # that is written in the background
    checkpoints.finish(policy, steps)                        # the final model

How a checkpoint is written and verified: `hone.learn.checkpoint`.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.base import checksums, jsonl
from hone.base.settings import UserError
from hone.base.visible import visible
from hone.learn import checkpoint
from hone.learn.policy import Policy
from hone.recipe.sections.optim import CheckpointConfig
from hone.runs import lock, seal
from hone.runs.layout import drop_resets, reset_folder
from hone.runs.retention import best_validated
from hone.runs.writer import RunWriter
from hone.tasks.curriculum import Curriculum


@dataclass(frozen=True)
class Boundary:
    """The beginning of a step, the only point at which a checkpoint is taken."""

    step: int
    policy: Policy
    curriculum: Curriculum | None  # None: a stage that draws no problems
    records: seal.Records | None  # of the rows before the step: an evaluation that belongs to it is repeated with it


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, writer: RunWriter, config: CheckpointConfig) -> None:
        self.config = config
        self._boundary: Boundary | None = None  # of the step in progress, until its update begins
        self._writer, self._world = writer, writer.world
        self._folder = writer.folder / "checkpoints"
        self._background = checkpoint.Writer()
        self._saved = 0  # the last step that was saved, or is being saved
        self._writing: int | None = None  # the step of the checkpoint that is being written

    @property
    def failed(self) -> bool:
        """Whether the checkpoint that was begun last could not be written."""
        return self._background.error is not None

    # --- saving -------------------------------------------------------------------------------

    def begin(self, step: int, policy: Policy, curriculum: Curriculum | None = None) -> None:
        """Step `step` begins: this is what may be saved until its update begins."""
        self._boundary = Boundary(step, policy, curriculum, self._writer.records())

    def leave(self) -> None:
        """The update of the step begins: its beginning can no longer be saved."""
        self._boundary = None

    @property
    def savable(self) -> int | None:
        """The step whose beginning can be saved now; None if there is none, or if nothing is finished before it."""
        return None if self._boundary is None or not self._boundary.step else self._boundary.step

    def save(self) -> None:
        """Copy what is needed to begin the step; it is written in the background. Rows and files of earlier steps are
        synced to disk first, because a resumed run does not write them again. Raises OSError as `settle` does."""
        self.settle()
        lock.check(self._writer.folder)
        boundary = self._boundary
        assert boundary is not None, "saved between two steps, or before an update"
        step, rows = boundary.step, self._writer.take_unsynced()
        state = None if boundary.curriculum is None else boundary.curriculum.state(step)
        kept = checkpoint.take(step, boundary.policy, self.config.keep, state, self.best_steps(), boundary.records)
        folder, world = self._folder, self._world
        self._background.begin(lambda: checkpoint.write(folder, kept, world, rows))
        self._writing = self._saved = step

    def save_boundary(self) -> int:
        """Save the beginning of the step in progress, unless that is done, and wait for it; returns the step."""
        assert self._boundary is not None, "the update has begun"
        if self._boundary.step != self._saved:
            self.save()
        self.settle()
        return self._boundary.step

    def settle(self) -> None:
        """Wait for the checkpoint that is being written. Raises OSError if that failed."""
        step, self._writing = self._writing, None
        self._background.wait()
        if step is not None:
            self._writer.event("checkpoint", f"saved before step {step}", step)
            self._writer.seal()

    def abandon(self) -> None:
        """Wait for the checkpoint that is being written; if it failed, print the reason in addition to the one that
        ends the run."""
        self._background.join()
        if self._background.error is not None:
            print(visible(self._background.error), file=sys.stderr, flush=True)

    def best_steps(self) -> list[int]:
        """The steps of the best checkpoints by validation, best first; of equal ones, the earlier."""
        return best_validated(self._writer.rows("evals.jsonl"), self.config.keep_best) if self._world.main else []

    # --- resuming -----------------------------------------------------------------------------

    def resume(self, policy: Policy, curriculum: Curriculum | None = None) -> int:
        """Load the newest intact checkpoint, and return its step; 0 if there is no checkpoint yet.

        Rows of steps that will be repeated are removed, so that the files read as if the run had
        never been interrupted.
        """
        good = self._world.on_main(self._newest, "the checkpoint to go on from")
        step = resets = 0
        records: seal.Records | None = {}  # None: written by a version of hone without records
        if good is not None:
            state = checkpoint.read_state(good)
            records = state.get("logs")
            step, resets = int(state["step"]), len(state["policy"].get("resets", ()))
            if resets:
                policy.restore(good, state["policy"], reset_folder(self._writer.folder, resets))
            else:
                policy.restore(good, state["policy"])
            if curriculum is not None and state.get("course") is not None:
                curriculum.restore(state["course"])
        self._writer.restart(self._world.on_main(lambda: self._back_to(step, resets, records), "the rows so far"))
        self.begin(step, policy, curriculum)
        self._saved = step
        return step

    def _newest(self) -> Path | None:
        """The newest intact checkpoint; damaged ones after it are removed."""
        there = checkpoint.saved_steps(self._folder)
        report = lambda message: self._writer.event("checkpoint_damaged", message)  # noqa: E731
        good = checkpoint.newest_good(self._folder, report, self._writer.folder / "resets")
        if there and good is None:
            raise UserError(
                f"{self._folder}: none of its {len(there)} checkpoints is intact; nothing was changed. Restore one, or "
                f"move {self._writer.folder} away to begin anew"
            )
        if good is not None:
            self._verify_files(good)
        checkpoint.drop_newer(self._folder, good)
        return good

    def _verify_files(self, good: Path) -> None:
        """Raises UserError if rows or files of the steps before this checkpoint were changed or lost.

        Nothing is changed. Damage on which no result depends is recorded as an event, and the run continues.
        """
        folder, records = self._writer.folder, checkpoint.read_state(good).get("logs")
        if records is None:
            return
        wrong = seal.log_faults(folder, records)
        for name in [name for name in wrong if name in seal.BESIDE]:
            message = f"{name}: {wrong.pop(name)}; nothing that is computed depends on it"
            self._writer.event("rows_damaged", message)
        if seal.ONCE not in wrong:
            rows = self._writer.rows(seal.ONCE)
            known = {str(row.get("file")) for row in rows if _step_of(row) < checkpoint.step_of(good)}
            wrong |= {name: text for name, text in seal.once_faults(folder).items() if name in known}
        if wrong:
            raise UserError(_damaged(folder, good, wrong))

    def _back_to(self, step: int, resets: int, records: seal.Records | None) -> list[dict[str, Any]]:
        """Remove the output of `step` and later steps; returns the rows of the steps before. Other files stay."""
        folder = self._writer.folder
        lock.check(folder)
        drop_resets(folder, resets)
        started = (folder / "metrics.jsonl").exists() or (folder / "evals.jsonl").exists()
        if records is None:
            for name in seal.LOGS:
                jsonl.keep(folder / name, lambda row: _step_of(row) < step)
        else:
            seal.cut(folder, records)
        for name in ("rollouts", "tokens", "skipped"):
            for path in (folder / name).glob("*"):
                ours = re.fullmatch(r"step_(\d+)\.(jsonl|safetensors)(\.writing)?|\.tmp\w{6}", path.name)
                torn = ours is not None and (ours[1] is None or ours[3])  # a kill may leave half-written files
                if ours is not None and (torn or int(ours[1]) >= step):
                    checksums.remove(path)
        self._writer.begin_logs()
        if started:
            self._writer.event("resumed", f"going on with step {step}", step)
        self._writer.seal()
        return self._writer.read_history()

    # --- the end ------------------------------------------------------------------------------

    def finish(self, policy: Policy, steps: int) -> None:
        """Export the final model; a stage with a `model` folder is complete."""
        self.settle()
        folder, main = self._writer.folder, self._world.main
        lock.check(folder)
        if main:
            checkpoint.prune(self._folder, self.config.keep, self.best_steps())
        if policy.lora is not None:
            policy.export_adapter(folder / "adapter")
        aside = folder / ".model"
        if main:
            checksums.remove(aside)
        policy.export(aside)
        if main:
            if policy.lora is not None:
                checksums.write(folder / "adapter")
                checkpoint.sync(folder / "adapter")
            checksums.write(aside)
            checkpoint.sync(aside)
            os.replace(aside, folder / "model")
            checkpoint.fsync(folder)
        self._world.barrier("the final model")
        self._writer.append("events.jsonl", {"step": steps, "kind": "finished", "message": "all steps are done"})
        self._writer.seal()


def _damaged(folder: Path, good: Path, wrong: Mapping[str, str]) -> str:
    """The error for damaged files. `wrong`: file -> its fault."""
    lines = [f"{name}: {text}" for name, text in list(wrong.items())[:5]]
    more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
    folders = sorted({name.split("/")[0] for name in wrong} & set(seal.DISPENSABLE))
    without = f", or remove {' and '.join(folders)}/ as a whole to continue without" if folders else ""
    return (
        f"{folder}: what was written before {good.name} is damaged: {'; '.join(lines)}{more}. Nothing was "
        f"changed. Restore it from a copy{without}; or move {good} away to continue from an earlier checkpoint; or "
        f"begin a new run with model={good / 'model'}"
    )


def _step_of(row: Mapping[str, Any]) -> float:
    """The step of a row; a row without a step belongs to no completed step."""
    step = row.get("step")
    return step if isinstance(step, int) else math.inf
