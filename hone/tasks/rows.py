"""Rows of a data file: JSONL, or parquet through pyarrow (imported only then)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hone.config import UserError

Row = dict[str, Any]


def read_rows(path: str | Path) -> list[Row]:
    """Every row of a `.jsonl` or `.parquet` file.

    Raises UserError for a missing file, or naming file and line of a row that is no JSON object.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such data file")
    if path.suffix == ".parquet":
        import pyarrow.parquet  # type: ignore[import-untyped, unused-ignore]

        rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
        return rows
    if path.suffix not in (".jsonl", ".json"):
        raise UserError(f"{path}: expected a .jsonl or a .parquet file")
    rows = []
    with path.open(encoding="utf-8") as lines:
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
