"""The collapse watch: from the metrics of the steps so far to named warnings.

    for warning in collapse_warnings(history, config):
        print(warning)  # step 60: length_collapse: response_length 41.2 is below 0.4 of its start, 166

`history` is one mapping per step with the key "step" and any of the metrics below; a metric that is
missing is not watched. A warning is issued at the step where its condition begins to hold and is not
repeated while it lasts: call this after every step. Conditions flag what ends runs, not what healthy
runs do: answers grow, entropy falls by half, a single gradient is large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from hone.recipe.sections.algo import WatchConfig

#: What the watch reads from a step's metrics.
ENTROPY = "entropy"  # mean over trained tokens, nats
LENGTH = "length/mean"  # mean completion tokens
DUPLICATES = "duplicate_thinking"  # `hone.measure.stats.reflection.duplicate_rate` over the problems of the step
KL = "kl"  # mean per token, to the reference
CLIP = "clip_fraction"  # share of trained tokens
GRAD_NORM = "grad_norm"  # before clipping
MISMATCH = "mismatch/mean_abs"  # mean |log-ratio| of sampler and trainer
MISMATCH_K3 = "mismatch/k3"  # mean of ratio - 1 - log-ratio

#: The gradient must be large for this many steps in a row: one spike is harmless.
GRAD_STEPS = 3

Series = list[float]
#: Describes the condition if it holds, else None.
Check = Callable[[Series, WatchConfig], "str | None"]


@dataclass(frozen=True, slots=True)
class CollapseWarning:
    name: str
    step: int
    metric: str
    value: float
    message: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.name}: {self.metric} {self.message}"


def collapse_warnings(history: Sequence[Mapping[str, Any]], config: WatchConfig) -> list[CollapseWarning]:
    """The warnings that begin at the last step of `history`."""
    if not history:
        return []
    step, warnings = int(history[-1]["step"]), []
    for name, (metric, check) in CHECKS.items():
        if metric not in history[-1]:
            continue
        series = [_number(row[metric]) for row in history if metric in row]
        if name != "grad_not_finite":  # a mean over NaN would silence the other checks for a whole window
            if not math.isfinite(series[-1]):
                continue
            series = [x for x in series if math.isfinite(x)]
        message = check(series, config)
        if message is not None and check(series[:-1], config) is None:
            warnings.append(CollapseWarning(name, step, metric, series[-1], message))
    return warnings


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)  # JSON has no NaN: a row read back may hold null


def _start_and_now(series: Series, config: WatchConfig) -> tuple[float, float] | None:
    """Means of the first and the last `window` steps, or None while these overlap."""
    w = config.window
    return (fmean(series[:w]), fmean(series[-w:])) if len(series) >= 2 * w else None


def _entropy_collapse(series: Series, config: WatchConfig) -> str | None:
    means = _start_and_now(series, config)
    if means is None or not means[1] < min(config.entropy_floor, 0.1 * means[0]):
        return None
    return f"{means[1]:.3g} is below {config.entropy_floor} and a tenth of its start, {means[0]:.3g}"


def _entropy_explosion(series: Series, config: WatchConfig) -> str | None:
    means = _start_and_now(series, config)
    if means is None or not means[1] > config.entropy_rise * means[0]:
        return None
    return f"{means[1]:.3g} is above {config.entropy_rise} times its start, {means[0]:.3g}"


def _length_collapse(series: Series, config: WatchConfig) -> str | None:
    means = _start_and_now(series, config)
    if means is None or not means[1] < config.length_drop * means[0]:
        return None
    return f"{means[1]:.4g} is below {config.length_drop} of its start, {means[0]:.4g}"


def _above(series: Series, limit: float, window: int) -> str | None:
    if len(series) < window or not fmean(series[-window:]) > limit:
        return None
    return f"{fmean(series[-window:]):.3g} is above {limit}"


def _duplicates(series: Series, config: WatchConfig) -> str | None:
    """A model that guesses in one sentence may begin with many duplicates; only an increase is a warning."""
    means = _start_and_now(series, config)
    if means is None or not means[1] > max(config.duplicate_thinking, means[0] + 0.1):
        return None
    return f"{means[1]:.3g} is above {config.duplicate_thinking}; at the start it was {means[0]:.3g}"


def _grad_explosion(series: Series, config: WatchConfig) -> str | None:
    before = [x for x in series[:-GRAD_STEPS][-4 * config.window :] if x > 0.0]
    if len(before) < config.window:
        return None
    limit, lowest = config.grad_norm_rise * median(before), min(series[-GRAD_STEPS:])
    if not lowest > limit:
        return None
    return f"was above {limit:.3g} for {GRAD_STEPS} steps, {config.grad_norm_rise:g} times the median before"


def _not_finite(series: Series, config: WatchConfig) -> str | None:
    return f"is {series[-1]}" if series and not math.isfinite(series[-1]) else None


CHECKS: dict[str, tuple[str, Check]] = {
    "entropy_collapse": (ENTROPY, _entropy_collapse),
    "entropy_explosion": (ENTROPY, _entropy_explosion),
    "length_collapse": (LENGTH, _length_collapse),
    "duplicate_thinking": (DUPLICATES, _duplicates),
    "kl_explosion": (KL, lambda s, c: _above(s, c.kl, c.window)),
    "clip_fraction": (CLIP, lambda s, c: _above(s, c.clip_fraction, c.window)),
    "grad_explosion": (GRAD_NORM, _grad_explosion),
    "grad_not_finite": (GRAD_NORM, _not_finite),
    "mismatch": (MISMATCH, lambda s, c: _above(s, c.mismatch, 1)),  # if it occurs, it does so from the first step
    "mismatch_k3": (MISMATCH_K3, lambda s, c: _above(s, c.mismatch_k3, 1)),
}
