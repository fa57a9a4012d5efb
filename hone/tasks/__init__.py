"""Tasks: problems with checkable answers. A new one is a file, a line here and a test."""

from __future__ import annotations

from typing import Any

from hone.config import UserError
from hone.tasks.base import Task
from hone.tasks.countdown import CountdownTask
from hone.tasks.knights import KnightsTask

TASKS: dict[str, Any] = {
    "countdown": CountdownTask,
    "knights": KnightsTask,
}


def make_task(config: Any, seed: int = 0) -> Task:
    """The task of a `task:` section; `seed` is the recipe's, on which training problems depend."""
    if config.name not in TASKS:
        raise UserError(f"task: no task {config.name!r}; there are {', '.join(sorted(TASKS))}")
    task: Task = TASKS[config.name](config, seed)
    return task
