"""One episode while it is played, and the prompts of the next turns of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np

from hone.base import streams
from hone.environments.base import Environment, Message, ModelCall, Observation, checked, finite
from hone.environments.conversation import Conversation, Histories
from hone.environments.formats import Reading
from hone.environments.pool import Failed
from hone.recipe.sections.rollout import SamplingConfig
from hone.rollout.turns import Prompt, Speaker
from hone.types import End, Episode, Problem, Rollout, Step, Turn


@dataclass
class Game:
    """One episode while it is played."""

    problem: Problem
    place: tuple[int, int]  # (p, g): which problem, which sample
    environment: Environment | None  # None: another process runs it
    turns: list[Turn] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    text: str = ""  # of the last turn
    end: End | None = None
    note: str | None = None
    reward: float | None = None
    ready: bool = True  # its next prompt is known, and has not been submitted
    since: float = 0.0  # when the turn that is being sampled was submitted
    saying: float = 0.0  # seconds of the last turn

    def begin(self, call: ModelCall, conversation: Conversation, read: Callable[[str], Reading]) -> None:
        self.call, self.conversation, self.read = call, copy(conversation), read
        self.histories = Histories(conversation.renderer)  # of programs

    def submit(self) -> None:
        self.ready, self.since = False, perf_counter()

    def prompt(self, stream: int, speakers: tuple[Speaker, ...]) -> Prompt:
        return Prompt(self.conversation.ids, stream, speakers, self.call.max_tokens, self.call.stop)

    def noted(self, sampling: SamplingConfig) -> dict[str, float]:
        """Of a program's call, what is recorded with its answer: a cut, and settings that were not followed."""
        differing = any(value != getattr(sampling, name) for name, value in self.call.other.items())
        numbers = {"cut": self.turns[-1].finish == "length", "other_sampling": differing}
        return {name: 1.0 for name, holds in numbers.items() if holds}

    def say(self, turn: Turn, text: str) -> None:
        self.turns.append(turn)
        self.text, self.saying = text, perf_counter() - self.since

    def go_on(self, step: Step) -> None:
        """Another turn follows this step."""
        self.conversation.append(self.turns[-1], step.message, step.replies)
        self.ready = True

    def follow(self, step: Step, call: ModelCall, read: Callable[[str], Reading]) -> None:
        """A program's next call follows this step. Raises UserError where the chat template refuses it."""
        self.histories.answered(self.conversation, self.turns[-1], step.message)
        self.call, self.read = call, read
        self.conversation = self.histories.next(call.messages, call.tools)
        self.ready = True

    def stop(self, end: End, note: str | None = None) -> None:
        self.end, self.note, self.ready = end, note, False

    def fail(self, failed: Failed) -> None:
        self.stop("environment_timeout" if failed.kind == "timeout" else "environment_error", failed.why)

    def rollout(self, version: int) -> Rollout:
        """The finished rollout. `version`: of the policy, for an episode that failed before its first turn."""
        assert self.end is not None
        instance = getattr(self.environment, "instance", self.environment)
        episode = Episode(self.end, tuple(self.steps), self.reward, self.note, instance)
        nothing = Turn(self.conversation.ids, np.empty(0, np.int64), np.empty(0, np.float32), "abort", version, read=0)
        return Rollout(self.problem.id, self.place[1], tuple(self.turns) or (nothing,), self.text, episode)

    # --- what runs in a thread: the environment's part ----------------------------------------------------------------

    def reset(self, seed: int) -> ModelCall:
        assert self.environment is not None
        opening = self.environment.reset(self.problem, streams.environment(seed, self.problem.id))
        if isinstance(opening, ModelCall):
            return opening
        return ModelCall(checked(opening or self.problem.messages), tuple(self.environment.tools))

    def step(self, message: Message) -> tuple[Observation, float]:
        """The answer, and how many seconds it took."""
        assert self.environment is not None
        started = perf_counter()
        observation = self.environment.step(message)
        if not isinstance(observation, Observation):
            raise TypeError(f"step returned {type(observation).__name__}, not an Observation")
        if not observation.done and not observation.messages:
            raise ValueError("step returned no message, and the episode is not done")
        return replace(observation, messages=checked(observation.messages)), perf_counter() - started

    def finish(self) -> float | None:
        assert self.environment is not None
        reward = self.environment.reward()
        self.environment.close()
        return None if reward is None else finite(reward)

    def close(self) -> None:
        assert self.environment is not None
        self.environment.close()


def active(games: Sequence[Game]) -> list[Game]:
    return [game for game in games if game.end is None]


def first_prompts(games: Sequence[Game], samples: int) -> list[Prompt]:
    """Samples of a problem that begin alike are sampled from one prompt."""
    groups: dict[int, list[Game]] = {}
    for game in active(games):
        groups.setdefault(game.place[0], []).append(game)
    prompts = []
    for p, group in groups.items():
        if len(group) == samples and _same_prompt(group):
            prompts.append(group[0].prompt(p, tuple(game.place for game in group)))
            for game in group:
                game.submit()
    return [*prompts, *next_prompts(games)]


def next_prompts(games: Sequence[Game]) -> list[Prompt]:
    """The next prompts of the games that are ready."""
    prompts = []
    for game in games:
        if game.ready:
            game.submit()
            stream = streams.turn(*game.place, len(game.turns))
            prompts.append(game.prompt(stream, (game.place,)))
    return prompts


def _same_prompt(games: Sequence[Game]) -> bool:
    first = games[0]
    return all(
        np.array_equal(game.conversation.ids, first.conversation.ids)
        and (game.call.max_tokens, game.call.stop) == (first.call.max_tokens, first.call.stop)
        for game in games[1:]
    )
