"""Makes the environment and tools of a recipe from its settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hone.base.places import locate_target
from hone.base.settings import UserError
from hone.base.world import ALONE, World
from hone.environments.base import Environment, SingleTurn
from hone.environments.calculator import calculator
from hone.environments.harbor import HarborEnvironment, harbor_tasks
from hone.environments.interrogation import KnightsInterrogation
from hone.environments.play import Episodes
from hone.environments.program import Launch, Program, check_module
from hone.environments.recorder import Recorder
from hone.environments.sandbox import python
from hone.environments.search import PREFIX, search_tool
from hone.environments.tools import Tool, ToolEnvironment
from hone.environments.trl import TRLEnvironment
from hone.grade.child import describe, load_target
from hone.grade.targets import read_target
from hone.recipe.recipe import TrainedStage
from hone.recipe.sections.environment import HARBOR, EnvironmentConfig
from hone.rollout.prompts import Renderer

ENVIRONMENTS: dict[str, type[Environment]] = {"knights_interrogation": KnightsInterrogation}
#: Of environments that programs of hone play: the module that their interpreter needs, and the package that has it.
MODULES = {"verifiers": ("verifiers.v1", "verifiers"), "openenv": ("websockets", "openenv-core")}
TOOLS: dict[str, Callable[..., Any]] = {"calculator": calculator, "python": python}


def make_episodes(recipe: TrainedStage, renderer: Renderer, world: World = ALONE) -> Episodes:
    """The `Episodes` of a stage. Raises UserError for an environment or tool that cannot be used."""
    if recipe.environment.is_program and renderer.is_raw:
        raise UserError(
            "environment.program: programs send conversations, and this model is prompted with raw text; give a model "
            "whose tokenizer has a chat template, with prompt.style: chat"
        )
    return Episodes(renderer, environment_of(recipe), recipe.environment, world)


def environment_of(recipe: TrainedStage) -> Callable[[], Environment]:
    """Makes an environment for one rollout."""
    if recipe.environment.is_program:
        return _program(recipe.environment)
    tools = tuple(load_tool(target) for target in recipe.tools)
    name = recipe.environment.name
    if name is None:
        return partial(ToolEnvironment, tools) if tools else SingleTurn
    if isinstance(name, str) and name.startswith(HARBOR):
        tasks, runtime = harbor_tasks(name.removeprefix(HARBOR))
        return _alone(partial(HarborEnvironment, tasks, recipe.environment.timeout, runtime), name, tools)
    if isinstance(name, str) and name in ENVIRONMENTS:
        return _alone(ENVIRONMENTS[name], name, tools)
    targets: dict[str | None, str] = dict(name.items()) if isinstance(name, dict) else {None: name}
    classes = {key: _load(target, "environment") for key, target in targets.items()}
    if len(classes) == 1 and None in classes and _is_own(classes[None]):
        return _alone(classes[None], str(name), tools)
    for key, kind in classes.items():
        if _is_own(kind):
            raise UserError(f"environment.name.{key}: {targets[key]} stands alone; of several, each is a TRL class")
        if not callable(getattr(kind, "reset", None)):
            raise UserError(f"environment {targets[key]}: has no method reset, with which an episode begins")
    return partial(TRLEnvironment, classes, tools)


def _program(config: EnvironmentConfig) -> Callable[[], Environment]:
    if config.adapter is None:
        return partial(Program, Launch(config, config.program), Recorder())
    kind, target = config.adapter
    launch = Launch(config, ("python", str(Path(__file__).with_name(f"{kind}_program.py")), target))
    check_module(launch.command[0], *MODULES[kind])
    return partial(Program, launch, Recorder())


def load_tool(target: str) -> Tool:
    """The tool of a recipe. Raises UserError if it cannot be loaded, or its schema is incomplete."""
    if target.startswith(PREFIX):
        return Tool(search_tool(target))
    tool = Tool(TOOLS[target] if target in TOOLS else _load(target, "tool"))
    tool.schema  # noqa: B018  # raises where hints or docstring are incomplete
    return tool


def _alone(kind: Callable[[], Environment], name: str, tools: Sequence[Tool]) -> Callable[[], Environment]:
    if tools:
        raise UserError(f"tools: the environment {name} has its own; remove the tools")
    return kind


def _is_own(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, Environment)


def _load(target: str, what: str) -> Any:
    source = read_target(target)
    try:
        return load_target(locate_target(target), source)
    except (Exception, SystemExit) as error:  # whatever importing the user's file raises
        raise UserError(f"{what} {target}: cannot be imported: {describe(error)}") from error
