"""The interface of environments, which answer a model between the turns of a rollout.

    class Guess(Environment):                      # environment: guess.py:Guess
        def reset(self, problem, seed):
            self.number = random.Random(seed).randint(1, 9)

        def step(self, message):
            right = message["content"].strip() == str(self.number)
            reply = {"role": "user", "content": "Yes." if right else "No, guess again."}
            return Observation((reply,), done=right, reward=float(right))

One instance plays one rollout at a time. Randomness comes from `seed`, so that an interrupted run continues exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hone.types import Problem

Message = Mapping[str, Any]  # {"role": "user" | "assistant" | "tool", "content": ...}
Schema = Mapping[str, Any]  # of a tool, as `transformers.utils.get_json_schema` makes it


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A whole prompt: the conversation so far, the tools offered, and how the answer is to be sampled."""

    messages: tuple[Message, ...]
    tools: tuple[Schema, ...] = ()
    stop: tuple[str, ...] = ()  # the first of them ends the turn; the program is given the text before it
    max_tokens: int | None = None  # of the turn; None, or more than the recipe's: the recipe's
    other: Mapping[str, float] = field(default_factory=dict)  # temperature, top_p: what is sampled is the recipe's


@dataclass(frozen=True, slots=True)
class Observation:
    """An environment's answer to one message."""

    messages: tuple[Message, ...] = ()  # to append to the conversation
    done: bool = False  # the episode is over
    reward: float | None = None  # for the turn; None: no reward for single turns
    parts: Mapping[str, float] = field(default_factory=dict)  # numbers to log, summed over the episode
    call: ModelCall | None = None  # of programs: the next prompt as a whole, instead of messages to append


class Environment:
    """Base class; the steps of several instances run at the same time, in threads."""

    instant: ClassVar[bool] = False  # whether a step takes no time worth a thread

    @property
    def tools(self) -> Sequence[Schema]:
        """The tools that are offered to the model; read after `reset`."""
        return ()

    def reset(self, problem: Problem, seed: int) -> Sequence[Message] | ModelCall | None:
        """Begin an episode. Returns the opening messages, with a ModelCall all of the prompt; None: the problem's."""
        return None

    def step(self, message: Message) -> Observation:
        """Answer the model's message: {"role": "assistant", "content": ..., "tool_calls": [...]}."""
        raise NotImplementedError

    def reward(self) -> float | None:
        """The reward of the whole episode, read once after its end; None: only the turns have rewards."""
        return None

    def close(self) -> None:
        """Free what the episode holds; after a failed step it may not be called."""


class SingleTurn(Environment):
    """The environment of a task that is answered in one turn: the answer ends the episode."""

    instant = True

    def step(self, message: Message) -> Observation:
        return Observation(done=True)


def checked(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages. Raises TypeError for an entry that is not a message."""
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TypeError(f"{message!r:.80} is not a message: give {{'role': ..., 'content': ...}}")
        if not isinstance(message.get("content"), str):
            raise TypeError(f"the content of a message is {type(message.get('content')).__name__}, not text")
    return tuple(dict(message) for message in messages)


def finite(reward: Any) -> float:
    """The reward as a number. Raises ValueError for nan and infinity."""
    value = float(reward)
    if not math.isfinite(value):
        raise ValueError(f"the reward is {value}; give a finite number")
    return value
