"""Keep earlier results: a run that starts again, or continues after its end, never overwrites them."""

from __future__ import annotations

import datetime
import os
import shutil
import sys
from pathlib import Path

from hone.base.settings import UserError

#: Folder with the models and results of the earlier ends of an extended run.
EARLIER = "earlier"


def set_aside(folder: Path) -> None:
    """Rename the folder of an earlier run, so that no result is lost. A symlink keeps pointing to a run folder."""
    real = folder.resolve()
    stamp = datetime.datetime.fromtimestamp(real.stat().st_mtime).strftime("%Y%m%d-%H%M%S")
    for n in range(100):
        target = real.with_name(f"{real.name}.{stamp}" + (f"-{n}" if n else ""))
        if not target.exists():
            real.rename(target)
            if folder.is_symlink():
                real.mkdir()
            print(f"{folder} was there already; it is now {target}", file=sys.stderr)
            return
    raise UserError(f"{folder}: a hundred earlier runs are there; remove some")


def reopen(run: Path, stage: Path, steps: int) -> None:
    """Reopen a finished stage: the files that mark it and its run as complete are moved to `earlier/`.

    If interrupted, it can be called again: results.json, written last by a run, is moved first.
    """
    kept = stage / EARLIER / f"step_{steps:06d}"
    (kept / "evals").mkdir(parents=True, exist_ok=True)
    for path, place in (
        (run / "results.json", kept / "results.json"),
        (stage / "evals" / "after.jsonl", kept / "evals" / "after.jsonl"),
        (stage / "adapter", kept / "adapter"),
        (stage / "model", kept / "model"),
    ):
        if path.exists():
            if place.is_dir():  # from an abandoned extension: the run has reached the same end again
                shutil.rmtree(place)
            os.replace(path, place)
