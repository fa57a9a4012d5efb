"""From problems to groups: render, generate, reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hone.recipe.sections.rollout import SamplingConfig
from hone.rollout.engine import Engine
from hone.rollout.prompts import Renderer
from hone.types import Problem, Rollout


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
    """Sample `samples` answers to each problem; returns [P] tuples of [G]."""
    prompts = [renderer.prompt_ids(p) for p in problems]
    turns = engine.generate(prompts, sampling, samples=samples, seed=seed, progress=progress)
    return [
        tuple(
            Rollout(problem.id, index, (turn,), renderer.text(turn.completion_ids)) for index, turn in enumerate(group)
        )
        for problem, group in zip(problems, turns, strict=True)
    ]
