"""Rows of a data file: JSON lines, a JSON list, CSV, or parquet through pyarrow (imported only then)."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hone.config import UserError

Row = dict[str, Any]

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv")


def read_rows(path: str | Path) -> list[Row]:
    """Every row of a file; its ending says what it is, and the fields of a `.csv` or `.tsv` are all text.

    Raises UserError for a missing file, or naming file and line of a row that is no JSON object.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such data file")
    if path.suffix == ".parquet":
        import pyarrow.parquet  # type: ignore[import-untyped, unused-ignore]

        try:
            rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
        except pyarrow.ArrowInvalid as error:
            raise UserError(f"{path}: not a parquet file: {error}") from error
        return rows
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: expected a .jsonl, .json, .csv, .tsv or .parquet file")
    try:
        return _read_table(path) if path.suffix in (".csv", ".tsv") else _read_json(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from error


def _read_json(path: Path) -> list[Row]:
    if path.suffix == ".json":
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
            except json.JSONDecodeError as error:
                raise UserError(f"{path}:{number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise UserError(f"{path}:{number}: expected one JSON object per line")
            rows.append(row)
    return rows


def _read_list(path: Path) -> list[Row]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON: {error}") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise UserError(f"{path}: entry {number} of the list is no JSON object")
    return list(rows)


def _read_table(path: Path) -> list[Row]:
    csv.field_size_limit(2**27)  # the module's own limit of 131072 characters is less than a worked solution may have
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
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
    """Write `.jsonl` or `.parquet`, replacing the file."""
    path = Path(path)
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), path)
        return
    if path.suffix != ".jsonl":
        raise UserError(f"{path}: expected a .jsonl or a .parquet file")
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
