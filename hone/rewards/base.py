"""From a group of rollouts to their rewards: the verdict, the parts, their weighted sum.

A reward named in a recipe is a `Part`: it scores the rollouts of a group, and `make_reward` adds
the parts up. Only `Rollout.text`, the text that the model generated, is ever parsed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from hone.base.settings import UserError
from hone.grade.parse import Parsed, parse
from hone.rewards.config import RewardConfig
from hone.tasks.base import Task, grade_all
from hone.types import ENVIRONMENT_FAILURES, VERIFIER_FAILURES, Grade, Group, Problem, Reward, Rollout, Verdict

#: Largest magnitude of a reward. Beyond it, differences are lost to rounding, and squares (value loss, standard
#: deviation) overflow single precision.
LARGEST = 1e15
#: Characters of a failure's note in a message about many.
NOTE = 200
POSSIBLE = f"a reward is a finite number from {-LARGEST:g} to {LARGEST:g}"

if TYPE_CHECKING:
    from hone.base.world import World  # imports torch


class RewardFn(Protocol):
    """Scores a whole group, so that judges and models can batch."""

    def __call__(self, problem: Problem, rollouts: Sequence[Rollout]) -> list[Reward]: ...


@runtime_checkable
class BatchRewardFn(RewardFn, Protocol):
    """A reward that scores all groups of a step at once, which is faster with workers and servers."""

    def score_all(self, problems: Sequence[Problem], answers: Sequence[Sequence[Rollout]]) -> list[list[Reward]]:
        """[P][G] rewards."""
        ...


@dataclass(frozen=True, slots=True)
class Judged:
    """A rollout with its parsed text and its grade, computed once for all parts."""

    rollout: Rollout
    parsed: Parsed
    grade: Grade


@dataclass(frozen=True, slots=True)
class Score:
    """One part's score of one rollout."""

    value: float | None  # None: the part does not apply to this rollout, and is left out of its sum
    details: Mapping[str, float] = field(default_factory=dict)  # logged, not added to the total
    failure: Verdict | None = None  # set if the part's own verifier failed
    note: str | None = None  # why it failed


class Part:
    """One named reward. Subclasses score a group in `__call__`."""

    tasks: ClassVar[tuple[str, ...]] = ()  # names of the supported tasks; empty: every task

    def __init__(self, config: RewardConfig) -> None:
        self.config = config

    def __call__(self, problem: Problem, group: Sequence[Judged]) -> list[Score]:
        """One score for each rollout of the group."""
        raise NotImplementedError

    def score_all(self, groups: Sequence[tuple[Problem, Sequence[Judged]]]) -> list[list[Score]]:
        """[P][G] scores. Parts that use workers or a server override this to send all requests at once."""
        return [self(problem, group) for problem, group in groups]

    def costs(self) -> dict[str, float]:
        """Usage since the last call of this method, such as requests to a server; shown beside the seconds."""
        return {}


def judge(task: Task, problem: Problem, rollout: Rollout) -> Judged:
    """Parse and grade one rollout.

    A rollout that was cut off before it gave an answer is `truncated`; a complete answer
    counts even if the rollout was cut off after it.
    """
    return _judged(rollout, task.grade(problem, rollout.text))


def judge_all(task: Task, items: Sequence[tuple[Problem, Rollout]]) -> list[Judged]:
    """`judge` for many rollouts, in one call if the task supports it."""
    grades = grade_all(task, [(problem, rollout.text) for problem, rollout in items])
    return [_judged(rollout, grade) for (_, rollout), grade in zip(items, grades, strict=True)]


def _judged(rollout: Rollout, grade: Grade) -> Judged:
    if failure := ENVIRONMENT_FAILURES.get(rollout.episode.end):  # the answer is unknown
        grade = Grade(failure, note=f"environment: {rollout.episode.note}")
    if grade.verdict == "malformed" and grade.extracted is None and rollout.finish != "stop":
        grade = Grade("truncated")
    return Judged(rollout, parse(rollout.text), grade)


