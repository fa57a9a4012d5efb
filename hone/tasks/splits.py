"""Assigns puzzles to splits by their canonical form, never by a seed or a size.

So no run trains on a test problem of another run, whatever their settings.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import TypeVar

from hone.types import Problem, Split

Level = TypeVar("Level")

#: The range of canonical forms in each split, as fractions of all.
SHARES: dict[Split, tuple[float, float]] = {"train": (0.0, 0.5), "validation": (0.5, 0.6), "test": (0.6, 1.0)}


def split_of(form: str) -> Split:
    """The split of a canonical form, from the SHA-256 of its text."""
    position = int.from_bytes(hashlib.sha256(form.encode()).digest()[:8], "big") / 2**64
    return next(split for split, (low, high) in SHARES.items() if low <= position < high)


def warn_of_overlap(forms: Mapping[Split, set[str]], split: Split) -> None:
    """Warn if a split read from a file shares canonical forms with another one."""
    for other, theirs in forms.items():
        shared = len(theirs & forms[split])
        if other != split and shared:
            warnings.warn(f"{shared} problems of {split}_file have equivalents in {other}_file", stacklevel=4)


def even_shares(total: int, levels: int) -> list[int]:
    """`total` problems divided evenly over `levels`; the remainder goes to the first ones."""
    return [total // levels + (k < total % levels) for k in range(levels)]


def by_level(total: int, levels: Sequence[Level], make: Callable[[Level, int], list[Problem]]) -> list[Problem]:
    """`total` problems divided evenly over the levels, which alternate; `make(level, count)` returns those of one."""
    made = [make(level, share) for level, share in zip(levels, even_shares(total, len(levels)))]
    return alternating(made)


def alternating(levels: Sequence[Sequence[Problem]]) -> list[Problem]:
    """The first problem of each level, then the second of each, and so on."""
    return [problem for row in zip_longest(*levels) for problem in row if problem is not None]
