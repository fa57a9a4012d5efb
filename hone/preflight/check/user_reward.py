"""Calls the user's reward functions on whole groups of right, wrong and empty answers, as training would."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator

import numpy as np

from hone.base.settings import UserError
from hone.preflight.check import probes
from hone.preflight.check.findings import Finding
from hone.preflight.check.subject import Subject
from hone.rewards import REWARDS, is_offline, make_reward
from hone.rewards.base import Composed, failures, reward_groups
from hone.rewards.config import RewardConfig
from hone.rewards.functions import UserFunction
from hone.rewards.gold import gold_text
from hone.tasks.base import Task
from hone.types import VERIFIER_FAILURES, Problem

#: Problems, spread over the training split, whose answers the functions are called with.
PROBLEMS = 6


def returns_numbers(subject: Subject) -> Iterator[Finding]:
    """Does the user's reward return numbers?

    Raises UserError if it returns something else, or no value for any answer.
    """
    checked: list[RewardConfig] = []
    for phase in subject.phases:
        if phase.reward in checked:
            continue
        checked.append(phase.reward)
        parts = {n: w for n, w in phase.reward.parts.items() if is_offline(n)}
        if not any(":" in name or name not in REWARDS for name in parts):
            continue
        reward = make_reward(phase.reward.model_copy(update={"parts": parts}), subject.task)
        try:
            with undisturbed():
                yield from _call(reward, subject.task, subject.seconds)
        finally:
            _close(reward)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Context manager that restores the state of the global random generators, from which a user's code may draw."""
    state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002  # what user code may draw from
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)  # noqa: NPY002


def _call(reward: Composed, task: Task, seconds: float) -> Iterator[Finding]:
    problems = task.problems("train")
    chosen = [problems[i * len(problems) // PROBLEMS] for i in range(min(PROBLEMS, len(problems)))]
    groups, started = [], time.monotonic()
    for problem in chosen:
        texts = [*_gold_answers(problem), "I do not know.", ""]
        rollouts = [probes.rollout_of(problem, probes.Probe("", "none", text), len) for text in texts]
        groups += reward_groups([problem], [tuple(rollouts)], reward)
        if time.monotonic() - started > seconds:
            break
    rewards = [r for group in groups for r in group.rewards]
    if rewards and all(r.verdict in VERIFIER_FAILURES for r in rewards):
        raised = any("raises: " in (r.note or "") for r in rewards)
        remedy = (
            "The function raises an error; fix it" if raised else "Give a number, such as 0, for unreadable answers"
        )
        raise UserError(
            f"reward: it gives no value for any of the {len(rewards)} right, wrong and empty answers to {len(groups)} "
            f"training problems that it was tried with, so training would leave every sample out: {failures(groups)}. "
            f"{remedy}"
        )
    silent = [
        name
        for name, part in reward.parts.items()
        if isinstance(part, UserFunction) and not any(name in r.parts for r in rewards)
    ]
    for name in silent:
        message = f"{name} returned None for all {len(rewards)} answers that it was tried with"
        yield Finding("warn", "called", message, name)
    if not silent and rewards:
        yield Finding("pass", "called", f"the reward returns numbers: tried with {len(rewards)} answers")


def _gold_answers(problem: Problem) -> list[str]:
    """The gold answer in every format, if the problem has one."""
    try:
        gold = gold_text(problem)
    except UserError:
        return []
    return [write(gold) for write in probes.writers(problem).values()]


def _close(reward: Composed) -> None:
    """End the processes of its functions."""
    for part in reward.parts.values():
        if isinstance(part, UserFunction) and part.workers is not None:
            part.workers.close()
