"""Rewards by name. A new one is a class in a file, a line here and a test."""

from __future__ import annotations

from hone.config import UserError
from hone.rewards.base import Composed, Part, RewardFn
from hone.rewards.config import RewardConfig
from hone.rewards.linear_algebra import LinearAlgebra
from hone.rewards.rules import Countdown, LogicRL, Outcome, Overlong, TaskScore, WellFormed
from hone.tasks.base import Task

REWARDS: dict[str, type[Part]] = {
    "countdown": Countdown,
    "linear_algebra": LinearAlgebra,
    "logic_rl": LogicRL,
    "outcome": Outcome,
    "overlong": Overlong,
    "task_score": TaskScore,
    "well_formed": WellFormed,
}


def make_reward(config: RewardConfig, task: Task) -> RewardFn:
    """The reward of a `reward:` section. Raises UserError for a part that does not fit the task."""
    for name in config.parts:
        fits = REWARDS[name].tasks
        if fits and task.name not in fits:
            possible = sorted(other for other, part in REWARDS.items() if not part.tasks or task.name in part.tasks)
            raise UserError(
                f"reward: {name!r} is for the task {' or '.join(fits)}, not for {task.name!r}, "
                f"which can have {', '.join(possible)}"
            )
    return Composed(task, {name: REWARDS[name](config) for name in config.parts}, dict(config.parts))
