"""The rows of earlier steps that the watch and the guards read, in bounded memory.

The watch compares the first steps with the last, metric by metric; the guards read the last steps. So only rows near
both ends are kept, as many as are read: the results are the same as with all rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from hone.learn.watch import CHECKS, GRAD_STEPS
from hone.recipe.sections.algo import WatchConfig
from hone.types import VERIFIER_FAILURES

Row = dict[str, Any]

#: The values that are read of a row. `trained_tokens` and `skipped` identify the steps with an update.
KEYS = frozenset(
    {"step", "reset", "trained_tokens", "skipped", "grad_norm"}
    | {metric for metric, _ in CHECKS.values()}
    | {f"verdict/{kind}" for kind in VERIFIER_FAILURES}
)
SERIES = tuple(sorted({metric for metric, _ in CHECKS.values()}))


def reach(config: Mapping[str, Any]) -> int:
    """How many values are read at either end, over the `watch` of a recipe and those in its schedule."""
    watches = [config.get("watch") or {}, *(line.get("watch") or {} for line in config.get("schedule") or ())]
    merged = [WatchConfig.model_validate({**watches[0], **watch}) for watch in watches]
    return max(max(5 * one.window + GRAD_STEPS, one.max_skipped, one.max_unscored) + 2 for one in merged)


class History(Sequence[Row]):
    """Rows of metrics.jsonl, oldest first, reduced to the rows and values that are still read."""

    def __init__(self, rows: Sequence[Mapping[str, Any]] = (), reach: int = 1000) -> None:
        """`reach`: number of values of each metric to keep at the beginning and at the end."""
        self._reach = reach
        self._rows: list[Row] = []
        self._bound = 0
        for row in rows:
            self.append(row)

    def append(self, row: Mapping[str, Any]) -> None:
        self._rows.append({key: value for key, value in row.items() if key in KEYS})
        if len(self._rows) > max(self._bound, 4 * self._reach):
            self._rows = self._kept()
            self._bound = len(self._rows) + 2 * self._reach

    def _kept(self) -> list[Row]:
        """The rows with the first and last finite values of each metric, the last rows, and the last with an update."""
        wanted: set[int] = set(range(max(0, len(self._rows) - self._reach), len(self._rows)))
        for order in (range(len(self._rows)), reversed(range(len(self._rows)))):
            counts: Counter[str] = Counter()
            for i in order:
                row = self._rows[i]
                for key in _counted(row):
                    counts[key] += 1
                    if counts[key] <= self._reach:
                        wanted.add(i)
        return [row for i, row in enumerate(self._rows) if i in wanted]

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)


def _counted(row: Row) -> Iterator[str]:
    for key in SERIES:
        value = row.get(key)
        if value is not None and math.isfinite(value):
            yield key
    if row.get("trained_tokens") != 0:
        yield "tried"
