"""Tables as data, rendered as HTML, CSV, Markdown and LaTeX."""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.base.visible import visible
from hone.report.text import escape, marked, percent, tokens
from hone.types import VERIFIER_FAILURES, Interval

_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?")
SMALL_N = 30  # cells with fewer problems are marked, since their intervals are wide


@dataclass(frozen=True)
class Cell:
    text: str
    below: str = ""  # a second, smaller line
    marked: tuple[int, int] | None = None  # a part of the text to emphasise


@dataclass(frozen=True)
class Table:
    """A table; the first column holds the row headers."""

    key: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    values: tuple[tuple[Any, ...], ...]  # the same values unformatted, in long form, for the .csv
    value_columns: tuple[str, ...]
    prose: tuple[int, ...] = ()  # columns that hold sentences: aligned left and wrapped

    def html(self) -> str:
        kinds = [' class="text"' if i in self.prose else "" for i in range(len(self.columns))]
        head = "".join(f'<th scope="col"{kinds[i]}>{escape(c)}</th>' for i, c in enumerate(self.columns))
        body = []
        for row in self.rows:
            cells = [f'<th scope="row">{_cell(row[0])}</th>']
            cells += [f"<td{kinds[i]}>{_cell(cell)}</td>" for i, cell in enumerate(row) if i]
            body.append(f"<tr>{''.join(cells)}</tr>")
        return (
            f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(self.caption)}">'
            f'<table id="table-{self.key}">'
            f"<caption><span>{escape(self.caption)}</span></caption><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
        )

    def markdown(self) -> str:
        lines = [self.caption, "", _pipes(self.columns), _pipes("---" for _ in self.columns)]
        for row in self.rows:
            lines.append(_pipes(f"{cell.text} {cell.below}".strip() for cell in row))
        return "\n".join(lines) + "\n"

    def latex(self) -> str:
        """For \\input in a paper that uses booktabs."""
        align = "".join("l" if i == 0 or i in self.prose else "r" for i in range(len(self.columns)))
        lines = [f"% {' '.join(visible(self.caption).split())}", f"\\begin{{tabular}}{{{align}}}", r"\toprule"]
        lines += [_ampersands(self.columns), r"\midrule"]
        lines += [_ampersands(f"{cell.text} {cell.below}".strip() for cell in row) for row in self.rows]
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"

    def csv(self) -> str:
        return to_csv(self.value_columns, self.values)


def _cell(cell: Cell) -> str:
    text = marked(cell.text, [(*cell.marked, "phrase")]) if cell.marked else escape(cell.text)
    return text + (f"<small>{escape(cell.below)}</small>" if cell.below else "")


def _pipes(cells: Iterable[str]) -> str:
    plain = (" ".join(visible(cell).split()) for cell in cells)
    escaped = (cell.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;") for cell in plain)
    return "| " + " | ".join(escaped) + " |"


#: Characters that are special in LaTeX; a model's name must not run a command.
_LATEX = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "†": r"$\dagger$",
    "\N{MINUS SIGN}": "$-$",
    "×": r"$\times$",
    "±": r"$\pm$",
}


def _ampersands(cells: Iterable[str]) -> str:
    plain = (" ".join(visible(cell).split()) for cell in cells)
    return " & ".join("".join(_LATEX.get(c, c) for c in cell) for cell in plain) + r" \\"


def to_csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([_inert(column) for column in columns])
    writer.writerows([_inert(value) for value in row] for row in rows)
    return out.getvalue()


def _inert(value: Any) -> Any:
    """Quote text that a spreadsheet would run as a formula, also after blanks and with full-width signs."""
    if not isinstance(value, str):
        return value
    text = visible(value)
    begins = unicodedata.normalize("NFKC", value.lstrip()[:1])
    if value[:1] in ("\t", "\r", "\n") or (begins in ("=", "+", "-", "@") and not _NUMBER.fullmatch(value)):
        return f"'{text}"
    return text


def interval_cell(interval: Interval, digits: int = 0) -> Cell:
    mark = " †" if interval.n < SMALL_N else ""
    return Cell(
        percent(interval.value, digits) + mark,
        f"{percent(interval.low, digits)}–{percent(interval.high, digits)}, n = {interval.n}",
    )


