"""The interface of a task: problems with checkable answers, and their grader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from hone.types import Example, Grade, Problem, Split


class Task(Protocol):
    """A source of problems. All randomness is seeded by the task's own settings."""

    name: str
    system: str  # the default system prompt; rendered by hone.rollout.prompts

    def problems(self, split: Split) -> Sequence[Problem]:
        """The problems of one split; splits are disjoint by canonical form."""
        ...

    def grade(self, problem: Problem, text: str) -> Grade:
        """Grade the model's output (`Rollout.text`). Never raises, whatever the text."""
        ...


@runtime_checkable
class TracedTask(Task, Protocol):
    """A task that can also write worked solutions, to train a model from scratch."""

    trace_styles: tuple[str, ...]

    def trace(self, problem: Problem, style: str, seed: int) -> Example:
        """A worked answer in one of the styles, with all tags; the same seed gives the same text."""
        ...


@runtime_checkable
class BatchTask(Task, Protocol):
    """A task that grades many answers faster at once than one by one, for example in workers."""

    def grade_all(self, items: Sequence[tuple[Problem, str]]) -> list[Grade]:
        """One grade for each (problem, model output). Never raises, whatever the text."""
        ...


def grade_all(task: Task, items: Sequence[tuple[Problem, str]]) -> list[Grade]:
    """One grade for each (problem, model output), in one call if the task supports it."""
    if isinstance(task, BatchTask):
        return task.grade_all(items)
    return [task.grade(problem, text) for problem, text in items]
