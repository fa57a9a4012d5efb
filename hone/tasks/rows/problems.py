"""Problems made from rows on demand, and an index of what must be known of all of them in advance.

    index = index_of(rows, read, key)          # one walk over the rows, once per machine: see hone.tasks.rows.store
    problems = Problems(table, index.places)   # a Sequence; problems.levels and problems.characters make no problem

`read` makes the problem of a row and its canonical form.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import hone
from hone.tasks.rows.corpus import RANK, rank
from hone.tasks.rows.store import Joined, Lazy, Row, stored
from hone.types import Problem

#: From this number of rows on, the index is kept for other processes.
INDEXED_FROM = 20_000

#: Bytes per row: 41 for the columns of the index, and 20 for a curriculum's indices, levels and order.
BYTES = 61

#: After this many problems, the pages that they were read from are released from the process's memory.
FORGOTTEN = 64

#: Row -> (problem, its canonical form), or None for a row that is not wanted; raises ValueError, KeyError or TypeError
#: for a faulty row.
Reader = Callable[[Row], tuple[Problem, str] | None]


@dataclass(frozen=True)
class Index:
    """Columns over all rows that are problems, in the order of the rows, split after split: [problems]."""

    sizes: Mapping[str, int]  # number of problems of each split
    rows: np.ndarray  # int64: index of the row in its split
    ranks: np.ndarray  # RANK: see hone.tasks.rows.corpus
    levels: np.ndarray  # int32: index in level_names
    level_names: Sequence[str]
    characters: np.ndarray  # int32: characters of all messages
    worked: np.ndarray  # bool: whether there is a worked solution
    without_domain: int  # problems
    faults: Sequence[str] = ()

    def places(self, split: str) -> range:
        """The positions of one split in the index."""
        start = 0
        for name, size in self.sizes.items():
            if name == split:
                return range(start, start + size)
            start += size
        return range(0)


class Faulty(Exception):
    """Some rows are faulty: their index is not kept."""

    def __init__(self, index: Index) -> None:
        super().__init__(f"{len(index.faults)} faults")
        self.index = index


def index_of(rows: Mapping[str, Joined], read: Reader, key: str | None) -> Index:
    """The index of rows. `key` identifies the rows and how they are read; None: the index is not kept for other
    processes."""
    import pyarrow

    def batches() -> tuple[Any, list[Any]]:
        index = _walk(rows, read)
        if index.faults:
            raise Faulty(index)
        known = {"sizes": index.sizes, "levels": index.level_names, "without_domain": index.without_domain}
        columns = {
            "row": index.rows,
            "high": np.ascontiguousarray(index.ranks["high"]),
            "low": np.ascontiguousarray(index.ranks["low"]),
            "level": index.levels,
            "characters": index.characters,
            "worked": index.worked.astype(np.uint8),
        }
        types = [pyarrow.from_numpy_dtype(column.dtype) for column in columns.values()]
        schema = pyarrow.schema(list(zip(columns, types, strict=True)), metadata={"index": json.dumps(known)})
        arrays = [  # not pyarrow.array: see hone.tasks.rows.store.json_batches
            pyarrow.Array.from_buffers(kind, len(column), [None, pyarrow.py_buffer(column)])
            for kind, column in zip(types, columns.values(), strict=True)
        ]
        return schema, [pyarrow.RecordBatch.from_arrays(arrays, schema=schema)]

    if key is None or sum(map(len, rows.values())) < INDEXED_FROM:
        return _walk(rows, read)
    try:
        table = stored(f"index-{key}", batches).table
    except Faulty as fault:
        return fault.index
    if not table.num_rows:
        return _walk(rows, read)
    known = json.loads(table.schema.metadata[b"index"])
    (batch,) = table.to_batches()
    kinds = {"row": np.int64, "high": np.uint64, "low": np.uint64, "level": np.int32, "characters": np.int32}
    column = {  # not to_numpy, for the same reason
        name: np.frombuffer(batch.column(name).buffers()[1], kinds.get(name, np.uint8), batch.num_rows)
        for name in batch.schema.names
    }
    ranks = np.empty(batch.num_rows, RANK)
    ranks["high"], ranks["low"] = column["high"], column["low"]
    return Index(
        known["sizes"],
        column["row"],
        ranks,
        column["level"],
        known["levels"],
        column["characters"],
        column["worked"].astype(bool),
        known["without_domain"],
    )


@dataclass
class _Columns:
    """The columns gathered on one walk over the rows."""

    row: array[int] = field(default_factory=lambda: array("q"))
    ranks: bytearray = field(default_factory=bytearray)
    level: array[int] = field(default_factory=lambda: array("i"))
    characters: array[int] = field(default_factory=lambda: array("i"))
    worked: bytearray = field(default_factory=bytearray)
    names: dict[str, int] = field(default_factory=dict)

    def add(self, row: int, problem: Problem, form: str) -> None:
        self.row.append(row)
        self.ranks += rank(form)[:16]
        self.level.append(self.names.setdefault(problem.level, len(self.names)))
        self.characters.append(characters(problem))
        self.worked.append(bool(problem.reference))


def characters(problem: Problem) -> int:
    """Characters of all messages."""
    return sum(len(message["content"]) for message in problem.messages)


def _walk(rows: Mapping[str, Joined], read: Reader) -> Index:
    made, faults, bare = _Columns(), [], 0
    sizes = {}
    for split, of_split in rows.items():
        before = len(made.row)
        for number, row in enumerate(of_split):
            try:
                one = read(row)
            except (ValueError, KeyError, TypeError) as error:  # a cell that is missing or of the wrong type
                faults.append(f"{'row' if split == 'all' else f'{split} row'} {number + 1}: {error}")
                continue
            if one is not None:
                made.add(number, *one)
                bare += not one[0].domain
        sizes[split] = len(made.row) - before
    big = np.frombuffer(bytes(made.ranks), np.dtype([("high", ">u8"), ("low", ">u8")]))
    return Index(
        sizes,
        np.array(made.row, np.int64),
        big.astype(RANK),
        np.array(made.level, np.int32),
        list(made.names),
        np.array(made.characters, np.int32),
        np.frombuffer(bytes(made.worked), np.uint8).astype(bool),
        bare,
        faults,
    )


@cache
def code_digest(*classes: type) -> str | None:
    """Digest of the code that makes problems from rows, and of these classes: changed code may make other problems.
    None if the code is not in files."""
    root = Path(hone.__file__).parent
    files = {*root.glob("tasks/**/*.py"), *root.glob("grade/**/*.py"), root / "types.py"}
    try:
        files |= {Path(inspect.getfile(kind)) for kind in classes if kind is not object}
        made = hashlib.sha256(repr(sys.version_info[:2]).encode())
        for file in sorted(files):
            made.update(hashlib.sha256(file.read_bytes()).digest())
    except (TypeError, OSError):
        return None
    return made.hexdigest()


# --- sequences -------------------------------------------------------------------------------


class Problems(Lazy[Problem]):
    """The problems at some positions of an index. A problem is made anew at each access; it is always the same."""

    def __init__(
        self, rows: Mapping[str, Joined], read: Reader, index: Index, places: Sequence[int] | np.ndarray
    ) -> None:
        self._rows, self._read, self._index = rows, read, index
        self._places = np.asarray(places, np.int64)
        self._made = 0
        self._splits, self._ends = list(index.sizes), np.cumsum(list(index.sizes.values()))

    def __len__(self) -> int:
        return len(self._places)

    def make(self, place: int) -> Problem:
        return self.pair(place)[1]

    def pair(self, place: int) -> tuple[Row, Problem]:
        """The problem at a position, with its row."""
        at = self._places[place]
        split = self._splits[int(np.searchsorted(self._ends, at, side="right"))]
        row = self._rows[split][int(self._index.rows[at])]
        self._made += 1
        if self._made % FORGOTTEN == 0:
            for rows in self._rows.values():
                rows.forget()
        one = self._read(row)
        assert one is not None  # else it would not be in the index
        return row, one[0]

    def __iter__(self) -> Iterator[Problem]:
        return (problem for _, problem in self.pairs())

    def pairs(self) -> Iterator[tuple[Row, Problem]]:
        """All problems with their rows, one after the other, without keeping what was read in memory."""
        for place in range(len(self)):
            yield self.pair(place)

    def at(self, places: np.ndarray | slice) -> Problems:
        """The problems at some of these positions."""
        return Problems(self._rows, self._read, self._index, self._places[places])

    def __getitem__(self, place: Any) -> Any:
        return self.at(place) if isinstance(place, slice) else super().__getitem__(place)

    @property
    def nbytes(self) -> int:
        """Memory of a process that draws from them: `BYTES` per row of the index, and the pages of the mapped table
        that are read, which the system may reclaim."""
        return BYTES * len(self._index.rows) + sum(rows.nbytes for rows in self._rows.values())

    @property
    def characters(self) -> np.ndarray:
        """[problems]: characters of all messages of each problem."""
        return self._index.characters[self._places]

    @property
    def worked(self) -> np.ndarray:
        """[problems] bool: whether each has a worked solution."""
        return self._index.worked[self._places]

    @property
    def levels(self) -> tuple[Sequence[str], np.ndarray]:
        """Names of levels, and [problems] the index of each problem's level among them."""
        return self._index.level_names, self._index.levels[self._places]


class Pairs(Lazy[tuple[Row, Problem]]):
    """Problems together with their rows."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems

    def __len__(self) -> int:
        return len(self.problems)

    def make(self, place: int) -> tuple[Row, Problem]:
        return self.problems.pair(place)

    def __iter__(self) -> Iterator[tuple[Row, Problem]]:
        return self.problems.pairs()


def levels_of(problems: Sequence[Problem]) -> tuple[Sequence[str], np.ndarray]:
    """Names of levels, and [problems] the index of each problem's level among them."""
    if isinstance(problems, Problems):
        return problems.levels
    names: dict[str, int] = {}
    places = [names.setdefault(problem.level, len(names)) for problem in problems]
    return list(names), np.array(places, np.int32)


def characters_of(problems: Sequence[Problem]) -> np.ndarray:
    """[problems]: characters of all messages of each problem."""
    if isinstance(problems, Problems):
        return problems.characters
    return np.array([characters(problem) for problem in problems], np.int64)
