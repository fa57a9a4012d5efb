"""Rows of a data file: JSON lines, a JSON list, CSV, or parquet through pyarrow (imported only then)."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hone.base.places import locate
from hone.base.settings import UserError
from hone.tasks.rows.store import BATCH, CACHED_FROM, Row, TableRows, digest_of, json_batches, stored

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv")

#: Characters of a JSON list that are read at a time.
CHUNK = 2**20

_BLANKS = re.compile(r"[ \t\n\r]*")


def read_rows(path: str | Path) -> list[Row]:
    """Every row of a file, in memory: see `open_rows`."""
    return list(open_rows(path))


def open_rows(path: str | Path) -> TableRows:
    """The rows of a file. The suffix decides the format; the fields of a `.csv` or `.tsv` are all text.

    The file is read to its end, and its rows are stored by `hone.tasks.rows.store`. Raises UserError for a missing
    file, and for a row that is not a JSON object, with its file and line.
    """
    path = locate(path)
    if not path.is_file():
        raise UserError(f"{path}: no such data file")
    kind = path.suffix.lower()
    if kind not in SUFFIXES:
        raise UserError(f"{path}: expected a .jsonl, .json, .csv, .tsv or .parquet file")
    digest = digest_of(path)

    def batches() -> tuple[Any, Iterator[Any]]:
        schema, parts = _parquet_batches(path) if kind == ".parquet" else json_batches(_texts(path))

        def checked() -> Iterator[Any]:
            yield from parts
            if digest_of(path) != digest:
                raise UserError(f"{path}: changed while it was read; start again")

        return schema, checked()

    name = f"rows-{kind[1:]}-{digest}"
    try:
        return TableRows(stored(name if path.stat().st_size >= CACHED_FROM else None, batches), name)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from error


def _parquet_batches(path: Path) -> tuple[Any, Iterator[Any]]:
    import pyarrow
    import pyarrow.parquet  # type: ignore[import-untyped, unused-ignore]

    def failed(error: Exception) -> UserError:
        return UserError(f"{path}: not a readable parquet file: {error}")

    try:
        file = pyarrow.parquet.ParquetFile(path, memory_map=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise failed(error) from error

    def batches() -> Iterator[Any]:
        with file:
            remaining = file.iter_batches(batch_size=BATCH)
            while True:
                try:
                    batch = next(remaining, None)
                except (pyarrow.ArrowException, OSError) as error:
                    raise failed(error) from error
                if batch is None:
                    return
                yield batch

    return file.schema_arrow, batches()


def _texts(path: Path) -> Iterator[bytes]:
    """Each row as JSON."""
    kind = path.suffix.lower()
    if kind in (".csv", ".tsv"):
        return _read_table(path)
    if kind == ".json":
        with path.open(encoding="utf-8-sig") as file:
            is_list = file.read(200).lstrip().startswith("[")
        if is_list:
            return _read_list(path)
    return _read_lines(path)


def _read_lines(path: Path) -> Iterator[bytes]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            # not JSON, an integer of thousands of digits, or nested too deep
            except (ValueError, RecursionError) as error:
                form = "a list of objects, or one object on each line" if path.suffix == ".json" else _ONE_A_LINE
                message = f"{path}:{number}: not readable as JSON: {error}. The file has to be {form}"
                raise UserError(message) from error
            if not isinstance(row, dict):
                raise UserError(f"{path}:{number}: expected one JSON object per line")
            yield line.strip().encode()


def _read_list(path: Path) -> Iterator[bytes]:
    """The entries of a list, reading the file in pieces."""
    decoder = json.JSONDecoder()
    with path.open(encoding="utf-8-sig") as file:
        text, ended = "", False
        while len(text) < 2 and not ended:  # the bracket, and what follows it
            more = file.read(CHUNK)
            text, ended = (text + more).lstrip(), not more
            text = text[:1] + text[1:].lstrip()
        if text[1:2] == "]" and not (text[2:] + file.read()).strip():
            return
        at = 1
        while True:
            try:
                at = _after_blanks(text, at)
                row, end = decoder.raw_decode(text, at)
                mark = _after_blanks(text, end)
                separator = text[mark]
            except (ValueError, IndexError, RecursionError) as error:  # the rest of the entry may not be read yet
                more = "" if ended else file.read(max(CHUNK, len(text) - at))
                if not more and (ended or not isinstance(error, IndexError)):
                    raise _wrong_list(path) from error
                text, at, ended = text[at:] + more, 0, not more
                continue
            if not isinstance(row, dict) or separator not in ",]":
                raise _wrong_list(path)
            if separator == "]":
                if (text[mark + 1 :] + file.read()).strip():
                    raise _wrong_list(path)
                yield text[at:end].encode()
                return
            yield text[at:end].encode()
            at = mark + 1


def _after_blanks(text: str, at: int) -> int:
    match = _BLANKS.match(text, at)
    return match.end() if match else at


def _wrong_list(path: Path) -> UserError:
    """The error of a malformed list, with its line; reads the whole file."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        return UserError(f"{path}{line}: not readable as JSON: {error}")
    number = next((n for n, row in enumerate(rows, start=1) if not isinstance(row, dict)), 0)
    return UserError(f"{path}: entry {number} of the list is not a JSON object")


_ONE_A_LINE = "one JSON object on each line; a table is read by its ending, .csv or .tsv"
#: What separates columns in tables that have the wrong ending.
_SEPARATORS = {".csv": ";\t|", ".tsv": ",;|"}


def _read_table(path: Path) -> Iterator[bytes]:
    suffix = path.suffix.lower()
    separator = "\t" if suffix == ".tsv" else ","
    csv.field_size_limit(2**27)  # a worked solution may be longer than the module's limit of 131072 characters
    with path.open(encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        if other := next((mark for mark in _SEPARATORS[suffix] if mark in first and separator not in first), None):
            remedy = "save it with commas between its columns, or as .tsv with tabs"
            raise UserError(f"{path}: the columns seem to be separated by {other!r}, not {separator!r}; {remedy}")
        file.seek(0)
        reader = csv.DictReader(file, delimiter=separator, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise UserError(f"{path}:{reader.line_num}: not as many fields as the first line names")
                yield json.dumps(row).encode()
        except csv.Error as error:
            raise UserError(f"{path}:{reader.line_num}: {error}") from error


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write `.jsonl` or `.parquet`; the file is replaced once everything is written.

    Raises UserError for another suffix, and for cells that the format cannot hold; the file is then unchanged.
    """
    path = Path(path)
    if path.suffix not in (".jsonl", ".parquet"):
        raise UserError(f"{path}: expected a .jsonl or a .parquet file")
    aside = path.with_name(path.name + ".writing")
    try:
        if path.suffix == ".parquet":
            _write_parquet(aside, [dict(row) for row in rows])
        else:
            with aside.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        os.replace(aside, path)
    except (TypeError, ValueError) as error:  # such as dates, and columns of mixed types
        raise UserError(f"{path}: a cell cannot be written: {error}; {_OTHER[path.suffix]}") from error
    finally:
        aside.unlink(missing_ok=True)


_OTHER = {".jsonl": "write a .parquet file", ".parquet": "write a .jsonl file, whose columns may be of several types"}


def _write_parquet(path: Path, rows: list[Row]) -> None:
    import pyarrow
    import pyarrow.parquet

    try:
        # The names of all rows: pyarrow would use those of the first row and silently drop the others.
        names = dict.fromkeys(name for row in rows for name in row)
        table = pyarrow.table({name: pyarrow.array([row.get(name) for row in rows]) for name in names})
        pyarrow.parquet.write_table(table, path)
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from error
