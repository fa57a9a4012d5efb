"""The parts of a training stage, loaded from its recipe once, before the loop begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hone.base.settings import UserError
from hone.base.world import World
from hone.environments.make import make_episodes
from hone.learn.policy import Policy, Trainable
from hone.model.load import left_out
from hone.recipe.recipe import Recipe, RLStage
from hone.recipe.schedule import Phases
from hone.recipe.sections.model import ModelConfig
from hone.rewards import make_reward
from hone.rewards.base import Composed
from hone.rewards.config import RewardConfig
from hone.rewards.perplexity import Answerer
from hone.rollout import make_engine
from hone.rollout.answerer import load_answerer
from hone.rollout.exactness import check_policy
from hone.rollout.identity import Verified
from hone.rollout.prompts import Renderer
from hone.rollout.together import DistributedEngine
from hone.runs.run import Run
from hone.stages.signals import Signal, make_signal
from hone.stages.source import Sampler
from hone.tasks import make_task
from hone.tasks.base import Task
from hone.tasks.curriculum import Curriculum


@dataclass(frozen=True)
class Stage:
    """The parts of a stage that samples (`rl`, `distil`)."""

    recipe: Recipe
    model: ModelConfig  # path of its model
    phases: Phases[Recipe]
    world: World
    task: Task
    curriculum: Curriculum
    policy: Policy
    renderer: Renderer
    signal: Signal
    run: Run
    engine: Verified | DistributedEngine
    sampler: Sampler

    @classmethod
    def load(cls, recipe: Recipe, folder: Path, model: ModelConfig) -> Stage:
        """Load everything, so that errors in a recipe are raised before the first step.

        `model`: the current path of the stage's model; the run records the path in the recipe.
        """
        phases = Phases(recipe)
        start = phases.at(0, 0)
        world = World.from_env(recipe.parallel)
        task = make_task(recipe.task, recipe.seed)
        curriculum = Curriculum(task.problems("train"), recipe.seed, start.curriculum)
        policy = load_policy(phases, model, curriculum, world)
        signal = make_signal(recipe, recipe.teacher, folder, policy)
        renderer = Renderer(policy.tokenizer, recipe.prompt, task.system)
        answerer = load_frozen(phases, model, task.system) if recipe.stage == "rl" else None
        run = Run.open(folder, recipe, world)
        for kind, message in left_out(policy.model):
            run.writer.event(kind, message)
        engine = make_engine(recipe.rollout, policy, folder, run.writer.event)

        def reward(settings: RewardConfig) -> Composed:
            # In distillation, rewards are only recorded.
            return make_reward(settings if recipe.stage == "rl" else RewardConfig(), task, answerer)

        episodes = make_episodes(recipe, renderer, world)
        sampler = Sampler(phases, policy, curriculum, episodes, engine, reward, world)
        sampler.reward_of(start)
        return cls(recipe, model, phases, world, task, curriculum, policy, renderer, signal, run, engine, sampler)

    @property
    def title(self) -> str:
        return "RL" if self.recipe.stage == "rl" else self.recipe.stage

    def held_out_reward(self, settings: RLStage) -> Composed | None:
        """The reward that evaluations compute in addition to the accuracy; None if the stage does not learn from
        rewards."""
        return self.sampler.reward_of(settings) if self.recipe.stage == "rl" else None

    def state(self, synced: Mapping[str, float]) -> dict[str, float]:
        """Columns of the metrics that describe the run in a step: the check of the weights, and the hard resets before
        it."""
        resets = {"reset": float(len(self.policy.resets))} if self.recipe.stage == "rl" else {}
        return {**synced, **resets}


def load_policy(phases: Phases[Recipe], model: ModelConfig, curriculum: Curriculum, world: World) -> Policy:
    """The initial policy of a run; it keeps a reference if any phase has a KL penalty.

    Raises UserError if a later phase needs layers, targets or levels that do not exist.
    """
    start, all_phases = phases.at(0, 0), [phases.merged(lines) for lines in phases.sets()]
    for phase in all_phases:
        curriculum.check(phase.curriculum)
    value = start.algo.value if start.algo.advantage == "gae" else None
    trainable = Trainable(start.lora, start.layers, value, start.seed)
    reference = any(phase.algo.kl.coef for phase in all_phases)
    policy = Policy.load(model, start.optim, start.updates or 0, trainable, reference=reference, world=world)
    for phase in all_phases:
        policy.check(phase.layers, phase.lora)
    check_policy(policy)
    return policy


def load_frozen(phases: Phases[Recipe], model: ModelConfig, system: str) -> Answerer | None:
    """The answerer of the perplexity reward, if any phase uses it. Raises UserError if phases name different ones."""
    rewards = [phases.merged(lines).reward for lines in phases.sets()]
    asking = {r.perplexity.answerer: r for r in rewards if "perplexity" in r.parts}
    if len(asking) > 1:
        raise UserError(
            f"schedule: reward.perplexity.answerer is {' and then '.join(asking)}; a run has only one answerer: name "
            f"the same in every line, or use two stages"
        )
    return load_answerer(next(iter(asking.values()), rewards[0]), model, phases.recipe.prompt, system)
