"""Rows as Arrow tables, mapped into memory: a row becomes a Python object only when it is accessed.

    table = stored("rows-5f3a...", batches)     # written once per machine; every process maps the same file
    rows = TableRows(table, key="5f3a...")      # a Sequence of dicts

Rows of text files are stored as their JSON, so that a cell may have any type in any row; rows of parquet files keep
their columns. Tables from sources below `CACHED_FROM` bytes stay in the process. The others are files below
`$XDG_CACHE_HOME/hone/rows` (else `~/.cache/hone/rows`), named after their source's content; one that was not used for
`KEPT_DAYS` days is removed when another is written.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np

Row = dict[str, Any]
T = TypeVar("T")

#: From this size of a source on (bytes), its table is a file that processes share.
CACHED_FROM = 8 * 2**20

#: Rows of one record batch, which is what is in memory while a table is written or read from end to end.
BATCH = 4096

#: Part of every file name; increase it when the layout of the files changes.
LAYOUT = 1

KEPT_DAYS = 30
WAIT_SECONDS = 3600.0  # waiting for another process that writes the same table

#: The column of rows that are stored as JSON.
JSON_COLUMN = "json"

#: (schema, record batches) of a table, both of pyarrow.
Batches = Callable[[], tuple[Any, Iterable[Any]]]


@dataclass(frozen=True)
class RowTable:
    """A table of pyarrow, and the memory map that holds it (None: memory of this process)."""

    table: Any
    map: mmap.mmap | None = None

    def forget(self) -> None:
        """Release the pages of the file that were read from this process's memory."""
        if self.map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED)


def stored(key: str | None, batches: Batches) -> RowTable:
    """The table of a key, from the cache folder; written if it is not there. Key None: in memory only.

    Several processes may call this at once: one writes, the others wait. A file appears only when it is complete. If
    the folder cannot be written to, a message says so, and the table is in a file that is removed with the process.
    """
    import pyarrow

    if key is None:
        sink = pyarrow.BufferOutputStream()
        _write(sink, batches)
        return RowTable(pyarrow.ipc.open_stream(sink.getvalue()).read_all())
    folder = cache_folder()
    path = folder / f"{key}-{LAYOUT}.arrow"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            if not path.exists():
                _write_file(path, batches)
                _remove_old(folder)
        os.utime(path)
    except OSError as error:
        _print(f"rows cannot be kept in {folder} for other processes: {error}; set XDG_CACHE_HOME to another folder")
        with tempfile.NamedTemporaryFile(suffix=".arrow") as file:
            _write(file, batches)
            file.flush()
            return _mapped(Path(file.name))
    return _mapped(path)


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hone" / "rows"


def _print(line: str) -> None:
    print(line, file=sys.stderr)


def _write(sink: Any, batches: Batches) -> None:
    import pyarrow

    schema, parts = batches()
    with pyarrow.ipc.new_stream(sink, schema) as writer:
        for part in parts:
            writer.write_batch(part)


