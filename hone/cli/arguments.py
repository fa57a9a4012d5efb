"""Arguments that several verbs have, and loading the recipe that one names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

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


class Verbs(TyperGroup):
    """The verbs. If one that takes settings is given an option that is a setting, here or in another trainer, the error
    says how hone writes it."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if type(error).__name__ == "NoSuchOption" and _takes_settings(error):  # of typer's parser, or of click
                explain_option(error)
            raise


def _takes_settings(error: Any) -> bool:
    """Whether the verb of a usage error has an argument for settings."""
    return any("KEY=VALUE" in (parameter.metavar or "") for parameter in error.ctx.command.params)


def explain_option(error: Any) -> None:
    """Add to the error of an unknown option which setting it may mean."""
    from hone.base.validate import setting_of
    from hone.recipe.recipe import Recipe

    setting = setting_of(error.option_name.lstrip("-").replace("-", "_"), Recipe)
    if setting is None:
        return
    if setting.startswith("none: "):
        error.message += f"; leave it out: {setting.removeprefix('none: ')}"
    else:
        error.message += f"; settings are written KEY=VALUE, without dashes; hone's name for it is {setting}"
    error.possibilities = None


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
