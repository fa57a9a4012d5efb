"""The panels of a run, from its metrics and evaluations. Consecutive RL stages share one axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hone.measure.stats import passk, reflection
from hone.report.figures import Array, Curve, Mark, Panel, smoothing_width
from hone.report.read import Row, RunRecord, StageRecord, rows, spread
from hone.report.story import Side

#: Enough to see a trend, and few enough to draw quickly for a run of any length.
SAMPLED_STEPS = 40
SAMPLED_PER_STEP = 256
#: Points of a smoothed curve that is drawn over others.
OVERLAY_POINTS = 200

#: Share of answers with reflection phrases from which on the report speaks of reflection.
REFLECTING = 0.02
_VERDICT_COLOURS = {"correct": "train", "wrong": "before", "malformed": "extra", "truncated": "valid"}


@dataclass(frozen=True)
class Timeline:
    """RL stages laid end to end; `offsets[i]` is where stage i starts."""

    stages: tuple[StageRecord, ...]
    offsets: tuple[int, ...]
    steps: Array

    def column(self, name: str) -> Array:
        parts = []
        for stage in self.stages:
            values = stage.metrics.columns.get(name)
            parts.append(np.array(values) if values else np.full(len(stage.metrics.steps), math.nan))
        return np.concatenate(parts) if parts else np.array([])

    def has(self, name: str) -> bool:
        return any(stage.metrics.has(name) for stage in self.stages)

    def evals(self, label: str) -> list[tuple[float, Row]]:
        """(step on the common axis, row) of the evaluations with that label."""
        rows_at = []
        for stage, offset in zip(self.stages, self.offsets, strict=True):
            rows_at += [(offset + float(row.get("step", 0)), row) for row in stage.evals if row.get("label") == label]
        return sorted(rows_at, key=lambda pair: pair[0])

    def names(self, prefix: str) -> list[str]:
        return sorted({n for stage in self.stages for n in stage.metrics.columns if n.startswith(prefix)})


def timeline(stages: Sequence[StageRecord]) -> Timeline:
    offsets, at, steps = [], 0, []
    for stage in stages:
        offsets.append(at)
        steps += [at + step for step in stage.metrics.steps]
        at += (stage.metrics.steps[-1] + 1) if stage.metrics.steps else 0
    return Timeline(tuple(stages), tuple(offsets), np.array(steps, dtype=np.float64))


def marks(line: Timeline) -> tuple[Mark, ...]:
    """Marks at the beginning of stages, at new phases of a schedule, and at resets of optimizer, reference or
    adapter."""
    all_marks = [Mark(at, stage.name) for stage, at in zip(line.stages, line.offsets, strict=True) if at]
    for stage, at in zip(line.stages, line.offsets, strict=True):
        all_marks += [
            Mark(at + float(e["step"]), str(e["kind"]))
            for e in stage.events
            if e.get("kind") in ("reset", "phase") and isinstance(e.get("step"), int)
        ]
    return tuple(sorted(all_marks, key=lambda mark: (mark.x, mark.label)))


def _eval_dots(line: Timeline, label: str, colour: str, field: str) -> list[Curve]:
    """The held-out measurement before or after training, as a dot."""
    points = line.evals(label)
    curves = []
    for x, row in points[:1] if label == "before" else points[-1:]:
        value = row.get(field)
        cell: Row = value if isinstance(value, dict) else {"value": value}
        if not isinstance(cell.get("value"), (int, float)):
            continue
        y = np.array([float(cell["value"])])
        low, high = (np.array([float(cell[end])]) if end in cell else None for end in ("low", "high"))
        curves.append(Curve(np.array([x]), y, label, colour, "dots", low, high, hollow=label == "before"))
    return curves


def _validation(line: Timeline) -> list[Curve]:
    points = [(step, row) for step, row in line.evals("validation") if "accuracy" in row]
    if not points:
        return []
    x = np.array([step for step, _ in points])
    y, low, high = (
        np.array([float(r["accuracy"].get(k, math.nan)) for _, r in points]) for k in ("value", "low", "high")
    )
    return [Curve(x, y, "validation", "valid", "band", low, high)]


def reflects(line: Timeline) -> bool:
    """Whether a task gives occasion for reflection: its phrases are in enough answers of training or an evaluation."""
    rates = [row.get("reflection_rate") for label in ("before", "validation", "after") for _, row in line.evals(label)]
    known = [rate for rate in rates if isinstance(rate, (int, float))]
    trained = line.column("reflection_rate") if line.has("reflection_rate") else np.zeros(0)
    known += [float(np.nanmean(trained))] if np.isfinite(trained).any() else []
    return max(known, default=0.0) >= REFLECTING


def key_panels(line: Timeline) -> list[Panel]:
    """Accuracy, response length and reflection, where there is any, over RL steps: the main panels of a run."""
    wanted = (
        ("accuracy", "Accuracy", "accuracy", "accuracy", True),
        ("length", "Response length (tokens)", "length/mean", "response_tokens", False),
        ("reflection", "Responses that reflect", "reflection_rate", "reflection_rate", True),
    )
    panels = []
    for key, title, column, field, share in wanted if reflects(line) else wanted[:-1]:
        curves = [Curve(line.steps, line.column(column), "training")] if line.has(column) else []
        if key == "accuracy":
            curves += _validation(line)
        dots = _eval_dots(line, "before", "before", field) + _eval_dots(line, "after", "after", field)
        if curves or dots:
            panels.append(Panel(key, title, "RL step", tuple(curves + dots), marks(line), share))
    return panels


def training_panels(line: Timeline) -> list[Panel]:
    """Everything else that RL logs, each only if it was logged."""
    panels = [
        _single(line, "reward/mean", "reward", "Reward", "Mean over the samples of a step."),
        _lengths(line),
        _single(line, "entropy", "entropy", "Entropy (nats per token)", "Falling to zero: the policy stops exploring."),
        _single(
            line, "teacher/kl", "distil-kl", "KL to the teacher (nats per token)",
            "Of the student to the teacher, at the tokens that the student drew.",
        ),
        _single(line, "clip_fraction", "clip", "Clipped tokens", "Share of tokens outside the clip range.", True),
        _single(
            line, "zero_variance", "zero-variance", "Groups without a signal",
            "Share of groups whose samples all have the same reward: no gradient.", True,
        ),
        _single(line, "groups/replaced", "replaced", "Groups replaced", "Because they had no reward difference."),
        _single(line, "length/truncated", "truncated", "Truncated responses", "Share that hit the length limit.", True),
        _grad_norm(line, "grad-norm"),
        _single(line, "kl", "kl", "KL to the reference", ""),
        _single(line, "value/loss", "value", "Loss of the value head", "PPO: half the squared error of the values."),
        _single(
            line, "mismatch/mean_abs", "mismatch", "Sampler against trainer",
            "Mean |log ratio| per token; about 0 while both compute the same.",
        ),
        _single(line, "duplicate_thinking", "duplicates", "Repeated thinking", "Share of identical texts.", True),
        _single(line, "episode/turns", "turns", "Turns per episode", "Mean of each step."),
        _single(line, "episode/tool_calls", "tool-calls", "Tool calls per episode", "Mean of each step."),
        _verdicts(line),
        reflection_kinds(line) if reflects(line) else None,
    ]  # fmt: skip
    return [panel for panel in panels if panel is not None]


def _single(line: Timeline, column: str, key: str, title: str, note: str, share: bool = False) -> Panel | None:
    unused = column in ("kl", "groups/replaced", "episode/tool_calls") and not np.nansum(np.abs(line.column(column)))
    if not line.has(column) or unused:  # always logged, and 0 unless it is used
        return None
    return Panel(key, title, "RL step", (Curve(line.steps, line.column(column)),), marks(line), share, note=note)


def _lengths(line: Timeline) -> Panel | None:
    if not line.has("length/mean"):
        return None
    curves = [Curve(line.steps, line.column("length/mean"), "mean")]
    for name in ("max", "min"):
        if line.has(f"length/{name}"):
            curves.append(Curve(line.steps, line.column(f"length/{name}"), name, "muted", "thin"))
    note = "Shortest, mean and longest response of each step."
    return Panel("lengths", "Shortest and longest response (tokens)", "RL step", tuple(curves), marks(line), note=note)


def _grad_norm(line: Timeline, key: str, x_label: str = "RL step", title: str = "Gradient norm") -> Panel | None:
    if not line.has("grad_norm"):
        return None
    y = line.column("grad_norm")
    y = np.where(y > 0, y, math.nan)
    if not np.isfinite(y).any():
        return None
    log = bool(np.nanmax(y) > 30 * np.nanmin(y))
    return Panel(key, title, x_label, (Curve(line.steps, y),), marks(line), log=log, note="Before clipping.")


def _verdicts(line: Timeline) -> Panel | None:
    curves = []
    for name in line.names("verdict/"):
        y, short = line.column(name), name.removeprefix("verdict/")
        if np.nanmax(y, initial=0.0) > 0.005:
            curves.append(Curve(line.steps, y, short, _VERDICT_COLOURS.get(short, "muted")))
    if len(curves) < 2:
        return None
    note = "The verifier's verdicts on the training samples."
    return Panel("verdicts", "Verdicts", "RL step", tuple(curves), marks(line), share=True, note=note)


def sampled_rollouts(line: Timeline) -> Iterator[tuple[int, list[str]]]:
    """Texts of some training samples at evenly spaced steps."""
    files = [
        (at + step, path)
        for stage, at in zip(line.stages, line.offsets, strict=True)
        for step, path in stage.rollout_files()
    ]
    for step, path in spread(files, SAMPLED_STEPS):
        texts: list[str] = []
        for record in rows(path):
            if isinstance(record.get("text"), str):
                texts.append(record["text"])
            if len(texts) >= SAMPLED_PER_STEP:
                break
        if texts:
            yield step, texts


def reflection_kinds(line: Timeline) -> Panel | None:
    """The rates of the kinds of reflection phrases over training, from the stored rollouts."""
    steps, shares = [], []
    for step, texts in sampled_rollouts(line):
        counts = [reflection.count(text) for text in texts]
        steps.append(float(step))
        shares.append([sum(kind in c for c in counts) / len(counts) for kind in reflection.KINDS])
    if len(steps) < 2:
        return None
    colours = dict(zip(reflection.KINDS, ("train", "valid", "extra", "before", "muted"), strict=True))
    table, x = np.array(shares), np.array(steps)
    curves = [
        Curve(x, table[:, i], kind, colours[kind])
        for i, kind in enumerate(reflection.KINDS)
        if table[:, i].max() > 0.005
    ]
    note = "Share of responses with such a phrase, in the stored training samples."
    return (
        Panel("kinds", "Kinds of reflection", "RL step", tuple(curves), marks(line), True, note=note)
        if curves
        else None
    )


def sft_panels(stage: StageRecord, key: str) -> list[Panel]:
    """Loss and gradient norm of one supervised stage, which the titles name."""
    line = timeline([stage])
    panels = []
    if line.has("loss"):
        curves = [Curve(line.steps, line.column("loss"), "training" if line.has("validation_loss") else "")]
        if line.has("validation_loss"):
            curves.append(Curve(line.steps, line.column("validation_loss"), "validation", "valid", "band"))
        panels.append(
            Panel(f"{key}-loss", f"Supervised loss of {stage.name} (nats per token)", "SFT step", tuple(curves))
        )
    norm = _grad_norm(line, f"{key}-grad-norm", "SFT step", f"Gradient norm of {stage.name}")
    return [*panels, norm] if norm else panels


def pass_at_k(side: Side) -> list[Curve]:
    """pass@k of one evaluation, if it drew several samples of every problem."""
    drawn = [len(outcomes) for outcomes in side.outcomes.values()]
    if min(drawn, default=0) < 2:
        return []
    ks = passk.powers_of_two(min(drawn))
    points = passk.pass_curve(drawn, [int(sum(outcomes)) for outcomes in side.outcomes.values()], ks)
    y, low, high = (np.array([getattr(point, name) for point in points]) for name in ("value", "low", "high"))
    return [Curve(np.array(ks, dtype=np.float64), y, side.label, side.label, "band", low, high)]


def smoothing_note(run: RunRecord) -> str:
    """The caption that explains the two line weights."""
    longest = max((stage.steps_done for stage in run.stages), default=0)
    width = smoothing_width(longest)
    if width <= 1:
        return ""
    return f"Faint: single steps. Thick: mean of up to {width} steps."
