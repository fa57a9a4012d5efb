"""seal.json: checksums of files that are always replaced as a whole, so that damage is detected.

{"logs": {file of rows: {"bytes": ..., "sha256": ...}}, "files": {name: [sha256, ...]}, "sha256": of the two}
"""

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
    remedy = "restore it from a copy, or remove it to continue without these checks"
    seal = checksums.read_json(folder / FILE, dict, remedy)
    if not all(isinstance(seal.get(key), dict) for key in ("logs", "files")):
        raise UserError(f"{folder / FILE} is damaged; {remedy}")
    records_ok = all(isinstance(r, dict) and isinstance(r.get("bytes"), int) for r in seal["logs"].values())
    if not records_ok or not all(isinstance(digests, list) for digests in seal["files"].values()):
        raise UserError(f"{folder / FILE} is damaged; {remedy}")
    content = {key: seal[key] for key in ("logs", "files")}
    if seal.get("sha256", _digest(content)) != _digest(content):  # older versions wrote none
        raise UserError(f"{folder / FILE} is damaged (it differs from its checksum); {remedy}")
    return content


def put(folder: Path, name: str, text: str) -> None:
    """Replace a file and its checksum. After a kill or a full disk at any moment the file matches an accepted checksum,
    or has none yet."""
    seal, new = read(folder), hashlib.sha256(text.encode()).hexdigest()
    accepted = seal["files"].get(name, [])  # more than one: of attempts that were cut
    if accepted and new not in accepted:
        seal["files"][name] = [*accepted, new]
        write(folder, seal)
    checksums.put(folder / name, text)
    if accepted != [new]:
        seal["files"][name] = [new]
        write(folder, seal)


def write(folder: Path, seal: Mapping[str, Any]) -> None:
    checksums.put(folder / FILE, json.dumps({**seal, "sha256": _digest(seal)}, indent=1))


def _digest(seal: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(seal).encode()).hexdigest()
