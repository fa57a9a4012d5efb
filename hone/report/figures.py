"""Data to matplotlib figures. Pure functions, which read no file and no clock.

A panel is one small chart with its own curves; a figure is one panel (`panel_figure`, for the page,
where panels flow to fit a phone) or several side by side (`key_figure`, for a README or a slide).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from hone.base.visible import visible
from hone.report.style import LIGHT
from hone.report.svg import RC
from hone.report.text import number, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = npt.NDArray[np.float64]
POINTS = 300  # most points of a drawn curve
INCH = 72.0


@dataclass(frozen=True)
class Curve:
    """One series. `line`: steps under a moving mean; `band`: values with intervals; `dots`: the same, unjoined;
    `steps`: a histogram, x being the edges of its bins."""

    x: Array
    y: Array
    label: str = ""
    colour: str = "train"  # a name in style.LIGHT
    style: Literal["line", "thin", "band", "dots", "steps"] = "line"
    low: Array | None = None
    high: Array | None = None
    hollow: bool = False


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step: a new stage, a reset."""

    x: float
    label: str


@dataclass(frozen=True)
class Panel:
    key: str
    title: str
    x_label: str
    curves: tuple[Curve, ...]
    marks: tuple[Mark, ...] = ()
    share: bool = False  # values in 0..1, shown in percent
    log: bool = False
    log_x: bool = False  # powers of two
    note: str = ""  # one sentence under the figure

    def description(self) -> str:
        """A text alternative for the figure."""
        parts = []
        for curve in self.curves:
            seen = np.flatnonzero(np.isfinite(curve.y))
            if seen.size:
                a, b = seen[0], seen[-1]
                name = curve.label or self.title.lower()
                first, last = self.value(curve.y[a]), self.value(curve.y[b])
                at_a, at_b = f"{curve.x[a]:g}", f"{curve.x[b]:g}"
                parts.append(
                    f"{name} {first} at {at_a}" if a == b else f"{name} from {first} at {at_a} to {last} at {at_b}"
                )
        return f"{self.title} by {self.x_label}: " + "; ".join(parts) + "."

    def rows(self) -> Iterator[tuple[str, float, float, float | str, float | str]]:
        """(curve, x, y, low, high) of every value that is drawn."""
        for curve in self.curves:
            for i in np.flatnonzero(np.isfinite(curve.y)):
                ends = [float(end[i]) if end is not None else "" for end in (curve.low, curve.high)]
                yield curve.label or self.title, float(curve.x[i]), float(curve.y[i]), ends[0], ends[1]

    def value(self, y: float) -> str:
        return percent(y, 0) if self.share else number(float(y))


def moving_mean(y: Array, width: int) -> Array:
    """Centred mean over `width` values, fewer at the ends; NaN is skipped."""
    if width <= 1:
        return y
    valid = np.isfinite(y)
    kernel = np.ones(min(width, len(y)))
    total = np.convolve(np.where(valid, y, 0.0), kernel, mode="same")
    count = np.convolve(valid.astype(np.float64), kernel, mode="same")
    return np.where(valid, total / np.maximum(count, 1.0), math.nan)


def smoothing_width(n: int) -> int:
    """How many steps the thick line averages."""
    return max(1, n // 20)


def thin_out(x: Array, y: Array, limit: int = POINTS) -> tuple[Array, Array, Array, Array]:
    """Means of equal blocks: x, y, and the smallest and largest value of each block."""
    keep = np.isfinite(y)
    x, y = x[keep], y[keep]
    if len(x) <= limit:
        return x, y, y, y
    blocks = np.array_split(np.arange(len(x)), limit)
    reduce = [(x[b].mean(), y[b].mean(), y[b].min(), y[b].max()) for b in blocks]
    a, m, low, high = (np.array(column) for column in zip(*reduce, strict=True))
    return a, m, low, high


def panel_figure(panel: Panel, width: float = 368.0, height: float = 244.0) -> Figure:
    """One panel, sized in points so that its text stays legible on a phone."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(RC):
        figure = Figure(figsize=(width / INCH, height / INCH), layout=None)
        axes = figure.add_axes((0.135, 0.19, 0.845, 0.66))
        draw(axes, panel)
    return figure


def key_figure(panels: Sequence[Panel], title: str = "") -> Figure:
    """Panels side by side on one picture, for a README: legible at 800 pixels."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({**RC, "font.size": 11.0}):
        figure = Figure(figsize=(860 / INCH, (296 if title else 266) / INCH), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08, wspace=0.05)  # type: ignore[union-attr, call-arg]
        if title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=14, fontweight="bold")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            draw(axes, panel)
    return figure


