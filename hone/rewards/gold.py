"""The gold answer of a problem as text, and the numbers that a text holds.

>>> gold_text(Problem(..., answer=42))
'42'
>>> number("$1,234.50")
Fraction(2469, 2)
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import ClassVar

from hone.base.settings import UserError
from hone.grade.parse import parse
from hone.rewards.base import Part
from hone.types import Problem

#: A number as people write it: thousands separated by commas or not, a decimal point, no exponent.
_UNSIGNED = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"

#: The same in a text, where a `-` is a sign unless it follows a letter, a digit or a bracket that closes.
_IN_TEXT = re.compile(rf"(?:(?<![\w)\]}}])[-\u2212])?{_UNSIGNED}")

MAX_DIGITS = 100  # a longer number is none: nobody's answer, and slow to compute with


def gold_text(problem: Problem) -> str:
    """An answer that is right, as one would write it.

    A problem whose answer is not plain text or a number has one if its worked solution ends in an answer block.
    Raises UserError if there is none.
    """
    answer = problem.answer
    if isinstance(answer, (str, int, float)) and not isinstance(answer, bool) and str(answer).strip():
        return str(answer).strip()
    written = parse(problem.reference).answer if problem.reference else None
    if not written:
        raise UserError(
            f"{problem.id}: there is no gold answer as text: the answer of task {problem.task} is a "
            f"{type(answer).__name__} and its worked solution has no <answer> block; choose another reward"
        )
    return written


def number(text: str) -> Fraction | None:
    """The value of a text that is one number, with a sign, `$` or `%` perhaps; None if it is not."""
    plain = text.strip().strip("$%").strip()
    sign = -1 if plain[:1] in ("-", "\u2212") else 1
    plain = plain[1:] if plain[:1] in ("-", "\u2212", "+") else plain
    plain = plain.strip().removeprefix("$").strip()
    plain = plain[:-1] if plain.endswith(".") else plain  # the full stop of a sentence
    if len(plain) > MAX_DIGITS or not re.fullmatch(_UNSIGNED, plain):
        return None
    return sign * Fraction(plain.replace(",", ""))


def written_numbers(text: str) -> list[str]:
    """Every number of a text, as it stands there: `["1,200", "-7"]`."""
    return _IN_TEXT.findall(text)


class NeedsGold(Part):
    """A reward that compares with the gold answer itself; `numeric`: which has to be a number."""

    numeric: ClassVar[bool] = False

    @classmethod
    def check(cls, problem: Problem) -> None:
        """Raises UserError for a problem that this reward cannot score."""
        gold = gold_text(problem)
        if cls.numeric and number(gold) is None:
            raise UserError(
                f"{problem.id}: the gold answer {gold[:60]!r} is not a number, which this reward needs; "
                f"choose another one for task {problem.task}"
            )
