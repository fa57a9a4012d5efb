"""Targets as named in recipes: "path/file.py:function" or "package.module:function"."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from hone.base import places
from hone.base.settings import UserError
from hone.grade import child


def functions_in(source: bytes) -> list[str]:
    """The functions at the top level of a Python file that are not private. Raises SyntaxError or ValueError."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = [node.name for node in ast.parse(source).body if isinstance(node, kinds)]
    return [name for name in names if not name.startswith("_")]


def read_target(target: str) -> bytes | None:
    """The source, if the target is a file. Raises UserError if the target is malformed or missing."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not all(part.isidentifier() for part in name.split(".")):
        raise UserError(f"{target!r} names no function; write path/file.py:function or package.module:function")
    if not child.is_path(place):
        top = place.split(".")[0]
        if not all(part.isidentifier() for part in place.split(".")):
            raise UserError(f"{target!r}: {place!r} is not a module; write path/file.py:function or module:function")
        if importlib.util.find_spec(top) is None and not (Path(top).is_dir() or Path(f"{top}.py").is_file()):
            raise UserError(f"{target}: no module {top} is installed, nor is there one in {Path.cwd()}")
        return None
    try:
        return places.locate(place).read_bytes()
    except OSError as error:
        why = f"cannot be read ({error.strerror}); paths are relative to {Path.cwd()}"
        raise UserError(f"{target}: {place} {why}") from None


def source_of(target: str) -> bytes | None:
    """The source of the file with the target; also for a module, if it is written in Python."""
    place = target.rpartition(":")[0]
    if child.is_path(place):
        return read_target(target)
    try:
        spec = importlib.util.find_spec(place)
    except ImportError:
        spec = None
    here = Path(*place.split(".")).with_suffix(".py")  # in the folder one is in
    file = Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else here
    return file.read_bytes() if file.is_file() else None
