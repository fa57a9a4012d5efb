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

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.base import checksums, jsonl, places, sealed
from hone.base.visible import visible
from hone.base.world import ALONE, World
from hone.runs import lock, seal
from hone.runs.changes import changes
from hone.runs.history import History, reach
from hone.runs.layout import rollouts_name, tokens_name
from hone.runs.ledger import row_of
from hone.runs.manifest import manifest, user_files
from hone.runs.tokens import rollout_rows, write_tokens
from hone.types import Group, Sample, StepStats


class RunWriter:
    """Writes the rows and files of one run folder. Of several processes only the first writes; all know the history."""

    def __init__(self, folder: Path, world: World = ALONE, reach: int = 1000) -> None:
        """`reach`: values of each metric that are read again at either end of the run, see `hone.runs.history`."""
        self.folder, self.world = folder, world
        self.history = History(reach=reach)  # rows of metrics.jsonl that are read again
        self._reach = reach
        self._logs = seal.Logs(folder)
        self._printed = ""  # the last event on the terminal
        self._unsynced: set[Path] = set()  # written since the last checkpoint

    @classmethod
    def open(cls, folder: Path, config: Mapping[str, Any], seed: int, world: World = ALONE) -> RunWriter:
        """Create the folder, or continue in it; changed settings and files are recorded as events."""
        writer = cls(folder, world, reach(config))
        if not world.main:
            return writer
        lock.check(folder)
        folder.mkdir(parents=True, exist_ok=True)
        jsonl.keep(folder / "events.jsonl", lambda row: True)
        if before := lock.taken_over(folder):
            writer.event("lock_taken_over", f"the run folder was locked by {before}, which had ended")
        writer.begin_logs()
        for name in ("config.resolved.json", "manifest.json", places.FILE):
            sealed.require_file(folder, name)
        writer._put_config(config)
        writer._put_inputs(config)
        writer._put_manifest(seed, user_files(config))
        return writer

    def _put_config(self, config: Mapping[str, Any]) -> None:
        resolved = self.folder / "config.resolved.json"
        text = json.dumps(config, indent=1)
        if resolved.exists() and resolved.read_text() != text:
            changed = changes(checksums.read_json(resolved, dict, "restore it from a copy"), config)
            message = f"resumed with other settings than before: {', '.join(map(str, changed))}"
            self.event("config_changed", message, settings=[change.row() for change in changed])
        sealed.put(self.folder, resolved.name, text)

    def _put_inputs(self, config: Mapping[str, Any]) -> None:
        inputs, changed = places.record(self.folder, config)
        sealed.put(self.folder, places.FILE, inputs)
        if data := [key for key in changed if not key.startswith("reward.parts.")]:
            self.event("file_changed", f"resumed with other contents of {', '.join(data)} than before")

    def _put_manifest(self, seed: int, files: Mapping[str, Any]) -> None:
        path = self.folder / "manifest.json"
        if not path.exists():
            sealed.put(self.folder, path.name, json.dumps({**manifest(seed), "files": files}, indent=1))
            return
        remedy = "restore it from a copy, or remove it: a new one is written, with the versions and files of now"
        before = checksums.read_json(path, dict, remedy).get("files", {})
        if before != files:
            names = ", ".join(sorted(name for name in {*before, *files} if before.get(name) != files.get(name)))
            self.event("file_changed", f"resumed with other contents of {names} than at the start of the run")

    # --- rows ---------------------------------------------------------------------------------

    def log(
        self,
        step: int,
        metrics: Mapping[str, float | str],
        seconds: Mapping[str, float],
        turns: Sequence[Mapping[str, float]] = (),
    ) -> None:
        """`turns`: the times of each turn, if rollouts have several."""
        row = {"step": step, **metrics}
        self.history.append(row)
        self.append("metrics.jsonl", row)
        times: dict[str, Any] = {k: round(v, 4) for k, v in seconds.items()}
        if turns:
            times["turns"] = [{k: round(v, 4) for k, v in turn.items()} for turn in turns]
        self.append("timings.jsonl", {"step": step, **times})

    def log_costs(self, step: int, costs: Mapping[str, float]) -> None:
        every = self.world.gather([dict(costs)], "costs")  # each process has the costs of its own groups
        costs = {key: sum(c.get(key, 0.0) for c in every) for key in dict.fromkeys(key for c in every for key in c)}
        if costs:
            self.append("costs.jsonl", {"step": step, **costs})

    def event(self, kind: str, message: str, step: int | None = None, **details: Any) -> None:
        """Record an unusual event, and print it unless the same was printed last."""
        self.append("events.jsonl", {"step": step, "kind": kind, "message": message, **details})
        if self.world.main and kind not in ("checkpoint",) and message != self._printed:
            self._printed = message
            print(visible(f"[{kind}] {message}"), file=sys.stderr, flush=True)

    def log_eval(self, step: int, label: str, row: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        name = f"evals/{label}.jsonl" if label in ("before", "after") else f"evals/{label}_{step:06d}.jsonl"
        self._write_rows(name, samples)
        self._written(name, step)
        self.append("evals.jsonl", {"step": step, "label": label, **row, "samples_file": name})

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
        texts, tokens = rollouts_name(step), tokens_name(step)
        self._write_rows(texts, rollout_rows(groups, prompts, samples))
        write_tokens(self.path(tokens), samples, stats, piece)
        for name in (texts, tokens):
            self._written(name, step)

    def log_prompts(
        self, step: int, rounds: Sequence[Sequence[str]], groups: Sequence[Group], replaced: Sequence[Group] = ()
    ) -> None:
        """Record the problems drawn for a step, by round (ids), and their grades: see `hone.runs.ledger`."""
        for number, drawn in enumerate(filter(None, rounds)):
            self.append("ledger.jsonl", row_of(step, number, drawn, groups, replaced))

    def rows(self, name: str) -> list[dict[str, Any]]:
        return jsonl.read(self.folder / name)

    def read_history(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl that are read again."""
        return list(History(self.rows("metrics.jsonl"), self._reach))

    def restart(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Continue after these rows of metrics.jsonl."""
        self.history = History(rows, self._reach)

    # --- what a checkpoint records ------------------------------------------------------------

    def begin_logs(self) -> None:
        """Digest the existing rows, after those behind the checkpoint were removed."""
        self._logs.begin()

    def records(self) -> seal.Records | None:
        """Size and checksum of every file of rows; None in processes that do not write."""
        return self._logs.records() if self.world.main else None

    def take_unsynced(self) -> list[Path]:
        """What was written since the last call: the next checkpoint syncs it to disk."""
        paths = [path for path in self._unsynced if path.exists()]
        self._unsynced.clear()
        return paths

    def seal(self) -> None:
        """Write the checksums of the files of rows to seal.json."""
        if self.world.main:
            self._logs.seal()

    # --- files --------------------------------------------------------------------------------

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """Append a row to a file of rows."""
        if self.world.main:
            self.path(name)
            self._logs.append(name, row)

    def _written(self, name: str, step: int) -> None:
        if self.world.main:
            self.path(seal.ONCE)
            self._logs.written(name, step)

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
