"""Comparison of runs: which differ only in their seed, their other differences, and their overlaid curves."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hone.measure.stats.measured import Measured, measured
from hone.report import curves as single
from hone.report.curves import Timeline, marks, timeline
from hone.report.figures import Array, Curve, Panel, moving_mean, smoothing_width
from hone.report.models import COLOURS, difference_cell
from hone.report.read import Row, RunRecord, rows
from hone.report.tables import Cell, Table, interval_cell
from hone.report.text import percent
from hone.types import Interval

SETTINGS_SHOWN = 40
_SEED = re.compile(r"[-_. ]*(?:seed|s)?[-_. ]*\d+$")
_SAME_ANYWAY = ("name", "runs", "seed")


@dataclass(frozen=True)
class Condition:
    """Runs with the same settings except for the seed."""

    label: str
    runs: tuple[RunRecord, ...]
    lines: tuple[Timeline, ...]

    def sides(self, label: str) -> list[tuple[RunRecord, Row]]:
        """The evaluation called `label` of each run that has one: the first `before`, the last `after`."""
        pairs = []
        for run in self.runs:
            rows = [row for stage in run.stages for row in stage.evals if row.get("label") == label]
            if rows:
                pairs.append((run, rows[0] if label == "before" else rows[-1]))
        return pairs

    def measured(self, label: str) -> list[Measured]:
        """The samples of that evaluation, run by run; empty for runs whose samples are gone."""
        results = []
        for run, row in self.sides(label):
            stage = next(stage for stage in run.stages if row in stage.evals)
            path = stage.samples_file(row)
            records = [r for r in rows(path, stage.notes) if "problem_id" in r and "verdict" in r] if path else []
            if any(record["verdict"] != "ungraded" for record in records):
                sampling = row.get("sampling")
                task = stage.config.get("task")
                facts = {"task": task.get("name") if isinstance(task, dict) else None, "split": row.get("split")}
                about = {"sampling": sampling if isinstance(sampling, dict) else {}, "facts": facts}
                results.append(measured(run.name, records, **about))
        return results


def conditions(runs: Sequence[RunRecord]) -> list[Condition]:
    """Group runs whose settings differ only in their seed, in the order given."""
    groups: dict[str, list[RunRecord]] = {}
    for i, run in enumerate(runs):
        known = [stage.config for stage in run.stages if stage.config]
        key = json.dumps([_settings(config) for config in known], sort_keys=True) if known else str(i)
        groups.setdefault(key, []).append(run)
    result: list[Condition] = []
    for group in groups.values():
        label = group[0].name
        if len(group) > 1:
            label = _SEED.sub("", label) or label
        twins = sum(c.label == label or c.label.startswith(f"{label} (") for c in result)
        label = f"{label} ({twins + 1})" if twins else label
        lines = tuple(timeline(run.reinforced() or run.of_kind("sft")) for run in group)
        result.append(Condition(label, tuple(group), lines))
    return result


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _SAME_ANYWAY}


def different_settings(conditions: Sequence[Condition]) -> Table | None:
    """A row per setting that differs between the runs."""
    runs = [condition.runs[0] for condition in conditions]
    mixed = len({run.pipeline for run in runs}) > 1  # then a run of one stage is compared with the corresponding stage
    flat = [
        {
            key if not run.pipeline or (mixed and run.reinforced() == [stage]) else f"{stage.name}.{key}": value
            for stage in run.stages
            for key, value in _flat(stage.config)
        }
        for run in runs
    ]
    keys = sorted({key for settings in flat for key in settings})
    keys = [key for key in keys if len({json.dumps(s.get(key), sort_keys=True) for s in flat}) > 1]
    body = [(Cell(key), *(Cell(_short(settings.get(key))) for settings in flat)) for key in keys[:SETTINGS_SHOWN]]
    more = f" {len(keys) - SETTINGS_SHOWN} more are left out." if len(keys) > SETTINGS_SHOWN else ""
    values = [(key, *(json.dumps(settings.get(key)) for settings in flat)) for key in keys]
    head = tuple(condition.label for condition in conditions)
    table = Table(
        "settings", f"Settings that differ.{more}", ("", *head), tuple(body), tuple(values), ("setting", *head)
    )
    return table if keys else None


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if not prefix and key in _SAME_ANYWAY:
            continue
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else text[:39] + "…"


# --- curves --------------------------------------------------------------------------------------


def over_seeds(lines: Sequence[Timeline], column: str) -> tuple[Array, Array, Array | None, Array | None]:
    """x, mean, and with several seeds the lowest and highest value, of the smoothed curves."""
    by_step: list[dict[float, float]] = []
    for line in lines:
        if line.has(column):
            y = moving_mean(line.column(column), smoothing_width(len(line.steps)))
            by_step.append({x: v for x, v in zip(line.steps.tolist(), y.tolist(), strict=True) if np.isfinite(v)})
    return _band(by_step)


def validation_over_seeds(lines: Sequence[Timeline]) -> tuple[Array, Array, Array | None, Array | None]:
    curves_of_runs = [
        {x: float(row["accuracy"]["value"]) for x, row in line.evals("validation") if "accuracy" in row}
        for line in lines
    ]
    return _band([one for one in curves_of_runs if one])


def _band(by_step: Sequence[Mapping[float, float]]) -> tuple[Array, Array, Array | None, Array | None]:
    """Only at steps that every seed has: otherwise the mean would jump where one ends."""
    if not by_step:
        return np.array([]), np.array([]), None, None
    steps = sorted(set(by_step[0]).intersection(*by_step[1:]))
    table = np.array([[one[step] for step in steps] for one in by_step])
    x = np.array(steps)
    if len(by_step) == 1 or not steps:
        return x, table[0] if steps else x, None, None
    return x, table.mean(axis=0), table.min(axis=0), table.max(axis=0)


#: (column, key, title, share): results first, then indicators of the health of training.
OVERLAYS = (
    ("accuracy", "accuracy", "Training accuracy", True),
    ("validation", "validation", "Validation accuracy", True),
    ("reward/mean", "reward", "Reward", False),
    ("length/mean", "length", "Response length (tokens)", False),
    ("length/min", "length-min", "Shortest response (tokens)", False),
    ("length/max", "length-max", "Longest response (tokens)", False),
    ("length/truncated", "truncated", "Truncated responses", True),
    ("reflection_rate", "reflection", "Responses that reflect", True),
    ("entropy", "entropy", "Entropy (nats per token)", False),
    ("kl", "kl", "KL to the reference", False),
    ("clip_fraction", "clip", "Clipped tokens", True),
    ("zero_variance", "zero-variance", "Groups without a signal", True),
    ("grad_norm", "grad-norm", "Gradient norm", False),
    ("loss", "loss", "Loss", False),
)


def overlays(conditions: Sequence[Condition]) -> list[Panel]:
    """One panel per logged quantity, a curve per condition, seeds as bands."""
    panels = []
    shown = list(zip(conditions, COLOURS))
    sft = all(stage.kind == "sft" for c in conditions for line in c.lines for stage in line.stages)
    resets = single_marks(conditions)
    for column, key, title, share in OVERLAYS:
        if column == "loss" and not sft:  # in RL the value of the loss is not informative
            continue
        parts = []
        for condition, colour in shown:
            band = (
                validation_over_seeds(condition.lines)
                if column == "validation"
                else over_seeds(condition.lines, column)
            )
            if len(band[0]) and not (column == "kl" and not np.abs(band[1]).sum()):
                x, y, low, high = _fewer(*band)
                parts.append(Curve(x, y, condition.label, colour, "band", low, high))
        if parts:
            panels.append(Panel(key, title, "SFT step" if sft else "RL step", tuple(parts), resets, share))
    return panels


def single_marks(conditions: Sequence[Condition]) -> tuple[Any, ...]:
    """Resets and stages, if there are few of them and every run has the same ones."""
    each = {marks(line) for condition in conditions for line in condition.lines}
    return next(iter(each)) if len(each) == 1 else ()


def _fewer(
    x: Array, y: Array, low: Array | None, high: Array | None
) -> tuple[Array, Array, Array | None, Array | None]:
    """Every n-th point of very many: the curves are smooth already."""
    keep = slice(None, None, max(1, len(x) // single.OVERLAY_POINTS))
    return x[keep], y[keep], None if low is None else low[keep], None if high is None else high[keep]


# --- what came out -------------------------------------------------------------------------------


def over_runs(values: Sequence[float]) -> Interval | None:
    """Mean over seeds with Student's t interval; None for fewer than two."""
    from scipy.stats import t

    if len(values) < 2:
        return None
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values)))
    half = float(t.ppf(0.975, len(values) - 1)) * error
    return Interval(mean, mean - half, mean + half, len(values))


