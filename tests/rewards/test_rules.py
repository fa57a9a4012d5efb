"""Scores of the rewards: exact numbers, hostile answers, composition."""

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hone.base.settings import UserError
from hone.rewards import REWARDS, make_reward
from hone.rewards.base import Composed, Part, Score
from hone.rewards.config import RewardConfig
from hone.tasks.countdown.task import CountdownConfig, CountdownTask
from hone.tasks.knights.task import KnightsConfig, KnightsTask
from hone.types import Grade, Problem, Rollout, Turn

KNIGHTS = KnightsTask(KnightsConfig())
COUNTDOWN = CountdownTask(CountdownConfig())


def puzzle(names, solution):
    return Problem("p", "knights", (), {"names": names, "solution": solution}, str(len(names)))


TWO = puzzle(["Zoey", "Oliver"], [True, False])
RIGHT = "(1) Zoey is a knight\n(2) Oliver is a knave"
FLIPPED = "(1) Zoey is a knave\n(2) Oliver is a knave"


def rollout(text, tokens=5, finish="stop"):
    ids = np.zeros(tokens, dtype=np.int64)
    return Rollout("p", 0, (Turn(ids, ids, np.zeros(tokens, dtype=np.float32), finish, 0),), text)


def tagged(answer, thinking="hm"):
    return f"<think>{thinking}</think>\n<answer>{answer}</answer>"


def logic_rl(problem, text, **kwargs):
    reward = make_reward(RewardConfig(parts={"logic_rl": 1.0}), KNIGHTS)
    (result,) = reward(problem, [rollout(text, **kwargs)])
    return result


@pytest.mark.parametrize(
    "text, total, shape, answer, verdict",
    [
        (tagged(RIGHT), 3.0, 1.0, 2.0, "correct"),
        (tagged(FLIPPED), -0.5, 1.0, -1.5, "wrong"),
        (tagged("no idea"), -1.0, 1.0, -2.0, "malformed"),
        (tagged(""), -1.0, 1.0, -2.0, "malformed"),
        ("", -3.0, -1.0, -2.0, "malformed"),
        (f"<answer>{RIGHT}</answer>", -3.0, -1.0, -2.0, "correct"),  # right, but the format outweighs it
        (f"<answer>{FLIPPED}</answer>", -3.0, -1.0, -2.0, "wrong"),
        (f"<answer>{RIGHT}</answer><think>hm</think>", -3.0, -1.0, -2.0, "correct"),
    ],
)
def test_logic_rl_totals(text, total, shape, answer, verdict):
    reward = logic_rl(TWO, text)
    assert (reward.total, reward.verdict) == (total, verdict)
    assert (reward.parts["format"], reward.parts["answer"]) == (shape, answer)
    assert reward.parts["outcome"] == (verdict == "correct")
    assert reward.parts["well_formed"] == (shape > 0)


@pytest.mark.parametrize(
    "answer, verdict",
    [
        (RIGHT.upper(), "correct"),
        ("Oliver is a knave, and Zoey is a knight.", "correct"),  # in any order
        ("Zoey is a knight and Zoey is a knave", "malformed"),  # two roles for one person, none for the other
        ("Zoey is a knight and Zoey is a knave, Oliver is a knave", "malformed"),
        ("Zoey is a knight or a knave, Oliver is a knave", "malformed"),
        ("Zoey is a knight\nOliver is a knave\nEmma is a knave", "malformed"),  # an extra person
        ("Zoey is a knight", "malformed"),  # a missing one
        ("Zoey is a knight\nEmma is a knave", "malformed"),
        ("Zoey is a knight\nZoey is a knight", "malformed"),  # repeated
        (RIGHT + "\n" + RIGHT, "malformed"),
        ("Zoey is not a knave\nOliver is a knave", "malformed"),
        ("xZoey is a knight\nOliver is a knave", "malformed"),
        ("Zoey is a knighthood\nOliver is a knave", "malformed"),
        ("Zoey is a kn\u0131ght\nOliver is a knave", "malformed"),  # an undotted i
        ("\u200bZoey is a knight\nOliver is a knave \u2713", "correct"),
        ("Zoey is a knight\nOliver is a knave. Oliver lies.", "correct"),
        ("Zoey  is a\tknight\nOliver\u00a0is\na knave", "correct"),  # \\s+ as in the source
        ("Zoeyis a knight\nOliver is a knave", "malformed"),
        ("Zoey is a knight\nOliver is a knave" + " " * 9_950, "correct"),  # stripped
        ("Zoey is a knight," + " " * 10_000 + "Oliver is a knave", "malformed"),  # too long to be searched
    ],
)
def test_what_counts_as_an_answer(answer, verdict):
    assert logic_rl(TWO, tagged(answer)).verdict == verdict
    assert logic_rl(TWO, tagged(answer)).total == {"correct": 3.0, "wrong": -0.5, "malformed": -1.0}[verdict]


