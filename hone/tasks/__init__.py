"""Tasks: problems with checkable answers. To add one: a file, a line here and a test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, TypeVar

from hone.base.settings import Section, UserError
from hone.tasks.base import Task
from hone.tasks.countdown.task import CountdownConfig, CountdownTask
from hone.tasks.gym.task import GymConfig, GymTask
from hone.tasks.knights.task import KnightsConfig, KnightsTask
from hone.tasks.linear_algebra.task import LinearAlgebraConfig, LinearAlgebraTask
from hone.tasks.registered import RegisteredConfig, make
from hone.tasks.rows.gsm8k import GSM8KConfig, GSM8KTask
from hone.tasks.rows.math import MathConfig, MathTask
from hone.tasks.rows.task import DatasetConfig, DatasetTask


class Kind(NamedTuple):
    settings: type[Section]  # the `task:` section of a recipe
    task: Any  # called with (settings, seed of the recipe); imports heavy packages when first needed


#: Keys are the `task.name` of a recipe, up to a colon: `reasoning_gym:chain_sum` is of the kind reasoning_gym.
TASKS: dict[str, Kind] = {
    "knights": Kind(KnightsConfig, KnightsTask),
    "countdown": Kind(CountdownConfig, CountdownTask),
    "gsm8k": Kind(GSM8KConfig, GSM8KTask),
    "math": Kind(MathConfig, MathTask),
    "dataset": Kind(DatasetConfig, DatasetTask),
    "linear_algebra": Kind(LinearAlgebraConfig, LinearAlgebraTask),
    "reasoning_gym": Kind(GymConfig, GymTask),
}


Made = TypeVar("Made")

#: The cache of `once` within `keeping`; None outside of it.
_kept: dict[Any, Any] | None = None


def kind_of(name: str) -> str:
    """The key of `TASKS` for a task's name; it may not exist."""
    return name.partition(":")[0]


@contextlib.contextmanager
def keeping() -> Iterator[dict[Any, Any]]:
    """Caches the results of `once`: the preflight and the stages of a run share problems that take seconds to
    generate or to read. Yields the cache, so that a caller can free it."""
    global _kept
    before, _kept = _kept, {} if _kept is None else _kept
    try:
        yield _kept
    finally:
        _kept = before


def once(key: Hashable, make: Callable[[], Made]) -> Made:
    """The result of `make`; within `keeping`, its first result for this key."""
    if _kept is None:
        return make()
    if key not in _kept:
        _kept[key] = make()
    made: Made = _kept[key]
    return made


def make_task(config: Any, seed: int = 0) -> Task:
    """The task of a `task:` section; `seed` is the recipe's, on which training problems depend."""
    return once(("task", type(config), config.model_dump_json(), seed), lambda: _make_task(config, seed))


def _make_task(config: Any, seed: int) -> Task:
    if isinstance(config, RegisteredConfig):
        return make(config, seed)
    if kind_of(config.name) not in TASKS:
        raise UserError(f"task: no task {config.name!r}; there are {', '.join(sorted(TASKS))}")
    task: Task = TASKS[kind_of(config.name)].task(config, seed)
    return task
