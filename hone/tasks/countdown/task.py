"""Countdown: reach a target with + - * /, using each of the numbers exactly once.

A problem in the brief wording is `3 7 2 make 20`, an answer to it `(3 + 7) * 2`. The wording
`full`, the rows (`nums`, `target`) and the scores follow TinyZero's countdown task.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from hone.base import streams
from hone.base.settings import Section, UserError
from hone.grade.parse import completion, parse
from hone.tasks.countdown import arithmetic
from hone.tasks.rows.files import read_rows
from hone.tasks.splits import SHARES, by_level, split_of, warn_of_overlap
from hone.types import Example, Grade, Problem, Split

SYSTEM = (
    "You are a helpful assistant. First think about the problem inside <think> </think>, then give the final "
    "answer inside <answer> </answer>, for example <answer> (1 + 2) / 3 </answer>."
)

#: Consecutive tries without a new problem after which a split counts as exhausted.
MAX_TRIES = 50_000

#: Most combinations tried when searching for a solution of a row of a file.
MAX_SEARCH = 500_000


class CountdownConfig(Section):
    """Sizes are totals, divided evenly between the counts in `numbers`. A split with a file
    consists of all rows of that file."""

    name: Literal["countdown"] = "countdown"
    numbers: tuple[int, ...] = Field(default=(3, 4), min_length=1)  # how many numbers a problem has
    max_number: int = Field(default=99, ge=3)
    max_target: int = Field(default=100, ge=1)
    train: NonNegativeInt = 1000
    validation: NonNegativeInt = 100
    test: NonNegativeInt = 100
    seed: NonNegativeInt = 0  # training problems also depend on the recipe's seed, other splits do not
    quiz: Literal["full", "brief"] = "full"
    tries: PositiveInt = 4  # most failed attempts in a careful trace
    train_file: str | None = None
    validation_file: str | None = None
    test_file: str | None = None

    @model_validator(mode="after")
    def _possible(self) -> CountdownConfig:
        if not all(3 <= n <= 6 for n in self.numbers) or len(set(self.numbers)) < len(self.numbers):
            raise ValueError(f"numbers: {self.numbers}: must be distinct, from 3 to 6")
        return self

    def without_effect(self) -> list[str]:
        changed = self.changed()
        splits = [split for split in SHARES if split in changed and getattr(self, f"{split}_file")]
        notes = [f"{split} has no effect beside {split}_file, whose rows are all used" for split in splits]
        return notes


@dataclass(frozen=True, slots=True)
class Term:
    """An expression with its value and the steps that compute it."""

    value: Fraction
    text: str
    binding: int = 3  # of the outermost operator: 1 for + and -, 2 for * and /, 3 for a number
    steps: tuple[str, ...] = ()  # ("3 + 7 = 10", "10 * 2 = 20")


def combine(operator: str, left: Term, right: Term) -> Term:
    """`left operator right` with as few parentheses as possible. Raises ZeroDivisionError."""
    binding = 1 if operator in "+-" else 2
    a = left.text if left.binding >= binding else f"({left.text})"
    loose = right.binding > binding or (right.binding == binding and operator in "+*")
    b = right.text if loose else f"({right.text})"
    value = arithmetic.apply(operator, left.value, right.value)
    step = f"{left.value} {operator} {right.value} = {value}"
    return Term(value, f"{a} {operator} {b}", binding, (*left.steps, *right.steps, step))


def random_term(rng: random.Random, nums: Sequence[int]) -> Term:
    """A random expression of all the numbers, with positive integers as intermediate results."""
    terms = [Term(Fraction(n), str(n)) for n in nums]
    while len(terms) > 1:
        left, right = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
        allowed = ["+", "*"]
        if left.value > right.value:
            allowed.append("-")
        if right.value and (left.value / right.value).denominator == 1:
            allowed.append("/")
        terms.append(combine(rng.choice(allowed), left, right))
    return terms[0]


def canonical_form(nums: Sequence[int], target: int) -> str:
    """Problems with the same numbers, in any order, and the same target have the same form."""
    return f"{sorted(nums)} {target}"


def find_term(nums: Sequence[int], target: int, most: int = MAX_SEARCH) -> Term | None:
    """A solution by exhaustive search, combining two numbers at a time; None if `most` tries find none."""
    budget = [most]
    seen: set[tuple[Fraction, ...]] = set()

    def search(terms: list[Term]) -> Term | None:
        key = tuple(sorted(term.value for term in terms))
        if key in seen or budget[0] <= 0:
            return None
        seen.add(key)
        if len(terms) == 1:
            return terms[0] if terms[0].value == target else None
        for i, a in enumerate(terms):
            for j, b in enumerate(terms):
                if i == j:
                    continue
                rest = [term for k, term in enumerate(terms) if k not in (i, j)]
                for operator in "+*-/":
                    if (operator in "+*" and i > j) or (operator == "/" and b.value == 0):
                        continue
                    budget[0] -= 1
                    solution = search([*rest, combine(operator, a, b)])
                    if solution is not None:
                        return solution
        return None

    return search([Term(Fraction(n), str(n)) for n in nums])


def careful(nums: Sequence[int], target: int, solution: Term, rng: random.Random, tries: int) -> str:
    """Some failed attempts, each computed step by step, then the solution."""
    lines = []
    for _ in range(rng.randint(0, tries)):
        term = random_term(rng, nums)
        if term.value != target:
            lines.append(f"Try {term.text}: {', '.join(term.steps)}, not {target}, try again.")
    lines.append(f"Try {solution.text}: {', '.join(solution.steps)}. Found it.")
    return completion("\n".join(lines), solution.text)


def terse(nums: Sequence[int], target: int, solution: Term, rng: random.Random, tries: int) -> str:
    """`careful` in half the tokens, for very small models: `3+7=10 10-2=8 vs 20 no`, a line for each attempt.

    The target is repeated next to each result: comparing over a long distance is learned much later.
    """
    failed = [random_term(rng, nums) for _ in range(rng.randint(0, tries))]
    lines = [f"{' '.join(term.steps)} vs {target} no" for term in failed if term.value != target]
    lines.append(f"{' '.join(solution.steps)} vs {target} yes")
    steps = (re.sub(r" ([-+*/=]) ", r"\1", line) for line in lines)
    return completion("\n".join(steps), solution.text.replace(" ", ""))


def calculated(nums: Sequence[int], target: int, solution: Term, rng: random.Random, tries: int) -> tuple[str, ...]:
    """Calls of the tool `calculator`, one for each attempt, the last of them right; then the answer.

    The result is repeated beside the target, for the reason given in `terse`.
    """
    terms = [random_term(rng, nums) for _ in range(rng.randint(0, tries))]
    failed = [term for term in terms if term.value != target]
    calls = [f'```tool\ncalculator(expression="{term.text}")\n```' for term in (*failed, solution)]
    seen = [f"{term.value} vs {target} no\n" for term in failed]
    turns = [before + call for before, call in zip(["", *seen], calls, strict=True)]
    return (*turns, completion(f"{solution.value} vs {target} yes", solution.text))


class CountdownTask:
    """A `TracedTask`; see `hone.tasks.base`."""

    name = "countdown"
    system = SYSTEM
    trace_styles: tuple[str, ...] = ("careful", "hasty", "terse", "calculator")

    def __init__(self, config: CountdownConfig, seed: int = 0) -> None:
        self.config, self.seed = config, seed
        self._problems: dict[Split, list[Problem]] = {}
        self._solutions: dict[str, Term] = {}  # of generated problems

    def problems(self, split: Split) -> Sequence[Problem]:
        """Generated (or read) once. Raises UserError if there are not enough distinct problems."""
        if split not in self._problems:
            self._problems[split] = self._from_file(split) if split in self._files else self._generated(split)
        return self._problems[split]

    def grade(self, problem: Problem, text: str) -> Grade:
        """`malformed` if the answer block is missing or holds no arithmetic; only the text before `=` counts."""
        answer = parse(text).answer
        if not answer:
            return Grade("malformed")
        expression = answer[: arithmetic.MAX_LENGTH + 1].split("=", 1)[0]
        shown = expression[:100].strip()
        try:
            postfix = arithmetic.parse(expression)
        except ValueError:  # the model wrote something else
            return Grade("malformed", shown)
        if Counter(arithmetic.numbers(postfix)) != Counter(problem.answer["nums"]):
            return Grade("wrong", shown)
        try:
            value = arithmetic.compute(postfix)
        except ZeroDivisionError:  # the model divided by zero
            return Grade("wrong", shown)
        return Grade("correct" if value == problem.answer["target"] else "wrong", shown)

    def trace(self, problem: Problem, style: str, seed: int) -> Example:
        """A worked answer. Raises UserError for an unknown style, and for a row without a solution."""
        if style not in self.trace_styles:
            raise UserError(f"countdown: no trace style {style!r}; there are {', '.join(self.trace_styles)}")
        nums, target = problem.answer["nums"], problem.answer["target"]
        rng = streams.text(style, seed, problem.id)
        if style in ("careful", "terse"):
            write = careful if style == "careful" else terse
            return Example(problem, write(nums, target, self._solution(problem), rng, self.config.tries), style)
        if style == "calculator":
            *calls, text = calculated(nums, target, self._solution(problem), rng, self.config.tries)
            return Example(problem, text, style, tuple(calls))
        return Example(problem, completion("I will just guess.", random_term(rng, nums).text), style)

    def _solution(self, problem: Problem) -> Term:
        nums, target = problem.answer["nums"], problem.answer["target"]
        term = self._solutions.get(problem.id) or find_term(nums, target)
        if term is None:
            raise UserError(f"countdown: found no way to make {target} of {nums} ({problem.id})")
        return term

    # --- where problems come from ----------------------------------------------------------

    @cached_property
    def _files(self) -> dict[Split, list[Problem]]:
        """The problems of splits that are read from files."""
        paths: dict[Split, str | None] = {split: getattr(self.config, f"{split}_file") for split in SHARES}
        return {split: self._read(path) for split, path in paths.items() if path}

    def _read(self, path: str) -> list[Problem]:
        problems = []
        for number, row in enumerate(read_rows(path), start=1):
            try:
                problems.append(self.problem_of(*numbers_of(row), suffix=f"-{number}", messages=row.get("messages")))
            except (ValueError, KeyError, TypeError) as error:  # missing columns, or wrong types
                raise UserError(f"{path}: row {number}: {error}") from error
        return problems

    @cached_property
    def _file_forms(self) -> dict[Split, set[str]]:
        """Canonical forms of the files; generated splits avoid them."""
        return {split: {canonical_form(**p.answer) for p in problems} for split, problems in self._files.items()}

    def _from_file(self, split: Split) -> list[Problem]:
        warn_of_overlap(self._file_forms, split)
        return self._files[split]

    def _generated(self, split: Split) -> list[Problem]:
        return by_level(getattr(self.config, split), self.config.numbers, partial(self._level, split))

    def _level(self, split: Split, count: int, wanted: int) -> list[Problem]:
        config = self.config
        source = (config.seed, self.seed) if split == "train" else (config.seed,)
        rng = streams.text("countdown", *source, split, count)
        taken = set().union(*self._file_forms.values())
        problems: list[Problem] = []
        tries = 0
        while len(problems) < wanted:
            tries += 1
            if tries > MAX_TRIES:
                raise UserError(
                    f"countdown: found {len(problems)} distinct problems of {count} numbers for the {split} split, "
                    f"but {wanted} were asked for. Ask for fewer, or raise max_number or max_target."
                )
            nums = [rng.randint(1, config.max_number) for _ in range(count)]
            term = random_term(rng, nums)
            target = int(term.value)
            form = canonical_form(nums, target)
            if target > config.max_target or form in taken or split_of(form) != split:
                continue
            taken.add(form)
            problem = self.problem_of(nums, target, solution=term)
            self._solutions[problem.id] = term
            problems.append(problem)
            tries = 0
        return problems

    def problem_of(
        self, nums: list[int], target: int, suffix: str = "", messages: Any = None, solution: Term | None = None
    ) -> Problem:
        """The record of one problem; its prompt is `messages`, or worded as the settings say."""
        quiz = (
            f"Use the numbers {', '.join(map(str, nums))} to make {target}. Write one expression with + - * / and "
            "parentheses in which every number is used exactly once."
        )
        if self.config.quiz == "brief":
            quiz = f"{' '.join(map(str, nums))} make {target}"
        if messages:
            prompt = tuple({"role": str(m["role"]), "content": str(m["content"])} for m in messages)
        else:
            prompt = ({"role": "user", "content": quiz},)
        return Problem(
            id=f"countdown-{'-'.join(map(str, nums))}-to-{target}{suffix}",
            task="countdown",
            messages=prompt,
            answer={"nums": nums, "target": target},
            level=str(len(nums)),
            reference=careful(nums, target, solution, streams.text("careful", 0, "reference"), tries=0)
            if solution
            else None,
        )


def numbers_of(row: Mapping[str, Any]) -> tuple[list[int], int]:
    """`nums` and `target` of a row. Raises ValueError naming the column that does not fit."""
    nums, target = row.get("nums"), row.get("target")
    if not isinstance(nums, list) or not nums or not all(type(n) is int and n >= 0 for n in nums):
        raise ValueError(f"countdown row: nums must be a list of integers from 0, found {nums!r}")
    if type(target) is not int:
        raise ValueError(f"countdown row: target must be an integer, found {target!r}")
    return nums, target
