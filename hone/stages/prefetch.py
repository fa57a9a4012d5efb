"""The loop with rollouts one step ahead: while the policy learns from one batch, a server samples the next.

    rollout: {engine: vllm, ahead: true}
    algo: {correction: {kind: tis}}

Step k learns from answers that were sampled with the weights of step k - 1: one update old, never more (step 0 and the
first step after a resume: none). The correction weighs them by the ratio of the policy's probabilities to the
sampler's, cut off at its cap (truncated importance sampling). Everything else is the loop of `hone.stages.loop`, whose parts it
uses.

    trainer     learn 0      learn 1      learn 2
    server   sample 0 | sample 1 | sample 2 | ...     each with the weights at its left bar
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hone.base.progress import Clock, Track
from hone.base.settings import UserError
from hone.base.world import World
from hone.learn.batches import prepare
from hone.learn.policy import Policy
from hone.measure.evaluate import Evaluator
from hone.model.lora import coverage
from hone.preflight.plan.batch import longest_prompt
from hone.preflight.plan.rehearse import rehearse
from hone.recipe.recipe import Recipe
from hone.recipe.schedule import Phases
from hone.recipe.sections.model import ModelConfig
from hone.recipe.sections.rollout import RolloutConfig
from hone.rewards import make_reward
from hone.rewards.base import Composed
from hone.rewards.config import RewardConfig
from hone.rollout import make_engine
from hone.rollout.engine import Engine
from hone.rollout.prompts import Renderer
from hone.runs.writer import Run
from hone.stages.loop import collect, load_frozen, load_policy, make_packer, record
from hone.stages.reset import announce, due, reset
from hone.tasks import make_task
from hone.tasks.curriculum import Course
from hone.types import Group


@dataclass(frozen=True, slots=True)
class Sampled:
    """The rollouts of one step."""

    settings: Recipe  # what they were sampled with, and are trained on with
    groups: list[Group]
    replaced: list[Group]
    seconds: dict[str, float]  # of the parts

    @property
    def oldest(self) -> int | None:
        """The oldest weights that an answer was sampled with; None: there are no answers."""
        return min((t.policy_version for group in self.groups for r in group.rollouts for t in r.turns), default=None)


@dataclass(frozen=True)
class Sampler:
    """Samples and rewards the groups of a step, with the settings that hold then; in another thread too."""

    phases: Phases[Recipe]
    policy: Policy
    course: Course
    renderer: Renderer
    engine: Engine
    make_reward: Callable[[RewardConfig], Composed]
    world: World
    rewards: dict[str, Composed] = field(default_factory=dict)

    def reward_of(self, settings: Recipe) -> Composed:
        key = settings.reward.model_dump_json()
        if key not in self.rewards:
            self.rewards[key] = self.make_reward(settings.reward)
        return self.rewards[key]

    def sample(self, step: int, progress: Track) -> Sampled:
        settings, clock = self.phases.at(step, len(self.policy.resets)), Clock()
        self.course.configure(settings.curriculum)
        reward = self.reward_of(settings)
        parts = (self.course, self.renderer, self.engine, reward, progress, clock, self.world)
        return Sampled(settings, *collect(settings, step, *parts), clock.seconds())


def train(recipe: Recipe, folder: Path, model: ModelConfig) -> None:
    """As `hone.stages.loop.train`. Raises UserError, too, if rollouts do not come within their bound."""
    phases = Phases(recipe)
    now = phases.at(0, 0)
    world = World.from_env(recipe.parallel)
    task = make_task(recipe.task, recipe.seed)
    course = Course(task.problems("train"), recipe.seed, now.curriculum)
    policy = load_policy(phases, model, course, world)
    renderer = Renderer(policy.tokenizer, recipe.prompt, task.system)
    frozen = load_frozen(phases, model, task.system)
    run = Run.open(folder, recipe.model_dump(mode="json"), recipe.checkpoint, recipe.seed, world)
    if (covered := coverage(policy.model)) is not None:
        run.event("lora", covered)
    engine = make_engine(recipe.rollout, policy, run.folder, run.event)

    sampler = Sampler(
        phases, policy, course, renderer, engine, lambda settings: make_reward(settings, task, frozen), world
    )
    sampler.reward_of(now)  # what is wrong with it shows before anything starts
    first = run.resume(policy, course)
    rehearse(run, recipe, model, policy, longest_prompt(course.problems, renderer))
    ahead = Ahead(bound(recipe.rollout, recipe.algo.refill_rounds))
    # What is last here ends first: the engine hangs up before the thread that waits for it is waited for.
    with run.interruptible(), ahead, closing(engine), run.track("RL", recipe.steps, first) as progress:
        evaluator = Evaluator(recipe, task, renderer, engine, progress, world)
        for step in range(first, recipe.steps + 1):
            clock = Clock()
            sampled = ahead.take()  # the engine is idle now
            clock.lap("wait")
            synced = engine.sync(policy, version=step)  # the only weight sync, verified
            clock.lap("sync")
            for label in evaluator.due(step):
                run.log_eval(step, label, *evaluator.evaluate(label))
            if step == recipe.steps:
                break
            clock.rest()
            sampled = sampled or sampler.sample(step, progress)  # of the first step there are none yet
            clock.lap("wait")
            if step + 1 < recipe.steps:
                ahead.begin(f"the rollouts of step {step + 1}", partial(sampler.sample, step + 1, progress))
            before, now = now, sampled.settings  # a line that begins with a reset is a step late here
            if now != before:
                announce(run, step, phases, len(policy.resets))
                policy.configure(now.optim, now.layers)
            groups, replaced = sampled.groups, sampled.replaced
            course.observe([*groups, *replaced])
            packer = make_packer(now, world)
            batch = prepare(groups, policy, policy.reference, now.algo, now.sampling, packer)
            stats = policy.update(batch.minibatches, now.algo, now.sampling.temperature)
            clock.lap("train")
            clock.beside({name: sampled.seconds[name] for name in ("generate", "reward")})
            staleness = 0 if sampled.oldest is None else step - sampled.oldest  # updates between sampler and policy
            state = {**synced, "reset": float(len(policy.resets)), **course.metrics(), "staleness": float(staleness)}
            run.log_prompts(step, course.taken(step), groups, replaced)
            note = record(run, now, step, groups, replaced, batch, stats, renderer, clock, state)
            run.log_costs(step, sampler.reward_of(now).costs())
            if why := due(recipe.reset, step + 1, recipe.steps, run, policy.resets):
                reset(run, step + 1, why, policy, phases, batch.minibatches)
            run.checkpoint(step + 1, policy, course, now=why is not None)
            progress.advance(note)
            run.stop_if_asked(step + 1)
    run.finish(policy, recipe.steps)


class Ahead:
    """One call that runs in another thread. Use as a context manager: what still runs at the end is waited for."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: the longest that anybody waits for a call."""
        self._seconds = seconds
        self._pool = ThreadPoolExecutor(1, "hone-ahead")
        self._running: tuple[str, Future[Sampled]] | None = None

    def begin(self, what: str, call: Callable[[], Sampled]) -> None:
        assert self._running is None, "one step ahead, no more"
        self._running = what, self._pool.submit(call)

    def take(self) -> Sampled | None:
        """What the call that was begun returns, or raises; None if there was none. Raises UserError after the bound."""
        if self._running is None:
            return None
        (what, future), self._running = self._running, None
        try:
            return future.result(self._seconds)
        except FutureTimeout:
            raise UserError(
                f"{what} did not come within {self._seconds:.0f} s, which is what the time-outs of the engine allow; "
                "look at its log"
            ) from None

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        if self._running is not None:
            self._running[1].add_done_callback(Future.exception)  # nobody will ask: the run is ending
        self._pool.shutdown(wait=True, cancel_futures=True)


def bound(rollout: RolloutConfig, refill_rounds: int) -> float:
    """Seconds after which rollouts must be there, with every restart and every round that may happen on the way."""
    server = rollout.vllm if rollout.engine == "vllm" else rollout.sglang
    once = server.request_timeout + server.sync_timeout + server.start_timeout
    return (1 + refill_rounds) * (1 + server.restarts) * once
