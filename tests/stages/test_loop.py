"""The loop's own decisions: which groups a step trains on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hone.base.settings import UserError
from hone.base.world import ALONE
from hone.learn.policy import Policy
from hone.recipe.recipe import Recipe
from hone.recipe.schedule import Phases
from hone.recipe.sections.algo import AlgoConfig
from hone.stages.source import Sampler
from hone.stages.stage import load_frozen
from hone.tasks.curriculum import Curriculum
from hone.tasks.knights.task import KnightsConfig
from hone.types import Group, Problem, Reward, Rollout, Turn

PROBLEMS = [Problem(f"p{i}", "t", ({"role": "user", "content": "?"},), None) for i in range(20)]


@pytest.fixture
def collect() -> Any:
    """`Sampler.sample` where the problem's number decides: rewards differ within a group for multiples of `useful`."""
    seeds: list[int] = []

    def run(refill_rounds: int, useful: int, step: int = 0) -> tuple[list[Group], list[Group], list[int]]:
        def rollouts(problems: list[Problem], *_: Any, samples: int, seed: int, **__: Any) -> list[Any]:
            seeds.append(seed)
            turn = Turn(np.zeros(1, np.int64), np.ones(2, np.int64), np.zeros(2, np.float32), "stop", 0)
            return [tuple(Rollout(p.id, g, (turn,), "") for g in range(samples)) for p in problems]

        def reward(problem: Problem, group: Any) -> list[Reward]:
            differs = int(problem.id[1:]) % useful == 0
            return [Reward(float(differs and g == 0), {}, "wrong") for g in range(len(group))]

        recipe = Recipe(
            name="x",
            task=KnightsConfig(name="knights"),
            algo=AlgoConfig(refill_rounds=refill_rounds),
            prompts_per_step=4,
            samples_per_prompt=2,
        )
        other: Any = None
        policy = cast(Policy, SimpleNamespace(resets=[]))
        episodes: Any = SimpleNamespace(sample=rollouts)
        sampler = Sampler(Phases(recipe), policy, Curriculum(PROBLEMS, 0), episodes, other, lambda _: reward, ALONE)
        reward.costs = dict  # type: ignore[attr-defined]
        sampled = sampler.sample(step, other)
        return sampled.groups, sampled.replaced, seeds

    return run


def test_without_refill_all_groups_are_trained_on(collect: Any) -> None:
    groups, replaced, seeds = collect(0, useful=1000)
    assert (len(groups), len(replaced), len(seeds)) == (4, 0, 1)


def test_a_refill_replaces_groups_that_teach_nothing_until_the_step_is_full(collect: Any) -> None:
    groups, replaced, seeds = collect(20, useful=2)
    assert len(groups) == 4
    assert all(int(g.problem.id[1:]) % 2 == 0 for g in groups)
    assert replaced
    assert all(int(g.problem.id[1:]) % 2 for g in replaced)
    assert len(set(seeds)) == len(seeds) > 1


def test_the_bound_ends_with_what_is_there(collect: Any) -> None:
    groups, replaced, seeds = collect(2, useful=1000)  # p0 alone teaches anything
    assert len(seeds) == 3
    assert {g.problem.id for g in groups} <= {"p0"}
    assert 4 + 3 + 3 <= len(groups) + len(replaced) <= 4 + 4 + 4


def test_no_problem_comes_twice_in_a_step_and_it_ends_when_all_have_come(collect: Any) -> None:
    groups, replaced, seeds = collect(100, useful=1000)
    ids = [g.problem.id for g in (*groups, *replaced)]
    assert sorted(ids) == sorted(p.id for p in PROBLEMS)
    assert len(seeds) < 10


def test_a_refill_is_the_same_for_the_same_step_and_another_for_another() -> None:
    course = Curriculum(PROBLEMS, seed=3)
    first, again = (course.draw_others(5, 1, 8, without=()) for _ in range(2))
    assert first == again
    assert len({p.id for p in first}) == 8
    assert course.draw_others(5, 2, 8, without=()) != first
    assert course.draw_others(6, 1, 8, without=()) != first
    rest = course.draw_others(5, 1, 50, without={p.id for p in first})
    assert {p.id for p in rest} == {p.id for p in PROBLEMS} - {p.id for p in first}


def test_phases_that_name_different_answerers_are_refused_before_anything_is_loaded() -> None:
    lines = [{"at": n, "reward": {"parts": {"perplexity": 1.0}, "perplexity": {"answerer": f"m{n}"}}} for n in (1, 2)]
    recipe = Recipe(name="x", task=KnightsConfig(name="knights"), steps=4, schedule=lines)
    with pytest.raises(UserError, match="answerer is m1 and then m2"):
        load_frozen(Phases(recipe), recipe.model, "")
