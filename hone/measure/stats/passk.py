"""Unbiased pass@k (Chen et al., arXiv:2107.03374, eq. 1) with bootstrap bands over problems.

    >>> float(pass_at_k([4], [1], [2])[0, 0])     # 1 - C(3, 2) / C(4, 2)
    0.5

Neither the average of max(correct) over one draw of k nor 1 - (1 - c/n)^k is unbiased.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hone.base.stats import shares
from hone.types import Interval

Array = npt.NDArray[np.float64]
_ROW_BLOCK = 2_000_000  # cells of the [P, k] product held at once


def pass_at_k(samples: Sequence[int], correct: Sequence[int], ks: Sequence[int]) -> Array:  # [P, K]
    """Probability that at least one of k of the n samples is correct, for each problem and each k.

    1 - prod_{j<k} (1 - c / (n - j)), as a sum of logarithms: no factorial, no cancellation, any n.
    """
    n, c, k = (np.asarray(x, dtype=np.int64) for x in (samples, correct, ks))
    if n.shape != c.shape or n.ndim != 1 or n.size == 0 or k.size == 0:
        raise ValueError(f"pass_at_k: needs one n and one c per problem and a k, got {n.shape}, {c.shape}, {k.shape}")
    if (c < 0).any() or (c > n).any():
        raise ValueError("pass_at_k: a problem has fewer than 0 or more than n correct samples")
    if k.min() < 1 or k.max() > n.min():
        raise ValueError(f"pass_at_k: k must lie in 1..{n.min()} (the fewest samples of a problem), got {list(ks)}")
    out = np.empty((n.size, k.size))
    rows = max(1, _ROW_BLOCK // int(k.max()))
    drawn = np.arange(k.max())  # j: number of samples drawn before
    for start in range(0, n.size, rows):
        remaining = n[start : start + rows, None] - drawn  # [rows, k]
        share = np.minimum(
            c[start : start + rows, None] / remaining, 1.0
        )  # probability that the next is correct; 1 if only correct ones remain
        with np.errstate(divide="ignore"):
            all_wrong = np.cumsum(np.log1p(-share), axis=1)
        out[start : start + rows] = -np.expm1(all_wrong[:, k - 1])
    return out


def pass_curve(
    samples: Sequence[int], correct: Sequence[int], ks: Sequence[int], confidence: float = 0.95, seed: int = 0
) -> list[Interval]:
    """pass@k over problems with one interval per k: bootstrap with the same problems for every k (`stats.shares`)."""
    return shares(pass_at_k(samples, correct, ks), confidence, seed)


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... and the limit itself: the usual k of a curve."""
    if limit < 1:
        raise ValueError(f"powers_of_two: limit must be at least 1, got {limit}")
    return sorted({2**i for i in range(limit.bit_length())} | {limit})
