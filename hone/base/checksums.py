"""Checksums of folders and files, to detect damage, and safe ways to read and write files.

    checksums.write(folder)        # folder/checksums.json: sha256 of every other file below it
    checksums.fault(folder)        # None, or what is wrong with it in words
    checksums.require(folder)      # raises UserError; a folder without checksums is not ours and passes

Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from hone.base.settings import UserError

#: The checksum file; it is in the folder whose files it lists.
FILE = "checksums.json"

T = TypeVar("T")


def sha256_of(path: Path, most: int | None = None) -> str:
    """sha256 of a file, or of its first `most` bytes. Raises OSError if it cannot be read."""
    digest, remaining = hashlib.sha256(), most
    with path.open("rb") as file:
        while chunk := file.read(1 << 20 if remaining is None else min(1 << 20, remaining)):
            digest.update(chunk)
            remaining = None if remaining is None else remaining - len(chunk)
    return digest.hexdigest()


def write(folder: Path, leave_out: Iterable[str] = ()) -> None:
    """Write checksums.json for every file below `folder` except `leave_out`, synced to disk."""
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    kept = [name for name in names if name not in (FILE, *leave_out)]
    put(folder / FILE, json.dumps({name: sha256_of(folder / name) for name in kept}, indent=1))


def fault(folder: Path) -> str | None:
    """What is wrong with a folder that has a checksums.json, in words; None if it is whole."""
    if not folder.is_dir():
        return "it is not there" if not folder.exists() else "it is a file"
    try:
        sums = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if not isinstance(sums, dict) or not sums or not all(isinstance(x, str) for x in sums.values()):
            return f"{FILE} lists no files"
        for name, expected in sums.items():
            if sha256_of(folder / name) != expected:
                return f"{name} differs from its checksum"
    except (OSError, ValueError, RecursionError) as error:  # a missing, unreadable or torn file is what this checks for
        return str(error)
    return None


def require(folder: Path) -> None:
    """Raises UserError if the files of `folder` differ from its checksums.

    The checksums of a checkpoint cover its `model/` too.
    """
    owner = next((place for place in (folder, folder.parent) if (place / FILE).exists()), None)
    if owner is None or (owner != folder and folder.name != "model"):
        return
    problem = fault(owner)
    if problem is not None:
        raise UserError(f"{owner} is damaged ({problem}); restore it from a copy, or name another model")


def read_json(path: Path, kind: type[T], remedy: str) -> T:
    """The JSON value of a file. Raises UserError, ending with `remedy`, if it is unreadable or of another type."""
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path} cannot be read ({why}); {remedy}") from error
    if not isinstance(value, kind):
        raise UserError(f"{path} is damaged (it holds {type(value).__name__}, not {kind.__name__}); {remedy}")
    return value


def put(path: Path, content: str | bytes) -> None:
    """Write a file atomically and sync it: a reader never sees half of it, even after a kill."""
    data = content.encode() if isinstance(content, str) else content
    aside = path.with_name(path.name + ".writing")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def remove(path: Path) -> None:
    """Remove a file, a link (never its target) or a folder with its contents; a missing path is ignored."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    elif path.exists():
        shutil.rmtree(path)
