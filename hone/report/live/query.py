"""Selects and orders the rollouts of a table or a scatter plot: presets, filters, sorting, search.

query = Query.of({"preset": "longest", "verdict": "wrong", "from": "10"})      # parameters of a request
table, rows = Browser(index).rows(query)                                       # row numbers of the table
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hone.base.settings import UserError
from hone.report.live.index import FINISHES, VERDICTS, Array, RolloutIndex, Table
from hone.runs import layout
from hone.types import VERIFIER_FAILURES

_WRONG, _CORRECT = VERDICTS.index("wrong"), VERDICTS.index("correct")
_FAILURES = [VERDICTS.index(name) for name in sorted(VERIFIER_FAILURES)]
_CUT = FINISHES.index("length")
#: A judge's score above it counts as agreement with a correct answer.
AGREES = 0.5

Chosen = Callable[[Table], "Array | None"]


@dataclass(frozen=True)
class Preset:
    title: str
    about: str
    chosen: Chosen  # selects rows, as a mask [N]; None: not applicable to this run
    sort: str = ""


def _all(table: Table) -> Array:
    return np.ones(len(table), bool)


def _known(name: str) -> Chosen:
    def chosen(table: Table) -> Array | None:
        known = np.isfinite(table.columns[name]) & (table.columns[name] != 0)
        return known if known.any() else None

    return chosen


def pull(table: Table) -> Array:
    """[N] |advantage| x tokens: roughly the share of each answer in the gradient of its step; NaN where unknown."""
    return np.asarray(np.abs(table.columns["advantage"]) * table.columns["tokens"])


def _pulls(table: Table) -> Array | None:
    known = pull(table) > 0
    return known if known.any() else None


def _tool_errors(table: Table) -> Array | None:
    failed = table.columns["errors"] > 0
    return failed if failed.any() else None


def _column(name: str, *values: int) -> Chosen:
    return lambda table: np.isin(table.columns[name], values)


def _tagged(verdict: int, formed: int) -> Chosen:
    """Only for tasks whose answers have tags."""

    def chosen(table: Table) -> Array | None:
        if not table.columns["formed"].any():
            return None
        return np.asarray((table.columns["verdict"] == verdict) & (table.columns["formed"] == formed))

    return chosen


def _judge_disagrees(table: Table) -> Array | None:
    judges = [name for name in table.parts if name == "judge" or name.startswith("judge")]
    if not judges:
        return None
    score = table.columns[f"part/{judges[0]}"]
    return np.asarray(np.isfinite(score) & ((score > AGREES) != (table.columns["verdict"] == _CORRECT)))


PRESETS: dict[str, Preset] = {
    "all": Preset("All answers", "Every sampled answer, newest step first.", _all, "-step"),
    "wrong": Preset("Wrong but well formed", "All tags in order, and a wrong answer.", _tagged(_WRONG, 1)),
    "untidy": Preset("Right but malformed", "A correct answer outside the expected format.", _tagged(_CORRECT, 0)),
    "longest": Preset("Longest", "Most tokens first.", _all, "-tokens"),
    "truncated": Preset("Cut off", "Ended at the token limit.", _column("finish", _CUT)),
    "same": Preset(
        "Groups without a difference",
        "Every answer of the group has the same reward, so nothing is learned from it.",
        lambda table: table.columns["spread"] == 0,
    ),
    "best": Preset("Highest advantage", "What the update encourages most.", _known("advantage"), "-advantage"),
    "worst": Preset("Lowest advantage", "What the update discourages most.", _known("advantage"), "advantage"),
    "pull": Preset(
        "Pull hardest",
        "Advantage times length, the largest first: roughly what moved the weights most.",
        _pulls,
        "-pull",
    ),
    "mismatch": Preset(
        "Highest mismatch", "Where sampler and trainer disagree most about the tokens.", _known("mismatch"), "-mismatch"
    ),
    "repetitive": Preset(
        "Most repetitive", "The largest share of repeated word sequences.", _known("repetition"), "-repetition"
    ),
    "failed": Preset(
        "Verifier failures", "Left out of their groups: the verifier gave no verdict.", _column("verdict", *_FAILURES)
    ),
    "tools": Preset(
        "Tool errors", "A tool call that could not be read, or whose result is an error.", _tool_errors, "-errors"
    ),
    "judge": Preset("Judge disagrees", "The judge and the verifier differ.", _judge_disagrees),
}
SORTS = (
    *("step", "total", "advantage", "tokens", "repetition", "mismatch", "entropy", "spread", "index", "group"),
    *("problem", "pull", "errors"),
)


@dataclass(frozen=True)
class Query:
    preset: str = "all"
    sort: str = ""  # a column of SORTS, "-" before it: largest first; empty: the preset's, else by step
    verdict: str = ""
    level: str = ""
    first: int | None = None  # steps, both included
    last: int | None = None
    problem: int | None = None
    text: str = ""

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> Query:
        """Reads the parameters of a request. Raises UserError for an invalid one."""
        preset, sort = parameters.get("preset") or "all", parameters.get("sort", "")
        if preset not in PRESETS:
            raise UserError(f"preset={preset}: give one of {', '.join(PRESETS)}")
        if sort.removeprefix("-") not in (*SORTS, ""):
            raise UserError(f"sort={sort}: give one of {', '.join(SORTS)}, with a - before it for largest first")
        verdict = parameters.get("verdict", "")
        if verdict and verdict not in VERDICTS:
            raise UserError(f"verdict={verdict}: give one of {', '.join(VERDICTS)}")
        return cls(
            preset, sort, verdict, parameters.get("level", ""), whole(parameters, "from"), whole(parameters, "to"),
            whole(parameters, "problem"), parameters.get("text", "")[:200],
        )  # fmt: skip


def whole(parameters: Mapping[str, str], name: str) -> int | None:
    """A whole number of at most 18 digits, None if it is absent; raises UserError for anything else."""
    value = parameters.get(name, "")
    if not value:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise UserError(f"{name}={value}: give a whole number")
    return int(value)


def select(table: Table, query: Query) -> Array:
    """Row numbers in order, before the search for text: see `matches`, which reads files."""
    preset = PRESETS[query.preset]
    chosen = preset.chosen(table)
    mask = np.zeros(len(table), bool) if chosen is None else chosen & filtered(table, query)
    return _ordered(table, np.flatnonzero(mask), query.sort or preset.sort)


def filtered(table: Table, query: Query) -> Array:
    """[N] which rows the filters keep, whatever the preset; the search for text is not among them."""
    columns, mask = table.columns, np.ones(len(table), bool)
    if query.verdict:
        mask &= columns["verdict"] == VERDICTS.index(query.verdict)
    if query.level:
        wanted = np.flatnonzero(np.array([level == query.level for level in table.levels], bool))
        mask &= np.isin(columns["problem"], wanted)
    if query.first is not None:
        mask &= columns["step"] >= query.first
    if query.last is not None:
        mask &= columns["step"] <= query.last
    if query.problem is not None:
        mask &= columns["problem"] == query.problem
    return mask


def _ordered(table: Table, rows: Array, sort: str) -> Array:
    """Unknown values last; of equal values the earlier sample first, so that a group stays together."""
    name = sort.removeprefix("-")
    if not name or (name == "step" and not sort.startswith("-")):
        return rows
    values = (pull(table) if name == "pull" else table.columns[name])[rows].astype(np.float64)
    if sort.startswith("-"):
        values = -values
    return rows[np.argsort(values, kind="stable")]


def matches(table: Table, stage: Path, rows: Array, text: str) -> Array:
    """[n] whether the model's text of each of these rows contains `text`, without regard to the case of A to Z.

    Reads every rollouts file that has one of the rows, one after the other.
    """
    pattern = re.compile(re.escape(json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "replace")), re.I)
    contains = np.zeros(len(rows), bool)
    steps = table.columns["step"][rows]
    for step in np.unique(steps):
        places = np.flatnonzero(steps == step)
        try:
            data = (stage / layout.rollouts_name(int(step))).read_bytes()
        except OSError:  # removed by a resumed run: the next refresh drops its rows
            continue
        for place in places:
            start = int(table.columns["offset"][rows[place]])
            line = data[start : start + int(table.columns["size"][rows[place]])]
            if pattern.search(line):
                contains[place] = _in_text(line, text)
    return contains


def _in_text(line: bytes, text: str) -> bool:
    """The pattern may have matched the prompt or a name instead."""
    try:
        row = json.loads(line)
    except ValueError:
        return False
    return isinstance(row, dict) and text.lower() in str(row.get("text", "")).lower()


class Browser:
    """An index, with a cache of the last selection: a page that scrolls requests the same rows repeatedly."""

    MOST = 8

    def __init__(self, index: RolloutIndex) -> None:
        self.index = index
        self._recent: dict[tuple[int, Query], Array] = {}

    def rows(self, query: Query) -> tuple[Table, Array]:
        """The current table, and the row numbers that the query selects, in order; a single step is read at once."""
        if query.first is not None and query.first == query.last:
            self.index.ensure(query.first)
        table = self.index.table()
        key = table.version, query
        rows = self._recent.get(key)
        if rows is None:
            rows = select(table, query)
            rows = rows[matches(table, self.index.stage, rows, query.text)] if query.text else rows
            for old in list(self._recent)[: max(0, len(self._recent) - self.MOST + 1)]:
                self._recent.pop(old, None)  # another thread may have removed it
            self._recent[key] = rows
        return table, rows
