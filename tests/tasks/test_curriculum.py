"""Which problems come when: shares by hand, once per epoch, and the same after a cut."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.base.settings import UserError
from hone.tasks.curriculum import Curriculum, CurriculumConfig, deal, learnable, natural
from hone.types import Group, Problem, Reward, Rollout, Verdict

LEVELS = {"2": 6, "3": 10, "10": 4}
PROBLEMS = [
    Problem(f"{level}-{i}", "t", ({"role": "user", "content": "?"},), None, level=level)
    for level, count in LEVELS.items()
    for i in range(count)
]


def course(**config: object) -> Curriculum:
    return Curriculum(PROBLEMS, 3, CurriculumConfig.model_validate(config))


def levels(problems: list[Problem]) -> dict[str, int]:
    return dict(Counter(p.level for p in problems))


def group(level: str, verdicts: list[Verdict]) -> Group:
    problem = Problem(f"{level}-x", "t", (), None, level=level)
    rollouts = tuple(Rollout(problem.id, i, (), "") for i in range(len(verdicts)))
    return Group(problem, rollouts, tuple(Reward(0.0, {}, v) for v in verdicts))


def test_uniform_is_every_problem_once_per_epoch_whatever_the_size_of_a_step() -> None:
    c = course()
    drawn = [p.id for step, count in enumerate([4, 4, 7, 5, 20]) for p in c.draw(step, count)]
    assert sorted(drawn[:20]) == sorted(drawn[20:]) == sorted(p.id for p in PROBLEMS)
    assert drawn[:20] != drawn[20:]
    assert c.metrics() == {}


def test_sequential_one_epoch_each() -> None:
    """Levels of 6, 10 and 4 problems, 4 a step: 2 steps, 3 steps, then the last one for good."""
    c = course(kind="sequential")
    steps = [c.draw(step, 4) for step in range(7)]
    assert [levels(s) for s in steps] == [{"2": 4}] * 2 + [{"3": 4}] * 3 + [{"10": 4}] * 2
    assert {p.id for s in steps[:2] for p in s} == {f"2-{i}" for i in range(6)}
    assert sorted(p.id for p in steps[5]) == [f"10-{i}" for i in range(4)]


def test_sequential_by_steps() -> None:
    c = course(kind="sequential", steps_per_level=3)
    assert [next(iter(levels(c.draw(step, 2)))) for step in range(8)] == ["2"] * 3 + ["3"] * 3 + ["10"] * 2


def test_a_mixture_has_its_shares_in_every_step() -> None:
    c = course(kind="mixture", weights={"2": 1.0, "10": 3.0})
    assert [levels(c.draw(step, 8)) for step in range(4)] == [{"2": 2, "10": 6}] * 4
    counts = [levels(c.draw(step, 2)).get("2", 0) for step in range(400)]
    assert np.mean(counts) == pytest.approx(0.5, abs=0.08)
    assert c.metrics() == {"curriculum/2": 0.25, "curriculum/10": 0.75}


def test_adaptive_goes_where_there_is_something_to_learn() -> None:
    """Pass rates 1/2, 1 and 1/4: p (1 - p) is 1/4, 0 and 3/16, 4 : 0 : 3; a tenth is dealt evenly."""
    c = course(kind="adaptive", memory=0.0)
    c.observe(
        [group("2", ["correct", "wrong"]), group("3", ["correct"]), group("10", ["correct", "wrong", "wrong", "wrong"])]
    )
    c.draw(0, 10)
    even = 0.1 / 3
    assert c.shares == pytest.approx({"2": even + 0.9 * 4 / 7, "3": even, "10": even + 0.9 * 3 / 7})


def test_pass_rates_are_remembered_and_failures_of_the_verifier_do_not_count() -> None:
    c = course(kind="adaptive", memory=0.75)
    c.observe([group("2", ["correct", "correct"])])
    c.observe([group("2", ["wrong", "verifier_error"]), group("3", ["verifier_timeout"])])
    assert c.state()["pass_rates"] == {"2": 0.75}
    assert learnable(0.5) == 0.25
    c.observe([group("10", ["wrong"])])
    c.draw(0, 4)
    # Level 3 has not been seen and counts as even; level 10 is hopeless and gets its part of the floor.
    assert c.shares["3"] > c.shares["2"] > c.shares["10"] == pytest.approx(0.1 / 3)


def test_all_solved_is_an_even_mixture() -> None:
    c = course(kind="adaptive", memory=0.0)
    c.observe([group(level, ["correct"]) for level in LEVELS])
    c.draw(0, 3)
    assert c.shares == pytest.approx(dict.fromkeys(LEVELS, 1 / 3))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"kind": "sequential"},
        {"kind": "sequential", "steps_per_level": 2},
        {"kind": "mixture", "weights": {"2": 1, "3": 2}},
        {"kind": "adaptive"},
    ],
)
@pytest.mark.parametrize("cut", [0, 1, 3, 5])
def test_a_run_that_is_cut_draws_the_same_problems(config: dict[str, object], cut: int) -> None:
    def run(c: Curriculum, steps: range) -> list[list[str]]:
        drawn = []
        for step in steps:
            problems = c.draw(step, 5)
            others = c.draw_others(step, 1, 2, without={p.id for p in problems})
            right: list[Verdict] = ["correct", "wrong"]
            c.observe([group(p.level, right[: 1 + (len(p.id) + step) % 2]) for p in problems])
            drawn.append([p.id for p in (*problems, *others)])
        return drawn

    whole, first = course(**config), course(**config)
    expected = run(whole, range(8))
    before = run(first, range(cut))
    second = course(**config)
    second.restore(json.loads(json.dumps(first.state())))
    assert before + run(second, range(cut, 8)) == expected
    assert second.state() == whole.state()


def test_others_come_from_the_levels_of_the_step() -> None:
    c = course(kind="sequential")
    drawn = {p.id for p in c.draw(0, 4)}
    others = c.draw_others(0, 1, 9, without=drawn)
    assert {p.id for p in others} == {f"2-{i}" for i in range(6)} - drawn
    mixture = course(kind="mixture", weights={"2": 1, "10": 9})
    mixture.draw(0, 1)
    first = Counter(mixture.draw_others(0, round, 1, without=())[0].level for round in range(1, 400))
    assert first["10"] / 399 == pytest.approx(0.9, abs=0.05)


def test_a_course_changes_on_the_way_and_goes_on_reading_where_it_was() -> None:
    c = course()
    before = [p.id for p in c.draw(0, 12)]
    c.configure(CurriculumConfig(kind="mixture", weights={"3": 1}))
    assert levels(c.draw(1, 5)) == {"3": 5}
    c.configure(CurriculumConfig())
    assert sorted(before + [p.id for p in c.draw(2, 8)]) == sorted(p.id for p in PROBLEMS)


def test_levels_that_are_not_there() -> None:
    with pytest.raises(UserError, match=r"curriculum.weights: no training problem has level 4; levels: 2, 3, 10"):
        course(kind="mixture", weights={"4": 1})
    with pytest.raises(UserError, match="the training problems have only one level; use uniform"):
        Curriculum(PROBLEMS[:3], 0, CurriculumConfig(kind="adaptive"))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 40), st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6), st.floats(0.0, 0.999))
def test_places_are_dealt_by_share(count: int, weights: list[float], u: float) -> None:
    shares = {str(i): w / sum(weights) for i, w in enumerate(weights)}
    dealt = deal(count, shares, u)
    assert sum(dealt.values()) == count
    assert all(abs(dealt[k] - count * share) < 1 + 1e-9 for k, share in shares.items())


def test_levels_in_their_natural_order() -> None:
    assert sorted(["10", "2", "level 9", "level 10", "", "easy"], key=natural) == [
        *("", "easy", "level 9", "level 10"),
        *("2", "10"),
    ]


def test_places_are_dealt_by_weights_of_any_sum() -> None:
    """Weights 1 and 3 of 8 places: 2 and 6; the line begins at u, so 0.5 more moves a place of 3 to the first."""
    assert deal(8, {"a": 1.0, "b": 3.0}, 0.0) == {"a": 2, "b": 6}
    assert deal(8, {"a": 0.05, "b": 0.15}, 0.0) == {"a": 2, "b": 6}
    # Ends 0, 0.75, 3 of 3 places: moved by 0.25 the first mark passes 1.
    assert [deal(3, {"a": 1.0, "b": 3.0}, u)["a"] for u in (0.0, 0.2, 0.25, 0.9)] == [0, 0, 1, 1]


def test_what_was_drawn_is_told_once_round_by_round() -> None:
    c = course(kind="sequential")
    first = [p.id for p in c.draw(0, 2)]
    assert c.shares == {"2": 1.0}
    second = [p.id for p in c.draw_others(0, 1, 3, without=first)]
    assert len(second) == 3
    assert c.draw_others(0, 2, 1, without=())[0].level == "2"
    rounds = c.taken(0)
    assert rounds[:2] == [first, second]
    assert len(rounds) == 3
    with pytest.raises(KeyError):
        c.taken(0)


def test_a_level_is_left_when_it_has_been_read_to_its_end() -> None:
    """Levels of 6 and 10 in steps of 3: exactly two steps, then one place short of four."""
    c = course(kind="sequential")
    assert [levels(c.draw(step, 3)) for step in range(7)] == [{"2": 3}] * 2 + [{"3": 3}] * 4 + [{"10": 3}]
    c = course(kind="sequential", steps_per_level=1)
    assert [next(iter(levels(c.draw(step, 2)))) for step in range(3)] == ["2", "3", "10"]


def test_a_level_of_one_problem_is_read_too() -> None:
    problems = [PROBLEMS[0], *PROBLEMS[6:9]]  # levels of 1 and 3
    c = Curriculum(problems, 3, CurriculumConfig(kind="sequential"))
    assert [p.level for step in range(2) for p in c.draw(step, 1)] == ["2", "3"]


def test_the_state_for_a_step_that_was_drawn_is_the_one_before_it() -> None:
    c = course(kind="sequential")
    c.draw(0, 4)
    before = c.state()
    assert before == {"drawn": {"2": 4}, "steps": {"2": 1}, "pass_rates": {}}
    c.draw(1, 4)
    assert c.state(1) == before
    assert c.state(2) == c.state() == {"drawn": {"2": 8}, "steps": {"2": 2}, "pass_rates": {}}


def test_groups_of_one_level_are_counted_together() -> None:
    c = course(kind="adaptive", memory=0.0)
    c.count([("2", 1, 2), ("3", 0, 3), ("2", 2, 6)])
    assert c.state()["pass_rates"] == {"2": 3 / 8, "3": 0.0}
