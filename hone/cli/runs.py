"""`hone runs`: verbs that list, check and clean up runs.

hone runs list
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hone.cli.data import STYLE

runs = typer.Typer(help="List, check and clean up runs.", **STYLE)  # type: ignore[arg-type]


@runs.command("check")
def runs_check(run: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/mine.")]) -> None:
    """Check the ledger of prompts, and that files are intact.

    Each prompt must have been trained on once. Exit code 1 if something is wrong.
    """
    from hone.stages.audit import check as examine

    lines, faults = examine(run)
    print("\n".join(lines))
    raise typer.Exit(1 if faults else 0)


Shelf = Annotated[Path, typer.Argument(metavar="[FOLDER]", help="The folder that contains the runs.")]


@runs.command("list")
def runs_list(folder: Shelf = Path("runs")) -> None:
    """List the runs of a folder.

    State, stage, step, age, size, latest validation.
    """
    from hone.runs.listing import show

    show(folder)


@runs.command("prune")
def runs_prune(
    folder: Shelf = Path("runs"),
    yes: Annotated[bool, typer.Option("--yes", help="Remove the files; without it, only list them.")] = False,
) -> None:
    """Remove runs that were set aside, and what is no longer needed.

    Active runs stay untouched.
    """
    from hone.runs.listing import prune

    for line in prune(folder, yes):
        print(line)


@runs.command("show")
def runs_show(
    run: Annotated[Path, typer.Argument(help="The folder of a run or of one of its stages.")],
    step: Annotated[int | None, typer.Option(min=0, help="Default: the last step that has answers.")] = None,
    group: Annotated[int | None, typer.Option(min=0, help="Show the answers of this group in full.")] = None,
    answer: Annotated[int | None, typer.Option(min=0, help="Show only this answer of the group.")] = None,
) -> None:
    """Show the groups of a step.

    With --group its answers, and why each got its reward.
    """
    from hone.report.terminal import show

    for line in show(run, step, group, answer):
        print(line)
