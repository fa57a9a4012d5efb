"""Checkpoints: copied to memory, then written in a background thread: to a side folder, synced, renamed, checksummed.

    checkpoints/step_000010/
        model/           weights, config and tokenizer; with LoRA the adapter alone: see `hone.learn.state`
        optimizer/       moments, float32 masters, the value head
        state.json       step and counters, hard resets so far, state of the curriculum
        checksums.json   sha256 of every other file, written last

Each process writes its part of the weights (`shard-N-*.safetensors`, `hone.model.shards`); any number of processes can
read them. A folder without a valid `checksums.json` is ignored, so a run killed at any moment still has its previous
checkpoint. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import distributed as dist

from hone.base import checksums
from hone.base.settings import UserError
from hone.base.world import ALONE, World
from hone.learn.policy import Policy
from hone.learn.state import State
from hone.model import shards

PREFIX = "step_"
FORMAT = 2


@dataclass(frozen=True)
class Snapshot:
    """Everything needed to begin a step, in memory, and which older checkpoints to keep."""

    step: int
    state: State
    course: Mapping[str, Any] | None  # of the curriculum
    keep: int  # number of newest checkpoints to keep
    best: Collection[int] = ()  # steps whose checkpoints are kept as well
    logs: Mapping[str, Any] | None = None  # the length of each log file at that time: see `hone.runs.seal`


def take(
    step: int,
    policy: Policy,
    keep: int,
    course: Mapping[str, Any] | None = None,
    best: Collection[int] = (),
    logs: Mapping[str, Any] | None = None,
) -> Snapshot:
    """Copy what a checkpoint holds; the policy may change afterwards. Every process calls it."""
    return Snapshot(step, policy.save(), course, keep, best, logs)


def save(folder: Path, step: int, policy: Policy, keep: int, course: Mapping[str, Any] | None = None) -> Path:
    """Write checkpoint `step` under `folder`, and wait until it is complete."""
    return write(folder, take(step, policy, keep, course), policy.world)


def write(folder: Path, snapshot: Snapshot, world: World = ALONE, rows: Collection[Path] = ()) -> Path:
    """Write a checkpoint under `folder`, then remove those not kept. Every process calls it.

    `rows`: files that belong to it, such as metrics; they are synced before it becomes visible.
    Raises OSError if the disk is full; existing checkpoints stay intact.
    """
    final = folder / f"{PREFIX}{snapshot.step:06d}"
    aside = folder / f".writing_{snapshot.step:06d}"
    try:
        _together(world, lambda: _prepare(aside) if world.main else None)
        with world.waiting("their parts of a checkpoint"):
            sums = _together(world, lambda: _write_part(aside, snapshot.state, world))
        _together(world, lambda: _complete(aside, final, snapshot, sums, rows) if world.main else None)
    except OSError as error:
        if world.main:
            shutil.rmtree(aside, ignore_errors=True)
        earlier = "earlier ones are intact" if saved_steps(folder) else "there is no earlier one"
        why = f"{final} could not be written ({error.strerror or error}); {earlier}"
        raise OSError(error.errno, why) from error
    return final


def _prepare(aside: Path) -> None:
    checksums.remove(aside)
    (aside / "model").mkdir(parents=True)


def _write_part(aside: Path, state: State, world: World) -> dict[str, str]:
    """Write this process's tensors; returns the checksums of its files."""
    for name, tensors in state.tensors.items():
        shards.write(aside / name, tensors, world.writing)
    own = [p for name in state.tensors for p in (aside / name).glob(f"shard-{world.rank + 1:05d}-*")]
    return {str(p.relative_to(aside)): checksums.sha256_of(p) for p in own}


def _complete(
    aside: Path, final: Path, snapshot: Snapshot, parts: list[dict[str, str]], rows: Collection[Path]
) -> None:
    """Write the remaining files, make the checkpoint visible, remove older ones. Only the first process calls it."""
    sums = {name: digest for part in parts for name, digest in part.items()}
    state = {
        "format": FORMAT, "step": snapshot.step, "policy": dict(snapshot.state.scalars), "course": snapshot.course,
        "logs": snapshot.logs,
    }  # fmt: skip
    files = {f"model/{name}": content for name, content in snapshot.state.files.items()}
    files["state.json"] = json.dumps(state, indent=1).encode()
    for name, content in files.items():
        (aside / name).parent.mkdir(parents=True, exist_ok=True)
        _write_synced(aside / name, content)
        sums[name] = hashlib.sha256(content).hexdigest()
    _write_synced(aside / checksums.FILE, json.dumps(dict(sorted(sums.items())), indent=1).encode())
    for path in (*(p for p in aside.rglob("*") if p.is_dir()), aside, *rows):
        fsync(path)
    if final.exists() and fault(final) is None:  # an earlier attempt at this step is whole: keep it
        shutil.rmtree(aside)
    else:
        checksums.remove(final)
        os.replace(aside, final)
    fsync(final.parent)
    prune(final.parent, snapshot.keep, snapshot.best)


