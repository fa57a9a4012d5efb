"""Perplexity of gold answers before and after training: did the right answer become more likely?

The caller computes the log-probs (one list of token log-probs in nats per problem); this module only compares them.
Perplexities multiply, so means and differences are taken of their logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hone.base import stats
from hone.measure.stats.measured import Measured
from hone.types import Interval


@dataclass(frozen=True, slots=True)
class PerplexityChange:
    before: Interval  # geometric mean over problems of exp(-mean log p)
    after: Interval
    ratio: Interval  # after / before, geometric mean over problems; below 1: the gold answer became more likely
    p_value: float  # two-sided sign-flip permutation on the differences of log perplexity


def perplexity(logprobs: Sequence[float]) -> float:
    """exp(-mean log p(y_t)) of one answer. Raises ValueError for an empty list or an impossible log-prob."""
    values = np.asarray(logprobs, dtype=np.float64)
    if values.ndim != 1 or not values.size or not (values <= 1e-6).all():
        raise ValueError(f"perplexity: needs at least one log-prob, none above 0; got {list(logprobs)[:5]}")
    return math.exp(-float(values.mean()))


def gold_perplexity(logprobs: Mapping[str, Sequence[float]]) -> Interval:
    """Geometric mean over problems, with a bootstrap over them."""
    return _exp(stats.bootstrap_mean([math.log(perplexity(logprobs[key])) for key in sorted(logprobs)]))


def change(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]) -> PerplexityChange:
    """Compare {problem id: token log-probs of its gold answer}, paired on the common problems. Raises ValueError if
    there are none."""
    shared = sorted(before.keys() & after.keys())
    if not shared:
        raise ValueError("perplexity: the two share no problem")
    a, b = ({key: side[key] for key in shared} for side in (before, after))
    first, second = ([math.log(perplexity(side[key])) for key in shared] for side in (a, b))
    compared = stats.compare(first, second)
    return PerplexityChange(gold_perplexity(a), gold_perplexity(b), _exp(compared.difference), compared.p_value)


def gold_logprobs(model: Measured, column: int) -> dict[str, list[float]]:
    """Problem -> log-prob per token of its gold answer: without reasoning (column 0), after the model's own (1)."""
    values = model.gold_nll[:, column].tolist()
    return {i: [-v] for i, v in zip(model.problems, values, strict=True) if math.isfinite(v)}


def gold_changes(models: Sequence[Measured]) -> list[tuple[Measured, PerplexityChange | None]]:
    """The models whose gold answers were scored after their reasoning, each with its change against the first (None
    for the first itself, and without common problems)."""
    scored = [(model, own) for model in models if (own := gold_logprobs(model, 1))]
    first = scored[0][1] if scored else {}
    return [(model, change(first, own) if i and first.keys() & own.keys() else None)
            for i, (model, own) in enumerate(scored)]  # fmt: skip


def _exp(interval: Interval) -> Interval:
    return Interval(math.exp(interval.value), math.exp(interval.low), math.exp(interval.high), interval.n)
