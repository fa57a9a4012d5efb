"""From problems to groups: render, generate, reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hone.base.world import ALONE, World
from hone.recipe.sections.rollout import SamplingConfig
from hone.rewards.base import BatchRewardFn, RewardFn
from hone.rollout.engine import Engine
from hone.rollout.prompts import Renderer
from hone.types import Group, Problem, Rollout


def rollouts(
    problems: Sequence[Problem],
    renderer: Renderer,
    engine: Engine,
    sampling: SamplingConfig,
    *,
    samples: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[tuple[Rollout, ...]]:
    """`samples` answers to each problem, as [P] tuples of [G]."""
    prompts = [renderer.prompt_ids(p) for p in problems]
    turns = engine.generate(prompts, sampling, samples=samples, seed=seed, progress=progress)
    return [
        tuple(
            Rollout(problem.id, index, (turn,), renderer.text(turn.completion_ids)) for index, turn in enumerate(group)
        )
        for problem, group in zip(problems, turns, strict=True)
    ]


def score(
    problems: Sequence[Problem], answers: Sequence[tuple[Rollout, ...]], reward: RewardFn, world: World = ALONE
) -> list[Group]:
    """Rewards: of all groups at once if the reward can, else a group at a time; the processes share the groups."""
    return world.gather(_scored(world.share(problems), world.share(answers), reward), "rewards")


def _scored(problems: Sequence[Problem], answers: Sequence[tuple[Rollout, ...]], reward: RewardFn) -> list[Group]:
    if not problems:
        return []
    if isinstance(reward, BatchRewardFn):
        rewards = reward.score_all(problems, answers)
    else:
        rewards = [reward(problem, group) for problem, group in zip(problems, answers, strict=True)]
    return [Group(p, group, tuple(scored)) for p, group, scored in zip(problems, answers, rewards, strict=True)]