def _write_file(path: Path, batches: Batches) -> None:
    aside = path.with_name(f"{path.name}.{os.getpid()}.writing")
    try:
        with aside.open("wb") as file:
            _write(file, batches)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _mapped(path: Path) -> RowTable:
    import pyarrow

    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    table = RowTable(pyarrow.ipc.open_stream(pyarrow.py_buffer(mapped)).read_all(), mapped)
    table.forget()  # reading the beginning of each batch also maps the pages around it, possibly the whole file
    return table


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which the system releases if the process ends. Raises OSError after `WAIT_SECONDS`."""
    start, told = time.monotonic(), False
    with path.with_suffix(".lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - start > WAIT_SECONDS:
                    raise TimeoutError(f"another process has been writing {path} for {WAIT_SECONDS:g} s") from None
                if not told and time.monotonic() - start > 5:
                    _print(f"waiting for another process, which writes {path}")
                    told = True
                time.sleep(0.1)
        yield  # closing the file unlocks it


def _remove_old(folder: Path) -> None:
    oldest = time.time() - KEPT_DAYS * 86400
    for file in folder.iterdir():
        if file.stat().st_mtime < oldest:
            file.unlink(missing_ok=True)  # processes that have mapped it keep their mapping


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return _file_digest(file)


def _file_digest(file: Any) -> str:
    made = hashlib.sha256()
    while chunk := file.read(2**20):
        made.update(chunk)
    return made.hexdigest()


def json_batches(texts: Iterable[bytes]) -> tuple[Any, Iterator[Any]]:
    """(schema, record batches) of rows that are JSON objects."""
    import pyarrow

    schema = pyarrow.schema([(JSON_COLUMN, pyarrow.large_binary())], metadata={"rows": "json"})

    def batches() -> Iterator[Any]:
        remaining = iter(texts)
        while chunk := list(islice(remaining, BATCH)):
            # Not pyarrow.array: it imports pandas if it is installed, which takes 60 MB and seconds.
            ends = np.cumsum([0, *map(len, chunk)], dtype=np.int64)
            buffers = [None, pyarrow.py_buffer(ends), pyarrow.py_buffer(b"".join(chunk))]
            column = pyarrow.Array.from_buffers(pyarrow.large_binary(), len(chunk), buffers)
            yield pyarrow.RecordBatch.from_arrays([column], schema=schema)

    return schema, batches()


# --- sequences -------------------------------------------------------------------------------


class Lazy(Sequence[T]):
    """A sequence whose elements are made on access; so is a slice of it. It equals any sequence with equal elements."""

    def make(self, place: int) -> T:
        """The element at 0 <= place < len(self)."""
        raise NotImplementedError

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[T]: ...
    def __getitem__(self, place: int | slice) -> T | Sequence[T]:
        if isinstance(place, slice):
            return RowSlice(self, range(len(self))[place])
        at = int(place) + (len(self) if place < 0 else 0)
        if not 0 <= at < len(self):
            raise IndexError(f"place {place} of {len(self)}")
        return self.make(at)

    def __iter__(self) -> Iterator[T]:
        return (self.make(place) for place in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


class RowSlice(Lazy[T]):
    """Some positions of another sequence."""

    def __init__(self, whole: Lazy[T], places: Sequence[int]) -> None:
        self.whole, self.places = whole, places

    def __len__(self) -> int:
        return len(self.places)

    def make(self, place: int) -> T:
        return self.whole.make(int(self.places[place]))


class TableRows(Lazy[Row]):
    """The rows of a table. `key` identifies the content that they were made from."""

    def __init__(self, table: RowTable, key: str) -> None:
        self._table, self.key = table, key
        self._json = (table.table.schema.metadata or {}).get(b"rows") == b"json"

    def __len__(self) -> int:
        return int(self._table.table.num_rows)

    def make(self, place: int) -> Row:
        if self._json:
            row: Row = json.loads(self._table.table.column(0)[place].as_py())
            return row
        (row,) = self._table.table.slice(place, 1).to_pylist()
        return row

    def __iter__(self) -> Iterator[Row]:
        for batch in self._table.table.to_batches(max_chunksize=BATCH):
            if self._json:
                yield from map(json.loads, batch.column(0).to_pylist())
            else:
                yield from batch.to_pylist()
            self._table.forget()

    def forget(self) -> None:
        self._table.forget()

    @property
    def nbytes(self) -> int:
        return int(self._table.table.nbytes)


class MadeRows(Lazy[Row]):
    """Rows of a sequence of mappings, such as a split of the package datasets. `key`: None if the content has no
    name."""

    def __init__(self, rows: Any, key: str | None = None) -> None:
        self._rows, self.key = rows, key

    def __len__(self) -> int:
        return len(self._rows)

    def make(self, place: int) -> Row:
        return dict(self._rows[place])

    def __iter__(self) -> Iterator[Row]:
        return map(dict, self._rows)

    def forget(self) -> None:
        """Does nothing: the rows belong to another sequence."""

    @property
    def nbytes(self) -> int:
        return 0  # not known here


class Joined(Lazy[Row]):
    """Several sequences, one after the other."""

    def __init__(self, parts: Sequence[TableRows | MadeRows | Joined]) -> None:
        self._parts = tuple(parts)
        self._ends = list(accumulate(map(len, self._parts)))

    @property
    def key(self) -> str | None:
        """One key for all; None if one of them has none."""
        keys = [part.key for part in self._parts]
        return None if None in keys else "+".join(map(str, keys))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def make(self, place: int) -> Row:
        part = bisect_right(self._ends, place)
        return self._parts[part].make(place - (self._ends[part - 1] if part else 0))

    def __iter__(self) -> Iterator[Row]:
        for part in self._parts:
            yield from part

    def forget(self) -> None:
        """See `RowTable.forget`."""
        for part in self._parts:
            part.forget()

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return sum(part.nbytes for part in self._parts)
