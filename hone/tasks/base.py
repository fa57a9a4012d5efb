"""What a task is: problems with checkable answers, and the grader of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from hone.types import Example, Grade, Problem, Split


class Task(Protocol):
    """A source of problems. Everything random is seeded by the task's own settings."""

    name: str
    system: str  # the default system prompt; rendered by hone.rollout.prompts

    def problems(self, split: Split) -> Sequence[Problem]:
        """The problems of one split; splits are disjoint by canonical form."""
        ...

    def grade(self, problem: Problem, text: str) -> Grade:
        """Judge what the model said (`Rollout.text`). Never raises on any text."""
        ...


@runtime_checkable
class TracedTask(Task, Protocol):
    """A task that can also write worked solutions, to teach a model from scratch."""

    trace_styles: tuple[str, ...]

    def trace(self, problem: Problem, style: str, seed: int) -> Example:
        """A worked answer in the given style, complete with tags; same seed, same text."""
        ...


@runtime_checkable
class BatchTask(Task, Protocol):
    """A task that grades many answers at once faster than one by one, such as through workers."""

    def grade_all(self, items: Sequence[tuple[Problem, str]]) -> list[Grade]:
        """One grade for each (problem, what the model said). Never raises on any text."""
        ...


def grade_all(task: Task, items: Sequence[tuple[Problem, str]]) -> list[Grade]:
    """One grade for each (problem, what the model said), at once if the task can."""
    if isinstance(task, BatchTask):
        return task.grade_all(items)
    return [task.grade(problem, text) for problem, text in items]
