"""The run folder: all output of a run, append-only, readable with ordinary tools.

    config.resolved.json   the recipe as validated
    manifest.json          code version, seed, versions, hardware, command
    metrics.jsonl          one row per step, the same for the same seed
    timings.jsonl          one row per step, seconds
    costs.jsonl            one row per step whose reward calls a server: calls, tokens, answers from the cache
    ledger.jsonl           which problems were drawn for a step: see hone.runs.ledger
    evals.jsonl            one row per evaluation; evals/LABEL.jsonl its samples
    events.jsonl           unusual events
    inputs.json            the files that the recipe names, copies of the small ones in inputs/: see hone.base.places
    files.jsonl            size and checksum of every file that is written once; seal.json: of the others
    rollouts/step_N.jsonl  every sample: text, parts, verdict, advantage, lengths
    tokens/step_N.safetensors   its tokens: ids, advantages, entropies, log-probs of sampler and trainer
    skipped/               batches whose update was not finite: see hone.stages.guard
    checkpoints/           see hone.learn.checkpoint
    resets/reset_001/      the model at each hard reset, an ordinary Hugging Face checkpoint: see hone.stages.reset
    model/                 the final weights, an ordinary Hugging Face checkpoint
    adapter/               of LoRA: the adapter alone, in peft's format; its base is that of the last reset

A row of metrics.jsonl: {"step": 3, "phase": "rl", "loss": 0.01, "reward/mean": 0.42, ...}
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.base import checksums, jsonl, places, sealed
from hone.base.progress import Track
from hone.base.settings import UserError
from hone.base.stop import Interrupted, Preempted, Stop, Stopping
from hone.base.visible import visible
from hone.base.world import ALONE, World
from hone.learn import checkpoint
from hone.learn.policy import Policy
from hone.recipe.sections.optim import CheckpointConfig
from hone.runs import lock, seal
from hone.runs.changes import changes
from hone.runs.history import History, reach
from hone.runs.layout import drop_resets, reset_folder
from hone.runs.ledger import row_of
from hone.runs.manifest import manifest, user_files
from hone.runs.retention import best_validated
from hone.runs.tokens import rollout_rows, write_tokens
from hone.tasks.curriculum import Curriculum
from hone.types import Group, Sample, StepStats


class Run:
    """Writer of one run folder. Of several processes, only the first writes; the others know the contents."""

    def __init__(self, folder: Path, checkpoints: CheckpointConfig, world: World = ALONE) -> None:
        self.folder, self.world = folder, world
        self.config = checkpoints
        self.history = History()  # rows of metrics.jsonl that are read again
        self._reach = 1000
        self._logs = seal.Logs(folder)
        self._stop = Stop(checkpoints.stop_within_seconds, world.main)
        self._stopping = False  # a process was asked to stop, and the step is saved
        self._preempted = False  # the same, by SIGTERM
        self._writer = checkpoint.Writer()
        self._at: tuple[
            int, Policy, Curriculum | None
        ]  # the last step boundary: what may be saved in the middle of a step
        self._saved = 0  # the last step that was saved, or is being saved
        self._writing: int | None = None  # the step of the checkpoint that is being written
        self._unsynced: set[Path] = set()  # written since the last checkpoint

    @classmethod
    def open(
        cls, folder: Path, config: Mapping[str, Any], checkpoints: CheckpointConfig, seed: int, world: World = ALONE
    ) -> Run:
        """Create the folder, or continue in it; changed settings are recorded as an event."""
        run = cls(folder, checkpoints, world)
        run._reach = reach(config)
        run.history = History(reach=run._reach)
        if not world.main:
            return run
        lock.check(folder)
        folder.mkdir(parents=True, exist_ok=True)
        jsonl.keep(folder / "events.jsonl", lambda row: True)
        if before := lock.taken_over(folder):
            run.event("lock_taken_over", f"the run folder was locked by {before}, which had ended")
        run._logs.begin()
        for name in ("config.resolved.json", "manifest.json", places.FILE):
            sealed.require_file(folder, name)
        resolved = folder / "config.resolved.json"
        text = json.dumps(config, indent=1)
        if resolved.exists() and resolved.read_text() != text:
            changed = changes(checksums.read_json(resolved, dict, "restore it from a copy"), config)
            message = f"resumed with other settings than before: {', '.join(map(str, changed))}"
            run.event("config_changed", message, settings=[change.row() for change in changed])
        sealed.put(folder, resolved.name, text)
        inputs, other_inputs = places.record(folder, config)
        sealed.put(folder, places.FILE, inputs)
        if data := [key for key in other_inputs if not key.startswith("reward.parts.")]:
            run.event("file_changed", f"resumed with other contents of {', '.join(data)} than before")
        files = user_files(config)
        if not (folder / "manifest.json").exists():
            sealed.put(folder, "manifest.json", json.dumps({**manifest(seed), "files": files}, indent=1))
            return run
        remedy = "restore it from a copy, or remove it: a new one is written, with the versions and files of now"
        before = checksums.read_json(folder / "manifest.json", dict, remedy).get("files", {})
        if before != files:
            other = ", ".join(sorted(name for name in {*before, *files} if before.get(name) != files.get(name)))
            run.event("file_changed", f"resumed with other contents of {other} than at the start of the run")
        return run

    # --- rows ---------------------------------------------------------------------------------

    def log(self, step: int, metrics: Mapping[str, float | str], seconds: Mapping[str, float]) -> None:
        row = {"step": step, **metrics}
        self.history.append(row)
        self._append("metrics.jsonl", row)
        self._append("timings.jsonl", {"step": step, **{k: round(v, 4) for k, v in seconds.items()}})

    def log_costs(self, step: int, costs: Mapping[str, float]) -> None:
        every = self.world.gather([dict(costs)], "costs")  # each process has the costs of its own groups
        costs = {key: sum(c.get(key, 0.0) for c in every) for key in dict.fromkeys(key for c in every for key in c)}
        if costs:
            self._append("costs.jsonl", {"step": step, **costs})

    def event(self, kind: str, message: str, step: int | None = None, **details: Any) -> None:
        """Record an unusual event, and print it once."""
        self._append("events.jsonl", {"step": step, "kind": kind, "message": message, **details})
        if self.world.main and kind not in ("checkpoint",):
            print(visible(f"[{kind}] {message}"), file=sys.stderr, flush=True)

    def log_eval(self, step: int, label: str, row: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        name = f"evals/{label}.jsonl" if label in ("before", "after") else f"evals/{label}_{step:06d}.jsonl"
        self._write_rows(name, samples)
        self._written(name, step)
        self._append("evals.jsonl", {"step": step, "label": label, **row, "samples_file": name})

    def log_rollouts(
        self,
        step: int,
        groups: Sequence[Group],
        prompts: Sequence[str],
        samples: Sequence[Sample],
        stats: StepStats,
        piece: Callable[[int], str],
    ) -> None:
        """Every sample of a step, as text and as tokens; `piece` decodes one token id.

        `samples` [S] are those of the groups in order.
        """
        if not self.world.main:
            return
        texts, tokens = f"rollouts/step_{step:06d}.jsonl", f"tokens/step_{step:06d}.safetensors"
        self._write_rows(texts, rollout_rows(groups, prompts, samples))
        write_tokens(self.path(tokens), samples, stats, piece)
        for name in (texts, tokens):
            self._written(name, step)

    def log_prompts(
        self, step: int, rounds: Sequence[Sequence[str]], groups: Sequence[Group], replaced: Sequence[Group] = ()
    ) -> None:
        """Record the problems drawn for a step, by round (ids), and their grades: see `hone.runs.ledger`."""
        for number, drawn in enumerate(filter(None, rounds)):
            self._append("ledger.jsonl", row_of(step, number, drawn, groups, replaced))

    def track(self, title: str, total: int, done: int) -> Track:
        """The progress display; while answers are sampled, it also polls for a stop."""
        return Track(title, total, done, self.world.main, self.poll_stop)

    def rows(self, name: str) -> list[dict[str, Any]]:
        return jsonl.read(self.folder / name)

    # --- checkpoints --------------------------------------------------------------------------

    def checkpoint(self, step: int, policy: Policy, course: Curriculum | None = None, now: bool = False) -> None:
        """Save what is needed to begin step `step`, if it is due, if `now`, or if the user asked to stop.

        Raises OSError if the checkpoint before could not be written.
        """
        self._at = step, policy, course
        mine = self._stop.asked, self._stop.preempted, self._writer.error is not None
        states = self.world.gather([mine], "whether to stop")
        self._stopping, self._preempted, failed = (any(flags) for flags in zip(*states, strict=True))
        if failed:
            self.settle()
        if step % self.config.every == 0 or self._stopping or now:
            self.save(step, policy, course)

    def save(self, step: int, policy: Policy, course: Curriculum | None = None) -> None:
        """Copy what is needed to begin `step`; it is written in the background. Rows and files of earlier steps are
        synced to disk first, because a resumed run does not write them again."""
        self.settle()
        lock.check(self.folder)
        rows = [path for path in self._unsynced if path.exists()]
        self._unsynced.clear()
        state = None if course is None else course.state(step)
        logs = self._logs.records() if self.world.main else None
        kept = checkpoint.take(step, policy, self.config.keep, state, self.best_steps(), logs)
        folder, world = self.folder / "checkpoints", self.world
        self._writer.begin(lambda: checkpoint.write(folder, kept, world, rows))
        self._writing = self._saved = step

    def settle(self) -> None:
        """Wait for the checkpoint that is being written. Raises OSError if that failed."""
        step, self._writing = self._writing, None
        self._writer.wait()
        if step is not None:
            self._append("events.jsonl", {"step": step, "kind": "checkpoint", "message": f"saved before step {step}"})
            self._seal()

    def best_steps(self) -> list[int]:
        """The steps of the best checkpoints by validation accuracy, best first; of equal ones, the earlier."""
        return best_validated(self.rows("evals.jsonl"), self.config.keep_best) if self.world.main else []

    def resume(self, policy: Policy, course: Curriculum | None = None) -> int:
        """Load the newest intact checkpoint, and return its step; 0 if there is no checkpoint yet.

        Rows of steps that will be repeated are removed, so that the files read as if the run had
        never been interrupted.
        """
        good = self.world.on_main(self._newest_checkpoint, "the checkpoint to go on from")
        step = resets = 0
        records: seal.Records | None = {}  # None: written by a version of hone without records
        if good is not None:
            state = checkpoint.read_state(good)
            records = state.get("logs")
            step, resets = int(state["step"]), len(state["policy"].get("resets", ()))
            if resets:
                policy.restore(good, state["policy"], reset_folder(self.folder, resets))
            else:
                policy.restore(good, state["policy"])
            if course is not None and state.get("course") is not None:
                course.restore(state["course"])
        rows = self.world.on_main(lambda: self._back_to(step, resets, records), "the rows so far")
        self.history = History(rows, self._reach)
        self._at = step, policy, course
        self._saved = step
        return step

    def _newest_checkpoint(self) -> Path | None:
        """The newest intact checkpoint; damaged ones after it are removed."""
        folder = self.folder / "checkpoints"
        there = checkpoint.found(folder)
        report = lambda message: self.event("checkpoint_damaged", message)  # noqa: E731
        good = checkpoint.newest_good(folder, report, self.folder / "resets")
        if there and good is None:
            raise UserError(
                f"{folder}: none of its {len(there)} checkpoints is whole; nothing was changed. Restore one, or move "
                f"{self.folder} away to begin anew"
            )
        if good is not None:
            self._verify_files(good)
        checkpoint.drop_newer(folder, good)
        return good

    def _verify_files(self, good: Path) -> None:
        """Raises UserError if rows or files of the steps before this checkpoint were changed or lost.

        Nothing is changed. Damage on which no result depends is recorded as an event, and the run continues.
        """
        records = checkpoint.read_state(good).get("logs")
        if records is None:
            return
        wrong = seal.log_faults(self.folder, records)
        for name in [name for name in wrong if name in seal.BESIDE]:
            self.event("rows_damaged", f"{name}: {wrong.pop(name)}; nothing that is computed depends on it")
        if seal.ONCE not in wrong:
            known = {str(row.get("file")) for row in self.rows(seal.ONCE) if _step_of(row) < checkpoint.step_of(good)}
            wrong |= {name: text for name, text in seal.once_faults(self.folder).items() if name in known}
        if not wrong:
            return
        lines = [f"{name}: {text}" for name, text in list(wrong.items())[:5]]
        more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
        folders = sorted({name.split("/")[0] for name in wrong} & set(seal.DISPENSABLE))
        without = f", or remove {' and '.join(folders)}/ as a whole to go on without" if folders else ""
        raise UserError(
            f"{self.folder}: what was written before {good.name} is damaged: {'; '.join(lines)}{more}. Nothing was "
            f"changed. Restore it from a copy{without}; or move {good} away to go on from a checkpoint before it; or "
            f"begin a new run with model={good / 'model'}"
        )

    def _back_to(self, step: int, resets: int, records: seal.Records | None) -> list[dict[str, Any]]:
        """Remove the output of `step` and later steps; returns the rows of the steps before. Other files stay."""
        lock.check(self.folder)
        drop_resets(self.folder, resets)
        started = (self.folder / "metrics.jsonl").exists() or (self.folder / "evals.jsonl").exists()
        if records is None:
            for name in seal.LOGS:
                jsonl.keep(self.folder / name, lambda row: _step_of(row) < step)
        else:
            seal.cut(self.folder, records)
        for name in ("rollouts", "tokens", "skipped"):
            for path in (self.folder / name).glob("*"):
                ours = re.fullmatch(r"step_(\d+)\.(jsonl|safetensors)(\.writing)?|\.tmp\w{6}", path.name)
                torn = ours is not None and (ours[1] is None or ours[3])  # a kill may leave half-written files
                if ours is not None and (torn or int(ours[1]) >= step):
                    checksums.remove(path)
        self._logs.begin()
        if started:
            self.event("resumed", f"going on with step {step}", step)
        self._seal()
        return list(History(self.rows("metrics.jsonl"), self._reach))

    def finish(self, policy: Policy, steps: int) -> None:
        """Export the final model; a stage with a `model` folder is complete."""
        self.settle()
        lock.check(self.folder)
        if self.world.main:
            checkpoint.prune(self.folder / "checkpoints", self.config.keep, self.best_steps())
        if policy.lora is not None:
            policy.export_adapter(self.folder / "adapter")
        aside = self.folder / ".model"
        if self.world.main:
            checksums.remove(aside)
        policy.export(aside)
        if self.world.main:
            if policy.lora is not None:
                checksums.write(self.folder / "adapter")
                checkpoint.sync(self.folder / "adapter")
            checksums.write(aside)
            checkpoint.sync(aside)
            os.replace(aside, self.folder / "model")
            checkpoint.fsync(self.folder)
        self.world.barrier("the final model")
        self._append("events.jsonl", {"step": steps, "kind": "finished", "message": "all steps are done"})
        self._seal()

    # --- stopping -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """The first Ctrl-C asks the loop to save and stop, a second one stops at once; SIGTERM: see `hone.base.stop`.

        However the loop ends, this waits for a checkpoint that is being written.
        """
        try:
            with self._stop.listening():
                try:
                    yield
                except Stopping:  # in the middle of a step: the state at its beginning is still there
                    step, policy, course = self._at
                    if step != self._saved:
                        self.save(step, policy, course)
                    self.settle()
                    raise Preempted(step) from None
                except BaseException:
                    self._writer.join()
                    if self._writer.error is not None:  # in addition to what ends the run
                        print(visible(self._writer.error), file=sys.stderr, flush=True)
                    raise
                self.settle()
        except Preempted:
            raise
        except BaseException:
            self._stop.cancel()
            raise

    def poll_stop(self) -> None:
        """Abandon the step in progress if the machine is about to stop; called repeatedly while answers are sampled.

        Several processes synchronise within a step, so they stop together after it. Raises LockLost if another process
        has taken over the run folder.
        """
        lock.check(self.folder)
        if self._stop.preempted and self.world.size == 1:
            raise Stopping

    def stop_if_asked(self, step: int) -> None:
        """Called between steps, after `checkpoint`: raises `Interrupted` or `Preempted` if a stop was requested."""
        if self._stopping:  # requested since then: the next step saves first
            self.settle()
            raise Preempted(step) if self._preempted else Interrupted(step)

    # --- files --------------------------------------------------------------------------------

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        if self.world.main:
            self.path(name)
            self._logs.append(name, row)

    def _written(self, name: str, step: int) -> None:
        if self.world.main:
            self.path(seal.ONCE)
            self._logs.written(name, step)

    def _seal(self) -> None:
        if self.world.main:
            self._logs.seal()

    def _write_rows(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if self.world.main:
            jsonl.write(self.path(name), rows)

    def path(self, name: str) -> Path:
        """The path for a file of this run, which the next checkpoint syncs to disk.

        Raises LockLost if another process has taken over the run folder.
        """
        lock.check(self.folder)
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        self._unsynced |= {path, path.parent}
        return path


def _step_of(row: Mapping[str, Any]) -> float:
    """The step of a row; a row without a step belongs to no completed step."""
    step = row.get("step")
    return step if isinstance(step, int) else math.inf
