"""Plays episodes: the engine samples a turn, it is parsed, the environment answers, until the episode ends.

    episodes = Episodes(renderer)                                  # tasks that are answered in one turn
    episodes = make_episodes(recipe, renderer)                     # with the recipe's environment and tools
    episodes.sample(problems, engine, recipe.sampling, samples=8, seed=7)       # [P] tuples of [G] rollouts

All episodes of a batch advance together, turn by turn. Random numbers depend only on (seed, problem, sample, turn), and
batches only on the sampled turns and replies, so an interrupted run continues bit for bit. Of several processes each
runs the environments of its own problems, and all get all answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from hone.base import streams
from hone.base.world import ALONE, World
from hone.environments.base import Environment, Message, Observation, Schema, SingleTurn
from hone.environments.conversation import Conversation
from hone.environments.formats import Reading, reader_of
from hone.environments.pool import Failed, Pool
from hone.recipe.sections.environment import EnvironmentConfig
from hone.recipe.sections.rollout import SamplingConfig
from hone.rollout.engine import Engine
from hone.rollout.prompts import Renderer
from hone.types import End, Episode, Problem, Rollout, Step, Turn

Progress = Callable[[int, int], None]


@dataclass
class _Game:
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

    def begin(self, conversation: Conversation, read: Callable[[str], Reading]) -> None:
        self.conversation, self.read = copy(conversation), read

    def stop(self, end: End) -> None:
        self.end = end

    def fail(self, failed: Failed) -> None:
        self.end, self.note = "environment_timeout" if failed.kind == "timeout" else "environment_error", failed.why

    def rollout(self, version: int) -> Rollout:
        """The finished rollout. `version`: of the policy, for an episode that failed before its first turn."""
        assert self.end is not None
        instance = getattr(self.environment, "instance", self.environment)
        episode = Episode(self.end, tuple(self.steps), self.reward, self.note, instance)
        nothing = Turn(self.conversation.ids, np.empty(0, np.int64), np.empty(0, np.float32), "abort", version)
        return Rollout(self.problem.id, self.place[1], tuple(self.turns) or (nothing,), self.text, episode)


Opening = tuple[tuple[Message, ...], tuple[Schema, ...]]  # the messages that begin an episode, the tools offered


@dataclass(frozen=True)
class Episodes:
    """Samples rollouts, with the renderer of the prompts and the environment that answers."""

    renderer: Renderer
    make: Callable[[], Environment] = SingleTurn
    config: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    world: World = ALONE

    def sample(
        self,
        problems: Sequence[Problem],
        engine: Engine,
        sampling: SamplingConfig,
        *,
        samples: int,
        seed: int,
        progress: Progress | None = None,
    ) -> list[tuple[Rollout, ...]]:
        """Sample `samples` rollouts of each problem; returns [P] tuples of [G]."""
        games = self._open(problems, samples, seed)
        while active := _active(games):
            report = None if progress is None else _shifted(progress, len(games) - len(active), len(games))
            for game, turn in zip(active, _next_turns(active, engine, sampling, samples, seed, report), strict=True):
                game.turns.append(turn)
                game.text = self.renderer.text(turn.completion_ids)
            self._answer(active)
            self._end_full(_active(games), engine, sampling)
        self._finish(games)
        version = max((turn.policy_version for game in games for turn in game.turns), default=0)
        rollouts = [game.rollout(version) for game in games]
        return [tuple(rollouts[p * samples : (p + 1) * samples]) for p in range(len(problems))]

    # --- parts of an episode ------------------------------------------------------------------------------------------

    def _open(self, problems: Sequence[Problem], samples: int, seed: int) -> list[_Game]:
        """Begin all episodes. The samples of a problem have the same seed, so that they begin alike."""
        own = set(self.world.share(range(len(problems))))
        games = [
            _Game(problem, (p, g), self.make() if p in own else None)
            for p, problem in enumerate(problems)
            for g in range(samples)
        ]

        def reset(game: _Game) -> Opening:
            assert game.environment is not None
            messages = game.environment.reset(game.problem, streams.environment(seed, game.problem.id))
            return _checked(messages or game.problem.messages), tuple(game.environment.tools)

        known: dict[str, tuple[Conversation, Callable[[str], Reading]]] = {}
        for game, opening in zip(games, self._each(games, reset), strict=True):
            if isinstance(opening, Failed):
                game.fail(opening)
                opening = game.problem.messages, ()
            messages, tools = opening
            key = repr(opening)
            if key not in known:
                read = reader_of(self.renderer.tokenizer, tools, self.renderer.is_raw)
                known[key] = Conversation(self.renderer, messages, tools), read
            game.begin(*known[key])
        return games

    def _answer(self, games: Sequence[_Game]) -> None:
        """Read the last turn of every game, and let its environment answer."""
        waiting: list[tuple[_Game, Message]] = []
        for game in games:
            if game.turns[-1].finish != "stop":
                game.steps.append(Step({"role": "assistant", "content": game.text}))
                game.stop("max_tokens")
                continue
            reading = game.read(game.text)
            if reading.error is None:
                waiting.append((game, reading.message))
            else:
                self._continue(game, _complaint(reading))
        of_game = {game.place: message for game, message in waiting}

        def step(game: _Game) -> Observation:
            assert game.environment is not None
            observation = game.environment.step(of_game[game.place])
            if not isinstance(observation, Observation):
                raise TypeError(f"step returned {type(observation).__name__}, not an Observation")
            if not observation.done and not observation.messages:
                raise ValueError("step returned no message, and the episode is not done")
            return replace(observation, messages=_checked(observation.messages))

        for (game, message), answer in zip(waiting, self._each([game for game, _ in waiting], step), strict=True):
            if isinstance(answer, Failed):
                game.steps.append(Step(message))
                game.fail(answer)
                continue
            self._continue(game, Step(message, answer.messages, answer.reward, parts=dict(answer.parts)), answer.done)

    def _continue(self, game: _Game, step: Step, done: bool = False) -> None:
        """Add a step; the next prompt is made unless the episode ends with it."""
        game.steps.append(step)
        if done:
            game.stop("done")
        elif step.error is not None and self.config.malformed == "end":
            game.stop("malformed_call")
        elif len(game.turns) >= self.config.max_turns:
            game.stop("max_turns")
        else:
            game.conversation.append(game.turns[-1], step.message, step.replies)

    def _end_full(self, games: Sequence[_Game], engine: Engine, sampling: SamplingConfig) -> None:
        """End the games in whose conversations another turn might not fit."""
        if not games:
            return
        limits = [limit for limit in (self.config.max_tokens, engine.context) if limit is not None]
        for game in games:
            if limits and len(game.conversation.ids) + sampling.max_tokens > min(limits):
                game.stop("max_tokens")

    def _finish(self, games: Sequence[_Game]) -> None:
        """Ask for the rewards of the episodes, and close their environments."""
        whole = [game for game in games if game.note is None]

        def finish(game: _Game) -> float | None:
            assert game.environment is not None
            reward = game.environment.reward()
            game.environment.close()
            return None if reward is None else _number(reward)

        for game, reward in zip(whole, self._each(whole, finish), strict=True):
            if isinstance(reward, Failed):
                game.fail(reward)
            else:
                game.reward = reward

    def _each(self, games: Sequence[_Game], call: Callable[[_Game], Any]) -> list[Any]:
        """The results of the call for every game, a `Failed` where there is none; run where the environments are."""
        own = [game for game in games if game.environment is not None]
        if all(getattr(game.environment, "instant", False) for game in own):
            results = [call(game) for game in own]
        else:
            results = self._pool.run([partial(call, game) for game in own])
        return self.world.gather(results, "answers of environments")

    @cached_property
    def _pool(self) -> Pool:
        return Pool(self.config.workers, self.config.timeout)


def _active(games: Sequence[_Game]) -> list[_Game]:
    return [game for game in games if game.end is None]


def _next_turns(
    games: Sequence[_Game],
    engine: Engine,
    sampling: SamplingConfig,
    samples: int,
    seed: int,
    progress: Progress | None,
) -> list[Turn]:
    """The next turn of every game. Samples of a problem that begin alike are sampled from one prompt."""
    first = not games[0].turns
    alike: dict[int, list[_Game]] = {}
    for game in games if first else ():
        alike.setdefault(game.place[0], []).append(game)
    together = [p for p, group in alike.items() if len(group) == samples and _same_prompt(group)]
    shared = {p: alike[p] for p in together}
    turns: dict[tuple[int, int], Turn] = {}
    if shared:
        prompts = [group[0].conversation.ids for group in shared.values()]
        sampled = engine.generate(
            prompts, sampling, samples=samples, seed=seed, progress=progress, stream_ids=list(shared)
        )
        turns |= {(p, g): turn for p, group in zip(shared, sampled, strict=True) for g, turn in enumerate(group)}
    if rest := [game for game in games if game.place not in turns]:
        numbers = [streams.turn(*game.place, len(game.turns)) for game in rest]
        prompts = [game.conversation.ids for game in rest]
        sampled = engine.generate(prompts, sampling, samples=1, seed=seed, progress=progress, stream_ids=numbers)
        turns |= {game.place: turn for game, (turn,) in zip(rest, sampled, strict=True)}
    return [turns[game.place] for game in games]


def _same_prompt(games: Sequence[_Game]) -> bool:
    return all(np.array_equal(game.conversation.ids, games[0].conversation.ids) for game in games[1:])


def _complaint(reading: Reading) -> Step:
    """The answer to a tool call that cannot be read."""
    text = f"Error: the tool call could not be read: {reading.error}"
    return Step(reading.message, ({"role": "user", "content": text},), error=reading.error)


def _checked(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages. Raises TypeError for an entry that is not a message."""
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TypeError(f"{message!r:.80} is not a message: give {{'role': ..., 'content': ...}}")
        if not isinstance(message.get("content"), str):
            raise TypeError(f"the content of a message is {type(message.get('content')).__name__}, not text")
    return tuple(dict(message) for message in messages)


def _number(reward: Any) -> float:
    value = float(reward)
    if not math.isfinite(value):
        raise ValueError(f"the reward is {value}; give a finite number")
    return value


def _shifted(progress: Progress, before: int, total: int) -> Progress:
    return lambda done, _: progress(before + done, total)
