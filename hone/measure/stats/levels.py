"""Accuracy per level, and its macro average, in which every level counts the same."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hone.base.stats import resampled_means
from hone.measure.stats.measured import Measured
from hone.types import Interval


def by_level(model: Measured) -> tuple[dict[str, Interval], Interval | None]:
    """Accuracy of each level, and the unweighted mean over levels; None if the problems have no level."""
    parts = model.by("levels")
    cells = {level: part.accuracy() for level, part in parts.items()}
    return cells, macro_average(parts) if parts else None


def macro_average(parts: Mapping[str, Measured], confidence: float = 0.95) -> Interval:
    """Mean of the levels' accuracies; problems are resampled within each level (stratified bootstrap)."""
    names = sorted(parts)
    drawn = [resampled_means(parts[name].rates()[:, None], seed=i)[:, 0] for i, name in enumerate(names)]
    value = float(np.mean([parts[name].rates().mean() for name in names]))
    low, high = np.quantile(np.mean(drawn, axis=0), [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(value, min(float(low), value), max(float(high), value), sum(len(parts[name]) for name in names))


def histogram(model: Measured, bins: int = 10) -> list[tuple[float, float, int]]:
    """(low, high, problems) of equal bins of per-problem accuracy; the last bin holds its upper end.

    With few samples per problem, sampling noise widens it: compare only models with equally many samples.
    """
    counts, edges = np.histogram(model.rates(), bins=bins, range=(0.0, 1.0))
    return [(float(a), float(b), int(c)) for a, b, c in zip(edges, edges[1:], counts)]
