"""Tasks: problems with checkable answers. A new one is a file, a line here and a test."""

from __future__ import annotations

from typing import Any

from hone.config import UserError
from hone.tasks.base import Task
from hone.tasks.countdown import CountdownTask
from hone.tasks.dataset import DatasetTask
from hone.tasks.gsm8k import GSM8KTask
from hone.tasks.knights import KnightsTask
from hone.tasks.math import MathTask

TASKS: dict[str, Any] = {
    "countdown": CountdownTask,
    "dataset": DatasetTask,
    "gsm8k": GSM8KTask,
    "knights": KnightsTask,
    "math": MathTask,
}


def make_task(config: Any, seed: int = 0) -> Task:
    """The task of a `task:` section; `seed` is the recipe's, on which training problems depend."""
    if config.name not in TASKS:
        raise UserError(f"task: no task {config.name!r}; there are {', '.join(sorted(TASKS))}")
    task: Task = TASKS[config.name](config, seed)
    return task
