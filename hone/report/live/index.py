"""An index of the rollouts of a stage: the place of each row in its file, and the columns of tables.

    index = RolloutIndex(Path("runs/demo/rl"), cache=index_file(Path("runs/demo/rl")))
    index.refresh()                                    # reads what is new; call it again while the run continues
    table = index.table()                              # columns [N] over all steps, numpy
    row_at(table, Path("runs/demo/rl"), 17)            # the row itself, read from the file by its byte offset

The index holds no text. It is disposable: a cache outside the run folder makes the next start faster, and a file whose
size or time has changed is read again. A last line without its newline is left for the next refresh.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, get_args

import numpy as np
import numpy.typing as npt

from hone.grade.parse import parse
from hone.report.live.tokens import token_means
from hone.report.live.turns import tool_errors
from hone.runs import layout
from hone.types import Finish, Verdict

Array = npt.NDArray[Any]
Row = dict[str, Any]
Stamp = tuple[int, int, int]  # size and time of the rollouts, size of the tokens; if it differs, the file has changed

VERDICTS: tuple[str, ...] = (*get_args(Verdict), "?")
FINISHES: tuple[str, ...] = (*get_args(Finish), "?")
#: The columns of an index and their types; a value that a row lacks is NaN. Parts of the reward: "part/NAME", float32.
COLUMNS: dict[str, type] = {
    "step": np.int32,
    "place": np.int32,  # of the sample in its step
    "offset": np.int64,  # bytes, of the row in its file
    "size": np.int32,  # bytes
    "problem": np.int32,  # index into Table.problems
    "group": np.int32,  # of the step
    "index": np.int16,  # of the sample in its group
    "total": np.float32,
    "advantage": np.float32,
    "tokens": np.int32,
    "verdict": np.int8,  # index into VERDICTS
    "finish": np.int8,  # index into FINISHES
    "formed": np.int8,  # 1: thinking and answer tags once each and in order
    "spread": np.float32,  # largest minus smallest reward of the group
    "repetition": np.float32,  # share of 4-grams of words that have occurred before in the text
    "mismatch": np.float32,  # mean |log-prob of the sampler - of the trainer| over tokens, nats
    "entropy": np.float32,  # mean over tokens, nats
    "errors": np.int16,  # tool calls that could not be read or gave an error
}
FORMAT = 2  # of the cache
SAVED_AFTER = 20  # new segments
#: Characters of a text in which repetition is counted.
LOOKED_AT = 20_000


@dataclass(frozen=True)
class Segment:
    """The rows of one rollouts file."""

    stamp: Stamp
    columns: dict[str, Array]  # [n] each


@dataclass(frozen=True)
class Table:
    """All rows so far, ordered by step and place."""

    columns: Mapping[str, Array]  # [N] each
    problems: tuple[str, ...]
    levels: tuple[str, ...]  # of the problems
    version: int  # changes with the rows

    def __len__(self) -> int:
        return len(self.columns["step"])

    @property
    def parts(self) -> list[str]:
        return [name.removeprefix("part/") for name in self.columns if name.startswith("part/")]

    def find(self, step: int, place: int) -> int | None:
        """The row number of a sample; None if there is no such sample."""
        first = int(np.searchsorted(self.columns["step"], step))
        at = first + place
        inside = place >= 0 and at < len(self) and self.columns["step"][at] == step
        return at if inside and self.columns["place"][at] == place else None


def row_at(table: Table, folder: Path, at: int) -> Row:
    """Row number `at`, read from its file. Raises OSError or ValueError if the file has changed since it was
    indexed."""
    with (folder / layout.rollouts_name(int(table.columns["step"][at]))).open("rb") as file:
        return _row_of(file, table, at)


def rows_at(table: Table, folder: Path, places: Sequence[int]) -> Iterator[Row | None]:
    """Rows by number, None for one whose file has changed since it was indexed; neighbours of one step share an open
    file."""
    for step, group in groupby(places, lambda at: int(table.columns["step"][at])):
        try:
            file = (folder / layout.rollouts_name(step)).open("rb")
        except OSError:
            yield from (None for _ in group)
            continue
        with file:
            for at in group:
                try:
                    yield _row_of(file, table, at)
                except (OSError, ValueError):
                    yield None


def _row_of(file: BinaryIO, table: Table, at: int) -> Row:
    offset = int(table.columns["offset"][at])
    file.seek(offset)
    row = json.loads(file.read(int(table.columns["size"][at])))
    if not isinstance(row, dict):
        raise ValueError(f"the row at byte {offset} is not an object")
    return row


def index_file(stage: Path) -> Path:
    """Where the index of a stage is kept between starts: in the user's cache, never in the run."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = hashlib.sha256(str(stage.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:20]
    return base / "hone" / "view" / f"{key}.npz"


