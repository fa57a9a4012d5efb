"""Knights and knaves: who tells the truth? Generated puzzles with exactly one solution.

A problem in the brief wording::

    Zoey says: Oliver is a knave.
    Oliver says: Zoey is a knight and Oliver is a knight.

and its answer `(1) Zoey is a knight` / `(2) Oliver is a knave`. The wording of the public rows
(`quiz: full`), their files and Logic-RL's (arXiv:2502.14768) scores are those of the K-and-K
benchmark (arXiv:2410.23123).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from hone.base import streams
from hone.base.settings import Section, UserError
from hone.grade.parse import parse
from hone.tasks.knights.logic import (
    MAX_PEOPLE,
    OPERATORS,
    Operator,
    Puzzle,
    canonical_form,
    parse_statements,
    random_puzzles,
    solve,
)
from hone.tasks.knights.rows import puzzle_of, roles_said, row_of
from hone.tasks.knights.text import (
    NAMES,
    answer_text,
    brief_quiz,
    full_quiz,
    hidden_quiz,
    is_brief,
    question,
    read_roles,
    swapped,
)
from hone.tasks.knights.trace import Search, careful, careful_steps, hasty
from hone.tasks.rows.files import read_rows
from hone.tasks.rows.store import Row
from hone.tasks.splits import SHARES, by_level, split_of, warn_of_overlap
from hone.types import Example, Grade, Problem, Split

SYSTEM = (
    "You are a helpful assistant. First think about the problem inside <think> </think>, then give the final "
    "answer inside <answer> </answer>. You are given a puzzle about knights, who always tell the truth, and "
    "knaves, who always lie. In the answer, state the role of every person on a line of its own, for example: "
    "<answer>(1) Zoey is a knight\n(2) Oliver is a knave</answer>"
)


_JOINING = ", ".join(OPERATORS[1:])

#: Consecutive tries without a new puzzle after which a split counts as exhausted.
MAX_TRIES = 50_000


class KnightsConfig(Section):
    """Sizes are totals, divided evenly between the numbers in `people`, which alternate in the order of
    problems. A split with a file of public rows consists of all its rows."""

    name: Literal["knights"] = "knights"
    people: tuple[int, ...] = Field(default=(3,), min_length=1)
    train: NonNegativeInt = 1000
    validation: NonNegativeInt = 100
    test: NonNegativeInt = 100
    seed: NonNegativeInt = 0  # training puzzles also depend on the recipe's seed, other splits do not
    names: PositiveInt | tuple[str, ...] = len(NAMES)  # the number of built-in names to use, or a list
    depth: PositiveInt = 2  # levels of a statement; a plain "X is a knight" is one
    width: int = Field(default=2, ge=2)  # most operands of `and` and `or`
    operators: tuple[Operator, ...] = OPERATORS  # each is drawn as often as a plain claim
    # The public wording; one bare line per person; or the names alone, for `environment: knights_interrogation`.
    quiz: Literal["full", "brief", "hidden"] = "full"
    search: Search = "depth_first"  # in careful worked answers; exhaustive: longer, with simpler steps
    repeats: bool = False  # training only: a form may occur again with other names and wording
    train_file: str | None = None
    validation_file: str | None = None
    test_file: str | None = None

    @model_validator(mode="after")
    def _possible(self) -> KnightsConfig:
        if not all(2 <= n <= MAX_PEOPLE for n in self.people) or len(set(self.people)) < len(self.people):
            raise ValueError(f"people: {self.people}: must be distinct, from 2 to {MAX_PEOPLE}")
        pool = self.name_pool
        if len(pool) < max(self.people) or (isinstance(self.names, int) and self.names > len(NAMES)):
            raise ValueError(
                f"names: {self.names}: give at least {max(self.people)} (the most people of a puzzle), "
                f"as a list or as a number up to {len(NAMES)}"
            )
        if len({name.casefold() for name in pool}) < len(pool) or not all(name.strip() == name != "" for name in pool):
            raise ValueError(f"names: {pool}: names must be distinct in any case, without blanks around them")
        if any("knight" in name.casefold() or "knave" in name.casefold() for name in pool):
            raise ValueError(f"names: {pool}: no name may hold the word knight or knave")
        if len(set(self.operators)) < len(self.operators) or not set(self.operators) - {"not"}:
            raise ValueError(
                f"operators: {list(self.operators)}: give distinct ones, and one that joins claims ({_JOINING}): from "
                "single claims alone, all roles could be swapped, so no puzzle would have just one solution"
            )
        return self

    def without_effect(self) -> list[str]:
        changed = self.changed()
        splits = [split for split in SHARES if split in changed and getattr(self, f"{split}_file")]
        notes = [f"{split} has no effect beside {split}_file, whose rows are all used" for split in splits]
        if "width" in changed and not {"and", "or"} & set(self.operators):
            notes.append("width has no effect without the operators `and` and `or`")
        return notes

    @property
    def name_pool(self) -> tuple[str, ...]:
        return tuple(NAMES[: self.names]) if isinstance(self.names, int) else self.names


class KnightsTask:
    """A `TracedTask`; see `hone.tasks.base`."""

    name = "knights"
    system = SYSTEM
    trace_styles: tuple[str, ...] = ("careful", "hasty")

    def __init__(self, config: KnightsConfig, seed: int = 0) -> None:
        self.config, self.seed = config, seed
        self._problems: dict[Split, list[Problem]] = {}

    def problems(self, split: Split) -> Sequence[Problem]:
        """Generated (or read) once. Raises UserError if there are not enough distinct puzzles."""
        if split not in self._problems:
            puzzles = self._from_file(split) if split in self._files else self._generated(split)
            self._problems[split] = _distinct_ids(puzzles)
        return self._problems[split]

    def grade(self, problem: Problem, text: str) -> Grade:
        """`malformed` without a complete answer block that gives each person exactly one role."""
        answer = parse(text).answer
        if not answer:
            return Grade("malformed")
        roles = read_roles(answer, problem.answer["names"])
        if roles is None:
            return Grade("malformed", answer[:500])
        correct = list(roles) == list(problem.answer["solution"])
        return Grade("correct" if correct else "wrong", answer_text(problem.answer["names"], roles))

    def trace(self, problem: Problem, style: str, seed: int) -> Example:
        """A worked answer. Raises UserError for an unknown style."""
        puzzle, hidden = puzzle_of_problem(problem), self.config.quiz == "hidden"
        if style == "careful":
            questions = tuple(map(question, puzzle.names)) if hidden else ()
            return Example(problem, worked(puzzle, self.config.search), style, questions)
        if style == "hasty":
            rng = streams.text("hasty", seed, problem.id)
            text = hasty(puzzle, rng)
            questions = tuple(map(question, puzzle.names[: rng.randrange(len(puzzle.names))])) if hidden else ()
            return Example(problem, text, style, questions)
        raise UserError(f"knights: no trace style {style!r}; there are {', '.join(self.trace_styles)}")

    # --- where puzzles come from -----------------------------------------------------------

    @cached_property
    def _files(self) -> dict[Split, list[tuple[Puzzle, str]]]:
        """Puzzles and quizzes of splits that are read from files."""
        paths: dict[Split, str | None] = {split: getattr(self.config, f"{split}_file") for split in SHARES}
        return {split: _read(path) for split, path in paths.items() if path}

    @cached_property
    def _file_forms(self) -> dict[Split, set[str]]:
        """Canonical forms of the files; generated splits avoid them."""
        return {s: {canonical_form(puzzle.statements) for puzzle, _ in rows} for s, rows in self._files.items()}

    def _from_file(self, split: Split) -> list[Problem]:
        warn_of_overlap(self._file_forms, split)
        brief = self.config.quiz != "full"
        rows = self._files[split]
        quizzes = [brief_quiz(p) if brief and not is_brief(quiz, p) else quiz for p, quiz in rows]
        return [self._posed(p, quiz) for (p, _), quiz in zip(rows, quizzes, strict=True)]

    def _posed(self, puzzle: Puzzle, quiz: str) -> Problem:
        problem = problem_of(puzzle, quiz, self.config.search)
        if self.config.quiz != "hidden":
            return problem
        people = {"role": "user", "content": hidden_quiz(puzzle)}
        return replace(problem, messages=(*problem.messages[:-1], people))

    def _generated(self, split: Split) -> list[Problem]:
        return by_level(getattr(self.config, split), self.config.people, partial(self._level, split))

    def _level(self, split: Split, people: int, count: int) -> list[Problem]:
        config = self.config
        source = (config.seed, self.seed) if split == "train" else (config.seed,)
        rng = streams.text("knights", *source, split, people)
        taken = set().union(*self._file_forms.values())
        quizzes: set[str] = set()
        problems: list[Problem] = []
        tries = 0
        for statements in random_puzzles(rng, people, config.depth, config.width, config.operators):
            if len(problems) == count:
                break
            tries += 1
            if tries > MAX_TRIES:
                raise UserError(_exhausted(split, people, count, len(problems)))
            if statements is None:
                continue
            form = canonical_form(statements)
            if form in taken or split_of(form) != split:
                continue
            puzzle = Puzzle(tuple(rng.sample(config.name_pool, people)), statements, solve(statements)[0])
            quiz = full_quiz(puzzle, rng) if config.quiz == "full" else brief_quiz(puzzle)
            if quiz in quizzes:
                continue
            quizzes.add(quiz)
            if not (split == "train" and config.repeats):
                taken.add(form)
            problems.append(self._posed(puzzle, quiz))
            tries = 0
        return problems


def _read(path: str) -> list[tuple[Puzzle, str]]:
    """Puzzles and quizzes of a file. Raises UserError unless the recorded solution of each is its only one."""
    result = []
    for number, row in enumerate(read_rows(path), start=1):
        try:
            puzzle = puzzle_of(row)
        except ValueError as error:
            raise UserError(f"{path}: row {number}: {error}") from error
        if solve(puzzle.statements) != [puzzle.solution]:
            raise UserError(f"{path}: row {number}: its statements do not lead to its solution, or not only to it")
        result.append((puzzle, str(row["quiz"])))
    return result


def _exhausted(split: Split, people: int, wanted: int, generated: int) -> str:
    repeats = " or set repeats: true" if split == "train" else ""
    return (
        f"knights: found {generated} distinct puzzles of {people} people for the {split} split, {wanted} were asked "
        f"for (no new one in {MAX_TRIES} tries). Ask for at most {generated}, allow more depth or width{repeats}."
    )


def problem_of(puzzle: Puzzle, quiz: str, search: Search = "depth_first") -> Problem:
    """The record of one puzzle; its id is a digest of the quiz, so equal in every run."""
    people = len(puzzle.names)
    digest = hashlib.sha256(quiz.encode()).hexdigest()[:12]
    answer: dict[str, Any] = {"names": list(puzzle.names), "solution": list(roles_said(puzzle))}
    # The task's own system prompt says that knights tell the truth.
    system = ({"role": "system", "content": swapped(SYSTEM)},) if puzzle.flipped else ()
    return Problem(
        id=f"knights-{people}-{digest}",
        task="knights",
        messages=(*system, {"role": "user", "content": quiz}),
        answer=answer,
        level=str(people),
        reference=worked(puzzle, search),
        extra={"statements": repr(puzzle.statements), **({"flipped": True} if puzzle.flipped else {})},
    )


def worked(puzzle: Puzzle, search: Search = "depth_first") -> str:
    """The careful answer; of a flipped puzzle, with the words swapped."""
    return swapped(careful(puzzle, search)) if puzzle.flipped else careful(puzzle, search)


def row_of_problem(problem: Problem, index: int) -> Row:
    """A problem of this task in the public row format."""
    puzzle = puzzle_of_problem(problem)
    return row_of(puzzle, problem.messages[-1]["content"], careful_steps(puzzle), index)


def puzzle_of_problem(problem: Problem) -> Puzzle:
    """The puzzle behind a record of this task."""
    statements = parse_statements(problem.extra["statements"])
    flipped = bool(problem.extra.get("flipped"))
    truthful = tuple(role != flipped for role in problem.answer["solution"])
    return Puzzle(tuple(problem.answer["names"]), statements, truthful, flipped)


def _distinct_ids(problems: Iterable[Problem]) -> list[Problem]:
    """Make ids unique: a file may hold a row twice."""
    seen: dict[str, int] = {}
    result = []
    for problem in problems:
        seen[problem.id] = count = seen.get(problem.id, 0) + 1
        if count > 1:
            fields = {name: getattr(problem, name) for name in Problem.__dataclass_fields__}
            problem = Problem(**{**fields, "id": f"{problem.id}-{count}"})
        result.append(problem)
    return result
