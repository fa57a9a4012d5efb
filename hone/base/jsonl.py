"""Files with one JSON object per line: append, read, and repair when a kill has cut the last line."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hone.base.settings import UserError
from hone.base.visible import well_formed

Row = Mapping[str, Any]


def append(path: Path, row: Row) -> None:
    append_line(path, line(row))


def append_line(path: Path, text: str) -> None:
    """Append `text`, a whole line as `line` returns it."""
    with path.open("ab") as file:
        file.write(text.encode("utf-8", errors="backslashreplace"))


def write(path: Path, rows: Iterable[Row]) -> None:
    replace(path, "".join(map(line, rows)))


def read(path: Path) -> list[dict[str, Any]]:
    """All whole rows; empty if the file does not exist. A line that is JSON but not an object counts as torn."""
    return [json.loads(line) for line in _whole_lines(path)]


def keep(path: Path, wanted: Callable[[Row], bool]) -> None:
    """Keep the wanted rows; drop the others and torn lines."""
    if path.exists():
        replace(path, "".join(line for line in _whole_lines(path) if wanted(json.loads(line))))


def replace(path: Path, text: str) -> None:
    """Write a file atomically, so that a reader never sees half of it."""
    aside = path.with_name(path.name + ".writing")
    aside.write_text(well_formed(text), encoding="utf-8")
    os.replace(aside, path)


def _whole_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    if not path.is_file():
        raise UserError(f"{path} is a folder, but must be a file of rows; move it away")
    whole = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
        with contextlib.suppress(ValueError, RecursionError):  # torn by a kill and appended to before it was repaired
            if isinstance(json.loads(line), dict):
                whole.append(line + "\n")
    return whole


def line(row: Row) -> str:
    """One row as text with its newline."""
    return well_formed(json.dumps(_finite(row), ensure_ascii=False)) + "\n"


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by null."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
