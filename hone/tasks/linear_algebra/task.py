"""Linear algebra, a ladder of generated rungs with exact answers: addition, row reduction, inverses.

A problem of the rung `inverse_2` in the brief wording is `inverse [[2, 1], [1, 1]]`, its answer
`[[1, -1], [-1, 2]]`. The rungs, each a level of the task:

    addition_5          the sum of two numbers of 5 digits
    rref_3x4            the reduced row echelon form of a 3 x 4 integer matrix of any rank (up to 10 x 10)
    near_identity_2     the inverse of the identity plus tenths, 2 x 2
    inverse_3           the inverse of an integer matrix, 3 x 3

A sum and a reduced form must be exact. An inverse may be given in decimals: it is correct if the absolute errors of
its entries add up to less than `tolerance`. No fixed guess, such as the identity or zero, is that close.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, model_validator

from hone.base import streams
from hone.base.settings import Section, UserError
from hone.grade.parse import completion, parse
from hone.tasks.linear_algebra import matrices
from hone.tasks.linear_algebra.matrices import Matrix
from hone.tasks.splits import by_level, split_of
from hone.types import Example, Grade, Problem, Split

SYSTEM = (
    "You are a helpful assistant. First think about the problem inside <think> </think>, then give the final "
    "answer inside <answer> </answer>: a number, or a matrix such as <answer>[[1, 0], [1/2, 3]]</answer>."
)

#: Consecutive tries without a new problem after which a rung counts as exhausted.
MAX_TRIES = 2_000

MAX_SIDE = 10

_RUNG = re.compile(r"(addition)_(\d{1,2})|(rref)_(\d{1,2})x(\d{1,2})|(near_identity|inverse)_(\d{1,2})")
_SUM = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


class LinearAlgebraConfig(Section):
    """Sizes are totals, divided evenly between the rungs, which alternate in the order of problems."""

    name: Literal["linear_algebra"] = "linear_algebra"
    rungs: tuple[str, ...] = Field(
        default=("addition_5", "rref_2x3", "rref_3x4", "near_identity_2", "inverse_2", "inverse_3"), min_length=1
    )
    max_entry: int = Field(default=9, ge=3, le=999)  # integer entries lie in -max_entry .. max_entry
    tolerance: float = Field(default=0.1, gt=0, le=0.25)  # sum of absolute errors below which an inverse is correct
    train: NonNegativeInt = 1000
    validation: NonNegativeInt = 100
    test: NonNegativeInt = 100
    seed: NonNegativeInt = 0  # training problems also depend on the recipe's seed, other splits do not
    quiz: Literal["full", "brief"] = "full"

    @model_validator(mode="after")
    def _possible(self) -> LinearAlgebraConfig:
        for rung in self.rungs:
            parse_rung(rung)
        if len(set(self.rungs)) < len(self.rungs):
            raise ValueError(f"rungs: {self.rungs}: a rung is named twice; remove one")
        return self


def parse_rung(name: str) -> tuple[str, tuple[int, ...]]:
    """`rref_3x4` -> ("rref", (3, 4)). Raises ValueError listing the possible rungs."""
    match = _RUNG.fullmatch(name)
    kind, *sizes = [group for group in match.groups() if group] if match else ("", "0")
    numbers = tuple(map(int, sizes))
    low, high = {"addition": (1, 18), "rref": (1, MAX_SIDE)}.get(kind, (2, MAX_SIDE))
    if match is None or not all(low <= n <= high for n in numbers) or (kind == "rref" and numbers[1] < 2):
        raise ValueError(
            f"rungs: {name!r} is not a rung; give addition_DIGITS (1 to 18), rref_ROWSxCOLUMNS "
            f"(up to {MAX_SIDE}x{MAX_SIDE}, at least 2 columns), near_identity_SIZE or inverse_SIZE (2 to {MAX_SIDE})"
        )
    return kind, numbers


# --- problems --------------------------------------------------------------------------------------------------------


def random_addends(rng: random.Random, digits: int) -> Matrix:
    """Two numbers of exactly `digits` digits, as a 1 x 2 matrix."""
    return (tuple(Fraction(rng.randint(10 ** (digits - 1), 10**digits - 1)) for _ in range(2)),)


def random_reducible(rng: random.Random, rows: int, columns: int, max_entry: int) -> Matrix | None:
    """An integer matrix; None if this try failed. A random reduced form of small integers, multiplied on the left by a
    random integer matrix: the reduced form of a uniform matrix has large denominators, and often is the identity."""
    most = min(rows, columns - 1)
    rank = rng.randint(max(1, most - 1), most)
    pivots = sorted(rng.sample(range(columns), rank))
    size = 3 if rank <= 3 else 2 if rank <= 5 else 1
    reduced = [[int(j == pivot) for j in range(columns)] for pivot in pivots]
    for row, pivot in zip(reduced, pivots, strict=True):
        for j in range(pivot + 1, columns):
            if j not in pivots:
                row[j] = rng.randint(-size - 2, size + 2)
    factors = [[rng.randint(-size, size) for _ in range(rank)] for _ in range(rows)]
    matrix = [[sum(f * row[j] for f, row in zip(mix, reduced)) for j in range(columns)] for mix in factors]
    small = all(abs(value) <= max_entry for row in matrix for value in row)
    return exact(matrix) if small and all(map(any, matrix)) else None


def random_near_identity(rng: random.Random, size: int) -> Matrix:
    return tuple(tuple(Fraction(10 * (i == j) + rng.randint(-5, 5), 10) for j in range(size)) for i in range(size))


def random_invertible(rng: random.Random, size: int, max_entry: int) -> Matrix | None:
    """An integer matrix; None if this try failed. 2 x 2: uniform. Larger: a shuffled product of a lower triangular,
    a diagonal of 1 and 2, and an upper triangular one, so that the inverse has small denominators."""
    if size == 2:
        return exact([[rng.randint(-max_entry, max_entry) for _ in range(2)] for _ in range(2)])
    lower = [[rng.choice((-1, 0, 1)) if j < i else int(i == j) for j in range(size)] for i in range(size)]
    upper = [[rng.choice((-1, 0, 1)) if j > i else int(i == j) for j in range(size)] for i in range(size)]
    diagonal = [rng.choice((1, 1, -1, 2)) for _ in range(size)]
    order = rng.sample(range(size), size)
    matrix = [[sum(lower[i][k] * diagonal[k] * upper[k][j] for k in range(size)) for j in range(size)] for i in order]
    return exact(matrix) if all(abs(value) <= max_entry for row in matrix for value in row) else None


def exact(matrix: Sequence[Sequence[Any]]) -> Matrix:
    """Convert integers, or fractions as text, to fractions."""
    return tuple(tuple(Fraction(value) for value in row) for row in matrix)


def answer_of(kind: str, matrix: Matrix) -> Matrix | None:
    """The exact answer (a sum as 1 x 1); None for a singular matrix."""
    if kind == "addition":
        return ((sum(matrix[0], Fraction()),),)
    return matrices.rref(matrix) if kind == "rref" else matrices.inverse(matrix)


def worth_asking(kind: str, matrix: Matrix, answer: Matrix, tolerance: float) -> bool:
    """Whether the answer takes work: no fixed guess (zero, the identity) and no copy of the matrix is correct."""
    if kind == "addition":
        return True
    if kind == "rref":
        entries = [value for row in answer for value in row]
        plain = all(value.denominator == 1 for value in entries)
        return plain and answer != matrix and sum(map(bool, entries)) > sum(map(any, answer))
    fixed = (matrices.identity(len(answer)), matrix)
    nearest = min(matrices.norm_1(matrices.difference(answer, guess)) for guess in fixed)
    return matrices.norm_1(answer) >= 1 and nearest >= 3 * Fraction(str(tolerance))


def canonical_form(kind: str, matrix: Matrix) -> str:
    """A text that is equal for equivalent problems.

    Equivalent are: sums in either order; matrices to reduce, up to the order and scale of rows; matrices to invert, up
    to the order of rows and columns, transposition and sign (a few others collide, and are then never used together).
    """
    if kind == "addition":
        return f"addition {sorted(map(int, matrix[0]))}"
    if kind == "rref":
        return f"rref {sorted(map(_primitive, matrix))}"
    forms = []
    for sign in (1, -1):
        rows = [[sign * value for value in row] for row in matrix]
        across = sorted(sorted(row) for row in rows)
        down = sorted(sorted(column) for column in zip(*rows, strict=True))
        forms.append(sorted((across, down)))
    return f"inverse {[[[str(v) for v in line] for line in side] for side in min(forms)]}"


def _primitive(row: Sequence[Fraction]) -> list[int]:
    """An integer row divided by its greatest common divisor, with its first nonzero entry made positive."""
    divisor = math.gcd(*map(int, row)) or 1
    sign = next((-1 if value < 0 else 1 for value in row if value), 1)
    return [sign * int(value) // divisor for value in row]


# --- answers ---------------------------------------------------------------------------------------------------------


def read_answer(problem: Problem, answer: str) -> Matrix:
    """The matrix (for a sum: the last number, as 1 x 1) of an answer block. Raises ValueError."""
    if problem.answer["kind"] != "addition":
        return matrices.parse_matrix(answer)
    if len(answer) > matrices.MAX_LENGTH:
        raise ValueError(f"{len(answer)} characters, at most {matrices.MAX_LENGTH} are read")
    written = _SUM.findall(answer)
    if not written:
        raise ValueError("no number in the answer")
    return ((matrices.parse_number(written[-1].replace(",", "")),),)


def is_correct(problem: Problem, answer: Matrix) -> bool:
    """Within the tolerance for an inverse, exact for everything else."""
    true = exact(problem.answer["value"])
    if matrices.shape(answer) != matrices.shape(true):
        return False
    if problem.answer["kind"] == "inverse":
        return within(matrices.norm_1(matrices.difference(answer, true)), problem.answer["tolerance"])
    return answer == true


def within(distance: Fraction, tolerance: float) -> bool:
    """`distance < tolerance`, with the tolerance as an exact decimal: 1/10 is not below 0.1."""
    return distance < Fraction(str(tolerance))


# --- worked answers --------------------------------------------------------------------------------------------------


def careful(kind: str, matrix: Matrix, answer: str) -> str:
    """A completion: column addition, or elimination with every entry computed."""
    if kind == "addition":
        steps = list(_column_addition(*map(int, matrix[0])))
    elif kind == "rref":
        steps = list(_elimination(matrix, None))
    else:
        augmented = matrices.beside(matrix, matrices.identity(len(matrix)))
        steps = list(_elimination(augmented, len(matrix)))
    return completion("\n".join(steps), answer)


def _column_addition(a: int, b: int) -> Iterator[str]:
    carry, left, right = 0, str(a)[::-1], str(b)[::-1]
    for x, y in zip(left.ljust(len(right), "0"), right.ljust(len(left), "0"), strict=True):
        total = int(x) + int(y) + carry
        carried = f" + {carry}" if carry else ""
        carry = total // 10
        yield f"{x} + {y}{carried} = {total}: write {total % 10}{f', carry {carry}' if carry else ''}."
    if carry:
        yield f"Write the {carry} in front."


def _elimination(matrix: Matrix, pivot_columns: int | None) -> Iterator[str]:
    yield matrices.text_of(matrix)
    for step in matrices.eliminate(matrix, pivot_columns):
        matrix = step.after
        if step.text.startswith("swap"):
            yield f"{step.text}: {matrices.text_of(matrix)}"
            continue
        name, operator, *rest = step.text.split()
        entries = _entries(step, operator, rest)
        yield f"{step.text}: {', '.join(entries)}, {name} = {matrices.row_text(matrix[step.row])}"
    yield f"Done: {matrices.text_of(matrix)}"


def _entries(step: matrices.Step, operator: str, rest: Sequence[str]) -> Iterator[str]:
    """`3 - 2*1 = 1` for each entry of a row operation such as `R2`, `-`, [`2`,] `R1`."""

    def inner(value: Fraction) -> str:
        return str(value) if value.denominator == 1 and value >= 0 else f"({value})"

    old, new = step.before[step.row], step.after[step.row]
    if operator == "/":
        for a, c in zip(old, new, strict=True):
            yield f"{a if a.denominator == 1 else inner(a)}/{rest[0]} = {c}"
        return
    factor = f"{rest[0]}*" if len(rest) == 2 else ""
    other = step.before[int(rest[-1][1:]) - 1]
    for a, b, c in zip(old, other, new, strict=True):
        yield f"{a} {operator} {factor}{inner(b)} = {c}"


def hasty(problem: Problem, rng: random.Random) -> str:
    """A completion with a random answer of the right shape."""
    value = exact(problem.answer["value"])
    if problem.answer["kind"] == "addition":
        highest = 2 * 10 ** len(problem.answer["matrix"][0][0])
        return completion("I will just guess.", str(rng.randrange(highest)))
    guess = tuple(tuple(Fraction(rng.randint(-3, 3)) for _ in row) for row in value)
    return completion("I will just guess.", matrices.text_of(guess))


# --- the task --------------------------------------------------------------------------------------------------------


class LinearAlgebraTask:
    """A `TracedTask`; see `hone.tasks.base`."""

    name = "linear_algebra"
    system = SYSTEM
    trace_styles: tuple[str, ...] = ("careful", "hasty")

    def __init__(self, config: LinearAlgebraConfig, seed: int = 0) -> None:
        self.config, self.seed = config, seed
        self._problems: dict[Split, list[Problem]] = {}

    def problems(self, split: Split) -> Sequence[Problem]:
        """Generated once. Raises UserError if there are not enough distinct problems."""
        if split not in self._problems:
            total = getattr(self.config, split)
            self._problems[split] = by_level(total, self.config.rungs, partial(self._level, split))
        return self._problems[split]

    def grade(self, problem: Problem, text: str) -> Grade:
        """`malformed` without an answer block in which a number or a matrix can be read."""
        answer = parse(text).answer
        if not answer:
            return Grade("malformed")
        try:
            value = read_answer(problem, answer)
        except ValueError:  # the model wrote something else
            return Grade("malformed", answer[:200])
        correct = is_correct(problem, value)
        return Grade("correct" if correct else "wrong", matrices.text_of(value)[:500])

    def trace(self, problem: Problem, style: str, seed: int) -> Example:
        """A worked answer. Raises UserError for an unknown style."""
        if style == "careful":
            assert problem.reference is not None
            return Example(problem, problem.reference, style)
        if style == "hasty":
            return Example(problem, hasty(problem, streams.text("hasty", seed, problem.id)), style)
        raise UserError(f"linear_algebra: no trace style {style!r}; there are {', '.join(self.trace_styles)}")

    def _level(self, split: Split, rung: str, wanted: int) -> list[Problem]:
        config = self.config
        kind, (size, *more) = parse_rung(rung)
        source = (config.seed, self.seed) if split == "train" else (config.seed,)
        rng = streams.text("linear_algebra", *source, split, rung)
        make: dict[str, Callable[[], Matrix | None]] = {
            "addition": lambda: random_addends(rng, size),
            "rref": lambda: random_reducible(rng, size, more[0], config.max_entry),
            "near_identity": lambda: random_near_identity(rng, size),
            "inverse": lambda: random_invertible(rng, size, config.max_entry),
        }
        taken: set[str] = set()
        problems: list[Problem] = []
        tries = 0
        while len(problems) < wanted:
            tries += 1
            if tries > MAX_TRIES:
                raise UserError(
                    f"linear_algebra: found {len(problems)} distinct problems of {rung} for the {split} split, "
                    f"{wanted} were asked for. Ask for fewer, raise max_entry, or give more rungs."
                )
            matrix = make[kind]()
            form = canonical_form(kind, matrix) if matrix else ""
            if matrix is None or form in taken or split_of(form) != split:
                continue
            answer = answer_of(kind, matrix)
            if answer is None or not worth_asking(kind, matrix, answer, config.tolerance):
                continue
            taken.add(form)
            problems.append(self._problem(rung, kind, matrix, answer))
            tries = 0
        return problems

    def _problem(self, rung: str, kind: str, matrix: Matrix, answer: Matrix) -> Problem:
        quiz = quiz_of(kind, matrix, self.config.quiz == "brief", self.config.tolerance)
        answer_text = str(answer[0][0]) if kind == "addition" else matrices.text_of(answer)
        record: dict[str, Any] = {
            "kind": "inverse" if kind == "near_identity" else kind,
            "matrix": [[str(value) for value in row] for row in matrix],
            "value": [[str(value) for value in row] for row in answer],
        }
        if record["kind"] == "inverse":
            record["tolerance"] = self.config.tolerance
        return Problem(
            id=f"linear_algebra-{rung}-{hashlib.sha256(quiz.encode()).hexdigest()[:12]}",
            task="linear_algebra",
            messages=({"role": "user", "content": quiz},),
            answer=record,
            level=rung,
            reference=careful(kind, matrix, answer_text),
        )


def quiz_of(kind: str, matrix: Matrix, brief: bool, tolerance: float) -> str:
    """The question, in one line."""
    if kind == "addition":
        total = f"{matrix[0][0]} + {matrix[0][1]}"
        return total if brief else f"What is {total}?"
    written = matrices.text_of(matrix, 1 if kind == "near_identity" else None)
    if kind == "rref":
        instruction = "Find the reduced row echelon form of the matrix"
        return f"rref {written}" if brief else f"{instruction} {written}. Write it as a list of rows, fractions as 1/3."
    how = f"fractions as 1/3 or decimals; the absolute errors must add up to less than {tolerance:g}"
    return f"inverse {written}" if brief else f"Find the inverse of {written}. Write it as a list of rows, {how}."
