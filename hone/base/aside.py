"""Nothing that was computed is overwritten: a run that begins anew, or goes on after its end, keeps the earlier one."""

from __future__ import annotations

import datetime
import os
import shutil
import sys
from pathlib import Path

from hone.base.settings import UserError

#: Of a run that was extended: the models and results of its earlier ends.
EARLIER = "earlier"


def set_aside(folder: Path) -> None:
    """Rename what an earlier run left, so that nothing computed is lost. A link goes on pointing to a run folder."""
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
    """A finished stage is to go on: what says that it and its run are complete is kept under `earlier/`.

    Cut anywhere, it can be called again: results.json says last that a run is done, so it goes first.
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
            if place.is_dir():  # of an extension that was given up: the run has come to the same end again
                shutil.rmtree(place)
            os.replace(path, place)
