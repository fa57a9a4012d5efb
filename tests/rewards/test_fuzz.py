"""The short form of benchmarks/fuzz.py, and the same parsers and rewards under hypothesis."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fuzz import FRAGMENTS, countdown, fuzz, parsers, rewards, rollout_of, tasks
from hone.rewards import REWARDS

TASKS = [(task, task.problems("train")[0], rewards(task)) for task in tasks()]

TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=20).map("".join)


def test_every_reward_is_fuzzed():
    assert {name for _, _, named in TASKS for name in named} == set(REWARDS) - {"judge"}


def test_random_and_mutated_completions_raise_nothing_and_are_quick():
    _, faults = fuzz(1200, seed=1)
    assert not faults


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_no_text_raises(text):
    for task, problem, named in TASKS:
        task.grade(problem, text)
        rollout = rollout_of(problem, text, random.Random(0))
        for call in named.values():
            call(problem, rollout)
        for parser in parsers(problem).values():
            parser(text)


def test_countdown_agrees_with_an_exhaustive_solver():
    graded, wrong = countdown(15, seed=3)
    assert graded > 3000
    assert not wrong


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_thousand_completions():
    _, faults = fuzz(100_000, seed=2)
    assert not faults[:20]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_countdown_agrees_with_an_exhaustive_solver_on_many_problems():
    graded, wrong = countdown(1000, seed=4)
    assert graded > 500_000
    assert not wrong
