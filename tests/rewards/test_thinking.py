"""The guards of thinking: each fault by example, none without cause."""

import time

import numpy as np
import pytest

from hone.rewards import make_reward
from hone.rewards.config import RewardConfig
from hone.rewards.thinking import is_dummy, scripts
from hone.tasks.knights.task import KnightsConfig, KnightsTask
from hone.types import Problem, Rollout, Turn

KNIGHTS = KnightsTask(KnightsConfig(people=(2,), train=20))
QUIZ = "Zoey says: Oliver is a knave. Oliver says: Zoey is a knight."
TWO = Problem(
    "p", "knights", ({"role": "user", "content": QUIZ},), {"names": ["Zoey", "Oliver"], "solution": [True, False]}
)
ANSWER = "<answer>(1) Zoey is a knight\n(2) Oliver is a knave</answer>"
GOOD = "Suppose Zoey is a knight. Then Oliver is a knave, and his claim is false. Everything fits."


def scored(thinking, finish="stop", problem=TWO, **settings):
    ids = np.zeros(5, dtype=np.int64)
    turn = Turn(ids, ids, np.zeros(5, dtype=np.float32), finish, 0)
    config = RewardConfig(parts={"thinking": 1.0}, **({"thinking": settings} if settings else {}))
    text = thinking if thinking.startswith("raw:") else f"<think>{thinking}</think>{ANSWER}"
    (reward,) = make_reward(config, KNIGHTS)(problem, [Rollout("p", 0, (turn,), text.removeprefix("raw:"))])
    return reward


@pytest.mark.parametrize(
    "thinking, finish, faults",
    [
        (GOOD, "stop", set()),
        ("", "stop", {"dummy", "unmentioned"}),
        ("raw:" + ANSWER, "stop", {"dummy", "unmentioned"}),
        ("this is thinking process", "stop", {"dummy", "unmentioned"}),
        ("This is the reasoning process. " * 50, "stop", {"dummy", "unmentioned"}),
        ("...", "stop", {"dummy", "unmentioned"}),
        ("Zoey and Oliver " * 30, "stop", {"dummy"}),
        ("Suppose Zoey is a knight. Then her claim is true and everything fits.", "stop", {"unmentioned"}),
        (GOOD.replace("Oliver", "Olivers"), "stop", {"unmentioned"}),
        (GOOD.upper(), "stop", set()),
        (GOOD + " \u6240\u4ee5\u7b54\u6848", "stop", {"foreign"}),
        (GOOD + " \u0438\u0442\u0430\u043a", "stop", {"foreign"}),
        (
            GOOD + " caf\u00e9, na\u00efve, \u03b1 \u2265 \u03b2, \u2192 \u2713 \u00bd \U0001d465 \U0001f600",
            "stop",
            set(),
        ),
        (GOOD, "length", {"length_limit"}),
        ("raw:<think>" + GOOD, "length", {"dummy", "unmentioned", "length_limit"}),  # never closed: no thinking block
    ],
)
def test_each_fault_takes_one_off(thinking, finish, faults):
    reward = scored(thinking, finish)
    assert {n for n in ("dummy", "foreign", "unmentioned", "length_limit") if reward.parts[n]} == faults
    assert reward.total == -len(faults)


def test_penalties_can_be_set():
    assert scored("", dummy=0.25, unmentioned=0).total == -0.25
    assert scored("one two three", min_words=3, unmentioned=0).total == 0.0
    assert scored("one two three", min_words=4, unmentioned=0).total == -1.0
    assert str(scored(GOOD).total) == "0.0"  # not -0.0


def test_a_problem_in_another_script_may_be_answered_in_it():
    problem = Problem(
        "p", "knights", ({"role": "user", "content": "\u0417\u043e\u044f \u0438 Max?"},), {"names": [], "solution": []}
    )
    assert scored(GOOD + " \u0438\u0442\u0430\u043a", problem=problem).parts["foreign"] == 0.0
    assert scored(GOOD + " \u6240\u4ee5", problem=problem).parts["foreign"] == 1.0
    assert scored(GOOD, problem=problem).parts["unmentioned"] == 0.0  # no names to mention


def test_worked_answers_are_without_fault():
    reward = make_reward(RewardConfig(parts={"thinking": 1.0}), KNIGHTS)
    ids = np.zeros(5, dtype=np.int64)
    turn = Turn(ids, ids, np.zeros(5, dtype=np.float32), "stop", 0)
    for problem in KNIGHTS.problems("train"):
        (result,) = reward(problem, [Rollout("p", 0, (turn,), str(problem.reference))])
        assert result.total == 0.0, problem.reference


def test_words_and_scripts():
    assert is_dummy("step step step the answer thinking", 2)
    assert not is_dummy("two words", 2)
    assert is_dummy("", 0)  # nothing is nothing, whatever is asked for
    assert scripts("abc 123 !?") == {"LATIN"}
    assert scripts("\u5909\u6570 \u30ab\u306a") == {"CJK", "KATAKANA", "HIRAGANA"}


@pytest.mark.parametrize("unit", ["the ", "Zoey ", "\u0301", "\u4e2d", "x", "a b c ", " "])
def test_a_hundred_kilobytes_are_quick(unit):
    start = time.process_time()
    scored(unit * (100_000 // len(unit)))
    assert time.process_time() - start < 0.1
