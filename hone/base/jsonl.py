"""Files of one JSON object per line: appended to, and mended when a kill cut the last line in the middle."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hone.base.visible import well_formed

Row = Mapping[str, Any]


def append(path: Path, row: Row) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(_line(row))


def write(path: Path, rows: Iterable[Row]) -> None:
    replace(path, "".join(map(_line, rows)))


def read(path: Path) -> list[dict[str, Any]]:
    """Every whole row; none if there is no such file."""
    return [json.loads(line) for line in _whole_lines(path)]


def keep(path: Path, wanted: Callable[[Row], bool]) -> None:
    """Drop the rows that are not wanted, and a torn last line."""
    if path.exists():
        replace(path, "".join(line for line in _whole_lines(path) if wanted(json.loads(line))))


def replace(path: Path, text: str) -> None:
    """Write a file in one step, so that a reader never sees half of it."""
    aside = path.with_name(path.name + ".writing")
    aside.write_text(well_formed(text), encoding="utf-8")
    os.replace(aside, path)


def _whole_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    whole = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
        with contextlib.suppress(json.JSONDecodeError):  # torn by a kill, and appended to before it was mended
            json.loads(line)
            whole.append(line + "\n")
    return whole


def _line(row: Row) -> str:
    return well_formed(json.dumps(_finite(row), ensure_ascii=False)) + "\n"


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null says that there is no number."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
