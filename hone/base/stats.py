"""Intervals and comparisons: hone reports no number without an interval.

    >>> wilson(171, 200)
    Interval(value=0.855, low=0.7996..., high=0.8971..., n=200)

Which interval: one sample per problem gives independent samples, so Wilson's interval holds.
Several samples of one problem are correlated, and Wilson's interval, which treats them as independent, would
be too narrow; then problems are resampled (bootstrap). `accuracy` chooses. See Miller, "Adding error bars to
evals", arXiv:2411.00640.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hone.base import streams
from hone.types import NOT_GRADED, Interval

Array = npt.NDArray[np.float64]

RESAMPLES = 10_000
#: With fewer problems than this on one side of a share (say, all but three solved), resampling seldom draws them, and
#: its percentiles covered the truth in 80 % of simulations instead of 95: then `score_interval` is used.
RARE = 10.0
_CHUNK = 4_000_000  # elements of a resampled matrix in memory at once: 32 MB


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two conditions measured on the same problems."""

    difference: Interval  # mean of (after - before) per problem; n counts problems
    p_value: float  # two-sided; null hypothesis: no difference
    method: str  # "McNemar exact" | "sign-flip permutation"


def wilson(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a share (Wilson 1927). Treats the n samples as independent."""
    from statsmodels.stats.proportion import proportion_confint

    if n <= 0 or not 0 <= successes <= n:
        raise ValueError(f"wilson: {successes} successes of {n} samples; need n >= 1 and 0 <= successes <= n")
    low, high = proportion_confint(successes, n, alpha=1.0 - confidence, method="wilson")
    return Interval(
        successes / n, float(min(max(low, 0.0), successes / n)), float(max(min(high, 1.0), successes / n)), n
    )


def bootstrap_mean(values: Sequence[float] | Array, confidence: float = 0.95, seed: int = 0) -> Interval:
    """Percentile bootstrap (Efron 1979) of the mean of independent values, one per problem."""
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 1 or data.size == 0:
        raise ValueError(f"bootstrap_mean: need a list of at least one value, got shape {data.shape}")
    means = resampled_means(data[:, None], seed)[:, 0]
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    mean = float(data.mean())
    return Interval(mean, min(float(low), mean), max(float(high), mean), int(data.size))


def resampled_means(columns: Array, seed: int = 0, resamples: int = RESAMPLES) -> Array:
    """Means of each column [P, K] over `resamples` draws of P rows with replacement: [resamples, K]."""
    rng = streams.generator("resampling", seed=seed)
    p = columns.shape[0]
    rows = max(1, _CHUNK // p)
    parts = []
    for start in range(0, resamples, rows):
        # Counts of how often each row was drawn: one matrix product with them covers all K columns.
        size = min(rows, resamples - start)
        drawn = rng.integers(0, p, size=(size, p)) + np.arange(size)[:, None] * p
        counts = np.bincount(drawn.ravel(), minlength=size * p).reshape(size, p)
        parts.append(counts.astype(np.float64) @ columns / p)
    return np.concatenate(parts)


def clustered(groups: Sequence[Sequence[float]], confidence: float = 0.95, seed: int = 0) -> Interval:
    """Mean over problems of the mean over their samples; problems are resampled. n counts problems.

    For values in 0..1 see `shares`.
    """
    if not groups or any(len(group) == 0 for group in groups):
        raise ValueError("clustered: need at least one problem, and at least one sample of each")
    means = np.array([float(np.mean(group)) for group in groups])
    if means.min() >= 0.0 and means.max() <= 1.0:
        return shares(means[:, None], confidence, seed)[0]
    return bootstrap_mean(means, confidence, seed)


def shares(values: Array, confidence: float = 0.95, seed: int = 0) -> list[Interval]:
    """Mean of each column of values in 0..1, [P, K], one row per problem: percentile bootstrap over problems, the same
    resamples for every column; with fewer than `RARE` problems on one side, `score_interval`."""
    p = values.shape[0]
    centre = values.mean(axis=0)
    common = np.minimum(centre, 1.0 - centre) * p >= RARE
    intervals = [score_interval(values[:, j], confidence) for j in range(values.shape[1])]
    if common.any():
        means = resampled_means(values[:, common], seed)
        low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
        for j, a, b in zip(np.flatnonzero(common), low, high, strict=True):
            mean = float(centre[j])
            intervals[j] = Interval(mean, min(float(a), mean), max(float(b), mean), p)
    return intervals


def score_interval(values: Array, confidence: float = 0.95) -> Interval:
    """Wilson's interval with the effective number of problems, for the mean of values in 0..1.

    n_eff = m (1 - m) / (s^2 / P) problems of 0 or 1 would have the observed variance; (z / t_{P-1})^2 adjusts for
    its being an estimate (Korn & Graubard 1998; Franco et al. 2019). At most P if fewer than 5 problems are on one
    side, since their variance is unreliable.
    """
    from scipy.stats import norm, t

    p, m = len(values), float(values.mean())
    z = float(norm.ppf((1 + confidence) / 2))
    n = float(p)
    if p > 1 and values.var() > 0 and not np.isin(values, (0.0, 1.0)).all():
        effective = m * (1 - m) * p / float(values.var(ddof=1)) * (z / float(t.ppf((1 + confidence) / 2, p - 1))) ** 2
        n = min(effective, p) if min(m, 1 - m) * p < 5 else effective
    centre = (m + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * float(np.sqrt(m * (1 - m) / n + z * z / (4 * n * n)))
    return Interval(m, max(0.0, min(centre - half, m)), min(1.0, max(centre + half, m)), p)


def accuracy(groups: Sequence[Sequence[float]], confidence: float = 0.95) -> Interval:
    """The interval to report for 0/1 outcomes grouped by problem: Wilson with one sample each, else clustered."""
    if all(len(group) == 1 for group in groups) and all(group[0] in (0, 1) for group in groups):
        return wilson(int(sum(group[0] for group in groups)), len(groups), confidence)
    return clustered(groups, confidence)


def outcomes(records: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Problem id -> its samples as 1 (correct) or 0; samples whose verifier failed are excluded, not 0."""
    by_problem: dict[str, list[float]] = {}
    for record in records:
        if record["verdict"] not in NOT_GRADED:
            by_problem.setdefault(str(record["problem_id"]), []).append(float(record["verdict"] == "correct"))
    return by_problem


def compare(
    before: Sequence[float] | Array, after: Sequence[float] | Array, confidence: float = 0.95, seed: int = 0
) -> Comparison:
    """Paired comparison: entry i of both lists is the mean accuracy on the same problem i.

    The interval is a bootstrap over problems. The p-value is McNemar's exact one (McNemar 1947) when
    every entry is 0 or 1, and otherwise that of a permutation test that swaps the two conditions.
    """
    a, b = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1 or a.size == 0:
        raise ValueError(f"compare: needs two equally long lists over the same problems, got {a.shape} and {b.shape}")
    binary = bool(np.isin(a, (0.0, 1.0)).all() and np.isin(b, (0.0, 1.0)).all())
    p_value = _mcnemar(a, b) if binary else _sign_flip(b - a, seed)
    method = "McNemar exact" if binary else "sign-flip permutation"
    return Comparison(bootstrap_mean(b - a, confidence, seed), p_value, method)


def _mcnemar(a: Array, b: Array) -> float:
    """McNemar's exact test: a binomial test of whether as many problems improved as got worse."""
    from scipy.stats import binomtest

    up, down = int(((a == 0) & (b == 1)).sum()), int(((a == 1) & (b == 0)).sum())
    return 1.0 if up + down == 0 else float(binomtest(up, up + down, 0.5).pvalue)


def _sign_flip(difference: Array, seed: int) -> float:
    """Permutation test: without an effect each problem's difference has either sign equally likely."""
    from scipy.stats import permutation_test

    if not difference.any():
        return 1.0
    result = permutation_test(
        (difference,),
        lambda x, axis: np.mean(x, axis=axis),
        permutation_type="samples",
        n_resamples=RESAMPLES - 1,
        batch=max(1, _CHUNK // difference.size),
        vectorized=True,
        rng=streams.generator("resampling", seed=seed),
    )
    return float(result.pvalue)