def to_interval(value: Any) -> Interval | None:
    """An interval from a row of evals.jsonl or results.json; None if it is not one."""
    try:
        return Interval(float(value["value"]), float(value["low"]), float(value["high"]), int(value["n"]))
    except (TypeError, KeyError, ValueError):  # written by another version, or by hand
        return None


def level_order(levels: Iterable[str]) -> list[str]:
    """Sort key: numbers by size, then the rest by name."""
    return sorted(set(levels), key=lambda s: (0, float(s), s) if s.replace(".", "", 1).isdigit() else (1, 0.0, s))


def level_table(rows: Sequence[tuple[str, Mapping[str, Any]]], unit: str) -> Table | None:
    """Accuracy by level: one row per evaluation, one column per level."""
    cells = {label: {str(k): to_interval(v) for k, v in by_level.items()} for label, by_level in rows}
    levels = level_order(level for by_level in cells.values() for level, cell in by_level.items() if cell)
    if not levels:
        return None
    body, values, small = [], [], False
    for label, by_level in cells.items():
        line = [Cell(label)]
        for level in levels:
            cell = by_level.get(level)
            line.append(interval_cell(cell) if cell else Cell("–"))
            if cell:
                small |= cell.n < SMALL_N
                values.append((label, level, cell.value, cell.low, cell.high, cell.n))
        body.append(tuple(line))
    note = f" † fewer than {SMALL_N} problems: read the interval, not the number." if small else ""
    caption = f"Accuracy by {unit}, with 95% intervals.{note}"
    names = ("evaluation", unit, "accuracy", "low", "high", "n")
    return Table("levels", caption, ("", *levels), tuple(body), tuple(values), names)


def verdict_table(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> Table | None:
    """Shares of the verdicts on all samples."""
    order = ("correct", "wrong", "malformed", "truncated", *sorted(VERIFIER_FAILURES))
    seen = {str(name) for _, verdicts in rows for name in verdicts}
    names = [name for name in order if name in seen] + sorted(seen.difference(order))
    if not names:
        return None
    body, values = [], []
    for label, verdicts in rows:
        total = sum(float(v) for v in verdicts.values()) or 1.0
        shares = [float(verdicts.get(name, 0.0)) / total for name in names]
        body.append((Cell(label), *(Cell(percent(share)) for share in shares)))
        values += [(label, name, share) for name, share in zip(names, shares, strict=True)]
    caption = "Verdicts on all samples. A sample whose verifier failed is counted here and left out of the accuracy."
    columns = ("", *(name.replace("_", " ") for name in names))
    return Table("verdicts", caption, columns, tuple(body), tuple(values), ("evaluation", "verdict", "share"))


def summary_table(
    rows: Sequence[tuple[str, Interval | None, float | None, float | None, float | None, str]],
) -> Table | None:
    """One row per evaluation: accuracy, truncation, tokens, reflection where it is known, sampling."""
    if not rows:
        return None
    body: list[tuple[Cell, ...]] = []
    values = []
    for label, accuracy, cut, length, reflects, sampling in rows:
        body.append(
            (
                Cell(label),
                interval_cell(accuracy, 1) if accuracy else Cell("–"),
                Cell(percent(cut) if cut is not None else "–"),
                Cell(tokens(length) if length is not None else "–"),
                Cell(percent(reflects) if reflects is not None else "–"),
                Cell(sampling or "–"),
            )
        )
        a = accuracy
        values.append((label, *((a.value, a.low, a.high, a.n) if a else ("",) * 4), cut, length, reflects, sampling))
    columns = ["", "Accuracy", "Cut off", "Tokens", "Reflects", "Sampling"]
    if all(reflects is None for *_, reflects, _ in rows):  # the .csv keeps the empty column
        columns.remove("Reflects")
        body = [(*cells[:4], cells[5]) for cells in body]
    names = (
        "evaluation",
        "accuracy",
        "low",
        "high",
        "n",
        "truncation_rate",
        "response_tokens",
        "reflection_rate",
        "sampling",
    )
    caption = (
        "The evaluations before and after training, with 95% intervals and how each was sampled. No checkpoint is "
        "chosen by its score, on any split: after is the end of training."
    )
    return Table("summary", caption, tuple(columns), tuple(body), tuple(values), names, prose=(len(columns) - 1,))
