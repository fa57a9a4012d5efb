"""Files of rows read from a byte offset on, so that a page that polls gets only what is new.

    piece = read_from(Path("runs/demo/rl"), "metrics.jsonl", offset=0, mark=0)
    piece = read_from(Path("runs/demo/rl"), "metrics.jsonl", piece.offset, piece.mark)      # only the rows since then

`mark` is a checksum of the bytes before the offset. A resumed run cuts the rows that it repeats, so the offset may
point into other rows; then the mark differs, and the piece begins at 0 (`again`).
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.runs.layout import inside

#: Bytes of a file that one piece covers at most.
MOST = 4 * 2**20
#: Bytes before an offset that its mark covers.
MARKED = 512


@dataclass(frozen=True)
class Piece:
    rows: list[dict[str, Any]]
    offset: int  # of the first byte that was not read; a torn last line waits
    mark: int
    again: bool  # the file has been replaced: these rows replace those known so far
    more: bool  # there are more rows already


def read_from(folder: Path, name: str, offset: int, mark: int) -> Piece:
    """The whole rows after `offset`, at most `MOST` bytes of them; no rows if the folder has no such file."""
    path = inside(folder, name)
    if path is None:
        return Piece([], 0, 0, offset > 0, False)
    try:
        file = path.open("rb")
    except OSError:  # removed or forbidden since
        return Piece([], 0, 0, offset > 0, False)
    with file:
        size = file.seek(0, 2)
        again = offset > 0 and (size < offset or _mark(file, offset) != mark)
        start = 0 if again or offset < 0 else offset
        file.seek(start)
        data = file.read(MOST)
        if b"\n" not in data and len(data) == MOST:  # a single row that is longer than a piece
            data += file.readline()
        data = data[: data.rfind(b"\n") + 1]
        end = start + len(data)
        return Piece(rows_of(data), end, _mark(file, end), again, len(data) > 0 and size > start + MOST)


def read_rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """All whole rows of a file; empty if it is not there."""
    rows, offset, mark = [], 0, 0
    while True:
        piece = read_from(folder, name, offset, mark)
        rows += piece.rows
        if not piece.rows:
            return rows
        offset, mark = piece.offset, piece.mark


def rows_of(data: bytes) -> list[dict[str, Any]]:
    """The rows of whole lines; damaged lines are skipped."""
    rows = []
    for line in data.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _mark(file: Any, offset: int) -> int:
    start = max(0, offset - MARKED)
    file.seek(start)
    return zlib.crc32(file.read(offset - start))
