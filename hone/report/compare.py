"""One page for several runs, or for the models of `hone eval`: overlaid curves, and differences with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hone.base.settings import UserError
from hone.measure.stats.measured import Measured, compare
from hone.measure.store import read_measured, stored
from hone.report import models, page, runs
from hone.report.read import RunRecord
from hone.report.runs import Condition
from hone.report.sheet import Sheet
from hone.report.tables import Cell, Table, level_order
from hone.report.text import escape, p_value, percent

#: At most this many pass@k panels by level or domain.
SPLITS_SHOWN = 10
#: Labels that are longer would leave no room for the curves, and are replaced by letters.
LABEL_ROOM = 14
Section = tuple[str, str, str]  # key, title, what is inside


def evaluations_of(folder: Path) -> list[Measured]:
    """The evaluations in a folder of them, or in a run's folder. Equal labels are numbered."""
    measured = [read_measured(path) for path in stored(folder) or stored(folder / "evaluations")]
    return [one for one in measured if one.graded]  # without grades there is nothing to compare


def distinct(measured: Sequence[Measured]) -> list[Measured]:
    """Number models with equal names."""
    seen: dict[str, int] = {}
    renamed = []
    for model in measured:
        seen[model.label] = n = seen.get(model.label, 0) + 1
        renamed.append(relabel(model, f"{model.label} ({n})") if n > 1 else model)
    return renamed


def relabel(model: Measured, label: str) -> Measured:
    from dataclasses import replace

    return replace(model, label=label)


def model_sections(sheet: Sheet, measured: Sequence[Measured], unit: str = "level") -> list[Section]:
    """Every table and figure that these models have data for."""
    letters = lettered([model.label for model in measured])
    short = [relabel(model, letters[model.label]) for model in measured]
    colours, key = models.colours_of([model.label for model in short]), legend(letters)
    notes = [page.paragraph(f"The figures show the first {len(models.COLOURS)} models; the tables all.", "quiet")] \
        if len(measured) > len(models.COLOURS) else []  # fmt: skip
    panels = [models.pass_panel(short, colours, "models-pass", "pass@k"), models.histogram_panel(short, colours)]
    parts = [
        sheet.table(models.summary(measured)), sheet.table(models.differences(measured)), key,
        sheet.flow(panel for panel in panels if panel), *notes, sheet.table(models.published_pass(measured)),
    ]  # fmt: skip
    sections = [("models", "Models compared", "\n".join(part for part in parts if part))]
    if table := sheet.table(models.knights(measured)):
        sections.append(("knights", "Knights and knaves", table))
    if table := sheet.table(models.gold(measured)):
        sections.append(("gold", "Gold answers", table))
    sections += _splits(sheet, measured, short, unit, key)
    return sections


def _splits(
    sheet: Sheet, measured: Sequence[Measured], short: Sequence[Measured], unit: str, key: str
) -> list[Section]:
    sections = []
    colours = models.colours_of([model.label for model in short])
    for column, name, title in (("levels", unit, f"By {unit}"), ("domains", "domain", "By domain")):
        table = models.grouped(measured, column, f"models-{column}", f"Accuracy by {name}, with 95% intervals.", name)
        if table is None:
            continue
        values = level_order({value for model in measured for value in model.by(column)})
        panels = []
        for i, value in enumerate(values if len(values) <= SPLITS_SHOWN else ()):
            parts = [part for model in short if (part := model.by(column).get(value)) is not None]
            panels.append(models.pass_panel(parts, colours, f"pass-{column}-{i}", f"pass@k, {name} {value}"))
        inside = [sheet.table(table), flow := sheet.flow(panel for panel in panels if panel), key if flow else ""]
        if column == "domains":
            fit, notes = models.regression(measured)
            inside += [sheet.table(fit), *(page.paragraph(note, "quiet") for note in notes)]
        sections.append((f"by-{column}", title, "\n".join(part for part in inside if part)))
    caption = "Accuracy by the form of the gold answer. A model that overfits to integers falls on the others."
    if table := models.grouped(measured, "formats", "models-formats", caption, "format"):
        rest = models.not_integer(short) if short else []
        panel = models.pass_panel(rest, colours, "pass-not-integer", "pass@k, answer not an integer") if rest else None
        inside = [sheet.table(table), sheet.flow([panel] if panel else [])]
        sections.append(("by-format", "By form of the answer", "\n".join(part for part in inside if part)))
    if ability := models.new_ability(measured, {}):
        graphs = models.new_ability(short, colours)  # the same with labels that fit in a figure
        inside = [sheet.table(ability[0]), sheet.flow(graphs[1] if graphs else []), key]
        sections.append(("ability", "New ability", "\n".join(part for part in inside if part)))
    return sections


