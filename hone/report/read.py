"""Reads run folders for the report: once, streaming, and in any state.

A line torn by a kill, a missing file or a stage that has not started is noted, never an error: reports of failed runs
are the most needed ones.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.base.settings import UserError
from hone.runs import layout, seal

Row = dict[str, Any]

#: Kinds of events that need attention, and those that occur in every run; others get a line each.
WARNINGS = frozenset(
    {
        *("warning", "error", "non_finite", "collapse", "grad_spike", "update_skipped", "verifier", "no_signal"),
        *("worker_failed", "worker_lost", "launcher_lost", "checkpoint_damaged", "rows_damaged", "sink_failed"),
        *("refill_bound", "file_changed", "grades_differ"),
    }
)
ROUTINE = frozenset({"checkpoint", "zero_variance", "finished", "memory"})

#: Damaged files that are named individually.
MOST_NAMED = 10


@dataclass
class Metrics:
    """Columns of metrics.jsonl; a value that a step lacks, or that is not finite, is NaN."""

    steps: list[int] = field(default_factory=list)
    columns: dict[str, list[float]] = field(default_factory=dict)
    non_finite: list[int] = field(default_factory=list)  # steps with a NaN or an infinity in the file

    def add(self, row: Row) -> None:
        bad = False
        for key, value in row.items():
            if key == "step" or isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            finite = math.isfinite(value)
            bad |= not finite
            column = self.columns.setdefault(key, [math.nan] * len(self.steps))
            column.append(float(value) if finite else math.nan)
        self.steps.append(int(row["step"]))
        if bad:
            self.non_finite.append(self.steps[-1])
        for column in self.columns.values():
            if len(column) < len(self.steps):
                column.append(math.nan)

    def has(self, name: str) -> bool:
        return any(not math.isnan(value) for value in self.columns.get(name, ()))


@dataclass
class StageRecord:
    """One run folder."""

    name: str
    kind: str  # sft | rl | generate | distil
    folder: Path
    config: Row
    manifest: Row
    metrics: Metrics
    seconds: dict[str, float]  # sums of timings.jsonl by name; "seconds" is the total
    events: list[Row]
    evals: list[Row]
    notes: list[str]  # what could not be read

    @property
    def started(self) -> bool:
        return bool(self.config or self.manifest or self.metrics.steps or self.evals)

    @property
    def steps_planned(self) -> int | None:
        """None if the configuration does not say."""
        if self.kind in ("rl", "distil"):
            steps = self.config.get("steps")
            return int(steps) if isinstance(steps, int) else None
        sft = self.config.get("sft")
        if self.kind == "sft" and isinstance(sft, dict) and sft.get("examples_per_step") and not sft.get("data"):
            return max(1, int(sft.get("examples", 0)) * int(sft.get("epochs", 1)) // int(sft["examples_per_step"]))
        return None

    @property
    def steps_done(self) -> int:
        return len(self.metrics.steps)

    @property
    def finished(self) -> bool:
        if any(row.get("label") == "after" for row in self.evals) or any(
            e.get("kind") == "finished" for e in self.events
        ):
            return True
        return self.steps_planned is not None and self.steps_done >= self.steps_planned

    def samples_file(self, row: Row) -> Path | None:
        """The samples behind an evaluation, if they are inside this folder."""
        path = (self.folder / str(row.get("samples_file") or f"evals/{row.get('label')}.jsonl")).resolve()
        return path if path.is_file() and path.is_relative_to(self.folder.resolve()) else None

    def rollout_files(self) -> list[tuple[int, Path]]:
        return layout.rollout_files(self.folder)


@dataclass
class RunRecord:
    """A plain run (one stage) or a pipeline (several)."""

    name: str
    folder: Path
    pipeline: bool
    stages: list[StageRecord]
    results: Row
    goes_on_with: dict[str, str | None] = field(default_factory=dict)  # stage -> the stage whose model it started from

    @property
    def finished(self) -> bool:
        return bool(self.results) or bool(self.stages and all(stage.finished for stage in self.stages))

    def of_kind(self, kind: str) -> list[StageRecord]:
        return [stage for stage in self.stages if stage.kind == kind and stage.metrics.steps]

    def line(self) -> list[StageRecord]:
        """The chain of stages that led to the last model; those of a teacher are not part of its student's chain."""
        models = [stage for stage in self.stages if stage.kind != "generate"]
        if not self.goes_on_with or not models:
            return models
        names: set[str] = set()
        name: str | None = models[-1].name
        while name is not None and name not in names:
            names.add(name)
            name = self.goes_on_with.get(name)
        return [stage for stage in models if stage.name in names]

    def reinforced(self) -> list[StageRecord]:
        """The stages of `line` that trained the model on its own answers."""
        return [stage for stage in self.line() if stage.kind in ("rl", "distil") and stage.metrics.steps]


