"""Partial credit for the matrices of `linear_algebra`, by their distance to the answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from hone.rewards.base import Judged, Part, Score
from hone.tasks.linear_algebra import matrices
from hone.tasks.linear_algebra.matrices import Matrix
from hone.tasks.linear_algebra.task import exact, read_answer, within
from hone.types import Problem

#: Reward for each of the five signs of a good format.
FORMAT_SIGN = 0.05


class LinearAlgebra(Part):
    """The sum of these terms, at most 5.25; an answer of the wrong shape earns only `format` and `thinking`.

    Inverse of A, answer P, ‖·‖₁ the sum of absolute values, tol the task's `tolerance`:
        `product`   2 exp(-‖P A - I‖₁ / tol)
        `nearness`  2 exp(-‖P - A⁻¹‖₁ / tol)
        `exact`     1 if ‖P - A⁻¹‖₁ < tol
    Reduced form R, answer P, ‖·‖ the Frobenius norm:
        `rows`      2 times the share of correct rows, not counting rows that are zero in both
        `nearness`  max(0, 2 - ‖P - R‖)
        `exact`     1 if P = R
    Sum of two numbers: `exact` is 5 or 0.
    Always:
        `format`    0.05 each: closed thinking, closed answer, the four tags once and in order, a matrix (a number) in
                    the answer, the right shape
        `thinking`  `reward.linear_algebra.thinking` times min(1, characters of thinking / thinking_chars): capped, and
                    0 by default, because a model that is rewarded for length only gets longer
    """

    tasks = ("linear_algebra",)

    def __call__(self, problem: Problem, group: Sequence[Judged]) -> list[Score]:
        true, matrix = exact(problem.answer["value"]), exact(problem.answer["matrix"])
        return [self._score(problem, true, matrix, one) for one in group]

    def _score(self, problem: Problem, true: Matrix, matrix: Matrix, one: Judged) -> Score:
        answer = _read(problem, one.parsed.answer)
        fits = answer is not None and matrices.shape(answer) == matrices.shape(true)
        signs = (one.parsed.thinking is not None, one.parsed.answer is not None, one.parsed.well_formed)
        terms = {"format": FORMAT_SIGN * sum((*signs, answer is not None, fits))}
        if answer is not None and fits:
            terms |= graded(problem.answer["kind"], matrix, true, answer, problem.answer.get("tolerance", 0.0))
        settings = self.config.linear_algebra
        if settings.thinking:
            length = len(one.parsed.thinking or "")
            terms["thinking"] = settings.thinking * min(1.0, length / settings.thinking_chars)
        return Score(sum(terms.values()), {f"linear_algebra/{name}": value for name, value in terms.items()})


def graded(kind: str, matrix: Matrix, true: Matrix, answer: Matrix, tolerance: float) -> dict[str, float]:
    """The terms of an `answer` of the right shape; see `LinearAlgebra`."""
    off = matrices.difference(answer, true)
    if kind == "addition":
        return {"exact": 5.0 * (answer == true)}
    if kind == "rref":
        counted = [(p, r) for p, r in zip(answer, true, strict=True) if any(p) or any(r)]
        rows = 2.0 * sum(p == r for p, r in counted) / max(1, len(counted))
        return {"rows": rows, "nearness": max(0.0, 2.0 - matrices.frobenius(off)), "exact": float(answer == true)}
    residual = matrices.difference(matrices.product(answer, matrix), matrices.identity(len(matrix)))
    return {
        "product": 2.0 * _decay(matrices.norm_1(residual), tolerance),
        "nearness": 2.0 * _decay(matrices.norm_1(off), tolerance),
        "exact": float(within(matrices.norm_1(off), tolerance)),
    }


def _decay(distance: Fraction, tolerance: float) -> float:
    return math.exp(-float(distance) / tolerance)


def _read(problem: Problem, answer: str | None) -> Matrix | None:
    try:
        return read_answer(problem, answer) if answer else None
    except ValueError:  # the model wrote something else
        return None