# --- several runs --------------------------------------------------------------------------------


def run_sections(
    sheet: Sheet, folders: Sequence[RunRecord], unit: str, evaluated: Sequence[Measured]
) -> tuple[str, list[str], list[Section]]:
    """Headline, lead sentences and sections of a comparison of runs; `evaluated`: their results of `hone eval`."""
    conditions = runs.conditions(folders)
    letters = lettered([condition.label for condition in conditions])
    short = [Condition(letters[c.label], c.runs, c.lines) for c in conditions]
    seeds = max(len(condition.runs) for condition in conditions)
    note = "Curves are means over steps" + ("; bands span the lowest to the highest seed" if seeds > 1 else "") + "."
    if len(conditions) > len(models.COLOURS):
        note += f" The first {len(models.COLOURS)} conditions are drawn; the tables hold all."
    curves = legend(letters) + sheet.flow(runs.overlays(short)) + page.paragraph(note, "quiet")
    after = [model for condition in conditions if (model := runs.pooled(condition)) is not None]
    outcome = [sheet.table(runs.outcome_table(conditions)), sheet.table(run_differences(conditions, after))]
    sections = [
        ("outcome", "What came out", "\n".join(part for part in outcome if part)),
        ("curves", "Training", curves),
    ]
    if settings := sheet.table(runs.different_settings(conditions)):
        sections.append(("settings", "What differs", settings))
    if evaluated:  # preferred over the other, since their tables have the same names
        sections += model_sections(sheet, evaluated, unit)
    elif after:
        # Samples of several seeds come from several models, so pass@k over all of them has no meaning.
        drawn = [relabel(m, letters[m.label]) for m in after] if seeds == 1 else []
        knights = sheet.table(models.knights(after))
        sections += [("knights", "Knights and knaves", knights)] if knights else []
        sections += _splits(sheet, after, drawn, unit, legend(letters))
    sections.append(("runs", "The runs", sheet.table(runs_table(conditions))))
    return headline(conditions, after), lead(conditions, after), sections


def headline(conditions: Sequence[Condition], after: Sequence[Measured]) -> str:
    if len(conditions) < 2:
        return f"{conditions[0].label}: {len(conditions[0].runs)} seeds"
    names = (
        f"{conditions[0].label} against {conditions[1].label}"
        if len(conditions) == 2
        else f"{len(conditions)} conditions compared"
    )
    if len(conditions) == 2 and len(after) == 2:
        return (
            f"{names}: {percent(after[0].rates().mean(), 0)} and {percent(after[1].rates().mean(), 0)} after training"
        )
    return names


def lead(conditions: Sequence[Condition], after: Sequence[Measured]) -> list[str]:
    """Sentences that the intervals support."""
    sentences = []
    for condition in conditions:
        values = [float(row["accuracy"]["value"]) for _, row in condition.sides("after") if "accuracy" in row]
        over = runs.over_runs(values)
        if over:
            sentences.append(
                f"{condition.label}: {percent(over.value)} after training, mean of {over.n} seeds "
                f"(95% interval over seeds {percent(over.low)} to {percent(over.high)})."
            )
    for model in after[1:]:
        result = compare(after[0], model)
        if result:
            d = result.difference
            clear = not d.low <= 0 <= d.high
            word = ("higher than" if d.value > 0 else "lower than") if clear else "not measurably different from"
            points = f"{100 * d.value:+.1f} points ({100 * d.low:+.1f} to {100 * d.high:+.1f})"
            points = points.replace("-", "\N{MINUS SIGN}")
            sentences.append(
                f"{model.label} is {word} {after[0].label} on the same {d.n:,} problems: {points}, "
                f"{p_value(result.p_value)}."
            )
    return sentences