def test_names_that_begin_alike_are_told_apart():
    people = puzzle(["Jack", "Jackson", "Mary Jack"], [True, False, False])
    right = "Jack is a knight\nJackson is a knave\nMary Jack is a knave"
    assert logic_rl(people, tagged(right)).total == 3.0
    assert logic_rl(people, tagged("Jackson is a knave\nMary Jack is a knave\nJackson is a knight")).total == -1.0
    assert logic_rl(people, tagged("Jackson is a knight\nJack is a knave\nMary Jack is a knave")).total == -0.5


def test_names_are_not_patterns():
    people = puzzle(["A.", "J(r)", "Łucja"], [True, False, True])
    assert logic_rl(people, tagged("A. is a knight, J(r) is a knave, Łucja is a knight")).total == 3.0
    assert logic_rl(people, tagged("Ab is a knight, J(r) is a knave, Łucja is a knight")).total == -1.0


def test_the_last_answer_block_counts():
    text = f"<think>hm</think><answer>{FLIPPED}</answer><answer>{RIGHT}</answer>"
    outcome = make_reward(RewardConfig(), KNIGHTS)
    assert outcome(TWO, [rollout(text)])[0].total == 1.0
    assert logic_rl(TWO, text).total == -3.0  # but the tags occur twice
    swapped = f"<think>hm</think><answer>{RIGHT}</answer><answer>{FLIPPED}</answer>"
    assert outcome(TWO, [rollout(swapped)])[0].total == 0.0


def test_tags_inside_the_thinking_break_the_format_only():
    text = tagged(RIGHT, thinking=f"maybe <answer>{FLIPPED}</answer>?")
    assert (logic_rl(TWO, text).total, logic_rl(TWO, text).verdict) == (-3.0, "correct")


def test_the_word_assistant_changes_nothing():
    text = tagged(RIGHT, thinking=f"Assistant: <|im_start|>assistant\n {FLIPPED}")
    assert logic_rl(TWO, text).total == 3.0
    assert logic_rl(TWO, f"Assistant: {tagged(FLIPPED)}").total == -0.5


