"""`hone config`: shows recipes, their schema, and the presets."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hone.cli.arguments import Target, load_recipe
from hone.cli.data import STYLE, Overrides

config = typer.Typer(help="Show recipes.", **STYLE)  # type: ignore[arg-type]


@config.command("show")
def config_show(
    recipe: Target,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of YAML.")] = False,
) -> None:
    """Print every value of a recipe, defaults included."""
    import json

    from ruamel.yaml import YAML

    from hone.recipe.recipe import resolved

    values = resolved(load_recipe(recipe, overrides, runs=False))
    if as_json:
        print(json.dumps(values, indent=2, ensure_ascii=False))
    else:
        yaml = YAML(typ="safe", pure=True)
        yaml.default_flow_style = False
        yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # declared as None
        yaml.dump(values, sys.stdout)


@config.command("schema")
def config_schema() -> None:
    """Print the JSON schema of recipe files, for editors."""
    import json

    from hone.recipe.load import schema

    print(json.dumps(schema(), indent=2))


@config.command("presets")
def config_presets() -> None:
    """List the recipes that come with hone.

    Every verb accepts their names.
    """
    from hone.recipe.load import presets

    for name, file in presets().items():
        print(f"{name:20} {file}")