def outcome_table(conditions: Sequence[Condition]) -> Table | None:
    """Accuracy before and after training, by condition and by seed."""
    body, values = [], []
    for condition in conditions:
        sides = {
            label: [(run, r) for run, r in condition.sides(label) if "accuracy" in r] for label in ("before", "after")
        }
        if not any(sides.values()):
            continue
        row = [Cell(condition.label), Cell(str(len(condition.runs)))]
        for side in sides.values():
            row.append(_seeds_cell([r["accuracy"] for _, r in side]))
        gains = [
            after["accuracy"]["value"] - before["accuracy"]["value"]
            for run, after in sides["after"] for other, before in sides["before"] if run is other
        ]  # fmt: skip
        gain = over_runs(gains)
        row.append(difference_cell(gain) if gain else Cell(f"{100 * gains[0]:+.1f}" if gains else "–"))
        body.append(tuple(row))
        values += [(condition.label, run.name, label, r["accuracy"]["value"], r["accuracy"].get("low"),
                    r["accuracy"].get("high"), r["accuracy"].get("n"))
                   for label, side in sides.items() for run, r in side]  # fmt: skip
    if not body:
        return None
    caption = (
        "Accuracy before and after training. With one run: its interval over problems. With several seeds: mean over "
        "seeds with Student’s t interval, and each seed below. Gains are in percentage points. No checkpoint is "
        "chosen by its score: `after` is the end of training."
    )
    names = ("condition", "run", "evaluation", "accuracy", "low", "high", "problems")
    return Table("outcome", caption, ("", "Seeds", "Before", "After", "Gain"), tuple(body), tuple(values), names)


