"""Plays episodes: the engine samples a turn, it is parsed, the environment answers, until the episode ends.

    episodes = Episodes(renderer)                                  # tasks that are answered in one turn
    episodes = make_episodes(recipe, renderer)                     # with the recipe's environment and tools
    episodes.sample(problems, engine, recipe.sampling, samples=8, seed=7)       # [P] tuples of [G] rollouts

Environments answer while the engine goes on with other episodes, until as many answers are missing as turns are being
sampled; then all of these answers are waited for. So batches depend only on the sampled turns and replies, random
numbers only on (seed, problem, sample, turn), and an interrupted run continues bit for bit. Of several processes each
plays the episodes of its own problems; with one server for all of them, each runs the environments of its own problems
between common turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from hone.base.settings import UserError
from hone.base.world import ALONE, World
from hone.environments.base import Environment, Message, ModelCall, SingleTurn
from hone.environments.chat import answer_message, told
from hone.environments.conversation import Conversation
from hone.environments.formats import Reading, complaint, reader_of
from hone.environments.game import Game, active, first_prompts, next_prompts
from hone.environments.pool import Failed, Here, Pool
from hone.recipe.sections.environment import EnvironmentConfig
from hone.recipe.sections.rollout import SamplingConfig
from hone.rollout.engine import Engine
from hone.rollout.prompts import Renderer
from hone.rollout.together import Divides
from hone.rollout.turns import open_turns
from hone.types import Problem, Rollout, Step

Progress = Callable[[int, int], None]
_KILLING = 30.0  # seconds


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A message that an environment is to answer; `ticket` None: another process does."""

    game: Game
    message: Message
    error: str | None  # why a tool call in it could not be read
    ticket: int | None


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
        batch = dict(enumerate(problems))
        if not isinstance(engine, Divides) or not engine.divided:
            return self._sample(batch, engine, sampling, samples, seed, progress)
        # Each process plays its own share, independently of the others.
        alone = replace(self, world=ALONE)
        mine: list[tuple[Rollout, ...]] = []

        def play(own: Engine) -> list[tuple[Rollout, ...]]:
            share = {p: batch[p] for p in self.world.share(list(batch))}
            mine[:] = alone._sample(share, own, sampling, samples, seed, progress)
            return mine

        parts = engine.on_each(play, "the episodes of the others")
        parts[self.world.rank] = mine  # with their environments, which are not sent
        return [group for part in parts for group in part]

    def _sample(
        self,
        problems: Mapping[int, Problem],
        engine: Engine,
        sampling: SamplingConfig,
        samples: int,
        seed: int,
        progress: Progress | None,
    ) -> list[tuple[Rollout, ...]]:
        """As `sample`, for problems given by their places in the whole batch, which determine their random numbers."""
        games = self._games(problems, samples)
        limit = self._longest_prompt(engine, sampling) if self._has_turns else None
        play = _Play(self.renderer, self.config, self.world, self._runner(games), limit, sampling)
        of_place = {game.place: game for game in games}
        play.open(games, seed)

        def report(ended: int) -> None:
            if progress is not None:
                progress(len(games) - len(active(games)) + ended, len(games))

        with open_turns(engine, sampling, seed, keep=self._has_turns, progress=report) as turns:
            turns.submit(first_prompts(games, samples))
            while active(games):
                ended = []
                for place, turn in turns.ended():
                    of_place[place].say(turn, self.renderer.text(turn.completion_ids))
                    ended.append(of_place[place])
                settled = play.after(ended, turns.running)
                for game in settled:
                    if game.end is not None:
                        turns.forget(game.place)
                turns.submit(next_prompts(settled))
        play.finish(games)
        version = max((turn.policy_version for game in games for turn in game.turns), default=0)
        rollouts = [game.rollout(version) for game in games]
        return [tuple(rollouts[i * samples : (i + 1) * samples]) for i in range(len(problems))]

    def _games(self, problems: Mapping[int, Problem], samples: int) -> list[Game]:
        own = set(self.world.share(list(problems)))
        return [
            Game(problem, (p, g), self.make() if p in own else None)
            for p, problem in problems.items()
            for g in range(samples)
        ]

    def _longest_prompt(self, engine: Engine, sampling: SamplingConfig) -> int | None:
        """The longest prompt after which another turn fits; None: there is no limit."""
        limits = [limit for limit in (self.config.max_tokens, engine.context) if limit is not None]
        return min(limits) - sampling.max_tokens if limits else None

    def _runner(self, games: Sequence[Game]) -> Here | Pool:
        own = [game.environment for game in games if game.environment is not None]
        return Here() if all(environment.instant for environment in own) else self._pool

    @property
    def _has_turns(self) -> bool:
        """Whether an episode may have a second turn."""
        return self.make is not SingleTurn and self.config.max_turns > 1

    @cached_property
    def _pool(self) -> Pool:
        # A program or container bounds its own waiting, and is killed after it: that takes a moment more.
        return Pool(self.config.workers, self.config.timeout + (_KILLING if self.config.is_outside else 0.0))