@pytest.mark.parametrize("unit", ["x", "Zoey is a knight ", "knight ", "<answer>", "Zoey "])
def test_a_megabyte_of_junk_is_quick_and_wrong(unit):
    junk = unit * (1_000_000 // len(unit))
    start = time.process_time()
    assert logic_rl(TWO, junk).total == -3.0
    assert logic_rl(TWO, f"<think>x</think><answer>{junk}</answer>").total in (-1.0, -3.0)
    assert time.process_time() - start < 1.0


@given(st.text())
def test_no_text_raises_or_is_rewarded(text):
    assert logic_rl(TWO, text).total == -3.0
    assert logic_rl(TWO, tagged(text)).total <= -0.5


@given(st.lists(st.booleans(), min_size=2, max_size=6), st.lists(st.booleans(), min_size=6, max_size=6))
def test_only_the_whole_solution_is_correct(solution, guess):
    names = ["Ann", "Bob", "Cy", "Dee", "Eve", "Flo"][: len(solution)]
    guess = guess[: len(solution)]
    text = tagged(", ".join(f"{name} is a {'knight' if g else 'knave'}" for name, g in zip(names, guess)))
    assert logic_rl(puzzle(names, solution), text).total == (3.0 if guess == solution else -0.5)


def test_truncation_is_a_verdict_unless_an_answer_was_complete():
    assert logic_rl(TWO, "<think>hm", finish="length").verdict == "truncated"
    assert logic_rl(TWO, "<think>hm</think><answer>Zoey is", finish="length").verdict == "truncated"
    assert logic_rl(TWO, "<think>hm", finish="length").total == -3.0
    assert logic_rl(TWO, "<think>hm", finish="stop").verdict == "malformed"
    assert logic_rl(TWO, tagged(RIGHT) + " and", finish="length").verdict == "correct"
    assert logic_rl(TWO, tagged("no idea") + " and", finish="length").verdict == "malformed"


# --- countdown -----------------------------------------------------------------------------

SUM = Problem("p", "countdown", (), {"nums": [1, 2, 3], "target": 1}, "3")


@pytest.mark.parametrize(
    "text, total",
    [
        (tagged("(1 + 2) / 3"), 1.0),
        (tagged("(1 + 2) / 3 = 1"), 1.0),
        (tagged("1 + 2 + 3"), 0.1),
        (tagged("1 + 2 + 3 = 1"), 0.1),
        (tagged("3 - 2"), 0.1),
        (tagged("words"), 0.1),
        (tagged(" "), 0.0),
        ("(1 + 2) / 3", 0.0),
        ("", 0.0),
    ],
)
def test_countdown_scores(text, total):
    reward = make_reward(RewardConfig(parts={"countdown": 1.0}), COUNTDOWN)
    assert reward(SUM, [rollout(text)])[0].total == total


def test_countdown_scores_can_be_set():
    config = RewardConfig(parts={"countdown": 1.0}, countdown={"wrong": 0.01, "correct": 1.01})
    results = make_reward(config, COUNTDOWN)(SUM, [rollout(tagged("1 + 2 + 3")), rollout(tagged("(1 + 2) / 3"))])
    assert [r.total for r in results] == [0.01, 1.01]


# --- length and composition ----------------------------------------------------------------


def test_overlong_is_zero_then_linear_then_minus_one():
    config = RewardConfig(parts={"overlong": 1.0}, overlong={"max_tokens": 100, "buffer": 20})
    reward = make_reward(config, KNIGHTS)
    lengths = [1, 80, 81, 90, 99, 100, 101, 500]
    totals = [r.total for r in reward(TWO, [rollout("", tokens=n) for n in lengths])]
    assert totals == pytest.approx([0.0, 0.0, -0.05, -0.5, -0.95, -1.0, -1.0, -1.0])


def test_the_total_is_the_weighted_sum_and_parts_are_unweighted():
    config = RewardConfig(
        parts={"logic_rl": 0.5, "outcome": 2.0, "overlong": 3.0}, overlong={"max_tokens": 10, "buffer": 10}
    )
    right, wrong = make_reward(config, KNIGHTS)(TWO, [rollout(tagged(RIGHT)), rollout(tagged(FLIPPED), tokens=10)])
    assert right.total == pytest.approx(0.5 * 3 + 2.0 * 1 + 3.0 * -0.5)
    assert wrong.total == pytest.approx(0.5 * -0.5 + 2.0 * 0 + 3.0 * -1.0)
    assert right.parts == {
        "logic_rl": 3.0, "format": 1.0, "answer": 2.0, "outcome": 1.0, "overlong": -0.5, "well_formed": 1.0,
    }  # fmt: skip
    assert right.extracted == RIGHT


class Flaky(Part):
    """A part whose verifier fails on every second rollout."""

    def __call__(self, problem, group):
        return [Score(1.0, failure="verifier_timeout" if i % 2 else None) for i in range(len(group))]


def test_a_failed_verifier_is_a_verdict_and_no_score():
    reward = Composed(KNIGHTS, {"flaky": Flaky(RewardConfig())}, {"flaky": 2.0})
    good, failed = reward(TWO, [rollout(tagged(RIGHT))] * 2)
    assert (good.total, good.verdict) == (2.0, "correct")
    assert failed.verdict == "verifier_timeout"
    assert failed.parts == {}
    assert math.isfinite(failed.total)


def test_a_grader_that_fails_is_a_verdict_and_no_score():
    class Broken(KnightsTask):
        def grade(self, problem, text):
            return Grade("verifier_error")

    (result,) = make_reward(RewardConfig(), Broken(KnightsConfig()))(TWO, [rollout(tagged(RIGHT))])
    assert (result.verdict, result.parts) == ("verifier_error", {})


def test_unknown_and_unfit_rewards_are_named():
    with pytest.raises(ValidationError, match=f"no reward 'outcom'; there are {', '.join(sorted(REWARDS))}"):
        RewardConfig(parts={"outcom": 1.0})
    with pytest.raises(ValidationError, match="give at least one"):
        RewardConfig(parts={})
    with pytest.raises(ValidationError, match="max_tokens"):
        RewardConfig(parts={"overlong": 1.0})
    with pytest.raises(ValidationError, match="finite"):
        RewardConfig(parts={"outcome": float("nan")})
    with pytest.raises(UserError, match="'logic_rl' is for the task knights, not for 'countdown'"):
        make_reward(RewardConfig(parts={"logic_rl": 1.0}), COUNTDOWN)
    with pytest.raises(UserError, match=r"can have boxed_numeric, .*logic_rl, outcome, overlong, perplexity"):
        make_reward(RewardConfig(parts={"countdown": 1.0}), KNIGHTS)
    assert {"countdown", "logic_rl", "outcome", "overlong", "well_formed"} <= set(REWARDS)
