"""Arguments that several verbs have, and loading the recipe that one names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hone.base.visible import visible

if TYPE_CHECKING:
    from hone.recipe.recipe import Pipeline, Recipe

Target = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file or its folder, a run folder, or a preset.")
]
OptionalTarget = Annotated[
    str | None,
    typer.Argument(
        metavar="RECIPE", help="A recipe file or its folder, a run folder, or a preset.", show_default=False
    ),
]
Checkpoint = Annotated[Path | None, typer.Option(help="A checkpoint folder; default: the last of the run.")]


def load_recipe(target: str, overrides: list[str] | None, runs: bool = True) -> Recipe | Pipeline:
    """Load a recipe and print notes about settings without effect. `runs`: something is computed, on its device."""
    from hone.base import device
    from hone.launch import job
    from hone.recipe.load import load
    from hone.recipe.notes import notices

    recipe = load(target, overrides or ())
    if runs:
        device.select(recipe.stages[0].device)
    for line in () if job.silent() else notices(recipe):
        print(visible(f"note: {line}"), file=sys.stderr)
    return recipe
