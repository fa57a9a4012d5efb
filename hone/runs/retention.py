"""The best checkpoint has the highest accuracy on the validation split, never on another split.

If the task does not grade answers, the mean of the training reward takes the place of the accuracy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

SPLIT = "validation"
#: What an evaluation may measure, with an interval, in the order of preference.
MEASURES = ("accuracy", "reward")


def measured(row: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The measure of a row of evals.jsonl: its name and its interval; None if the row has neither."""
    return next(((name, row[name]) for name in MEASURES if name in row), None)


def best_validated(evals: Iterable[Mapping[str, Any]], count: int) -> list[int]:
    """The `count` best steps in the rows of evals.jsonl, best first; of equal ones, the earlier.

    Step 0 is the initial model, which has no checkpoint.
    """
    if not count:
        return []
    rows = [row for row in evals if row["label"] == SPLIT and row["step"] > 0]
    values = [(-measure[1]["value"], int(row["step"])) for row in rows if (measure := measured(row)) is not None]
    return [step for _, step in sorted(values)[:count]]