def draw(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter

    axes.set_title(panel.title)
    axes.set_xlabel(panel.x_label)
    labels: list[tuple[float, str, str]] = []
    for curve in panel.curves:
        _draw_curve(axes, curve, panel, labels)
    every_x = np.concatenate([curve.x for curve in panel.curves]) if panel.curves else np.array([0.0, 1.0])
    left, right = float(every_x.min()), float(every_x.max())
    span = max(right - left, 1.0)
    room = max((len(text) for _, text, _ in labels), default=0)
    axes.set_xlim(left - 0.03 * span, right + (0.07 + 0.0285 * room) * span if room else right + 0.04 * span)
    if panel.log:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        low, high = _limits(panel)
        axes.set_ylim(low, high)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    if panel.share:
        decimals = 0 if axes.get_ylim()[1] > 0.08 else 1
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=decimals))
    else:  # also on a logarithmic axis, whose default labels are TeX, which an SVG with real text cannot show
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(round(value, 12))))
    if panel.log_x:
        _log_x(axes, left, right, room)
    else:
        whole = all(curve.style != "steps" for curve in panel.curves)
        ticks = MaxNLocator(nbins=5, integer=whole, steps=[1, 2, 5, 10]).tick_values(left, right)
        axes.set_xticks([tick for tick in ticks if left - 1e-9 <= tick <= right + 1e-9])
    _draw_marks(axes, panel.marks, left, right)
    dots = any(curve.style in ("dots", "band") and curve.x[-1] == right for curve in panel.curves if len(curve.x))
    _draw_labels(axes, labels, right, 9.0 if dots else 5.0)


