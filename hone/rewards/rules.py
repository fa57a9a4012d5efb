"""Rule-based rewards. Each class states its scores; `hone.rewards.REWARDS` lists them."""

from __future__ import annotations

from collections.abc import Sequence

from hone.rewards.base import Judged, Part, Score
from hone.types import Episode, Problem


class Outcome(Part):
    """1 for a correct answer, else 0."""

    def __call__(self, problem: Problem, group: Sequence[Judged]) -> list[Score]:
        return [Score(float(one.grade.verdict == "correct")) for one in group]


class TaskScore(Part):
    """The task's own score from 0 to 1, if it gives partial credit; else as `outcome`."""

    def __call__(self, problem: Problem, group: Sequence[Judged]) -> list[Score]:
        correct = (float(one.grade.verdict == "correct") for one in group)
        return [Score(c if one.grade.score is None else one.grade.score) for c, one in zip(correct, group, strict=True)]


class WellFormed(Part):
    """1 if each of the four tags occurs exactly once and in order, else 0."""

    def __call__(self, problem: Problem, group: Sequence[Judged]) -> list[Score]:
        return [Score(float(one.parsed.well_formed)) for one in group]


class LogicRL(Part):
    """Format 1 or -1, plus answer 2 (correct), -1.5 (wrong) or -2 (unreadable, missing, or bad format).

    The totals are 3, -0.5, -1 and -3. Logged in detail as `format` and `answer`.
    Source: Logic-RL, arXiv:2502.14768, section 2.2.
    """

    tasks = ("knights",)

    def __call__(self, problem: Problem, group: Sequence[Judged]) -> list[Score]:
        return [self._score(one) for one in group]

    @staticmethod
    def _score(one: Judged) -> Score:
        shape = 1.0 if one.parsed.well_formed else -1.0
        answer = {"correct": 2.0, "wrong": -1.5}.get(one.grade.verdict, -2.0) if one.parsed.well_formed else -2.0
        return Score(shape + answer, {"format": shape, "answer": answer})


class Countdown(Part):
    """1.0 for a correct expression, 0.1 for any other answer, 0 without one (TinyZero); see `CountdownReward`."""

    tasks = ("countdown",)

    def __call__(self, problem: Problem, group: Sequence[Judged]) -> list[Score]:
        return [Score(self._value(one)) for one in group]

    def _value(self, one: Judged) -> float:
        if one.grade.verdict == "correct":
            return self.config.countdown.correct
        return 0.0 if one.grade.extracted is None else self.config.countdown.wrong


def earned(episode: Episode) -> float | None:
    """What the environment gave; None if it ended the episode itself without a reward."""
    rewards = [*(step.reward for step in episode.steps), episode.reward]
    values = [value for value in rewards if value is not None]
    return None if not values and episode.end == "done" else sum(values, 0.0)


class EnvironmentReward(Part):
    """The environment's reward: the sum of the rewards of the turns and of the whole episode.

    An episode that was cut off before the environment gave any reward earned 0; one that the environment itself ended
    without a reward has no value.
    """

    def __call__(self, problem: Problem, group: Sequence[Judged]) -> list[Score]:
        return [Score(earned(one.rollout.episode)) for one in group]


class Overlong(Part):
    """Soft length penalty (DAPO, arXiv:2503.14476, eq. 13), over |y| completion tokens.

    0 up to Lmax - Lc; ((Lmax - Lc) - |y|) / Lc up to Lmax; -1 beyond.
    """

    def __call__(self, problem: Problem, group: Sequence[Judged]) -> list[Score]:
        longest, buffer = self.config.overlong.max_tokens, self.config.overlong.buffer
        assert longest is not None  # checked by RewardConfig
        return [Score(min(0.0, max(-1.0, (longest - buffer - one.rollout.num_tokens) / buffer))) for one in group]
