"""Countdown: arithmetic on model text, grades, problems, traces, rows."""

import random
import re
import time
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from hone.base.settings import UserError
from hone.grade.parse import parse
from hone.tasks import make_task
from hone.tasks.countdown import arithmetic
from hone.tasks.countdown.task import (
    CountdownConfig,
    CountdownTask,
    Term,
    canonical_form,
    combine,
    find_term,
    random_term,
)
from hone.tasks.rows.files import write_rows
from hone.types import Problem

TASK = CountdownTask(CountdownConfig())


def grade(answer, nums=(1, 2, 3), target=1):
    problem = Problem("p", "countdown", (), {"nums": list(nums), "target": target})
    return TASK.grade(problem, f"<think>x</think><answer>{answer}</answer>").verdict


# --- arithmetic ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, value",
    [
        ("7", 7),
        ("(1 + 2) / 3", 1),
        ("1 + 2 * 3", 7),
        ("8 - 3 - 2", 3),
        ("8 / 4 / 2", 1),
        ("8 / (4 / 2)", 4),
        ("8 - (3 - 2)", 7),
        ("2 * 3 - 4 / 2", 4),
        ("1 / 3", Fraction(1, 3)),
        ("1/3 + 1/3 + 1/3", 1),
        ("-3 + 5", 2),
        ("-(2 + 3) * -2", 10),
        ("2 - -3", 5),
        ("+4", 4),
        ("- - 4", 4),
        ("-2 * 3", -6),
        ("10 / -4", Fraction(-5, 2)),
        ("((((5))))", 5),
        ("007", 7),
    ],
)
def test_values(text, value):
    assert arithmetic.compute(arithmetic.parse(text)) == value


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "+", "1 +", "* 2", "1 2", "2(3)", "(1)(2)", "(", ")", "()", "(1", "1)", "1 + )", "2 ** 3", "7 // 2",
        "1.5", "1e3", "1_000", "x", "1 + x", "2 ^ 3", "5 % 3", "3!", "abs(1)", "__import__('os')", "１ + 2", "2 × 3",
        "[1]", "1, 2", "1 = 1", "(1 + 2",
    ],
)  # fmt: skip
def test_what_is_not_arithmetic(text):
    with pytest.raises(ValueError, match=r"."):
        arithmetic.parse(text)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(0, 10**9))
def test_expressions_are_read_back(nums, seed):
    """Text with as few parentheses as possible means what it was built to mean."""
    rng = random.Random(seed)
    terms = [Term(Fraction(n), str(n)) for n in nums]
    while len(terms) > 1:
        left, right = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
        terms.append(combine(rng.choice("+-*/" if right.value else "+-*"), left, right))
    postfix = arithmetic.parse(terms[0].text)
    assert arithmetic.compute(postfix) == terms[0].value
    assert Counter(arithmetic.numbers(postfix)) == Counter(nums)


@given(st.text(alphabet="0123456789+-*/() ", max_size=40))
def test_any_text_is_a_value_or_a_value_error(text):
    try:
        postfix = arithmetic.parse(text)
    except ValueError:
        return
    try:
        arithmetic.compute(postfix)
    except ZeroDivisionError:
        assert "/" in text


# --- grades --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer, verdict",
    [
        ("(1 + 2) / 3", "correct"),
        ("(1 + 2) / 3 = 1", "correct"),
        ("3 - 2 * 1 = 7", "correct"),  # what is right of the sign does not count
        ("1 = 3 - 2", "wrong"),
        ("= 1", "malformed"),
        ("3 - 2", "wrong"),  # a number is missing
        ("1 + 2 + 3 - 3 - 2", "wrong"),  # numbers used twice
        ("2 / 2", "wrong"),
        ("12 / 3", "wrong"),  # 12 is no 1 and 2
        ("1", "wrong"),
        ("1 / (2 - 3 + 1)", "wrong"),
        ("3 / (1 - 2 + 1)", "wrong"),
        ("1 + 2 + 3", "wrong"),
        ("(1 + 2) : 3", "malformed"),
        ("(1 + 2) / 3" + " " * 495 + "x", "malformed"),  # nothing is cut off unseen
        ("(1 + 2) / 3 = " + "1" * 600, "correct"),
        ("one", "malformed"),
        ("", "malformed"),
    ],
)
def test_grades(answer, verdict):
    assert grade(answer) == verdict


