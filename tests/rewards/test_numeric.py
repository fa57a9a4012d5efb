"""Rewards for numbers and for shape: scores by hand, hostile texts."""

import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.base.settings import UserError
from hone.rewards import make_reward
from hone.rewards.config import RewardConfig
from hone.rewards.gold import number, written_numbers
from hone.rewards.numeric import boxed, kept_number, soft_format, strict_format, trailing
from hone.tasks.knights.task import KnightsConfig, KnightsTask
from hone.types import Grade, Problem, Rollout, Turn


class Sums:
    """A task of one problem whose answer is a number in an answer block."""

    name, system = "sums", ""

    def __init__(self, answer="1200"):
        self.problem = Problem("p", "sums", ({"role": "user", "content": "How many?"},), answer)

    def problems(self, split):
        return [self.problem]

    def grade(self, problem, text):
        answer = text.split("<answer>")[-1].split("</answer>")[0].strip() if "<answer>" in text else None
        if answer is None:
            return Grade("malformed")
        return Grade("correct" if answer == str(problem.answer) else "wrong", answer)


def rollout(text, finish="stop"):
    ids = np.zeros(5, dtype=np.int64)
    return Rollout("p", 0, (Turn(ids, ids, np.zeros(5, dtype=np.float32), finish, 0),), text)


def scored(name, text, answer="1200"):
    task = Sums(answer)
    (result,) = make_reward(RewardConfig(parts={name: 1.0}), task)(task.problem, [rollout(text)])
    return result


# --- boxed -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, reward",
    [
        (r"so \boxed{1200}", 1),
        (r"so \boxed{1,200}", 1),
        (r"so \boxed{\$1,200.00}", 1),
        (r"\box{1200}", 1),
        (r"\boxed {1200}.", 1),
        (r"\boxed{\text{about } 1200 \text{ m}}", 1),  # braces are balanced
        (r"\boxed{7} no, \boxed{1200}", 1),  # the last one counts
        (r"\boxed{1200} no, \boxed{7}", -1),
        (r"\boxed{1200} and \boxed{7", 1),  # the last complete one
        (r"\boxed{1200", -1),
        (r"\boxed{}", -1),
        ("1200", -1),
        ("", -1),
        (r"\boxed{-1200}", -1),
        (r"\boxed{1200.5}", -1),
        (r"\boxed{12 00}", 1),  # what is left is 1200: the rule as published
        (r"\boxed{1/200}", 1),  # likewise
        (r"\boxed{1200/2}", -1),
        (r"\boxed{1-200}", -1),  # no number is left
        (r"\boxed{1.200}", -1),
        (r"\framebox{1200}", -1),
        ("boxed{1200}", -1),
    ],
)
def test_boxed_numeric(text, reward):
    assert scored("boxed_numeric", text).total == reward


def test_boxed_numeric_reads_a_fraction_as_its_source_does():
    assert scored("boxed_numeric", r"\boxed{1/2}", answer="12").total == 1.0


def test_the_content_of_a_box():
    assert boxed(r"\boxed{\frac{1}{2}} and \boxed{\{3\}}") == r"\{3\}"
    assert boxed(r"\boxed{a\boxed{b}c}") == "b"  # the last to begin
    assert boxed("}}}{{{") is None
    assert boxed("\\boxed{" * 20_000 + "x" + "}" * 20_000) == "x"


@pytest.mark.parametrize(
    "text, value", [("1,200.", 1200), ("-.5", Fraction(-1, 2)), ("5.", 5), ("", None), ("--5", None), ("1.2.3", None),
                    ("9" * 101, None), ("x" * 1001 + "1", None)]
)  # fmt: skip
def test_what_is_kept_of_a_box(text, value):
    assert kept_number(text) == value


# --- GSM8K -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, strict, flexible",
    [
        ("It is 600 * 2 = 1200.\n#### 1200", 1, 1),
        ("#### 1,200", 1, 1),
        ("#### $1,200.00.", 1, 1),
        ("####1200", 1, 1),
        ("#### 7\n#### 1200", 1, 1),
        ("#### 1200\n#### 7", 0, 0),
        ("#### 1200 and then 7", 1, 0),  # flexible takes the last number, whatever it is
        ("The answer is 1200", 0, 1),
        ("The answer is 1,200 dollars.", 0, 1),
        ("1200 apples for 3 people", 0, 0),
        ("#### about 1200", 0, 1),
        ("#### -1200", 0, 0),
        ("#### 12001", 0, 0),
        ("#### 1200.5", 0, 0),
        ("####\n1200", 0, 1),  # the answer stands in the line of its marks
        ("no number", 0, 0),
        ("", 0, 0),
    ],
)
def test_gsm8k(text, strict, flexible):
    assert scored("gsm8k_strict", text).total == strict
    assert scored("gsm8k_flexible", text).total == flexible


def test_numbers_as_written():
    assert written_numbers("a 1,234.50 -7 (-8) 3-2 x-1 .5 1,23 5.") == [
        "1,234.50", "-7", "-8", "3", "2", "1", ".5", "1", "23", "5",
    ]  # fmt: skip
    assert number("1,234.50") == Fraction(2469, 2)
    assert number(" -$1,000 ") == -1000
    assert number("\u22125") == -5
    assert number("1e5") is None
    assert number("4 5") is None
    assert number("9" * 101) is None


