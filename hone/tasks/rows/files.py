"""Rows of a data file: JSON lines, a JSON list, CSV, or parquet through pyarrow (imported only then)."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hone.base.places import locate
from hone.base.settings import UserError

Row = dict[str, Any]

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv")


def read_rows(path: str | Path) -> list[Row]:
    """Every row of a file; its ending says what it is, and the fields of a `.csv` or `.tsv` are all text.

    Raises UserError for a missing file, or naming file and line of a row that is no JSON object.
    """
    path = locate(path)
    if not path.is_file():
        raise UserError(f"{path}: no such data file")
    kind = path.suffix.lower()
    if kind == ".parquet":
        import pyarrow.parquet  # type: ignore[import-untyped, unused-ignore]

        try:
            rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{path}: not a parquet file that can be read: {error}") from error
        return rows
    if kind not in SUFFIXES:
        raise UserError(f"{path}: expected a .jsonl, .json, .csv, .tsv or .parquet file")
    try:
        return _read_table(path) if kind in (".csv", ".tsv") else _read_json(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from error


def _read_json(path: Path) -> list[Row]:
    if path.suffix.lower() == ".json":
        with path.open(encoding="utf-8-sig") as file:
            is_list = file.read(200).lstrip().startswith("[")
        if is_list:
            return _read_list(path)
    rows = []
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # no JSON; an integer of thousands of digits; nested too deep
                also = ". A .json file is a list of objects, or one object per line" if path.suffix == ".json" else ""
                raise UserError(f"{path}:{number}: not JSON that can be read: {error}{also}") from error
            if not isinstance(row, dict):
                raise UserError(f"{path}:{number}: expected one JSON object per line")
            rows.append(row)
    return rows


def _read_list(path: Path) -> list[Row]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UserError(f"{path}{line}: not JSON that can be read: {error}") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise UserError(f"{path}: entry {number} of the list is no JSON object")
    return list(rows)


def _read_table(path: Path) -> list[Row]:
    csv.field_size_limit(2**27)  # the module's own limit of 131072 characters is less than a worked solution may have
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        rows = []
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise UserError(f"{path}:{reader.line_num}: another number of fields than the first line names")
                rows.append(dict(row))
        except csv.Error as error:
            raise UserError(f"{path}:{reader.line_num}: {error}") from error
    return rows


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write `.jsonl` or `.parquet`, replacing the file when all is written.

    Raises UserError for another ending, and for cells that the format cannot hold; the file is then as it was.
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
    except (TypeError, ValueError) as error:  # a date, say; columns of mixed types
        raise UserError(f"{path}: a cell cannot be written: {error}; {_OTHER[path.suffix]}") from error
    finally:
        aside.unlink(missing_ok=True)


_OTHER = {".jsonl": "write a .parquet file", ".parquet": "write a .jsonl file, whose columns may be of several types"}


def _write_parquet(path: Path, rows: list[Row]) -> None:
    import pyarrow
    import pyarrow.parquet

    try:
        # The names of all rows: pyarrow would take those of the first one, and drop the others without a word.
        names = dict.fromkeys(name for row in rows for name in row)
        table = pyarrow.table({name: pyarrow.array([row.get(name) for row in rows]) for name in names})
        pyarrow.parquet.write_table(table, path)
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from error
