"""Several evaluated models on the same problems: the tables and figures of a comparison.

Every function takes `Measured`s, in the order in which they are shown; the others are compared with the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hone.measure.stats import ability, levels, ols, published
from hone.measure.stats.measured import Measured, compare
from hone.measure.stats.perplexity import gold_changes, gold_logprobs, gold_perplexity
from hone.report.figures import Curve, Panel
from hone.report.tables import Cell, Table, interval_cell, level_order
from hone.report.text import p_value, percent, tokens
from hone.types import Interval

#: Colours of models and runs, in order; further ones appear only in the tables.
COLOURS = ("train", "before", "valid", "extra", "after", "muted")
#: A histogram of the accuracies of single problems needs several samples of each.
HISTOGRAM_SAMPLES = 4
PUBLISHED = "published, not measured here"


def colours_of(labels: Sequence[str]) -> dict[str, str]:
    """One colour per label, the same in every figure of a page."""
    return dict(zip(labels, COLOURS))


def coloured(models: Sequence[Measured], colours: Mapping[str, str]) -> list[tuple[Measured, str]]:
    return [(model, colours[model.label]) for model in models if model.label in colours]


def sampling_words(model: Measured) -> str:
    """temperature 0.7, top p 1, ..., 8 samples, seed 0"""
    parts = [f"{key.replace('_', ' ')} {value:g}" for key, value in model.sampling.items()
             if isinstance(value, (int, float)) and not (key in ("top_k", "min_p") and not value)]  # fmt: skip
    n = sorted({int(model.drawn.min()), int(model.drawn.max())})
    parts.append(f"{'–'.join(map(str, n))} sample{'s' if n[-1] > 1 else ''} per problem")
    if model.facts.get("split"):
        parts.insert(0, f"{model.facts['split']} split")
    if model.facts.get("seeds", 1) > 1:
        parts[-1] = f"{model.facts['seeds']} seeds, {parts[-1]} in all"
    return ", ".join(parts + ([f"seed {model.seed}"] if model.seed is not None else []))


def some_ks(models: Sequence[Measured], most: int = 4) -> list[int]:
    """Values of k that every model allows: 1, the largest, and powers of two in between."""
    ks = min((model.ks() for model in models), key=len)
    return sorted({ks[round(i * (len(ks) - 1) / (most - 1))] for i in range(most)}) if len(ks) > most else ks


def summary(models: Sequence[Measured]) -> Table:
    ks = [k for k in some_ks(models) if k > 1]
    body, values = [], []
    for model in models:
        cells = [interval_cell(model.accuracy(), 1), *(interval_cell(point, 1) for point in model.pass_curve(ks))] \
            if ks else [interval_cell(model.accuracy(), 1)]  # fmt: skip
        cut = "" if model.truncated is None else f"; {percent(float(model.truncated.mean()))} cut off"
        how = sampling_words(model) + cut + (f"; {model.failures} samples left out" if model.failures else "")
        length, reflects = float(model.tokens.mean()), float(model.reflects.mean())
        body.append((Cell(model.label), *cells, Cell(tokens(length)), Cell(percent(reflects)), Cell(how)))
        for k, point in zip([1, *ks], model.pass_curve([1, *ks]), strict=True):
            at = model.accuracy() if k == 1 else point
            values.append((model.label, k, at.value, at.low, at.high, at.n, length, reflects, how))
    columns = ("", "Accuracy", *(f"pass@{k}" for k in ks), "Tokens", "Reflects", "Sampling")
    names = ("model", "k", "pass_at_k", "low", "high", "problems", "response_tokens", "reflection_rate", "sampling")
    caption = "Accuracy is pass@1, the mean over problems; with 95% intervals."
    return Table("models", caption, columns, tuple(body), tuple(values), names, prose=(len(columns) - 1,))


def differences(models: Sequence[Measured], key: str = "differences") -> Table | None:
    """Each model against the first, paired on their common problems."""
    body, values = [], []
    first = models[0]
    for model in models[1:]:
        if (comparison := compare(first, model)) is None:
            continue
        d = comparison.difference
        p = Cell(bare_p(comparison.p_value))
        row = (Cell(f"{model.label} − {first.label}"), difference_cell(d), p, Cell(str(d.n)), Cell(comparison.method))
        body.append(row)
        values.append((model.label, first.label, d.value, d.low, d.high, comparison.p_value, comparison.method, d.n))
    if not body:
        return None
    caption = (
        "Differences of accuracy on the same problems, in percentage points, with 95% intervals (problems are "
        "resampled) and two-sided p-values. With many comparisons, some p-values are small by chance."
    )
    names = ("model", "against", "difference", "low", "high", "p_value", "method", "problems")
    return Table(key, caption, ("", "Difference", "p", "Problems", "Test"), tuple(body), tuple(values), names)


def bare_p(value: float) -> str:
    """A p-value for a column headed p."""
    return p_value(value).removeprefix("p ").removeprefix("= ")


def difference_cell(d: Interval) -> Cell:
    points = [f"{100 * v:+.1f}".replace("-", "\N{MINUS SIGN}") for v in (d.value, d.low, d.high)]
    return Cell(points[0], f"{points[1]} to {points[2]}")


def pass_panel(
    models: Sequence[Measured], colours: Mapping[str, str], key: str, title: str, note: str = ""
) -> Panel | None:
    """pass@k with bands; None if nothing was sampled more than once. Models without a colour are not drawn."""
    curves = []
    for model, colour in coloured(models, colours):
        ks = model.ks()
        if len(ks) < 2:
            continue
        points = model.pass_curve(ks)
        y, low, high = (np.array([getattr(p, name) for p in points]) for name in ("value", "low", "high"))
        curves.append(Curve(np.array(ks, dtype=float), y, model.label, colour, "band", low, high))
    log2 = len(curves) > 0 and max(float(curve.x[-1]) for curve in curves) > 8
    label = "k, samples per problem"
    return Panel(key, title, label, tuple(curves), share=True, note=note, log_x=log2) if curves else None


def histogram_panel(
    models: Sequence[Measured],
    colours: Mapping[str, str],
    key: str = "histogram",
    title: str = "Accuracy of single problems",
    note: str = "",
) -> Panel | None:
    """Share of problems by their accuracy, an outline per model."""
    curves = []
    for model, colour in coloured(models, colours):
        if int(model.drawn.min()) >= HISTOGRAM_SAMPLES:
            rows = levels.histogram(model)
            edges = np.array([low for low, _, _ in rows] + [1.0])
            share = np.array([count for _, _, count in rows], dtype=float) / len(model)
            curves.append(Curve(edges, np.append(share, share[-1]), model.label, colour, "steps"))
    note = note or "Share of problems by the share of their samples that is correct, in tenths."
    return Panel(key, title, "pass@1 of a problem", tuple(curves), share=True, note=note) if curves else None


def grouped(models: Sequence[Measured], column: str, key: str, caption: str, unit: str) -> Table | None:
    """Accuracy by level, domain or format: a row per model, a column per value."""
    names = level_order(value for model in models for value in model.by(column))
    if len(names) < 2:
        return None
    body, values = [], []
    for model in models:
        parts = model.by(column)
        cells = {name: parts[name].accuracy() for name in names if name in parts}
        body.append((Cell(model.label), *(interval_cell(cells[n]) if n in cells else Cell("–") for n in names)))
        values += [(model.label, name, c.value, c.low, c.high, c.n) for name, c in cells.items()]
    return Table(key, caption, ("", *names), tuple(body), tuple(values),
                 ("model", unit, "accuracy", "low", "high", "problems"))  # fmt: skip


def gold(models: Sequence[Measured]) -> Table | None:
    """Perplexity of the gold answers, and its ratio to the first model's; None if they were not scored."""
    body, values = [], []
    for model, changed in gold_changes(models):
        cells = [gold_perplexity(gold_logprobs(model, column)) for column in (0, 1)]
        row = [Cell(f"{c.value:.3f}", f"{c.low:.3f} to {c.high:.3f}") for c in cells]
        ratio, p = (Cell("–"), Cell("–")) if changed is None else (
            Cell(f"{changed.ratio.value:.3f}", f"{changed.ratio.low:.3f} to {changed.ratio.high:.3f}"),
            Cell(bare_p(changed.p_value)),
        )  # fmt: skip
        body.append((Cell(model.label), *row, ratio, p))
        for name, c in zip(("without", "after"), cells, strict=True):
            values.append((model.label, name, c.value, c.low, c.high, c.n))
    if not body:
        return None
    caption = (
        "Perplexity of the gold answers, without any reasoning and after the model’s own: geometric means over "
        "problems with 95% intervals; lower is better, 1 is certainty. The ratio is of the values after "
        "reasoning to those of the first model, paired on problems, with a two-sided p."
    )
    names = ("model", "reasoning", "perplexity", "low", "high", "problems")
    head = ("", "Without reasoning", "After its own", "Ratio to the first", "p")
    return Table("gold-perplexity", caption, head, tuple(body), tuple(values), names)


