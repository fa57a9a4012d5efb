"""Checksums of the files of a run folder, which reveal rows that were truncated, lost or changed.

Three kinds of files, one rule each:

    files of rows           metrics.jsonl, evals.jsonl, ...: they only grow, so their first N bytes keep one sha256.
                            Every checkpoint records both (`state.json`), and so does `seal.json` for readers of the run
    files written once      rollouts/step_N.jsonl, tokens/step_N.safetensors, evals/LABEL.jsonl: a row in files.jsonl
                            {"step": 3, "file": "rollouts/step_000003.jsonl", "bytes": 5120, "sha256": "..."}
    files that are replaced config.resolved.json, manifest.json, ...: their sha256 in `seal.json`

A run folder of an older version has no records, so nothing is checked. Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from hone.base import checksums, jsonl, sealed
from hone.base.settings import UserError

#: The row of each file that is written once.
ONCE = "files.jsonl"

#: Truncated on resume. The state of a resumed run depends on the first four.
LOGS = ("metrics.jsonl", "evals.jsonl", "ledger.jsonl", ONCE, "timings.jsonl", "costs.jsonl")
#: Never truncated: a duplicate is better than a loss.
EVENTS = "events.jsonl"
#: A fault in these is reported, and the run continues: no result depends on them.
BESIDE = ("timings.jsonl", "costs.jsonl", EVENTS)
#: Folders of files written once that a user may delete to free the disk, as a whole.
DISPENSABLE = ("rollouts", "tokens", "skipped")

Records = Mapping[str, Mapping[str, Any]]  # file of rows -> {"bytes": its size, "sha256": of these bytes}


class Logs:
    """The files of rows of one run folder, with the digests of their contents. One process owns it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._digests: dict[str, tuple[Any, int]] = {}

    def begin(self) -> None:
        """Digest the existing rows, after those behind the checkpoint were removed."""
        for name in (*LOGS, EVENTS):
            path = self.folder / name
            data = path.read_bytes() if path.is_file() else b""
            self._digests[name] = hashlib.sha256(data), len(data)

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        line = jsonl.line(row)
        jsonl.append_line(self.folder / name, line)
        data = line.encode("utf-8", errors="backslashreplace")
        digest, size = self._digests.get(name) or (hashlib.sha256(), 0)
        digest.update(data)
        self._digests[name] = digest, size + len(data)

    def written(self, name: str, step: int) -> None:
        """Record the complete file `name`, which will not be written again."""
        path = self.folder / name
        row = {"step": step, "file": name, "bytes": path.stat().st_size, "sha256": checksums.sha256_of(path)}
        self.append(ONCE, row)

    def records(self) -> dict[str, dict[str, Any]]:
        return {name: {"bytes": n, "sha256": digest.hexdigest()} for name, (digest, n) in self._digests.items()}

    def seal(self) -> None:
        """Write the current records of the files of rows to seal.json."""
        write_logs(self.folder, self.records())


# --- checking ---------------------------------------------------------------------------------------------------------


def log_faults(folder: Path, records: Records) -> dict[str, str]:
    """File of rows -> its fault, for files that do not begin with the recorded bytes."""
    faults = {}
    for name, record in records.items():
        path, size = folder / name, int(record["bytes"])
        if not size:
            continue
        try:
            there = path.stat().st_size
            if there < size:
                faults[name] = f"{there} of at least {size} bytes are there: rows are missing"
            elif checksums.sha256_of(path, size) != record["sha256"]:
                faults[name] = f"its first {size} bytes differ from their checksum: rows were changed or lost"
        except OSError as error:
            faults[name] = f"it cannot be read ({error.strerror})"
    return faults


def once_faults(folder: Path, without: Collection[str] = ()) -> dict[str, str]:
    """File -> its fault, for files that are written once; a folder that was removed as a whole is not a fault.

    `without`: folders that are not checked.
    """
    faults = {}
    removed = {*without, *(name for name in DISPENSABLE if not (folder / name).exists())}
    for row in jsonl.read(folder / ONCE):
        name = str(row.get("file"))
        if name.split("/")[0] in removed:
            continue
        try:
            if (folder / name).stat().st_size != row.get("bytes"):
                faults[name] = "rows are missing, or were added"
            elif checksums.sha256_of(folder / name) != row.get("sha256"):
                faults[name] = "it differs from its checksum"
        except OSError as error:
            faults[name] = f"it cannot be read ({error.strerror})"
    return faults


def faults(folder: Path, without: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """Yields (file, fault) for every damaged file in a run folder."""
    seal = sealed.read(folder)
    for name in seal["files"]:
        if problem := sealed.file_fault(folder, name, seal):
            yield name, problem
    yield from log_faults(folder, seal["logs"]).items()
    yield from once_faults(folder, without).items()


def folder_faults(folder: Path, without: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """Yields (folder, fault) for damaged weights in the folder of a stage: its model, adapter and hard resets."""
    for place in (*sorted((folder / "resets").glob("reset_*")), folder / "model", folder / "adapter"):
        if place.name not in without and place.exists() and (problem := checksums.fault(place)):
            yield str(place.relative_to(folder)), problem


def require_logs(folder: Path, *names: str) -> None:
    """Raises UserError if one of these files of rows does not begin with the bytes recorded in seal.json."""
    wrong = log_faults(folder, {k: v for k, v in sealed.read(folder)["logs"].items() if k in names})
    if wrong:
        name, problem = next(iter(wrong.items()))
        raise UserError(f"{folder / name} is damaged ({problem}); restore it from a copy")


# --- seal.json --------------------------------------------------------------------------------------------------------


def write_logs(folder: Path, records: Records) -> None:
    sealed.write(folder, {**sealed.read(folder), "logs": records})


def stage_folders(run: Path) -> list[Path]:
    """The folders of a run's stages in order (with one stage, the run folder). Raises UserError for a damaged list."""
    sealed.require_file(run, "stages.json")
    path = run / "stages.json"
    if not path.exists():
        return [run]
    rows = checksums.read_json(path, list, "restore it from a copy")
    if not all(isinstance(row, dict) and isinstance(row.get("folder"), str) for row in rows):
        raise UserError(f"{path} is damaged: it does not name the folders of stages; restore it from a copy")
    return [run / row["folder"] for row in rows]


# --- going back -------------------------------------------------------------------------------------------------------


def cut(folder: Path, records: Records) -> None:
    """Truncate the files of rows to the bytes that a checkpoint recorded (see `log_faults`).

    `seal.json` is written first: it is true before and after.
    """
    if (folder / sealed.FILE).exists():
        write_logs(folder, {name: record for name, record in records.items() if name not in BESIDE})
    for name in LOGS:
        size = int(records[name]["bytes"]) if name in records else 0
        path = folder / name
        if path.exists() and path.stat().st_size > size:
            os.truncate(path, size)
