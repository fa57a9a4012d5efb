"""Rewards by name. To add one: a class in a file, a line here and a test."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from hone.base.settings import UserError
from hone.rewards.base import Composed, Part
from hone.rewards.config import RewardConfig, part_label
from hone.rewards.functions import UserFunction
from hone.rewards.gold import NeedsGold
from hone.rewards.judge.part import JudgePart
from hone.rewards.linear_algebra import LinearAlgebra
from hone.rewards.numeric import BoxedNumeric, GSM8KFlexible, GSM8KStrict, SmallParts
from hone.rewards.perplexity import Answerer, Perplexity
from hone.rewards.rules import Countdown, EnvironmentReward, LogicRL, Outcome, Overlong, TaskScore, WellFormed
from hone.rewards.thinking import Thinking
from hone.tasks.base import Task

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

REWARDS: dict[str, type[Part]] = {
    "boxed_numeric": BoxedNumeric,
    "countdown": Countdown,
    "environment": EnvironmentReward,
    "gsm8k_flexible": GSM8KFlexible,
    "gsm8k_strict": GSM8KStrict,
    "judge": JudgePart,
    "linear_algebra": LinearAlgebra,
    "logic_rl": LogicRL,
    "outcome": Outcome,
    "overlong": Overlong,
    "perplexity": Perplexity,
    "small_parts": SmallParts,
    "task_score": TaskScore,
    "thinking": Thinking,
    "well_formed": WellFormed,
}


@cache
def registered() -> dict[str, EntryPoint]:
    """Rewards of installed packages, by name: entry points of the group `hone.rewards`.

    Each is a `Part`, or a function with one of the signatures of `hone.rewards.functions`.
    """
    from importlib.metadata import entry_points  # not at the top: slow to import, and seldom needed

    return {point.name: point for point in entry_points(group="hone.rewards")}


def tasks_of(name: str) -> tuple[str, ...]:
    """The tasks that a part supports; empty: every task."""
    kind = _kind(name)
    return kind.tasks if isinstance(kind, type) and issubclass(kind, Part) else ()


def is_offline(name: str) -> bool:
    """Whether a part is computed without a model or a server."""
    return bool(getattr(_kind(name), "offline", True))


def _kind(name: str) -> object:
    """The class of a part; None for a function in a user's file."""
    return None if ":" in name else REWARDS.get(name) or _load(name)


def make_reward(config: RewardConfig, task: Task, frozen: Answerer | None = None) -> Composed:
    """The reward of a `reward:` section; `frozen` is the answerer of `perplexity`.

    Raises UserError for a part that does not fit the task, and for a function that cannot be used.
    """
    parts: dict[str, Part] = {}
    weights: dict[str, float] = {}
    for name, weight in config.parts.items():
        fits = tasks_of(name)
        if fits and task.name not in fits:
            possible = sorted(other for other, part in REWARDS.items() if not part.tasks or task.name in part.tasks)
            raise UserError(
                f"reward: {name!r} is for the task {' or '.join(fits)}, not for {task.name!r}, "
                f"which can have {', '.join(possible)}"
            )
        label = part_label(name, config.parts)
        part = _make_part(name, label, config, frozen)
        if isinstance(part, UserFunction):
            part.check(task.problems("train"))
        if isinstance(part, NeedsGold):  # every problem: with an unusable gold answer, all its answers would be wrong
            for problem in task.problems("train"):
                part.check(problem)
        parts[label], weights[label] = part, weight
    return Composed(task, parts, weights)


def only_function(config: RewardConfig) -> str | None:
    """The name in metrics of the user's function, if it is the whole reward; else None."""
    names = list(config.parts)
    return part_label(names[0], names) if len(names) == 1 and names[0] not in REWARDS else None


def check_functions(config: RewardConfig) -> None:
    """Check what a `reward:` section needs from outside: import the user's functions, look up the judge's key.

    Called before anything else starts. Raises UserError.
    """
    for name in config.parts:
        if name not in REWARDS or name == "judge":
            _make_part(name, name, config)


def _make_part(name: str, label: str, config: RewardConfig, frozen: Answerer | None = None) -> Part:
    if name == "perplexity":
        if frozen is None:
            raise ValueError("reward perplexity: needs a frozen answerer, from hone.rollout.answerer.load_answerer")
        return Perplexity(config, frozen)
    if name in REWARDS:
        return REWARDS[name](config)
    if ":" in name:
        return UserFunction(config, name, label)
    kind = _load(name)
    if isinstance(kind, type) and issubclass(kind, Part):
        return kind(config)
    return UserFunction(config, registered()[name].value, label)


def _load(name: str) -> object:
    try:
        return registered()[name].load()
    except Exception as error:  # whatever importing the package raises
        raise UserError(f"reward {name!r} of {registered()[name].value}: cannot be imported: {error}") from error
