"""Ordinary least squares of per-problem accuracy on level and domain: how good a model is per domain at equal level.

    accuracy_i = b_level * level_i + sum_d b_d * [domain_i = d] + e_i

One-hot domains without an intercept, as in the published table it is compared with: the coefficient of a domain is
the accuracy that the fit gives at level 0. Accuracies lie in 0..1 and their noise differs, so read it as a summary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Coefficient:
    name: str
    value: float
    standard_error: float  # classical: sqrt(diag(s^2 (X'X)^-1)), s^2 = RSS / (P - K)
    t: float
    p_value: float  # two-sided, Student's t with P - K degrees of freedom
    n: int  # problems with that domain; for `level` all of them


def regress(accuracy: Array | Sequence[float], levels: Sequence[str], domains: Sequence[str]) -> list[Coefficient]:
    """The coefficient of the level (if it varies and is always numeric), then of the domains, the largest first.

    `accuracy` [P] in 0..1. Raises ValueError when the coefficients are not determined: fewer problems than
    coefficients, or a level that follows from the domain.
    """
    import statsmodels.api as sm

    y = np.asarray(accuracy, dtype=np.float64)
    if not len(y) == len(levels) == len(domains):
        raise ValueError(f"regress: {len(y)} accuracies, {len(levels)} levels and {len(domains)} domains")
    names = sorted(set(domains))
    columns = [np.array([domain == name for domain in domains], dtype=np.float64) for name in names]
    labels = [name or "all" for name in names]
    number = _numbers(levels)
    if number is not None and len(set(number.tolist())) > 1:
        columns.insert(0, number)
        labels.insert(0, "level")
    design = np.stack(columns, axis=1)
    if len(y) <= design.shape[1]:
        raise ValueError(f"regress: {len(y)} problems do not determine {design.shape[1]} coefficients")
    if np.linalg.matrix_rank(design) < design.shape[1]:
        raise ValueError("regress: the level follows from the domain, so their effects cannot be told apart")
    fit = sm.OLS(y, design).fit()
    counts = [len(y) if label == "level" else int(column.sum()) for label, column in zip(labels, columns)]
    rows = zip(labels, fit.params, fit.bse, fit.tvalues, fit.pvalues, counts, strict=True)
    coefficients = [Coefficient(name, float(b), float(se), float(t), float(p), n) for name, b, se, t, p, n in rows]
    return sorted(coefficients, key=lambda c: (c.name != "level", -c.value))


def _numbers(levels: Sequence[str]) -> Array | None:
    """The levels "5" and "Level 5" are 5; None if any level has no number."""
    try:
        return np.array([float(level.lower().removeprefix("level").strip()) for level in levels])
    except ValueError:
        return None