def _together(world: World, part: Callable[[], Any]) -> list[Any]:
    """The results of `part` on all processes; an OSError on one is raised on all."""
    failed: OSError | None = None
    result = None
    try:
        result = part()
    except OSError as error:
        failed = error
    answers: list[Any] = [(result, failed)]
    if world.writing is not None:
        answers = [None] * world.size
        with world.waiting("a checkpoint"):
            dist.all_gather_object(answers, (result, failed), group=world.writing)
    for _, failure in answers:
        if failure is not None:
            raise failure
    return [answer for answer, _ in answers]


class Writer:
    """Writes one checkpoint at a time in a background thread; the next one waits for it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None  # why the last checkpoint could not be written, if known yet

    def begin(self, write: Callable[[], Any]) -> None:
        """Run `write` in the background, after the previous one. Raises what the previous one raised."""
        self.wait()

        def work() -> None:
            try:
                write()
            except BaseException as error:  # raised again in the loop's own thread
                self.error = error

        self._thread = threading.Thread(target=work, name="hone-checkpoint", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until nothing is being written; raises nothing."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Wait until nothing is being written. Raises, once, what the writing raised."""
        self.join()
        self._thread = None
        error, self.error = self.error, None
        if error is not None:
            raise error


# --- listing --------------------------------------------------------------------------------------------------------


def prune(folder: Path, keep: int, best: Collection[int] = ()) -> None:
    """Remove all checkpoints except the newest `keep` and those of the steps `best`."""
    for old in saved_steps(folder)[:-keep]:
        if step_of(old) not in best:
            checksums.remove(old)


def drop_newer(folder: Path, good: Path | None) -> None:
    """Remove checkpoints newer than `good`, from which the run continues and rewrites them, and half-written ones."""
    for candidate in saved_steps(folder):
        if good is not None and step_of(candidate) > step_of(good):
            checksums.remove(candidate)
    for torn in folder.glob(".writing_*"):
        checksums.remove(torn)


def saved_steps(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first, damaged ones included; other names, such as step_000010_old, are ignored."""
    named = (p for p in folder.glob(f"{PREFIX}*") if p.name.removeprefix(PREFIX).isdecimal())
    return sorted((p for p in named if p.is_dir()), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(PREFIX))


def newest_good(folder: Path, report: Callable[[str], None], resets: Path | None = None) -> Path | None:
    """The newest undamaged checkpoint; `resets` is the folder with the models of hard resets, which are checked too.

    `report` gets a message for each checkpoint that is skipped.
    """
    for candidate in reversed(saved_steps(folder)):
        problem = fault(candidate)
        if problem is None and resets is not None:
            problem = _fault_of_reset(candidate, resets)
        if problem is None:
            return candidate
        report(f"checkpoint {candidate.name} is damaged ({problem}); trying the one before it")
    return None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The content of state.json. Raises UserError for a checkpoint of another version of hone."""
    state = checksums.read_json(checkpoint / "state.json", dict, "restore it, or move the checkpoint away")
    if state.get("format") != FORMAT:
        raise UserError(
            f"{checkpoint}: written by another version of hone (format {state.get('format', 1)}, this one reads "
            f"{FORMAT}): finish the run with that version, or begin a new one with model={checkpoint / 'model'}"
        )
    return state


def fault(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    problem = checksums.fault(checkpoint)
    if problem is None and "state.json" not in json.loads((checkpoint / checksums.FILE).read_text()):
        return f"{checksums.FILE} does not list state.json"
    return problem


def reset_name(number: int) -> str:
    """The folder of hard reset `number` (from 1) inside `resets`."""
    return f"reset_{number:03d}"


def _fault_of_reset(checkpoint: Path, resets: Path) -> str | None:
    """What is wrong with the model of the checkpoint's last hard reset; None if nothing is, or without a reset."""
    try:
        policy = read_state(checkpoint)["policy"]
    except UserError:  # of another version: reported by the caller
        return None
    number = len(policy.get("resets", ())) if isinstance(policy, dict) else 0
    problem = checksums.fault(resets / reset_name(number)) if number else None
    return None if problem is None else f"its base resets/{reset_name(number)}: {problem}"


# --- files ----------------------------------------------------------------------------------------------------------


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Flush the folder and everything below it to disk."""
    for path in (*folder.rglob("*"), folder):
        fsync(path)


def fsync(path: Path) -> None:
    """Flush the file, or the entries of the folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