def _log_x(axes: Axes, left: float, right: float, room: int) -> None:
    """Powers of two on a logarithmic axis, with room for the names at its end."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    octaves = math.log2(right / left)
    axes.set_xlim(left * 2 ** (-0.03 * octaves), right * 2 ** ((0.07 + 0.0285 * room) * octaves))
    powers = [2.0**i for i in range(math.ceil(math.log2(left)), math.floor(math.log2(right)) + 1)]
    shown = powers[:: 1 + (len(powers) - 1) // 6]
    axes.set_xticks(shown, [f"{tick:g}" for tick in shown])
    axes.xaxis.set_minor_locator(NullLocator())


def _draw_curve(axes: Axes, curve: Curve, panel: Panel, labels: list[tuple[float, str, str]]) -> None:
    colour = LIGHT[curve.colour]
    x, y, low, high = thin_out(curve.x, curve.y)
    if not len(x):
        return
    end = float(y[-1])
    if curve.style == "line":
        smooth_x, smooth, _, _ = thin_out(curve.x, moving_mean(curve.y, smoothing_width(len(curve.y))))
        if len(curve.x) > POINTS:
            axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
        elif smoothing_width(len(curve.y)) > 1:
            axes.plot(x, y, color=colour, alpha=0.32, linewidth=1.0)
        axes.plot(smooth_x, smooth, color=colour, marker="o" if len(x) == 1 else None)
        end = float(smooth[-1])
    elif curve.style == "steps":
        axes.stairs(curve.y[:-1], curve.x, color=colour, linewidth=1.8, fill=False)
        axes.stairs(curve.y[:-1], curve.x, color=colour, alpha=0.08, fill=True)
    elif curve.style == "thin":
        axes.plot(x, y, color=colour, linewidth=1.2)
    elif curve.style == "band":
        if curve.low is not None and curve.high is not None:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
        marker = "o" if len(curve.x) <= 25 else None
        axes.plot(curve.x, curve.y, color=colour, linewidth=1.6, marker=marker, markersize=4.5)
        end = float(curve.y[-1])
    else:
        _draw_dots(axes, curve, panel, colour, labels)
        return
    if curve.label:
        labels.append((end, curve.label, curve.colour))


def _draw_dots(axes: Axes, curve: Curve, panel: Panel, colour: str, labels: list[tuple[float, str, str]]) -> None:
    """Single measurements with their intervals; the first of them is labelled where it stands."""
    errors = None
    if curve.low is not None and curve.high is not None:
        errors = np.stack([np.maximum(curve.y - curve.low, 0.0), np.maximum(curve.high - curve.y, 0.0)])
    fill = "white" if curve.hollow else colour
    axes.errorbar(
        curve.x, curve.y, yerr=errors, fmt="o", color=colour, markerfacecolor=fill, markersize=8.5,
        markeredgewidth=2.0, elinewidth=2.0, capsize=0.0, zorder=5, clip_on=False,
    )  # fmt: skip
    if not curve.label:
        return
    text = f"{curve.label} {panel.value(float(curve.y[-1]))}"
    if curve.x[-1] <= min(c.x.min() for c in panel.curves) + 1e-9 and len(panel.curves) > 1:
        reach = float(curve.high[-1]) if curve.high is not None else float(curve.y[-1])
        crowded = any(len(c.y) > 3 and np.nanmean(c.y[: max(1, len(c.y) // 4)]) > curve.y[-1] for c in panel.curves)
        low = float(curve.low[-1]) if curve.low is not None else float(curve.y[-1])
        at, offset, align = (low, -5, "top") if crowded else (reach, 5, "bottom")
        axes.annotate(
            text, (float(curve.x[-1]), at), xytext=(-4, offset), textcoords="offset points",
            va=align, ha="left", color=colour, fontsize=11.5, zorder=6,
        )  # fmt: skip
    else:
        labels.append((float(curve.y[-1]), text, curve.colour))


def _limits(panel: Panel) -> tuple[float, float]:
    values = [c for curve in panel.curves for c in (curve.y, curve.low, curve.high) if c is not None]
    finite = np.concatenate(values) if values else np.array([0.0, 1.0])
    finite = finite[np.isfinite(finite)]
    if not finite.size:
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    if low >= 0:
        low = 0.0  # so that a rise is not exaggerated
    room = 0.08 * (high - low) or 0.1 * max(abs(high), 1.0)
    if panel.share:
        return 0.0 - 0.03 * (high > 0.3), min(high + room, 1.03) if high > 0 else 0.1
    return (low if low == 0 else low - room), high + room


def _draw_marks(axes: Axes, marks: tuple[Mark, ...], left: float, right: float) -> None:
    """Draw lines at stages and resets, with their names if there are few."""
    for mark in marks:
        if left <= mark.x <= right:
            axes.axvline(mark.x, color=LIGHT["muted"], linewidth=1.0, linestyle=(0, (3, 3)), zorder=1)
            if len(marks) <= 4 and mark.label:
                axes.annotate(
                    visible(mark.label)[:24], (mark.x, 1.0), xycoords=("data", "axes fraction"), xytext=(4, -1),
                    textcoords="offset points", va="top", ha="left", fontsize=10.5, color=LIGHT["muted"],
                )  # fmt: skip


def _draw_labels(axes: Axes, labels: list[tuple[float, str, str]], x: float, offset: float = 0.0) -> None:
    """Names at the right ends of their curves, moved apart where they would overlap."""
    bottom, top = axes.get_ylim()
    log = axes.get_yscale() == "log"
    to_unit = (
        (lambda y: math.log(y / bottom) / math.log(top / bottom)) if log else (lambda y: (y - bottom) / (top - bottom))
    )
    gap = 0.095
    placed = sorted((min(max(to_unit(y), 0.02), 0.98), text, colour) for y, text, colour in labels)
    heights = [height for height, _, _ in placed]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    overflow = heights[-1] - 1.0 if heights else 0.0
    if overflow > 0:  # push the stack down from the top
        heights[-1] -= overflow
        for i in range(len(heights) - 2, -1, -1):
            heights[i] = min(heights[i], heights[i + 1] - gap)
    for height, (_, text, colour) in zip(heights, placed, strict=True):
        axes.annotate(
            text, (x, height), xycoords=axes.get_xaxis_transform(), xytext=(offset, 0), textcoords="offset points",
            va="center", ha="left", color=LIGHT[colour], fontsize=11.5, annotation_clip=False,
        )  # fmt: skip


def level_figure(
    levels: Sequence[str], rows: Sequence[tuple[str, str, Sequence[Any]]], title: str, x_label: str
) -> Figure:
    """Accuracy by level; each row is (label, colour, one Interval or None per level)."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    with mpl.rc_context(RC):
        figure = Figure(figsize=(400 / INCH, 250 / INCH), layout=None)
        axes = figure.add_axes((0.115, 0.185, 0.865, 0.67))
        axes.set_title(title)
        axes.set_xlabel(x_label)
        labels: list[tuple[float, str, str]] = []
        for i, (label, colour, cells) in enumerate(rows):
            shift = 0.0 if len(rows) == 1 else -0.09 + 0.18 * i / (len(rows) - 1)
            at = [j for j, cell in enumerate(cells) if cell is not None]
            y = np.array([cells[j].value for j in at])
            low, high = np.array([cells[j].low for j in at]), np.array([cells[j].high for j in at])
            axes.plot(np.array(at) + shift, y, color=LIGHT[colour], linewidth=1.0, alpha=0.45)
            axes.errorbar(
                np.array(at) + shift, y, yerr=np.stack([y - low, high - y]), fmt="o", color=LIGHT[colour],
                markerfacecolor="white" if colour == "before" else LIGHT[colour], markersize=8, markeredgewidth=2,
                elinewidth=2, zorder=5,
            )  # fmt: skip
            if at:
                labels.append((float(y[-1]), label, colour))
        axes.set_xticks(range(len(levels)), [visible(level)[:14] for level in levels])
        axes.set_xlim(-0.4, len(levels) - 0.6 + 0.09 * len(levels) + 0.35)
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        _draw_labels(axes, labels, len(levels) - 1 + 0.1 + 0.06 * len(levels))
    return figure
