"""The best checkpoint has the highest accuracy on the validation split, never on another split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

SPLIT = "validation"


def best_validated(evals: Iterable[Mapping[str, Any]], count: int) -> list[int]:
    """The `count` best steps in the rows of evals.jsonl, best first; of equal ones, the earlier.

    Step 0 is the initial model, which has no checkpoint.
    """
    if not count:
        return []
    rows = [row for row in evals if row["label"] == SPLIT and row["step"] > 0 and "accuracy" in row]
    ranked = sorted(rows, key=lambda row: (-row["accuracy"]["value"], row["step"]))
    return [int(row["step"]) for row in ranked[:count]]
