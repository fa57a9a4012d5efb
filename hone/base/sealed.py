"""seal.json: checksums of files that are always replaced as a whole, so that damage is detected."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hone.base import checksums
from hone.base.settings import UserError

FILE = "seal.json"


def file_fault(folder: Path, name: str, seal: Mapping[str, Any] | None = None) -> str | None:
    """Why a file fails its checksum in seal.json; None if it passes or has no checksum."""
    digests = (read(folder) if seal is None else seal)["files"].get(name)
    if not digests:
        return None
    try:
        return None if checksums.sha256_of(folder / name) in digests else f"it differs from its checksum in {FILE}"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"


def require_file(folder: Path, name: str) -> None:
    """Raises UserError if a file differs from what was last written."""
    problem = file_fault(folder, name)
    if problem is not None:
        raise UserError(
            f"{folder / name} is damaged ({problem}); restore it from a copy, or, if you changed it yourself, remove "
            f"{folder / FILE}"
        )


def read(folder: Path) -> dict[str, Any]:
    """{"logs": records, "files": {name: [sha256, ...]}}. Raises UserError if the file is damaged."""
    if not (folder / FILE).exists():
        return {"logs": {}, "files": {}}
    remedy = "restore it from a copy, or remove it to go on without these checks"
    seal: dict[str, Any] = checksums.read_json(folder / FILE, dict, remedy)
    if not all(isinstance(seal.get(key), dict) for key in ("logs", "files")):
        raise UserError(f"{folder / FILE} is damaged; {remedy}")
    records_ok = all(isinstance(r, dict) and isinstance(r.get("bytes"), int) for r in seal["logs"].values())
    if not records_ok or not all(isinstance(digests, list) for digests in seal["files"].values()):
        raise UserError(f"{folder / FILE} is damaged; {remedy}")
    return seal


def put(folder: Path, name: str, text: str) -> None:
    """Replace a file and its checksum. After a kill at any moment the file still matches an accepted checksum."""
    seal, new = read(folder), hashlib.sha256(text.encode()).hexdigest()
    before = seal["files"].get(name, [])[-1:]
    if before != [new]:
        seal["files"][name] = [*before, new]
        write(folder, seal)
    checksums.put(folder / name, text)
    if before and before != [new]:
        seal["files"][name] = [new]
        write(folder, seal)


def write(folder: Path, seal: Mapping[str, Any]) -> None:
    checksums.put(folder / FILE, json.dumps(seal, indent=1))