class Composed:
    """A `RewardFn`: the weighted sum of parts.

    `Reward.parts` holds every part unweighted, its details, always `well_formed` and, for tasks that grade, `outcome`
    (0 or 1). A part without a value for a rollout is left out of the sum, as in TRL (functions for one of several tasks
    return None for the others' rows). If a verifier failed, or no part has a value, the verdict says so and `parts` is
    empty: the total of 0 is not a score, and the caller drops the sample.
    """

    def __init__(self, task: Task, parts: Mapping[str, Part], weights: Mapping[str, float]) -> None:
        self.task, self.parts, self.weights = task, parts, weights

    def __call__(self, problem: Problem, rollouts: Sequence[Rollout]) -> list[Reward]:
        return self.score_all([problem], [rollouts])[0]

    def score_all(self, problems: Sequence[Problem], answers: Sequence[Sequence[Rollout]]) -> list[list[Reward]]:
        """[P][G] rewards: every part sees all groups at once."""
        pairs = [(problem, rollout) for problem, group in zip(problems, answers, strict=True) for rollout in group]
        rest = iter(judge_all(self.task, pairs))
        groups = [(problem, [next(rest) for _ in group]) for problem, group in zip(problems, answers, strict=True)]
        scores = {name: part.score_all(groups) for name, part in self.parts.items()}
        for name, columns in scores.items():
            for (problem, group), column in zip(groups, columns, strict=True):
                if len(column) != len(group):
                    raise ValueError(f"reward {name}: {len(column)} scores for {len(group)} rollouts of {problem.id}")
        return [
            [self._sum(one, {name: columns[p][g] for name, columns in scores.items()}) for g, one in enumerate(group)]
            for p, (_, group) in enumerate(groups)
        ]

    def offline(self) -> Composed:
        """This reward without the parts that call a model or a server, which cost time or money."""
        parts = {name: part for name, part in self.parts.items() if getattr(part, "offline", True)}
        return Composed(self.task, parts, {name: self.weights[name] for name in parts})

    def costs(self) -> dict[str, float]:
        """The costs of all parts, as `name/what`; see `Part.costs`."""
        return {f"{name}/{what}": value for name, part in self.parts.items() for what, value in part.costs().items()}

    def _sum(self, one: Judged, scores: Mapping[str, Score]) -> Reward:
        verdict, note = one.grade.verdict, one.grade.note
        if verdict not in VERIFIER_FAILURES:
            for name, score in scores.items():
                if score.failure:
                    verdict, note = score.failure, f"{name}: {score.note}" if score.note else name
                    break
            else:
                if scores and all(score.value is None for score in scores.values()):
                    verdict, note = "verifier_error", f"{', '.join(scores)}: returned None"
        if verdict in VERIFIER_FAILURES:
            return Reward(0.0, {}, verdict, one.grade.extracted, note)
        values = {name: score.value for name, score in scores.items() if score.value is not None}
        parts = {} if verdict == "ungraded" else {"outcome": float(verdict == "correct")}
        parts["well_formed"] = float(one.parsed.well_formed)
        for name, score in scores.items():
            parts.update({**({name: values[name]} if name in values else {}), **score.details})
        total = sum(self.weights[name] * value for name, value in values.items())
        if not abs(total) <= LARGEST:
            worth = ", ".join(f"{name} {value:g} x {self.weights[name]:g}" for name, value in values.items())
            raise UserError(f"reward: the sum of the parts is {total:g} ({worth}); {POSSIBLE}")
        return Reward(total, parts, verdict, one.grade.extracted, turns=self._by_turn(one.rollout, total))

    def _by_turn(self, rollout: Rollout, total: float) -> tuple[float, ...]:
        """The environment's reward of each turn, weighted; all other parts belong to the last turn."""
        steps, weight = rollout.episode.steps, self.weights.get("environment", 0.0)
        if len(steps) < 2:
            return ()
        first = [weight * (step.reward or 0.0) for step in steps[:-1]]
        return (*first, total - sum(first))


def failures(groups: Iterable[Group]) -> str | None:
    """A message about samples that were left out because a verifier failed; None without such samples."""
    rewards = [reward for group in groups for reward in group.rewards]
    out = [reward for reward in rewards if reward.verdict in VERIFIER_FAILURES]
    if not out:
        return None
    kinds = Counter((reward.verdict, reward.note or "no reason given") for reward in out).most_common()
    reasons = "; ".join(f"{count} x {verdict} ({_short(note)})" for (verdict, note), count in kinds[:3])
    rest = f"; and {len(kinds) - 3} other reasons" if len(kinds) > 3 else ""
    return f"{len(out)} of {len(rewards)} samples have no reward and were left out: {reasons}{rest}"


def reward_groups(
    problems: Sequence[Problem], answers: Sequence[tuple[Rollout, ...]], reward: RewardFn, world: World | None = None
) -> list[Group]:
    """Score groups: all at once if the reward supports it, else one by one; ranks share the work."""
    if world is None:
        return _reward_groups(problems, answers, reward)
    return world.gather(_reward_groups(world.share(problems), world.share(answers), reward), "rewards")


def _reward_groups(
    problems: Sequence[Problem], answers: Sequence[tuple[Rollout, ...]], reward: RewardFn
) -> list[Group]:
    if not problems:
        return []
    if isinstance(reward, BatchRewardFn):
        rewards = reward.score_all(problems, answers)
    else:
        rewards = [reward(problem, group) for problem, group in zip(problems, answers, strict=True)]
    return [Group(p, group, tuple(scored)) for p, group, scored in zip(problems, answers, rewards, strict=True)]


def _short(note: str) -> str:
    """A note that may quote a whole answer, with its end: that names the place of an error. Rollouts have all of it."""
    return note if len(note) <= NOTE else f"{note[: NOTE // 2]} ... {note[-NOTE // 2 :]}"