def not_integer(models: Sequence[Measured]) -> list[Measured]:
    """The models on problems whose answer is not an integer; empty if all or none are."""
    parts = [model.where(~np.isin(model.formats, ("integer", ""))) for model in models]
    return parts if all(0 < len(part) < len(model) for part, model in zip(parts, models)) else []


def knights(models: Sequence[Measured]) -> Table | None:
    """Accuracy by number of people and its average, with the published rows below."""
    models = [model for model in models if model.facts.get("task") == "knights" and len(model.by("levels")) > 1]
    if not models:
        return None
    columns = level_order({str(n) for n in range(2, 9)} | {level for model in models for level in model.by("levels")})
    body: list[tuple[Cell, ...]] = []
    values: list[tuple[Any, ...]] = []
    for model in models:
        cells, average = levels.by_level(model)
        assert average is not None
        row = [interval_cell(cells[c]) if c in cells else Cell("–") for c in columns]
        body.append((Cell(model.label), *row, interval_cell(average), Cell(sampling_words(model))))
        named = {**cells, "average": average}
        values += [(model.label, n, i.value, i.low, i.high, i.n, sampling_words(model)) for n, i in named.items()]
    for other in published.KNIGHTS:
        row = [Cell(percent(other.values[c], 0)) if c in other.values else Cell("–") for c in columns]
        body.append((Cell(other.model, PUBLISHED), *row, Cell(percent(other.average, 0)), Cell("100 puzzles a cell")))
        named_values = {**other.values, "average": other.average}
        values += [(f"{other.model} ({PUBLISHED})", n, v, "", "", 100, "") for n, v in named_values.items()]
    caption = (
        "Knights and knaves: accuracy by number of people, and the average over the measured numbers of people, each "
        "with equal weight. Published rows are from other puzzles of the same kind and have no interval; 100 puzzles "
        "mean about ±8 points at 80%."
    )
    head = ("", *(f"{c} people" for c in columns), "Average", "Sampling")
    names = ("model", "people", "accuracy", "low", "high", "puzzles", "sampling")
    return Table("knights", caption, head, tuple(body), tuple(values), names, prose=(len(head) - 1,))