@pytest.mark.parametrize("name", ["boxed_numeric", "gsm8k_strict", "gsm8k_flexible"])
def test_a_gold_answer_that_is_no_number_is_refused_before_training(name):
    with pytest.raises(UserError, match="the gold answer 'x\\^2' is not a number"):
        make_reward(RewardConfig(parts={name: 1.0}), Sums("x^2"))
    with pytest.raises(UserError, match="is not a number"):
        make_reward(RewardConfig(parts={name: 1.0}), KnightsTask(KnightsConfig(people=(2,), train=1)))


# --- small parts -----------------------------------------------------------------------------

STRICT = "<think>\nhm\n</think>\n<answer>\n1200\n</answer>\n"


@pytest.mark.parametrize(
    "text, correctness, integer, strict, soft, tags",
    [
        (STRICT, 2.0, 0.5, 0.5, 0.5, 0.5),
        (STRICT.rstrip(), 2.0, 0.5, 0.5, 0.5, 0.5),
        (STRICT.replace("1200", "7"), 0.0, 0.5, 0.5, 0.5, 0.5),
        (STRICT.replace("1200", "7.5"), 0.0, 0.0, 0.5, 0.5, 0.5),
        (STRICT.replace("1200", "-7"), 0.0, 0.5, 0.5, 0.5, 0.5),
        (STRICT + "ten chars!", 2.0, 0.5, 0.0, 0.5, 0.5 - 11 * 0.001),  # the newline too, now that it is not the last
        ("<think>hm</think><answer>1200</answer>", 2.0, 0.5, 0.0, 0.5, 0.5),
        ("so <think>hm</think> <answer>1200</answer>", 2.0, 0.5, 0.0, 0.5, 0.5),
        ("<think>hm</think> so <answer>1200</answer>", 2.0, 0.5, 0.0, 0.0, 0.5),
        ("<answer>1200</answer><think>hm</think>", 2.0, 0.5, 0.0, 0.0, 0.5 - 17 * 0.001),
        ("<answer>1200</answer>", 2.0, 0.5, 0.0, 0.0, 0.25),
        ("<answer>1</answer><answer>1200</answer>", 2.0, 0.5, 0.0, 0.0, 0.0),
        ("1200", 0.0, 0.0, 0.0, 0.0, 0.0),
        ("", 0.0, 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_small_parts(text, correctness, integer, strict, soft, tags):
    reward = scored("small_parts", text)
    expected = {
        "correctness": correctness, "integer": integer, "strict_format": strict, "soft_format": soft, "tag_count": tags,
    }  # fmt: skip
    assert {name: reward.parts[name] for name in expected} == pytest.approx(expected)
    assert reward.total == pytest.approx(sum(expected.values()))


def test_small_parts_can_be_weighted():
    task = Sums()
    config = RewardConfig(parts={"small_parts": 1.0}, small_parts={"strict_format": 0, "tag": 0.25, "trailing": 0.01})
    (reward,) = make_reward(config, task)(task.problem, [rollout(STRICT + "x")])
    assert reward.total == pytest.approx(2.0 + 0.5 + 0.5 + 1.0 - 0.02)


def test_formats_at_their_edges():
    assert not strict_format("<think>\n</think>\n<answer>\n</answer>")  # the lines would have to overlap
    assert strict_format("<think>\n\n</think>\n<answer>\n\n</answer>")
    assert not strict_format(STRICT + "\n")
    assert not soft_format("</think> <answer></answer> <think>")
    assert soft_format("<think></think>\n\n<answer></answer>")
    assert trailing("<answer></answer>\n") == 0
    assert trailing("<answer></answer> \n") == 1
    assert trailing("no answer") == 0


@pytest.mark.parametrize("name", ["boxed_numeric", "gsm8k_strict", "gsm8k_flexible", "small_parts"])
@pytest.mark.parametrize(
    "unit",
    ["<think>", "</think> ", "<think></think> \n", "\\boxed{", "{", "}", "\\boxed{{}", "#### ", "####", "9", "9,", "-",
     "1.", "9,999", "\n", "<answer>", "\\", "1200 ", ",999", "</answer>"],
)  # fmt: skip
def test_a_hundred_kilobytes_take_less_than_fifty_milliseconds(name, unit):
    text = unit * (100_000 // len(unit))
    start = time.process_time()
    scored(name, text)
    assert time.process_time() - start < 0.05 * 2  # twice, for a busy machine


@given(st.text(alphabet="0123456789.,-$%# \n\\boxed{}<>/answerthink", max_size=60))
def test_only_the_number_itself_is_paid(text):
    """Where no digit of the answer's stands, nothing is correct; nothing raises."""
    for name, worst in (("boxed_numeric", -1.0), ("gsm8k_strict", 0.0), ("gsm8k_flexible", 0.0)):
        assert scored(name, text.replace("7", ""), answer="777").total == worst


@pytest.mark.parametrize("name", ["boxed_numeric", "gsm8k_strict", "gsm8k_flexible"])
def test_every_gold_answer_has_to_be_a_number(name):
    """Otherwise every answer to such a problem would silently be wrong."""
    task = Sums("12")
    task.problems = lambda split: [task.problem, Problem("q", "sums", task.problem.messages, "x + 1")]
    with pytest.raises(UserError, match="q: the gold answer 'x \\+ 1' is not a number"):
        make_reward(RewardConfig(parts={name: 1.0}), task)
