"""Nothing that was computed is overwritten: a run that begins anew sets the earlier one aside."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

from hone.base.settings import UserError


def finished(folder: Path) -> bool:
    """Whether the run that is there is done; then it says so."""
    done = (folder / "results.json").exists()
    if done:
        print(f"{folder} is finished; without --resume it is set aside and trained anew", file=sys.stderr)
    return done


def set_aside(folder: Path) -> None:
    """Rename what an earlier run left, so that nothing computed is lost."""
    stamp = datetime.datetime.fromtimestamp(folder.stat().st_mtime).strftime("%Y%m%d-%H%M%S")
    for n in range(100):
        target = folder.with_name(f"{folder.name}.{stamp}" + (f"-{n}" if n else ""))
        if not target.exists():
            folder.rename(target)
            print(f"{folder} was there already; it is now {target}", file=sys.stderr)
            return
    raise UserError(f"{folder}: a hundred earlier runs are there; remove some")
