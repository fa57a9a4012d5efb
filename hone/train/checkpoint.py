"""Checkpoints: written aside, synced, renamed; verified by checksum when read.

    checkpoints/step_000010/
        model/                  an ordinary Hugging Face checkpoint; of LoRA the adapter alone, in peft's format
        optimizer.safetensors   moments
        state.json              step and counters, hard resets so far, where the curriculum is
        checksums.json          sha256 of every other file, written last

A folder without a good `checksums.json` does not count, so a run killed at any moment still has
the checkpoint before. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hone.train.policy import Policy

PREFIX = "step_"


def save(folder: Path, step: int, policy: Policy, keep: int, course: Mapping[str, Any] | None = None) -> Path:
    """Write checkpoint `step` under `folder`, then remove all but the newest `keep`.

    `course` is the state of the curriculum.
    Raises OSError if the disk is full; the checkpoints already there are left alone.
    """
    final = folder / f"{PREFIX}{step:06d}"
    aside = folder / f".writing_{step:06d}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        scalars = policy.save(aside)
        (aside / "state.json").write_text(json.dumps({"step": step, "policy": scalars, "course": course}, indent=1))
        sums = {str(p.relative_to(aside)): _sha256(p) for p in sorted(aside.rglob("*")) if p.is_file()}
        for name in sums:
            fsync(aside / name)
        (aside / "checksums.json").write_text(json.dumps(sums, indent=1))
        fsync(aside / "checksums.json")
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise OSError(
            error.errno, f"checkpoint {step} could not be written ({error.strerror}); the ones before are intact", final
        ) from error
    if final.exists():  # of an earlier attempt at this step; whole, so this one changes nothing
        shutil.rmtree(aside)
    else:
        os.replace(aside, final)
    fsync(folder)
    for old in found(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def drop_newer(folder: Path, good: Path | None) -> None:
    """Remove damaged checkpoints after the one that a run goes on from; its steps will write them again."""
    for candidate in found(folder):
        if good is not None and candidate.name > good.name:
            shutil.rmtree(candidate)


def sync(folder: Path) -> None:
    """Every file below `folder` is on the disk when this returns."""
    for path in folder.rglob("*"):
        if path.is_file():
            fsync(path)


def found(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first, whole or not."""
    return sorted(p for p in folder.glob(f"{PREFIX}*") if p.is_dir())


def newest_good(folder: Path, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose checksums hold; `report` is told of each that was passed over."""
    for candidate in reversed(found(folder)):
        problem = _fault(candidate)
        if problem is None:
            return candidate
        report(f"checkpoint {candidate.name} is damaged ({problem}); looking for one before it")
    return None


def read_state(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    return state


def _fault(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        sums = json.loads((checkpoint / "checksums.json").read_text())
        for name, expected in sums.items():
            if _sha256(checkpoint / name) != expected:
                return f"{name} differs from its checksum"
    except (OSError, ValueError) as error:  # missing, unreadable or torn files are what is looked for here
        return str(error)
    return None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def fsync(path: Path) -> None:
    """The file, or the folder's list of files, is on the disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