def load_run(folder: Path) -> RunRecord:
    """Read a run folder or a pipeline folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"report: {folder} is not a folder; give the folder of a run, e.g. runs/demo")
    has_metrics = (folder / "metrics.jsonl").exists()  # then `load_stage` checks
    notes: list[str] = [] if has_metrics else damage(folder)
    listed = _json(folder / "stages.json", notes)
    results = _json(folder / "results.json", notes)
    results = results if isinstance(results, dict) else {}
    if isinstance(listed, list):
        stages = [
            load_stage(_inside(folder, str(s.get("folder", s.get("name", "")))), str(s.get("name", "?")), s.get("kind"))
            for s in listed
            if isinstance(s, dict)
        ]
        if stages:
            stages[0].notes.extend(notes)
        listed_with_start = [s for s in listed if isinstance(s, dict) and "goes_on_with" in s]
        goes_on = {str(s.get("name", "?")): s["goes_on_with"] for s in listed_with_start}
        return RunRecord(folder.resolve().name, folder, True, stages, results, goes_on)
    stage = load_stage(folder)
    stage.notes.extend(notes)
    if not stage.started:
        raise UserError(
            f"report: {folder} holds no run (no stages.json, config.resolved.json, metrics.jsonl or evals.jsonl)"
        )
    return RunRecord(stage.name, folder, False, [stage], results)


def _is_eval(row: Row) -> bool:
    """Whether a row is an evaluation's. Without grades a row has no accuracy, but it has lengths."""
    is_eval = isinstance(row.get("accuracy"), dict) or ("accuracy" not in row and "response_tokens" in row)
    return is_eval and isinstance(row.get("step", 0), (int, float))


def _inside(folder: Path, relative: str) -> Path:
    path = folder / relative
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"report: stages.json names the folder {relative!r}, which is outside {folder}")
    return path


def load_stage(folder: Path, name: str | None = None, kind: str | None = None) -> StageRecord:
    notes = damage(folder)
    config = _json(folder / "config.resolved.json", notes)
    manifest = _json(folder / "manifest.json", notes)
    config, manifest = (value if isinstance(value, dict) else {} for value in (config, manifest))
    metrics, by_step = Metrics(), {}
    for row in rows(folder / "metrics.jsonl", notes):
        if isinstance(row.get("step"), int):
            by_step[row["step"]] = row  # after a resume the later row of a step counts
    for _, row in sorted(by_step.items()):
        metrics.add(row)
    phase = next((str(row.get("phase")) for row in by_step.values() if row.get("phase")), None)
    return StageRecord(
        name=name or str(config.get("name") or folder.resolve().name),
        kind=str(kind or config.get("stage") or phase or "run"),
        folder=folder,
        config=config,
        manifest=manifest,
        metrics=metrics,
        seconds=_sums(folder / "timings.jsonl", notes),
        events=list(rows(folder / "events.jsonl", notes)),
        evals=[row for row in rows(folder / "evals.jsonl", notes) if _is_eval(row)],
        notes=notes,
    )


def rows(path: Path, notes: list[str] | None = None) -> Iterator[Row]:
    """The JSON objects of a .jsonl file, line by line; invalid lines are counted in `notes`."""
    if not path.is_file():
        return
    damaged = 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.strip():
                continue
            try:  # the last line of a killed run may be torn
                row = json.loads(line)
            except (json.JSONDecodeError, RecursionError):
                damaged += 1
                continue
            if isinstance(row, dict):
                yield row
            else:
                damaged += 1
    if damaged and notes is not None:
        notes.append(f"{path.name}: {damaged} unreadable line{'s' if damaged > 1 else ''} left out")


def spread(files: list[tuple[int, Path]], limit: int) -> list[tuple[int, Path]]:
    """At most `limit` of the files, evenly spaced, first and last among them."""
    if len(files) <= limit:
        return files
    return [files[round(i * (len(files) - 1) / (limit - 1))] for i in range(limit)]


def stream(files: list[tuple[int, Path]], byte_budget: int) -> Iterator[tuple[int, Row]]:
    """(step, record) of rollout files in order, until about `limit` bytes have been read."""
    for step, path in files:
        if byte_budget <= 0:
            return
        byte_budget -= path.stat().st_size
        for record in rows(path):
            if isinstance(record.get("text"), str):
                yield step, record


def damage(folder: Path) -> list[str]:
    """Damaged files, for messages on the terminal and in the report, which is made nevertheless.

    Tokens are not checked: no report reads them.
    """
    try:
        wrong = [f"{name} is damaged: {why}" for name, why in seal.faults(folder, without=("tokens", "skipped"))]
    except UserError as error:
        wrong = [str(error)]
    if len(wrong) > MOST_NAMED:
        wrong[MOST_NAMED:] = [f"and {len(wrong) - MOST_NAMED} more files are damaged: hone runs check {folder}"]
    for line in wrong:
        print(f"{folder}: {line}", file=sys.stderr)
    return wrong


def _sums(path: Path, notes: list[str]) -> dict[str, float]:
    last: dict[int, Row] = {row["step"]: row for row in rows(path, notes) if isinstance(row.get("step"), int)}
    sums: dict[str, float] = {}
    for row in last.values():
        for key, value in row.items():
            if key != "step" and isinstance(value, (int, float)) and math.isfinite(value):
                sums[key] = sums.get(key, 0.0) + float(value)
    return sums


def _json(path: Path, notes: list[str]) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (json.JSONDecodeError, RecursionError):
        notes.append(f"{path.name} is unreadable and was left out")
        return None