def run_differences(conditions: Sequence[Condition], after: Sequence[Measured]) -> Table | None:
    """Differences over problems (would other problems show them too?) and over seeds (would other runs?)."""
    table = models.differences(after) if len(after) > 1 else None
    if table is None:
        return None
    by_label = {condition.label: condition for condition in conditions}
    body, values = [], []
    for row, value in zip(table.rows, table.values, strict=True):
        over = runs.seed_difference(by_label[str(value[1])], by_label[str(value[0])])
        cells = (models.difference_cell(over[0]), Cell(models.bare_p(over[1]))) if over else (Cell("–"),) * 2
        body.append((*row, *cells))
        values.append((*value, *((over[0].low, over[0].high, over[1]) if over else ("",) * 3)))
    caption = table.caption + (
        " Over seeds: Welch’s t interval, for conditions with two seeds or more; it says whether other runs would show "
        "the difference too, the one over problems whether other problems would."
    )
    names = (*table.value_columns, "seeds_low", "seeds_high", "seeds_p_value")
    columns = (*table.columns, "Over seeds", "p")
    return Table(table.key, caption, columns, tuple(body), tuple(values), names)


def runs_table(conditions: Sequence[Condition]) -> Table:
    body, values = [], []
    for condition in conditions:
        for run in condition.runs:
            stage = run.stages[-1]
            seed = stage.manifest.get("seed", stage.config.get("seed", "–"))
            steps = sum(s.steps_done for s in run.stages)
            state = "finished" if run.finished else "not finished"
            row = (run.name, condition.label, str(seed), f"{steps:,}", state, str(run.folder))
            body.append(tuple(Cell(text) for text in row))
            values.append((run.name, condition.label, seed, steps, state, str(run.folder)))
    columns = ("", "Condition", "Seed", "Steps", "State", "Folder")
    return Table("runs", "Every run with its folder.", columns, tuple(body), tuple(values),
                 tuple(c.lower() or "run" for c in columns), prose=(5,))  # fmt: skip


# --- names -----------------------------------------------------------------------------------------


def lettered(labels: Sequence[str]) -> dict[str, str]:
    """Label -> the name at its curve: the label itself, or a letter if any label is too long for a figure."""
    if max(map(len, labels), default=0) <= LABEL_ROOM:
        return {label: label for label in labels}
    return {label: chr(ord("A") + i) if i < 26 else str(i) for i, label in enumerate(labels)}


def legend(letters: dict[str, str]) -> str:
    """A legend of the letters, in the colours of the curves; empty if curves carry their labels."""
    if all(label == letter for label, letter in letters.items()):
        return ""
    rows = "".join(
        f'<li class="c-{colour}"><b>{escape(letter)}</b> {escape(label)}</li>'
        for (label, letter), colour in zip(letters.items(), models.COLOURS)
    )
    return f'<ul class="legend">{rows}</ul>'


def assemble(eyebrow: str, title: str, lead: Sequence[str], sections: Sequence[Section]) -> str:
    placed = [section for section in sections if section[2]]
    links = "".join(f'<li><a href="#{key}">{escape(name)}</a></li>' for key, name, _ in placed)
    head = f"{page.paragraph(eyebrow, 'eyebrow')}<h1>{escape(title)}</h1>{page.paragraph(' '.join(lead), 'lead')}"
    body = [f"<header>{head}</header>", f'<nav aria-label="Sections"><ul>{links}</ul></nav>']
    body += [page.section(key, name, inside) for key, name, inside in placed]
    body.append(
        "<footer><p>Intervals are 95%: Wilson’s with one sample per problem, otherwise a bootstrap over problems. "
        "Figures are next to this page as .svg, .png and .csv, tables as .csv, .md and .tex.</p></footer>"
    )
    return page.document(title, "\n".join(body))


def build_evaluations(folder: Path, sheet: Sheet) -> str:
    """The page of a folder that `hone eval` wrote."""
    measured = distinct(evaluations_of(folder))
    if not measured:
        raise UserError(f"report: {folder} holds no run and no evaluation")
    best = " and ".join(f"{m.label} {percent(m.rates().mean(), 0)}" for m in measured[:2])
    title = best if len(measured) <= 2 else f"{len(measured)} models on the same problems"
    unit = page.LEVEL_UNITS.get(str(measured[0].facts.get("task")), "level")
    return assemble(f"Evaluations in {folder.name}", title, [], model_sections(sheet, measured, unit))