def _seeds_cell(accuracies: Sequence[Row]) -> Cell:
    if not accuracies:
        return Cell("–")
    means = [float(a["value"]) for a in accuracies]
    if (over := over_runs(means)) is None:
        a = accuracies[0]
        return interval_cell(Interval(means[0], float(a["low"]), float(a["high"]), int(a["n"])), 1)
    each = ", ".join(percent(mean) for mean in means)
    return Cell(percent(over.value), f"{percent(over.low)}–{percent(over.high)}; {each}")


def pooled(condition: Condition, label: str = "after") -> Measured | None:
    """All seeds of a condition as one model, which pools their samples of each problem. None if there are no
    samples."""
    parts = condition.measured(label)
    if not parts:
        return None
    first = parts[0]
    same = [part for part in parts if part.problems == first.problems]
    weights = np.array([part.drawn for part in same], dtype=float)
    return Measured(
        condition.label, first.problems, np.sum([p.drawn for p in same], axis=0),
        np.sum([p.correct for p in same], axis=0), first.levels, first.domains, first.formats,
        np.average([p.tokens for p in same], axis=0, weights=weights),
        np.average([p.reflects for p in same], axis=0, weights=weights),
        np.mean([p.gold_nll for p in same], axis=0),
        sum(p.failures for p in same), first.sampling, None, {**first.facts, "seeds": len(same)},
    )  # fmt: skip


def seed_difference(a: Condition, b: Condition) -> tuple[Interval, float] | None:
    """Difference of the mean accuracy after training, with Welch's interval and p over seeds; None for single runs."""
    from scipy.stats import ttest_ind

    x, y = ([float(row["accuracy"]["value"]) for _, row in side.sides("after") if "accuracy" in row] for side in (a, b))
    if min(len(x), len(y)) < 2 or np.std(x) + np.std(y) == 0:
        return None
    result = ttest_ind(y, x, equal_var=False)
    interval = result.confidence_interval(0.95)
    value = float(np.mean(y) - np.mean(x))
    return Interval(value, float(interval.low), float(interval.high), len(x) + len(y)), float(result.pvalue)