def test_repeated_numbers_are_a_multiset():
    assert grade("5 + 5 / 5", nums=(5, 5, 5), target=6) == "correct"
    assert grade("5 + 5 / 5", nums=(5, 5), target=6) == "wrong"


def test_division_is_exact():
    assert grade("8 / (3 - 8 / 3)", nums=(3, 3, 8, 8), target=24) == "correct"
    assert grade("49 / 49 * 1", nums=(49, 49, 1), target=1) == "correct"
    assert grade("1 / 3 * 3", nums=(1, 3, 3), target=1) == "correct"


def test_division_by_zero_is_wrong():
    assert grade("2 / (1 - 1)", nums=(1, 1, 2), target=0) == "wrong"


@pytest.mark.parametrize(
    "hostile",
    [
        "9**9**9",
        "9" * 10_000_000,
        "1+" * 5_000_000 + "1",
        "(" * 10_000 + "1" + ")" * 10_000,
        "(" * 240 + "1" + ")" * 240,
        "-" * 400 + "1",
        "9*" * 240 + "9",
        "=" * 1_000_000,
        "<answer>" * 100_000,
        "(1 + 2) / 3" + " " * 10_000_000 + "x",
    ],
    ids=lambda text: text[:8],
)
def test_hostile_answers_are_quick(hostile):
    problem = Problem("p", "countdown", (), {"nums": [1, 2, 3], "target": 1})
    text = f"<answer>{hostile}</answer>"
    TASK.grade(problem, "<answer>1</answer>")
    took = []
    for _ in range(3):  # the best of three: the machine may be busy
        start = time.process_time()
        verdict = TASK.grade(problem, text).verdict
        took.append(time.process_time() - start)
    assert verdict in ("wrong", "malformed")
    assert min(took) < 0.05


# --- problems and traces -------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 4, 5, 6])
def test_problems_are_solvable_and_traces_correct(count):
    made = CountdownTask(CountdownConfig(numbers=(count,), train=40, max_target=60))
    problems = made.problems("train")
    assert len({p.id for p in problems}) == 40
    for problem in problems:
        assert len(problem.answer["nums"]) == count
        assert problem.level == str(count)
        assert 1 <= problem.answer["target"] <= 60
        assert all(1 <= n <= 99 for n in problem.answer["nums"])
        assert made.grade(problem, problem.reference).verdict == "correct"
        text = made.trace(problem, "careful", seed=3).text
        assert parse(text).well_formed
        assert made.grade(problem, text).verdict == "correct"
        hasty = made.trace(problem, "hasty", seed=3).text
        assert made.grade(problem, hasty).verdict in ("correct", "wrong")


def test_the_careful_trace_computes_and_tries_again():
    made = CountdownTask(CountdownConfig(numbers=(3,), train=20, tries=4))
    failures = 0
    for problem in made.problems("train"):
        *tried, solution = parse(made.trace(problem, "careful", seed=0).text).thinking.splitlines()
        target = problem.answer["target"]
        assert solution.endswith(f"= {target}. Found it.")
        for line in [*tried, solution]:
            for left, right in re.findall(r"(?:: |, )(\d+ [-+*/] \d+) = (\d+)", line):
                assert arithmetic.compute(arithmetic.parse(left)) == int(right)
        assert all(line.endswith(f", not {target}, try again.") for line in tried)
        assert not any(f" = {target}, not {target}," in line for line in tried)
        failures += len(tried)
    assert 20 < failures < 60  # 0 to 4 each, evenly
    with pytest.raises(UserError, match="no trace style 'slow'"):
        made.trace(problem, "slow", 0)