def regression(models: Sequence[Measured]) -> tuple[Table | None, list[str]]:
    """OLS of per-problem accuracy on level and domain, one column per model, and the reasons for missing ones."""
    fits: dict[str, dict[str, ols.Coefficient]] = {}
    notes = []
    for model in models:
        if len(model.by("domains")) < 2:
            continue
        try:
            fits[model.label] = {c.name: c for c in ols.regress(model.rates(), model.levels, model.domains)}
        except ValueError as error:  # too few problems, or a level that follows from the domain
            notes.append(f"{model.label}: {error}")
    if not fits:
        return None, notes
    names = list(next(iter(fits.values())))
    names += [name for fit in fits.values() for name in fit if name not in names]
    body = [(Cell(name), *(_coefficient(fit.get(name)) for fit in fits.values())) for name in names]
    values = [(label, c.name, c.value, c.standard_error, c.t, c.p_value, c.n) for label, fit in fits.items()
              for c in fit.values()]  # fmt: skip
    head: tuple[str, ...] = ("", *fits)
    if len(set(names) & set(published.OLS_MATH500)) > 2:
        head = (*head, f"MATH500, {PUBLISHED}")
        others = [published.OLS_MATH500.get(name) for name in names]
        body = [
            (*row, Cell(f"{b[0]:.4f}", f"± {b[1]:.3f}, t = {b[2]:.1f}") if b else Cell("–"))
            for row, b in zip(body, others, strict=True)
        ]
    caption = (
        "Least squares of each problem’s accuracy on level and domain, one-hot without an intercept: coefficient, and "
        "below it standard error, t and two-sided p. The coefficient of a domain is the fitted accuracy at level 0."
    )
    columns = ("model", "variable", "coefficient", "standard_error", "t", "p_value", "problems")
    return Table("regression", caption, head, tuple(body), tuple(values), columns), notes


