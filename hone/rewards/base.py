"""From a group of rollouts to their rewards: the verdict, the parts, their weighted sum.

A reward named in a recipe is a `Part`: it scores the rollouts of a group, and `make_reward` adds
the parts up. Only `Rollout.text`, what the model itself said, is ever parsed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from hone.data.parse import Parsed, parse
from hone.rewards.config import RewardConfig
from hone.tasks.base import Task
from hone.types import VERIFIER_FAILURES, Grade, Problem, Reward, Rollout, Verdict


class RewardFn(Protocol):
    """Scores a whole group, so that judges and models can batch."""

    def __call__(self, problem: Problem, rollouts: Sequence[Rollout]) -> list[Reward]: ...


@dataclass(frozen=True, slots=True)
class Judged:
    """A rollout with what was read in it, done once for all parts."""

    rollout: Rollout
    parsed: Parsed
    grade: Grade


@dataclass(frozen=True, slots=True)
class Score:
    """One part's score of one rollout."""

    value: float
    details: Mapping[str, float] = field(default_factory=dict)  # logged too, not added to the total
    failure: Verdict | None = None  # why this part's own verifier has no score, if so


class Part:
    """One named reward. Subclasses score a group in `__call__`."""

    tasks: ClassVar[tuple[str, ...]] = ()  # names of the tasks that it fits; none: every task

    def __init__(self, config: RewardConfig) -> None:
        self.config = config

    def __call__(self, problem: Problem, group: Sequence[Judged]) -> list[Score]:
        """One score for each rollout of the group."""
        raise NotImplementedError


def judge(task: Task, problem: Problem, rollout: Rollout) -> Judged:
    """Parse and grade one rollout.

    A rollout that was cut off before it gave any answer is `truncated`; if an answer was
    already complete, that answer counts, cut off or not.
    """
    grade = task.grade(problem, rollout.text)
    if grade.verdict == "malformed" and grade.extracted is None and rollout.finish != "stop":
        grade = Grade("truncated")
    return Judged(rollout, parse(rollout.text), grade)


class Composed:
    """A `RewardFn`: the weighted sum of parts.

    `Reward.parts` holds every part unweighted, its details, and always `outcome` and
    `well_formed` (0 or 1). If a verifier failed, the verdict says so and there are no parts: the
    total of 0 is not a score, and the caller leaves the sample out.
    """

    def __init__(self, task: Task, parts: Mapping[str, Part], weights: Mapping[str, float]) -> None:
        self.task, self.parts, self.weights = task, parts, weights

    def __call__(self, problem: Problem, rollouts: Sequence[Rollout]) -> list[Reward]:
        group = [judge(self.task, problem, rollout) for rollout in rollouts]
        scores = {name: part(problem, group) for name, part in self.parts.items()}
        for name, column in scores.items():
            if len(column) != len(group):
                raise ValueError(f"reward {name}: {len(column)} scores for {len(group)} rollouts of {problem.id}")
        return [self._sum(one, {name: column[i] for name, column in scores.items()}) for i, one in enumerate(group)]

    def _sum(self, one: Judged, scores: Mapping[str, Score]) -> Reward:
        verdict = one.grade.verdict
        failures = [score.failure for score in scores.values() if score.failure]
        if verdict not in VERIFIER_FAILURES and failures:
            verdict = failures[0]
        if verdict in VERIFIER_FAILURES:
            return Reward(0.0, {}, verdict, one.grade.extracted)
        parts = {"outcome": float(verdict == "correct"), "well_formed": float(one.parsed.well_formed)}
        for name, score in scores.items():
            parts.update({name: score.value, **score.details})
        total = sum(self.weights[name] * score.value for name, score in scores.items())
        return Reward(total, parts, verdict, one.grade.extracted)