def test_the_terse_trace_is_the_careful_one_in_other_words():
    made = CountdownTask(CountdownConfig(numbers=(3, 4), train=20, tries=3))
    failures = 0
    for problem in made.problems("train"):
        text = made.trace(problem, "terse", seed=0).text
        *tried, solution = parse(text).thinking.splitlines()
        for line in [*tried, solution]:
            *steps, versus, target, verdict = line.split(" ")
            assert (versus, target) == ("vs", str(problem.answer["target"]))
            assert len(steps) == len(problem.answer["nums"]) - 1
            for step in steps:
                left, right = step.split("=")
                assert arithmetic.compute(arithmetic.parse(left)) == int(right)
            assert (
                (int(steps[-1].split("=")[1]) == problem.answer["target"]) is (verdict == "yes") is (line is solution)
            )
        assert made.grade(problem, text).verdict == "correct"
        failures += len(tried)
    assert 15 < failures < 45  # 0 to 3 each, evenly


def test_splits_are_disjoint_whatever_the_seeds():
    config = {"numbers": (3, 4), "max_number": 9, "max_target": 20, "validation": 60, "test": 100}
    one = CountdownTask(CountdownConfig(train=150, **config))
    other = CountdownTask(CountdownConfig(train=100, **config, seed=4), seed=7)
    forms = {}
    for split in ("train", "validation", "test"):
        sets = [{canonical_form(**p.answer) for p in made.problems(split)} for made in (one, other)]
        assert len(sets[0]) == len(one.problems(split))
        forms[split] = sets[0] | sets[1]
    assert not forms["train"] & forms["test"]
    assert not forms["train"] & forms["validation"]
    assert not forms["validation"] & forms["test"]
    assert canonical_form([3, 1, 2], 6) == canonical_form([2, 3, 1], 6) != canonical_form([1, 2, 3], 7)


def test_a_split_that_cannot_be_filled_is_an_error():
    with pytest.raises(UserError, match=r"found \d+ distinct problems of 3 numbers for the train split, but 5000 were"):
        CountdownTask(CountdownConfig(numbers=(3,), max_number=3, max_target=5, train=5000)).problems("train")


def test_the_same_settings_give_the_same_problems():
    def ids(split, seed=0):
        return [p.id for p in CountdownTask(CountdownConfig(train=20, test=20), seed).problems(split)]

    assert ids("train") == ids("train") != ids("train", seed=1)
    assert ids("test") == ids("test", seed=1)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=4), st.integers(0, 10**9))
def test_the_search_finds_what_can_be_made(nums, seed):
    target = random_term(random.Random(seed), nums).value
    solution = find_term(nums, int(target))
    assert arithmetic.compute(arithmetic.parse(solution.text)) == target
    assert find_term([1, 1], 7) is None


# --- rows and settings ---------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_are_read(tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    messages = [{"role": "user", "content": "Make 24 of 4 6 1"}]
    write_rows(path, [{"nums": [4, 6, 1], "target": 24, "messages": messages}, {"nums": [2, 0, 3], "target": 6}])
    made = make_task(CountdownConfig(test_file=str(path), quiz="brief"))
    with_messages, plain = made.problems("test")
    assert with_messages.messages == ({"role": "user", "content": "Make 24 of 4 6 1"},)
    assert plain.messages == ({"role": "user", "content": "2 0 3 make 6"},)
    for problem in (with_messages, plain):
        assert made.grade(problem, made.trace(problem, "careful", 0).text).verdict == "correct"
        made.trace(problem, "hasty", 0)


def test_faulty_rows_are_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    for row, message in [
        ({"nums": [1, "2"], "target": 3}, "row 1: countdown row: nums"),
        ({"nums": [1, 2]}, "row 1: countdown row: target"),
        ({"nums": [1, 2], "target": 3, "messages": [{"role": "user"}]}, "row 1: 'content'"),
    ]:
        write_rows(path, [row])
        with pytest.raises(UserError, match=message):
            CountdownTask(CountdownConfig(test_file=str(path))).problems("test")
    write_rows(path, [{"nums": [1, 1], "target": 7}])
    made = CountdownTask(CountdownConfig(test_file=str(path)))
    with pytest.raises(UserError, match="found no way to make 7"):
        made.trace(made.problems("test")[0], "careful", 0)


@pytest.mark.parametrize("config", [{"numbers": (2,)}, {"numbers": (3, 3)}])
def test_settings_that_cannot_be(config):
    with pytest.raises(ValidationError):
        CountdownConfig(**config)
