"""MATH (arXiv:2103.03874) and MATH-500: competition problems with LaTeX answers, by level (1-5) and subject.

One row: {"problem": "If $f(x) = ...$", "solution": "... $\\boxed{\\frac{14}{3}}$.", "answer": "\\frac{14}{3}",
"level": 3, "subject": "Algebra"}; in the original the level is "Level 3", the subject is called type, and there is no
answer column.
"""

from __future__ import annotations

from typing import Literal

from hone.tasks.rows.sources import Rows, read_source
from hone.tasks.rows.task import RowsConfig, RowsTask
from hone.types import Problem

SOURCE, TEST_SOURCE = "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"


class MathConfig(RowsConfig):
    """With the default source, train is that of MATH (7500) and test is MATH-500; validation is cut from train."""

    name: Literal["math"] = "math"
    source: str | None = SOURCE
    levels: tuple[Literal[1, 2, 3, 4, 5], ...] = (1, 2, 3, 4, 5)
    subjects: tuple[str, ...] = ()  # empty: all


class MathTask(RowsTask):
    """Answers are compared exactly where possible, else by math-verify in workers."""

    name = "math"
    config: MathConfig

    def rows(self) -> Rows:
        rows = super().rows()
        if self.config.source == SOURCE and not self.config.test_file:
            rows["test"] = read_source(TEST_SOURCE)["test"]
        return rows

    def wanted(self, problem: Problem) -> bool:
        subjects = {name.casefold() for name in self.config.subjects}
        levels = {str(level) for level in self.config.levels}
        all_levels = len(levels) == 5  # a row then need not have one
        return (all_levels or problem.level in levels) and (not subjects or problem.domain.casefold() in subjects)
