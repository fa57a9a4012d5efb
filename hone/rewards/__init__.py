"""Rewards by name. A new one is a class in a file, a line here and a test."""

from __future__ import annotations

from hone.config import UserError
from hone.rewards.base import Composed, Part, RewardFn
from hone.rewards.config import RewardConfig
from hone.rewards.gold import NeedsGold
from hone.rewards.numeric import BoxedNumeric, GSM8KFlexible, GSM8KStrict, SmallParts
from hone.rewards.perplexity import Answerer, Perplexity
from hone.rewards.rules import Countdown, LogicRL, Outcome, Overlong, WellFormed
from hone.rewards.thinking import Thinking
from hone.tasks.base import Task

REWARDS: dict[str, type[Part]] = {
    "boxed_numeric": BoxedNumeric,
    "countdown": Countdown,
    "gsm8k_flexible": GSM8KFlexible,
    "gsm8k_strict": GSM8KStrict,
    "logic_rl": LogicRL,
    "outcome": Outcome,
    "overlong": Overlong,
    "perplexity": Perplexity,
    "small_parts": SmallParts,
    "thinking": Thinking,
    "well_formed": WellFormed,
}


def make_reward(config: RewardConfig, task: Task, frozen: Answerer | None = None) -> RewardFn:
    """The reward of a `reward:` section; `frozen` is the answerer of `perplexity`.

    Raises UserError for a part that does not fit the task.
    """
    for name in config.parts:
        fits = REWARDS[name].tasks
        if fits and task.name not in fits:
            possible = sorted(other for other, part in REWARDS.items() if not part.tasks or task.name in part.tasks)
            raise UserError(
                f"reward: {name!r} is for the task {' or '.join(fits)}, not for {task.name!r}, "
                f"which can have {', '.join(possible)}"
            )
        part = REWARDS[name]
        if issubclass(part, NeedsGold):
            for problem in task.problems("train")[:1]:
                part.check(problem)
    made = {name: _make_part(name, config, frozen) for name in config.parts}
    return Composed(task, made, dict(config.parts))


def _make_part(name: str, config: RewardConfig, frozen: Answerer | None) -> Part:
    if REWARDS[name] is not Perplexity:
        return REWARDS[name](config)
    if frozen is None:
        raise ValueError("reward perplexity: needs a frozen answerer, from hone.train.answerer.load_answerer")
    return Perplexity(config, frozen)