class RolloutIndex:
    """The index of one stage. `refresh` may run in a separate thread; `table` returns the rows so far."""

    def __init__(self, stage: Path, cache: Path | None = None) -> None:
        self.stage, self._cache = stage, cache
        self.files = 0  # rollouts files that are there
        self._segments: dict[int, Segment] = {}
        self._problems: dict[str, int] = {}
        self._levels: list[str] = []
        self._version = 0
        self._unsaved = 0  # segments that the cache lacks
        self._table: Table | None = None
        self._lock = threading.Lock()  # one file at a time
        if cache is not None:
            self._load(cache)

    @property
    def indexed(self) -> int:
        """Files in the index so far, of `files`."""
        return len(self._segments)

    def refresh(self) -> bool:
        """Read new and changed files, newest first, and forget deleted ones; returns whether anything changed."""
        before = self._version
        stamps = self._stamps()
        self.files = len(stamps)
        for step in self._segments.keys() - stamps.keys():  # a resumed run repeats these steps
            with self._lock:
                del self._segments[step]
                self._version += 1
        for step in sorted(stamps, reverse=True):
            known = self._segments.get(step)
            if known is None or known.stamp != stamps[step]:
                self._read(step, self.stage / layout.rollouts_name(step))
        if self._cache is not None and self._unsaved >= SAVED_AFTER:
            self._save(self._cache)
            self._unsaved = 0
        return self._version != before

    def ensure(self, step: int) -> None:
        """Read the file of one step now, if it exists: an address may need it before `refresh` reads it."""
        if step not in self._segments:
            self._read(step, self.stage / layout.rollouts_name(step))

    def _read(self, step: int, path: Path) -> None:
        with self._lock:
            stamp = self._stamp(step, path)
            known = self._segments.get(step)
            if stamp is None or (known is not None and known.stamp == stamp):
                return
            self._segments[step] = Segment(stamp, self._columns(step, path))
            self._version += 1
            self._unsaved += 1

    def table(self) -> Table:
        """The table so far; the same object until something changes."""
        version, table = self._version, self._table
        if table is not None and table.version == version:
            return table
        segments = [segment.columns for _, segment in sorted(self._segments.copy().items())]
        names = list(dict.fromkeys([*COLUMNS, *(name for segment in segments for name in segment)]))
        columns = {name: _joined(name, segments) for name in names}
        self._table = Table(columns, tuple(self._problems.copy()), tuple(self._levels), version)
        return self._table

    def _stamps(self) -> dict[int, Stamp]:
        """The stamps of all steps, from two folder listings: called every few seconds, it takes microseconds a file."""
        tokens = {name: status.st_size for name, status in _listed(self.stage / "tokens") if status is not None}
        stamps: dict[int, Stamp] = {}
        for name, status in _listed(self.stage / "rollouts"):
            if (step := layout.step_of(name)) is not None:
                size = tokens.get(Path(layout.tokens_name(step)).name, 0)
                own = None if status is None else (status.st_size, status.st_mtime_ns, size)
                if stamp := own or self._stamp(step, self.stage / layout.rollouts_name(step)):
                    stamps[step] = stamp
        return stamps

    def _stamp(self, step: int, path: Path) -> Stamp | None:
        """None if the file has gone, or is a link out of the run."""
        try:
            if layout.inside(self.stage, layout.rollouts_name(step)) is None:
                return None
            status = path.stat()
            tokens = self.stage / layout.tokens_name(step)
            return status.st_size, status.st_mtime_ns, tokens.stat().st_size if tokens.is_file() else 0
        except OSError:  # removed meanwhile: the next refresh forgets it
            return None

    # --- from a file to its columns -------------------------------------------------------------------------------

    def _columns(self, step: int, path: Path) -> dict[str, Array]:
        rows = [(offset, size, row) for offset, size, row in _rows(path)]
        values: dict[str, Any] = {name: [] for name in COLUMNS}
        parts: dict[str, list[float]] = {}
        group = -1
        last: tuple[str | None, int] = None, -1
        for place, (offset, size, row) in enumerate(rows):
            problem, index = str(row.get("problem_id", "?")), _whole(row.get("index"))
            if problem != last[0] or index <= last[1]:  # the same problem may be drawn twice in a row
                group += 1
            last = (problem, index)
            text = str(row.get("text") or "")
            for name, value in (
                ("step", step), ("place", place), ("offset", offset), ("size", size),
                ("problem", self._problem(problem, row)), ("group", group), ("index", min(index, 32767)),
                ("total", _number(row.get("total"))), ("advantage", _number(row.get("advantage"))),
                ("tokens", _whole(row.get("tokens"))), ("verdict", _code(VERDICTS, row.get("verdict"))),
                ("finish", _code(FINISHES, row.get("finish"))), ("formed", parse(text).well_formed),
                ("spread", 0.0), ("repetition", repetition(text)), ("errors", min(tool_errors(row), 32767)),
            ):  # fmt: skip
                values[name].append(value)
            scores = row.get("parts")
            for name, score in scores.items() if isinstance(scores, dict) else ():
                parts.setdefault(str(name), [np.nan] * place).append(_number(score))
            for column in parts.values():
                column += [np.nan] * (place + 1 - len(column))
        mismatch, entropy = token_means(self.stage, step, len(rows))
        values |= {"mismatch": mismatch, "entropy": entropy}
        columns: dict[str, Array] = {name: np.asarray(values[name], kind) for name, kind in COLUMNS.items()}
        columns["spread"] = _spread(columns["group"], columns["total"])
        return columns | {f"part/{name}": np.asarray(column, np.float32) for name, column in sorted(parts.items())}

    def _problem(self, name: str, row: Row) -> int:
        if name not in self._problems:
            level = row.get("level")
            self._levels.append("" if level is None else str(level))
            self._problems[name] = len(self._problems)
        return self._problems[name]

    # --- the cache ------------------------------------------------------------------------------------------------

    def _save(self, path: Path) -> None:
        """Write the cache. A failure is ignored: the cache only makes the next start faster."""
        steps = sorted(self._segments)
        about = {
            "format": FORMAT,
            "stamps": {step: self._segments[step].stamp for step in steps},
            "problems": list(self._problems),
            "levels": self._levels,
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(f".{os.getpid()}-{path.name}")
            with aside.open("wb") as file:
                text = np.frombuffer(json.dumps(about).encode(), np.uint8)
                np.savez(file, about=text, **self.table().columns)  # type: ignore[arg-type]  # its stub has a bool
            os.replace(aside, path)
        except OSError:
            return

    def _load(self, path: Path) -> None:
        """An absent or unreadable cache counts as an empty one: everything is read from the run again."""
        try:
            with np.load(path, allow_pickle=False) as saved:
                about = json.loads(saved["about"].tobytes())
                columns = {name: saved[name] for name in saved.files if name != "about"}
            if about["format"] != FORMAT or not COLUMNS.keys() <= columns.keys():
                return
            for step, stamp in about["stamps"].items():
                low, high = np.searchsorted(columns["step"], [int(step), int(step) + 1])
                part = {name: column[low:high] for name, column in columns.items()}
                self._segments[int(step)] = Segment((stamp[0], stamp[1], stamp[2]), part)
            self._problems = {name: at for at, name in enumerate(about["problems"])}
            self._levels = list(about["levels"])
            self._version = 1
        except (OSError, ValueError, KeyError, EOFError, TypeError):
            self._segments, self._problems, self._levels = {}, {}, []


def _rows(path: Path) -> Iterator[tuple[int, int, Row]]:
    """(offset, size, row) of the whole lines of a file; a torn last line is left for later, a damaged one is
    skipped."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                yield offset, len(line), row
            offset += len(line)


def _listed(folder: Path) -> Iterator[tuple[str, os.stat_result | None]]:
    """The files of a folder, with None for a link; nothing if the folder is not there."""
    try:
        entries = os.scandir(folder)
    except FileNotFoundError:
        return
    with entries:
        for entry in entries:
            try:
                if entry.is_symlink():
                    yield entry.name, None
                elif entry.is_file():
                    yield entry.name, entry.stat()
            except FileNotFoundError:  # removed meanwhile: as if it had not been listed
                continue


def _joined(name: str, segments: list[dict[str, Array]]) -> Array:
    """One column over all steps; NaN where a step lacks it."""
    kind = COLUMNS.get(name, np.float32)
    pieces = [s[name] if name in s else np.full(len(s["step"]), np.nan, kind) for s in segments]
    return np.concatenate(pieces) if pieces else np.zeros(0, kind)


def _spread(group: Array, total: Array) -> Array:
    """[n] the largest minus the smallest reward of each sample's group; samples without a reward do not count."""
    if not len(group):
        return np.zeros(0, np.float32)
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    high = np.fmax.reduceat(total, starts)
    low = np.fmin.reduceat(total, starts)
    return np.asarray((high - low)[group], np.float32)


def repetition(text: str) -> float:
    """The share of 4-grams of words that have occurred before in the text; 0 for a text of fewer than 5 words."""
    words = text[:LOOKED_AT].split()
    count = len(words) - 3
    return 1 - len(set(zip(words, words[1:], words[2:], words[3:]))) / count if count > 1 else 0.0


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")


def _whole(value: Any) -> int:
    return min(int(value), 2**31 - 1) if isinstance(value, int) and value >= 0 else 0


def _code(names: tuple[str, ...], value: Any) -> int:
    return names.index(value) if value in names else len(names) - 1