def _coefficient(c: ols.Coefficient | None) -> Cell:
    if c is None:
        return Cell("–")
    text = f"{c.value:.4f}".replace("-", "\N{MINUS SIGN}")
    return Cell(
        text, f"± {c.standard_error:.3f}, t = {c.t:.1f}, {p_value(c.p_value)}".replace("= -", "= \N{MINUS SIGN}")
    )


def ability_base(models: Sequence[Measured]) -> tuple[Measured, Measured, list[Measured]] | None:
    """The first model that was sampled twice with different seeds and otherwise equal settings, its second sample, and
    the others."""
    for i, base in enumerate(models):
        for again in models[i + 1 :]:
            alike = dict(base.sampling) == dict(again.sampling) and base.seed != again.seed
            if alike and base.facts.get("weights") and base.facts["weights"] == again.facts.get("weights"):
                rest = [m for m in models if m.facts.get("weights") != base.facts["weights"]]
                return base, again, rest
    return None


def new_ability(models: Sequence[Measured], colours: Mapping[str, str]) -> tuple[Table, list[Panel]] | None:
    """New ability: problems that the base never solved, solved by the other models, and by the base when sampled
    again."""
    sampled = ability_base(models)
    result = ability.new_ability(*sampled) if sampled else None
    if result is None or sampled is None:
        return None
    base, again, others = sampled
    body, values = [], []
    for row in result.rows:
        gain = row.gain.difference if row.gain else None
        p = bare_p(row.gain.p_value) if row.gain else "–"
        name = Cell(row.label, "the base, sampled again" if row.gain is None else "")
        body.append((name, *(interval_cell(point, 1) for point in row.solved),
                     difference_cell(gain) if gain else Cell("–"), Cell(p)))  # fmt: skip
        for k, point in zip(result.ks, row.solved, strict=True):
            values.append((row.label, k, point.value, point.low, point.high, point.n))
    caption = (
        f"New ability: the {len(result.problems):,} of {result.of:,} problems that {base.label} never solved in "
        f"{result.tries} samples. The first row is the same model with other random numbers, which shows what chance "
        f"alone gives; gains are relative to it, at k = {result.ks[-1]}."
    )
    columns = ("", *(f"pass@{k}" for k in result.ks), "Gain", "p")
    table = Table("new-ability", caption, columns, tuple(body), tuple(values),
                  ("model", "k", "pass_at_k", "low", "high", "problems"))  # fmt: skip
    chosen = set(result.problems)
    kept = [m.where(np.array([i in chosen for i in m.problems], dtype=bool)) for m in (again, *others)]
    note = "On the problems that the base never solved in its first sample."
    panels = [
        pass_panel(kept, colours, "new-ability-pass", "pass@k, never solved by the base", note),
        histogram_panel(kept, colours, "new-ability-histogram", "Accuracy, never solved by the base", note),
    ]
    return table, [panel for panel in panels if panel]


def published_pass(models: Sequence[Measured]) -> Table | None:
    """Published results for the same benchmark."""
    tables: dict[str, dict[str, tuple[float, float]]] = {"gsm8k": published.GSM8K, "math": published.MATH500}
    task = str(models[0].facts.get("task"))
    if task not in tables:
        return None
    rows: list[tuple[Any, ...]] = [(name, *cells) for name, cells in tables[task].items()]
    body = [(Cell(name, PUBLISHED), Cell(percent(a)), Cell(percent(b))) for name, a, b in rows]
    caption = f"Published results on {'GSM8K' if task == 'gsm8k' else 'MATH500'}; they have no interval."
    return Table("published", caption, ("", "pass@1", "pass@32"), tuple(body), tuple(rows), ("model", "1", "32"))
