"""List the runs of a folder, and remove what they no longer need.

    hone runs list                  # runs/: state, stage, step, age, size, latest validation
    hone runs prune runs --yes      # runs set aside by later ones, earlier ends, checkpoints of finished runs

Folders may contain anything: only runs are shown or removed, and a run that cannot be read is shown as such.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.base.aside import EARLIER
from hone.base.settings import UserError
from hone.runs import lock
from hone.runs.retention import measured

#: What `set_aside` appends to the name of a run.
ASIDE = re.compile(r"\.\d{8}-\d{6}(-\d+)?$")
#: Every folder of a run or stage has at least one of these files.
MARKS = ("manifest.json", "stages.json", "slurm.sbatch", "sessions.jsonl")


@dataclass(frozen=True)
class Line:
    """A run, as `hone runs list` shows it."""

    folder: Path
    state: str  # running, finished, stopped, died, waiting
    stage: str
    step: str
    seconds: float  # since the last write
    size: int  # bytes
    validation: str

    def __str__(self) -> str:
        cells = (f"{self.folder.name:28}", f"{self.state:9}", f"{self.stage:10}", f"{self.step:>9}")
        return "  ".join((*cells, f"{_ago(self.seconds):>6}", f"{_bytes(self.size):>8}", self.validation)).rstrip()


HEAD = "  ".join(
    (f"{'run':28}", f"{'state':9}", f"{'stage':10}", f"{'step':>9}", f"{'age':>6}", f"{'size':>8}", "validation")
)


def listed(folder: Path) -> list[Line]:
    """The runs in a folder, newest first. Raises UserError if the folder does not exist."""
    return sorted((line_of(run) for run in runs_in(folder)), key=lambda line: line.seconds)


def runs_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the one that contains the runs, such as runs")
    return sorted(p for p in folder.iterdir() if not p.name.startswith(".") and is_run(p))


def is_run(folder: Path) -> bool:
    return folder.is_dir() and any((folder / mark).is_file() for mark in MARKS)


def line_of(run: Path) -> Line:
    names = [str(row.get("folder", "")) for row in _rows(_json(run / "stages.json"))] or ["."]
    begun = [name for name in names if (run / name / "manifest.json").is_file()]
    stage = run / (begun[-1] if begun else names[0])
    config = _json(stage / "config.resolved.json")
    config = config if isinstance(config, dict) else {}
    steps = [row["step"] for row in _lines(stage / "metrics.jsonl") if isinstance(row.get("step"), int)]
    total = config.get("steps") if config.get("stage") in ("rl", "distil") else None
    done = str(steps[-1] + 1) if steps else "-"
    newest, size = _files(run)
    return Line(
        run,
        state(run),
        str(config.get("name" if len(names) > 1 else "stage") or "-"),
        f"{done}/{total}" if total else done,
        max(0.0, time.time() - newest),
        size,
        validation(stage),
    )


def state(run: Path) -> str:
    """The state by the lock and the last write. A run that ends before its last step, by Ctrl-C, SIGTERM or an error,
    releases its lock (`stopped`); one that is killed does not (`died`). A lock of another machine counts while its file
    is young. That compares two clocks, so it is only for display; a writer watches the lock instead."""
    owner, path = lock.owner_of(run), lock.place(run)
    if owner is not None and not owner.dead:
        try:
            young = owner.here or time.time() - path.stat().st_mtime < 2 * lock.STALE
        except OSError:  # released just now
            young = False
        if young:
            return "running"
    if (run / "results.json").is_file():
        return "finished"
    if (run / "slurm.sbatch").is_file() and not any(run.rglob("manifest.json")):
        return "waiting"  # for its turn in the queue
    return "stopped" if owner is None else "died"


def validation(stage: Path) -> str:
    """The latest accuracy on the validation split, or the mean reward if there is none, with its interval."""
    rows = [row for row in _lines(stage / "evals.jsonl") if row.get("label") == "validation"]
    measure = measured(rows[-1]) if rows else None
    if measure is None:
        return ""
    name, x = measure
    what = "" if name == "accuracy" else f"{name} "
    try:
        return f"{what}{x['value']:.3f} [{x['low']:.3f}, {x['high']:.3f}] at step {rows[-1]['step']}"
    except (TypeError, KeyError, ValueError):  # of another form
        return ""


# --- prune ------------------------------------------------------------------------------------------------------------


def removable(folder: Path) -> Iterator[tuple[Path, Path, str]]:
    """Yields (run, path that could be removed, reason)."""
    for run in runs_in(folder):
        if ASIDE.search(run.name):
            yield run, run, "set aside by a later run of this name"
            continue
        stages = [run / str(row.get("folder", "")) for row in _rows(_json(run / "stages.json"))] or [run]
        for stage in stages:
            if (stage / EARLIER).is_dir():
                yield run, stage / EARLIER, "ends of a run that went on"
            if (run / "results.json").is_file() and (stage / "checkpoints").is_dir():
                yield run, stage / "checkpoints", "checkpoints of a finished run: it can no longer be extended"


def prune(folder: Path, yes: bool) -> Iterator[str]:
    """Remove what `removable` lists, if `yes`; yields a line for each. A locked run is never touched."""
    total = 0
    for run, path, why in list(removable(folder)):
        try:
            held = lock.acquire(lock.place(run), watch=False)
        except lock.Held as error:
            yield f"left alone: {error}"
            continue
        try:
            size = _files(path)[1]
            if yes and path.is_symlink():
                yield f"left alone: {path} is a link"
                continue
            if yes:
                shutil.rmtree(path)
            total += size
            yield f"{'removed' if yes else 'would remove'} {_bytes(size):>8}  {path} ({why})"
        finally:
            held.release()
    yield f"{_bytes(total)} {'freed' if yes else 'could be freed; to remove: --yes'}"


# --- reading what may be anything -------------------------------------------------------------------------------------


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # missing, torn or of another form: the line shows "-"
        return None


def _rows(value: Any) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _lines(path: Path) -> list[Mapping[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    rows = []
    for line in text.splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:  # torn by a kill
            continue
    return _rows(rows)


def _files(folder: Path) -> tuple[float, int]:
    """(time of the newest file, total bytes). Links are not followed; files that vanish meanwhile do not count."""
    newest, size = 0.0, 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(place, name))
            except OSError:
                continue
            newest, size = max(newest, status.st_mtime), size + status.st_size
    return newest, size


def _ago(seconds: float) -> str:
    for unit, of in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= of:
            return f"{seconds / of:.0f} {unit}"
    return f"{seconds:.0f} s"


def _bytes(size: int) -> str:
    for unit, of in (("GB", 1e9), ("MB", 1e6)):
        if size >= of:
            return f"{size / of:.1f} {unit}"
    return f"{size / 1e3:.0f} kB"


def show(folder: Path) -> None:
    lines = listed(folder)
    print("\n".join([HEAD, *map(str, lines)]) if lines else f"{folder}: no runs", file=sys.stdout)
