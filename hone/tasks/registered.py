"""Tasks of installed packages: entry points of the group `hone.tasks`, named unlike any built-in task.

    [project.entry-points."hone.tasks"]
    riddles = "my_package.riddles:Riddles"

The class implements `hone.tasks.base.Task`, has a `settings` class (a `hone.base.settings.Section` with a `name`), and
is constructed with (settings, seed).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, model_validator

from hone.base.settings import Section, UserError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@cache
def registered() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # not at the top: slow to import, and seldom needed

    return {point.name: point for point in entry_points(group="hone.tasks")}


class RegisteredConfig(Section):
    """The `task:` section of a registered task, validated by the package's own settings class."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)
    name: str

    @model_validator(mode="after")
    def _checked(self) -> RegisteredConfig:
        try:
            self.own()
        except UserError as error:
            raise ValueError(f"name: {error}") from None
        return self

    def own(self) -> Section:
        """The settings as an instance of the package's own class."""
        section: Section = load(self.name).settings(**self.model_dump())
        return section


def load(name: str) -> Any:
    """The class of a registered task. Raises UserError if it cannot be imported or has no settings class."""
    point = registered()[name]
    try:
        task = point.load()
    except Exception as error:  # whatever importing the package raises
        raise UserError(f"task {name!r} of {point.value}: cannot be imported: {error}") from error
    if not (isinstance(getattr(task, "settings", None), type) and issubclass(task.settings, Section)):
        raise UserError(
            f"task {name!r} of {point.value}: has no `settings`, a class derived from hone.base.settings.Section"
        )
    return task


def make(config: RegisteredConfig, seed: int) -> Any:
    return load(config.name)(config.own(), seed)
