"""Evaluations of a stage, and what changed between two of them, problem by problem."""

from __future__ import annotations

from typing import Any

from hone.base.settings import UserError
from hone.report.live.index import Row
from hone.report.live.library import StageFolder
from hone.report.live.tail import read_rows
from hone.runs.layout import inside

#: Problems listed of each kind of change.
MOST_LISTED = 200


def evaluations(stage: StageFolder) -> list[Row]:
    """The rows of evals.jsonl, each with a key that identifies its samples."""
    return [{**row, "key": key(row)} for row in read_rows(stage.folder, "evals.jsonl")]


def key(row: Row) -> str:
    return f"{row.get('label')}@{row.get('step')}"


def flips(stage: StageFolder, first: str, second: str) -> dict[str, Any]:
    """How each problem changed between two evaluations, and the paired difference with its interval.

    A problem sampled several times counts by its share of correct samples. Raises UserError if an evaluation is
    missing, has no samples, or shares no problem with the other.
    """
    from hone.measure.stats.measured import compare, measured, shared  # scipy: only this page needs it

    both = [_samples(stage, one) for one in (first, second)]
    try:
        before, after = (measured(one, rows) for one, rows in zip((first, second), both))
    except ValueError as error:
        raise UserError(str(error)) from error
    comparison = compare(before, after)
    if comparison is None:
        raise UserError(f"{first} and {second} have no problem in common")
    a, b = shared(before, after)
    kinds: dict[str, list[Row]] = {"solved": [], "lost": [], "both": [], "neither": []}
    for problem, level, old, new in zip(a.problems, a.levels, a.rates(), b.rates()):
        kind = "solved" if new > old else "lost" if new < old else "both" if new > 0 else "neither"
        kinds[kind].append({"problem": problem, "level": level, "before": float(old), "after": float(new)})
    interval = comparison.difference
    return {
        "first": first,
        "second": second,
        "difference": {name: getattr(interval, name) for name in ("value", "low", "high", "n")},
        "p_value": comparison.p_value,
        "method": comparison.method,
        "counts": {kind: len(rows) for kind, rows in kinds.items()},
        "problems": {kind: rows[:MOST_LISTED] for kind, rows in kinds.items()},
        "never_before": sum(row["before"] == 0 for row in kinds["solved"]),
    }


def answers(stage: StageFolder, first: str, second: str, problem: str) -> dict[str, list[Row]]:
    """The samples of one problem in two evaluations."""
    chosen: dict[str, list[Row]] = {}
    for one in (first, second):
        chosen[one] = [row for row in _samples(stage, one) if str(row.get("problem_id")) == problem]
    return chosen


def _samples(stage: StageFolder, wanted: str) -> list[Row]:
    row = next((row for row in evaluations(stage) if row["key"] == wanted), None)
    if row is None:
        raise UserError(f"no evaluation {wanted}")
    name = str(row.get("samples_file") or "")
    if inside(stage.folder, name) is None:
        raise UserError(f"the samples of {wanted} are not in the run folder")
    return [one for one in read_rows(stage.folder, name) if "problem_id" in one and "verdict" in one]
