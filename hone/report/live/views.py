"""The content of the pages about a stage's rollouts, as plain values for JSON.

listing(Browser(index), Query(), start=0, count=100)      # rows of the table
group_of(index, step=3, group=0, weights={...})  # one prompt and its answers
sample_of(index, step=3, place=5, weights={...}) # one answer with its tokens
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from hone.base.settings import UserError
from hone.report.live.index import FINISHES, VERDICTS, Array, RolloutIndex, Row, Table, row_at, rows_at
from hone.report.live.query import PRESETS, Browser, Query, filtered
from hone.report.live.tokens import read_tokens
from hone.report.live.turns import turns_of
from hone.report.why import why_of

#: Most points of a scatter plot; of more rows, every n-th is drawn.
MOST_POINTS = 4000
#: Most points of a distribution over time; of more steps, neighbours are merged.
MOST_STEPS = 160
#: Rows of the heat map of problems.
MOST_PROBLEMS = 60
#: Characters of an answer shown in a table.
SNIPPET = 90
QUANTILES = (0, 10, 25, 50, 75, 90, 100)

Weights = Mapping[str, float]


def listing(browser: Browser, query: Query, start: int, count: int) -> dict[str, Any]:
    """Rows `start` to `start + count` of the selected ones, and how many there are."""
    index = browser.index
    table, rows = browser.rows(query)
    page = [int(at) for at in rows[start : start + count]]
    read = rows_at(table, index.stage, page)
    return {
        "total": len(rows),
        "start": start,
        "rows": [_line(table, at, row) for at, row in zip(page, read, strict=True)],
        "indexed": index.indexed,
        "files": index.files,
        "whole": index.files > 0 and index.indexed >= index.files,
        "version": table.version,
    }


def choices(index: RolloutIndex, query: Query) -> dict[str, Any]:
    """The choices of the filters: presets with the number of their rows among the filtered ones, verdicts, levels,
    the range of steps. A preset is offered if the run has any of its rows, even if the filters keep none."""
    table = index.table()
    kept = filtered(table, query)
    presets = []
    for name, preset in PRESETS.items():
        mask = preset.chosen(table)
        if mask is not None and (name == "all" or mask.any()):
            rows = int((mask & kept).sum())
            presets.append({"name": name, "title": preset.title, "about": preset.about, "rows": rows})
    counts = np.bincount(table.columns["verdict"], minlength=len(VERDICTS))
    steps = table.columns["step"]
    return {
        "presets": presets,
        "verdicts": {name: int(n) for name, n in zip(VERDICTS, counts) if n},
        "levels": sorted(set(table.levels))[:100],
        "parts": table.parts,
        "steps": [int(steps[0]), int(steps[-1])] if len(steps) else [],
        "rollouts": len(table),
        "version": table.version,
    }


def points(browser: Browser, query: Query) -> dict[str, Any]:
    """Length, reward and verdict of the selected rows, for a scatter plot and histograms: columns of equal length."""
    table, rows = browser.rows(query)
    share = rows[:: max(1, -(-len(rows) // MOST_POINTS))]
    columns = {
        name: finite(table.columns[name][share])
        for name in ("tokens", "total", "advantage", "verdict", "step", "place")
    }
    return {"columns": columns, "verdicts": VERDICTS, "rows": len(rows), "drawn": len(share)}


def _line(table: Table, at: int, row: Row | None) -> Row:
    """One row of the table: its columns, and the end of its text; None: a resumed run has replaced the file, and the
    next refresh shows the new rows."""
    line: Row = {
        name: number(table.columns[name][at])
        for name in (
            "step",
            "place",
            "group",
            "index",
            "total",
            "advantage",
            "tokens",
            "mismatch",
            "repetition",
            "errors",
        )
    }
    problem = int(table.columns["problem"][at])
    line |= {
        "verdict": VERDICTS[table.columns["verdict"][at]],
        "finish": FINISHES[table.columns["finish"][at]],
        "problem": table.problems[problem],
        "level": table.levels[problem],
    }
    if row is None:
        return line | {"extracted": None, "text": ""}
    text = " ".join(str(row.get("text", "")).split())
    return line | {"extracted": row.get("extracted"), "text": text[-SNIPPET:], "cut": len(text) > SNIPPET}


# --- one group, one sample ----------------------------------------------------------------------------------------


def group_of(index: RolloutIndex, step: int, group: int, weights: Weights) -> dict[str, Any]:
    """The prompt once, and every answer with the reasons for its reward. Raises UserError if there is no such group."""
    index.ensure(step)
    table = index.table()
    low, high = np.searchsorted(table.columns["step"], [step, step + 1])
    places = low + np.flatnonzero(table.columns["group"][low:high] == group)
    if not len(places):
        raise UserError(f"step {step} has no group {group}")
    answers = [_answer(index, table, int(at), weights) for at in places]
    first = row_at(table, index.stage, int(places[0]))
    return {
        "step": step,
        "group": group,
        "groups": int(table.columns["group"][low:high].max()) + 1,
        "prompt": first.get("prompt", ""),
        "gold": answers[0]["gold"],
        "problem": first.get("problem_id"),
        "level": first.get("level"),
        "code": int(table.columns["problem"][places[0]]),
        "answers": answers,
        "spread": number(table.columns["spread"][places[0]]),
    }


def sample_of(index: RolloutIndex, step: int, place: int, weights: Weights) -> dict[str, Any]:
    """One answer, its tokens, and where its group is. Raises UserError if there is no such sample."""
    index.ensure(step)
    table = index.table()
    at = table.find(step, place)
    if at is None:
        raise UserError(f"step {step} has no sample {place}")
    row = row_at(table, index.stage, at)
    low, high = np.searchsorted(table.columns["step"], [step, step + 1])
    return {
        **_answer(index, table, at, weights),
        "samples": int(high - low),
        "prompt": row.get("prompt", ""),
        "problem": row.get("problem_id"),
        "level": row.get("level"),
        "version": row.get("policy_version"),
        "tokens_of": read_tokens(index.stage, step, place),
    }


def raw_text(index: RolloutIndex, step: int, place: int) -> str:
    """The text of an answer as the model wrote it. Raises UserError if there is no such sample."""
    index.ensure(step)
    table = index.table()
    at = table.find(step, place)
    if at is None:
        raise UserError(f"step {step} has no sample {place}")
    return str(row_at(table, index.stage, at).get("text", ""))


def _answer(index: RolloutIndex, table: Table, at: int, weights: Weights) -> Row:
    row = row_at(table, index.stage, at)
    why = why_of(row, weights)
    return {
        "step": int(table.columns["step"][at]),
        "place": int(table.columns["place"][at]),
        "group": int(table.columns["group"][at]),
        "index": row.get("index"),
        "total": row.get("total"),
        "advantage": row.get("advantage"),
        "tokens": row.get("tokens"),
        "finish": row.get("finish"),
        "verdict": row.get("verdict"),
        "extracted": row.get("extracted"),
        "gold": why.gold,
        "note": row.get("note"),
        "repetition": number(table.columns["repetition"][at]),
        "mismatch": number(table.columns["mismatch"][at]),
        "turns": turns_of(row),
        "end": row.get("end"),
        "seconds": row.get("seconds"),
        "pieces": why.pieces,
        "parts": [{"name": p.name, "value": p.value, "weight": p.weight, "points": p.points} for p in why.parts],
        "why": why.sentences,
    }


# --- over time ----------------------------------------------------------------------------------------------------


def distributions(index: RolloutIndex) -> dict[str, Any]:
    """Quantiles of reward, length and entropy over the steps, and how often each problem or level is solved."""
    table = index.table()
    steps = np.unique(table.columns["step"])
    width = max(1, -(-len(steps) // MOST_STEPS))
    starts = steps[::width]
    bins = np.searchsorted(starts, table.columns["step"], side="right") - 1
    return {
        "steps": starts.tolist(),
        "width": width,
        "quantiles": list(QUANTILES),
        "columns": {
            name: _quantiles(table.columns[name], bins, len(starts)) for name in ("total", "tokens", "entropy")
        },
        "groups": _group_mix(table, bins, len(starts)),
        "solved": _solved(table, bins, len(starts)),
    }


def _group_mix(table: Table, bins: Array, count: int) -> dict[str, list[float | int | None]]:
    """The share of groups in which all, some or no answers are correct, by time."""
    columns = table.columns
    if not len(table):
        return {"all right": [], "mixed": [], "all wrong": []}
    starts = np.flatnonzero(np.diff(columns["group"], prepend=-1) | np.diff(columns["step"], prepend=-1))
    correct = (columns["verdict"] == VERDICTS.index("correct")).astype(np.int64)
    right, size = np.add.reduceat(correct, starts), np.diff(np.append(starts, len(table)))
    kinds = {"all right": right == size, "mixed": (right > 0) & (right < size), "all wrong": right == 0}
    groups = np.bincount(bins[starts], minlength=count)
    shares = {name: np.bincount(bins[starts], weights=kind, minlength=count) / groups for name, kind in kinds.items()}
    return {name: finite(share) for name, share in shares.items()}


def _quantiles(values: Array, bins: Array, count: int) -> list[list[float | None]]:
    """[QUANTILES][bins]; None where nothing is known."""
    result: list[list[float | None]] = [[None] * count for _ in QUANTILES]
    edges = np.searchsorted(bins, np.arange(count + 1))
    for i in range(count):
        part = values[edges[i] : edges[i + 1]]
        part = part[np.isfinite(part)]
        if len(part):
            for row, value in zip(result, np.percentile(part, QUANTILES)):
                row[i] = number(value)
    return result


def _solved(table: Table, bins: Array, count: int) -> dict[str, Any]:
    """Share of correct answers by problem and time; by level if problems occur only once, hardest first."""
    correct = (table.columns["verdict"] == VERDICTS.index("correct")).astype(np.float64)
    problems = table.columns["problem"]
    seen = np.unique(np.stack([problems, bins], axis=1), axis=0)[:, 0] if len(problems) else problems
    visits = np.bincount(seen, minlength=len(table.problems))
    often = len(visits) > 0 and np.median(visits) >= 2
    names: list[str] = list(table.problems) if often else sorted(set(table.levels))
    rows = problems if often else np.array([names.index(level) for level in table.levels], np.int64)[problems]
    cells = np.zeros((len(names), count, 2))
    np.add.at(cells, (rows, bins), np.stack([correct, np.ones(len(correct))], axis=1))
    totals = cells.sum(1)
    share = np.divide(totals[:, 0], totals[:, 1], out=np.zeros(len(names)), where=totals[:, 1] > 0)
    order = np.argsort(share, kind="stable")
    order = order[np.linspace(0, len(order) - 1, min(len(order), MOST_PROBLEMS)).astype(int)] if len(order) else order
    with np.errstate(invalid="ignore"):
        grid = cells[order, :, 0] / cells[order, :, 1]
    return {
        "by": "problem" if often else "level",
        "names": [names[i] for i in order],
        "problems": [int(i) for i in order] if often else [],
        "shares": [finite(row) for row in grid],
        "of": len(names),
    }


def number(value: Any) -> float | int | None:
    """A number for JSON: None if it is not finite."""
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, float):
        return float(f"{plain:.6g}") if math.isfinite(plain) else None
    return int(plain)


def finite(values: Array) -> list[float | int | None]:
    """Numbers for JSON, with six significant digits; None where one is not finite."""
    if values.dtype.kind != "f":
        plain: list[float | int | None] = values.tolist()
        return plain
    wide = values.astype(np.float64)
    known = np.isfinite(wide) & (wide != 0)
    digits = np.zeros(len(wide))  # after the point
    digits[known] = 5 - np.floor(np.log10(np.abs(wide[known])))
    # Powers of ten are exact up to 1e22, so the results are the doubles nearest to the decimal numbers.
    up, down = 10.0 ** np.clip(digits, 0, 22), 10.0 ** np.clip(-digits, 0, 22)
    rounded = np.round(wide / down * up) / up * down
    return [value if math.isfinite(value) else None for value in rounded.tolist()]
