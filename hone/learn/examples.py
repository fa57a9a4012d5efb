"""The examples of supervised training: worked answers that the task writes, or a dataset, such as a teacher's answers.

    examples(recipe, task, folder).train        # [Example], the same for the same seed

The validation loss is measured on other problems: the task's validation split, or problems held out from the dataset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hone.base import sealed, streams
from hone.base.settings import UserError
from hone.recipe.recipe import SFTStage
from hone.recipe.stages import beside
from hone.tasks.base import Task, TracedTask
from hone.tasks.rows.pairs import key_of, read_pairs, split
from hone.tasks.rows.task import canonical
from hone.types import Example, Problem, Split

HELD_OUT: tuple[Split, ...] = ("validation", "test")


@dataclass(frozen=True)
class Examples:
    """Examples to train on, and examples for the validation loss."""

    train: list[Example]
    validation: list[Example]
    report: tuple[str, ...] = ()  # lines about what was left out


def examples(recipe: SFTStage, task: Task, folder: Path) -> Examples:
    """The examples of `sft.data`, or of the task. Raises UserError if there are none."""
    if recipe.sft.data is not None:
        return of_dataset(recipe, task, beside(recipe.sft.data, folder, "dataset.jsonl"))
    if not isinstance(task, TracedTask):
        raise UserError(
            f"task {task.name} writes no worked answers to learn from; stage: sft needs a task that does, or sft.data"
        )
    validation = task.problems("validation") if recipe.sft.validate_every else ()
    if recipe.sft.validate_every and not validation:
        raise UserError(f"sft.validate_every: the validation split of task {task.name} is empty; give it a size, or 0")
    return Examples(
        traces(recipe, task, task.problems("train"), recipe.sft.examples, stream="styles"),
        traces(recipe, task, validation, len(validation), stream="validation styles"),
    )


def traces(recipe: SFTStage, task: TracedTask, problems: Sequence[Problem], count: int, stream: str) -> list[Example]:
    """`count` worked answers to the problems in turn, each in a style drawn with the probabilities `sft.styles`."""
    styles = list(recipe.sft.styles)
    shares = np.asarray([recipe.sft.styles[s] for s in styles])
    chosen = streams.generator(stream, seed=recipe.seed).choice(len(styles), size=count, p=shares / shares.sum())
    return [
        task.trace(problems[i % len(problems)], styles[style], seed=streams.trace(recipe.seed, i))
        for i, style in enumerate(chosen.tolist())
    ]


def of_dataset(recipe: SFTStage, task: Task, source: str) -> Examples:
    """The rows of a dataset without the problems of the task's validation and test splits.

    The validation examples are the dataset's own validation split, or problems held out from the others.
    """
    sealed.require_file(Path(source).parent, Path(source).name)  # of an earlier stage
    splits = read_pairs(source)
    pool, held_out = [*splits.get("train", ()), *splits.get("all", ())], splits.get("validation", [])
    evaluated = [problem for name in HELD_OUT for problem in task.problems(name)]
    forms = {form for problem in evaluated for form in (canonical(problem), key_of(problem))}
    clean = [pair for pair in pool if key_of(pair.problem) not in forms]
    if not clean:
        raise UserError(
            f"sft.data: {source} has no rows to train on; {len(pool)} are in splits that are not trained on"
        )
    lines = []
    if len(clean) < len(pool):
        count = f"{len(pool) - len(clean)} of {len(pool)} examples left out"
        lines.append(f"{count}: their questions are in the validation or test split of task {task.name}")
    if held_out:
        known = {key_of(pair.problem) for pair in held_out}
        train = [pair for pair in clean if key_of(pair.problem) not in known]
    else:
        train, held_out = split(clean, recipe.sft.validation)
    problems = [len({key_of(pair.problem) for pair in part}) for part in (train, held_out)]
    lines.append(
        f"{len(train)} examples of {problems[0]} problems to train on, {len(held_out)} of {problems[1]} held out"
    )
    return Examples(train, held_out, tuple(lines))
