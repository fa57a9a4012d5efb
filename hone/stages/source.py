"""When the groups of a step are sampled: in the step (`Now`), or one update ahead (`Prefetch`).

    Now        sample 0, learn 0, sample 1, learn 1, ...

    Prefetch   trainer     learn 0      learn 1      learn 2
               server   sample 0 | sample 1 | sample 2 | ...     each with the weights at its left bar

With `rollout: {engine: vllm, ahead: true}` a server samples step k with the weights of step k - 1, one update old and
never more (the first step, and the first after a resume, with the current ones). `algo.correction` weighs those answers
by the ratio of the policy's probabilities to the sampler's, capped (truncated importance sampling).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Protocol

from hone.base import streams
from hone.base.progress import Clock
from hone.base.settings import UserError
from hone.base.world import World
from hone.environments.play import Episodes
from hone.learn.advantages import group_rewards, is_zero_variance
from hone.learn.policy import Policy
from hone.recipe.recipe import RLStage
from hone.recipe.schedule import Phases
from hone.rewards.base import Composed, reward_groups
from hone.rewards.config import RewardConfig
from hone.rollout.engine import Engine
from hone.tasks.curriculum import Curriculum
from hone.types import Group


@dataclass(frozen=True, slots=True)
class Sampled:
    """The rewarded groups of one step, and how they were sampled."""

    step: int
    settings: RLStage  # of sampling and of training on them
    groups: list[Group]  # to train on
    replaced: list[Group]  # without a reward difference, replaced by others
    drawn: list[list[str]]  # ids of the problems, by round
    shares: Mapping[str, float]  # curriculum/LEVEL -> share of the level
    costs: Mapping[str, float]  # of the reward, such as requests to a judge
    seconds: Mapping[str, float]  # seconds by part, in which the loop waited
    beside: Mapping[str, float] = field(default_factory=dict)  # seconds by part, in which the loop continued
    staleness: int | None = None  # updates between the oldest weights that sampled and the policy; None: always 0

    @property
    def everyone(self) -> list[Group]:
        return [*self.groups, *self.replaced]


class Source(Protocol):
    """Samples the groups of a step. Use as a context manager around the loop."""

    def settle(self) -> None:
        """Wait until no sampling is in flight, so that the weights may change."""
        ...

    def groups(self, step: int) -> Sampled:
        """The groups of `step`; steps are requested once each, in order."""
        ...


@dataclass(frozen=True)
class Sampler:
    """Draws the problems of a step, samples a group of answers to each, and rewards them. Used by one thread at a
    time."""

    phases: Phases[RLStage]
    policy: Policy  # whose hard resets determine which settings are active
    curriculum: Curriculum
    episodes: Episodes
    engine: Engine
    make_reward: Callable[[RewardConfig], Composed]
    world: World
    rewards: dict[str, Composed] = field(default_factory=dict)  # by their settings

    def reward_of(self, settings: RLStage) -> Composed:
        key = settings.reward.model_dump_json()
        if key not in self.rewards:
            self.rewards[key] = self.make_reward(settings.reward)
        return self.rewards[key]

    def sample(self, step: int, progress: Callable[[int, int], None]) -> Sampled:
        """Sample and reward the groups of a step.

        With `algo.refill_rounds`, groups without a reward difference are replaced by groups of other problems, in at
        most that many rounds (dynamic sampling: DAPO, arXiv:2503.14476).
        """
        settings, clock = self.phases.at(step, len(self.policy.resets)), Clock()
        self.curriculum.configure(settings.curriculum)
        kept: list[Group] = []
        replaced: list[Group] = []
        for round in range(1 + settings.algo.refill_rounds):
            groups = self._round(settings, step, round, [*kept, *replaced], clock, progress)
            uniform = [settings.algo.refill_rounds > 0 and is_zero_variance(group_rewards(g)) for g in groups]
            kept += [group for group, same in zip(groups, uniform, strict=True) if not same]
            replaced += [group for group, same in zip(groups, uniform, strict=True) if same]
            if not groups or len(kept) == settings.prompts_per_step:
                break
        return Sampled(
            step,
            settings,
            kept,
            replaced,
            drawn=self.curriculum.taken(step),
            shares=self.curriculum.metrics(),
            costs=self.reward_of(settings).costs(),
            seconds=clock.parts,
        )

    def _round(
        self,
        settings: RLStage,
        step: int,
        round: int,
        before: Sequence[Group],
        clock: Clock,
        progress: Callable[[int, int], None],
    ) -> list[Group]:
        """The groups of one round: the first draws all prompts, a refill replaces the missing ones by new problems."""
        if round == 0:
            problems = self.curriculum.draw(step, settings.prompts_per_step)
        else:
            missing = settings.prompts_per_step - sum(not is_zero_variance(group_rewards(g)) for g in before)
            problems = self.curriculum.draw_others(step, round, missing, without={g.problem.id for g in before})
        if not problems:  # the curriculum has no other problems
            return []
        answers = self.episodes.sample(
            problems,
            self.engine,
            settings.sampling,
            samples=settings.samples_per_prompt,
            seed=streams.answers("step", settings.seed, step, round),
            progress=progress,
        )
        clock.lap("generate")
        groups = reward_groups(problems, answers, self.reward_of(settings), self.world)
        clock.lap("reward")
        return groups


class Now:
    """Samples in the step itself, with the current weights."""

    def __init__(self, sampler: Sampler, progress: Callable[[int, int], None]) -> None:
        self._sampler, self._progress = sampler, progress

    def settle(self) -> None:
        """Returns at once: nothing is in flight between two calls of `groups`."""

    def groups(self, step: int) -> Sampled:
        sampled = self._sampler.sample(step, self._progress)
        self._sampler.curriculum.observe(sampled.everyone)
        return sampled


class Prefetch:
    """Samples step k + 1 in a thread while the policy learns step k."""

    def __init__(self, sampler: Sampler, progress: Callable[[int, int], None], steps: int, timeout: float) -> None:
        """`steps`: of the run: none is started after the last. `timeout`: seconds for the sampling of a step."""
        self._sampler, self._progress, self._steps, self._timeout = sampler, progress, steps, timeout
        self._pool = ThreadPoolExecutor(1, "hone-prefetch")
        self._running: tuple[int, Future[Sampled]] | None = None
        self._ready: Sampled | None = None
        self._waited = 0.0

    def settle(self) -> None:
        """Wait for the step in flight. Raises what its sampling raised, and UserError after the time-out."""
        if self._running is None:
            return
        started = perf_counter()
        (step, future), self._running = self._running, None
        try:
            self._ready = future.result(self._timeout)
        except FutureTimeout:
            raise UserError(
                f"the rollouts of step {step} took more than {self._timeout:.0f} s, which the time-outs of the engine "
                f"allow; see its log"
            ) from None
        self._waited = perf_counter() - started

    def groups(self, step: int) -> Sampled:
        """The groups of `step`; the sampling of the next step starts before this returns."""
        self.settle()
        sampled, beside = self._ready, True
        if sampled is None:  # the first step: nothing was started before it
            sampled, beside = self._sampler.sample(step, self._progress), False
        assert sampled.step == step, "steps are requested in order"
        self._ready = None
        # Observed before the next draw, so that an adaptive curriculum draws the same however long sampling takes.
        self._sampler.curriculum.observe(sampled.everyone)
        if step + 1 < self._steps:
            self._running = step + 1, self._pool.submit(self._sampler.sample, step + 1, self._progress)
        versions = [t.policy_version for g in sampled.groups for r in g.rollouts for t in r.turns]
        sampled = replace(sampled, staleness=step - min(versions) if versions else 0)
        if not beside:
            return sampled
        waited, self._waited = self._waited, 0.0
        return replace(sampled, seconds={"wait": waited}, beside=sampled.seconds)

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._running is not None:
            self._running[1].add_done_callback(Future.exception)  # the run is ending: its result is not needed
        self._pool.shutdown(wait=True, cancel_futures=True)


def make_source(
    recipe: RLStage, sampler: Sampler, progress: Callable[[int, int], None]
) -> AbstractContextManager[Source]:
    """The source that `rollout.ahead` selects."""
    if recipe.rollout.ahead:
        return Prefetch(sampler, progress, recipe.steps, time_limit(recipe))
    return nullcontext(Now(sampler, progress))


def time_limit(recipe: RLStage) -> float:
    """Time limit for the rollouts of a step, in seconds, including all possible restarts, refills and turns."""
    server = recipe.rollout.server
    if server is None:
        raise ValueError(f"rollout.ahead: needs a server, and rollout.engine is {recipe.rollout.engine}")
    once = server.request_timeout + server.sync_timeout + server.start_timeout
    seconds = (1 + server.restarts) * once
    if recipe.has_turns:
        environment, episodes = recipe.environment, recipe.prompts_per_step * recipe.samples_per_prompt
        calls = math.ceil(episodes / environment.workers) * environment.timeout  # if each takes as long as it may
        seconds = environment.max_turns * (seconds + calls) + 2 * calls  # to begin and to end
    return (1 + recipe.algo.refill_rounds) * seconds