@dataclass
class _Play:
    """What happens between the turns of a batch of episodes. `limit`: the longest prompt that may have another turn."""

    renderer: Renderer
    config: EnvironmentConfig
    world: World
    runner: Here | Pool
    limit: int | None
    sampling: SamplingConfig
    waiting: list[_Waiting] = field(default_factory=list)  # whose environments have begun to answer

    def open(self, games: Sequence[Game], seed: int) -> None:
        """Begin all episodes. The samples of a problem have the same seed, so that they begin alike."""
        known: dict[str, tuple[Conversation, Callable[[str], Reading]]] = {}
        openings = self._each(games, lambda game: game.reset(seed))
        for game, opening in zip(games, openings, strict=True):
            call = ModelCall(game.problem.messages) if isinstance(opening, Failed) else opening
            key = repr((call.messages, call.tools))
            try:
                if key not in known:
                    known[key] = Conversation(self.renderer, call.messages, call.tools), self._reader(call)
                game.begin(call, *known[key])
            except UserError as error:  # the chat template refuses what a program sent
                if not self.config.is_program:
                    raise
                game.begin(call, Conversation(self.renderer, game.problem.messages), self._reader(call))
                opening = Failed("error", str(error))
            length = len(game.conversation.ids)
            if self.config.is_program and self.limit is not None and length > self.limit:
                opening = Failed("error", f"the first prompt has {length} tokens, and at most {self.limit} leave room")
            if isinstance(opening, Failed):
                game.fail(opening)

    def after(self, ended: Sequence[Game], running: int) -> list[Game]:
        """Read the last turns of these games, and let their environments answer.

        Returns the games that have ended or have a next prompt. `running`: turns of others that are being sampled.
        """
        self.waiting += self._ask(ended)
        settled = [game for game in ended if game.ready or game.end is not None]
        if isinstance(self.runner, Here) or len(self.waiting) >= running:
            settled += self._hear()
        for game in settled:
            if game.ready and self.limit is not None and len(game.conversation.ids) > self.limit:
                game.stop("max_tokens")
        return settled

    def finish(self, games: Sequence[Game]) -> None:
        """Ask for the rewards of the episodes, and close their environments."""
        whole = [game for game in games if game.note is None]
        for game, reward in zip(whole, self._each(whole, Game.finish), strict=True):
            if isinstance(reward, Failed):
                game.fail(reward)
            else:
                game.reward = reward
        if self.config.is_outside:
            self._each([game for game in games if game.note is not None], Game.close)

    def _ask(self, ended: Sequence[Game]) -> list[_Waiting]:
        """Read the last turns; returns those that environments have begun to answer."""
        read: list[tuple[Game, Message, str | None]] = []
        is_program = self.config.is_program
        for game in ended:
            if game.turns[-1].finish != "stop" and not is_program:
                game.steps.append(Step({"role": "assistant", "content": game.text}, seconds=(game.saying, 0.0)))
                game.stop("max_tokens")
                continue
            reading = game.read(game.text)
            if is_program and (reading.error is None or self.config.malformed == "reply"):
                read.append((game, answer_message(game.text, reading, game.call, len(game.turns)), reading.error))
            elif reading.error is None:
                read.append((game, reading.message, None))
            else:
                self._continue(game, replace(complaint(reading), seconds=(game.saying, 0.0)))
        calls = [
            partial(game.step, told(message, game.turns[-1]) if is_program else message)
            for game, message, _ in read
            if game.environment is not None
        ]
        tickets = iter(self.runner.start(calls))
        return [_Waiting(*one, None if one[0].environment is None else next(tickets)) for one in read]

    def _hear(self) -> list[Game]:
        """Wait for the answers of environments, and add them to their conversations."""
        waiting, self.waiting = sorted(self.waiting, key=lambda one: one.game.place), []  # by process
        own = self.runner.results([one.ticket for one in waiting if one.ticket is not None])
        for one, answer in zip(waiting, self.world.gather(own, "answers of environments"), strict=True):
            if isinstance(answer, Failed):
                waited = self.config.timeout if answer.kind == "timeout" else 0.0
                one.game.steps.append(Step(one.message, seconds=(one.game.saying, waited)))
                one.game.fail(answer)
                continue
            observation, took = answer
            times = one.game.saying, took
            parts = {**observation.parts, **(one.game.noted(self.sampling) if self.config.is_program else {})}
            step = Step(one.message, observation.messages, observation.reward, one.error, parts, seconds=times)
            self._continue(one.game, step, observation.done, observation.call)
        return [one.game for one in waiting]

    def _continue(self, game: Game, step: Step, done: bool = False, call: ModelCall | None = None) -> None:
        """Add a step; the next prompt is made unless the episode ends with it."""
        game.steps.append(step)
        if done:
            game.stop("done")
        elif step.error is not None and self.config.malformed == "end":
            game.stop("malformed_call")
        elif len(game.turns) >= self.config.max_turns:
            game.stop("max_turns")
        elif call is None:
            game.go_on(step)
        else:
            try:
                game.follow(step, call, self._reader(call))
            except UserError as error:  # as in `open`
                game.fail(Failed("error", str(error)))

    def _reader(self, call: ModelCall) -> Callable[[str], Reading]:
        return reader_of(self.renderer.tokenizer, call.tools, self.renderer.is_raw)

    def _each(self, games: Sequence[Game], call: Callable[[Game], Any]) -> list[Any]:
        """The results of the call for every game, a `Failed` where there is none; run where the environments are."""
        own = [partial(call, game) for game in games if game.environment is not None]
        return self.world.gather(self.runner.run(own), "answers of environments")
