"""How much of an accuracy is memorization: the same problems, unchanged and with a small change.

    >>> plain, perturbed = [1, 1, 1, 0], [1, 0, 0, 0]
    >>> memorization(plain, perturbed).score.value      # two of the four are solved only unchanged
    0.5

`hone data perturb` writes both files. Leave problems with verifier failures out of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hone.base.stats import wilson
from hone.types import Interval


@dataclass(frozen=True, slots=True)
class Memorization:
    """n counts problems; that of `consistency` counts the problems solved unchanged."""

    accuracy: Interval  # Acc, on the unchanged problems
    perturbed: Interval  # accuracy of the perturbed ones
    consistency: (
        Interval | None
    )  # CR, the share of the solved problems that are also solved when perturbed; None: no problem was solved
    score: Interval  # LiMem


def memorization(plain: Sequence[bool | int], perturbed: Sequence[bool | int]) -> Memorization:
    """Local inconsistency-based memorization score, LiMem = Acc * (1 - CR) (Xie et al., arXiv:2410.23123, eq. 1).

    Entry i of both is whether problem i was solved, as it is and perturbed; with several perturbations of a problem,
    whether all of them were. Since Acc * CR is the share that is solved both ways, LiMem is the share that is solved
    only unperturbed, and has the interval of a share (Wilson). High on training problems: they are recited. About as
    high on problems that were never trained on: the change itself is hard, or answers are unstable.
    Raises ValueError for lists of different lengths, empty ones, and entries that are neither 0 nor 1.
    """
    if len(plain) != len(perturbed) or not plain:
        raise ValueError(f"memorization: {len(plain)} plain and {len(perturbed)} perturbed results; give one each")
    if any(value not in (0, 1) for value in (*plain, *perturbed)):
        raise ValueError("memorization: a result is 0 or 1, solved or not")
    n, solved = len(plain), int(sum(plain))
    both = sum(1 for a, b in zip(plain, perturbed, strict=True) if a and b)
    return Memorization(
        accuracy=wilson(solved, n),
        perturbed=wilson(int(sum(perturbed)), n),
        consistency=wilson(both, solved) if solved else None,
        score=wilson(solved - both, n),
    )
