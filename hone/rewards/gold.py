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

#: A number in everyday notation: optional thousands separators, a decimal point, no exponent.
_UNSIGNED = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"

#: The same within a text, where `-` is a sign unless it follows a letter, a digit or a closing bracket.
_IN_TEXT = re.compile(rf"(?:(?<![\w)\]}}])[-\u2212])?{_UNSIGNED}")

MAX_DIGITS = 100  # longer numbers are not read: no answer needs them, and they are slow to compute with


def gold_text(problem: Problem) -> str:
    """The correct answer as text.

    If the recorded answer is neither text nor a number, it is the answer block of the worked solution.
    Raises UserError if the problem has neither.
    """
    gold = known_gold(problem)
    if gold is None:
        raise UserError(
            f"{problem.id}: there is no gold answer as text: the answer of task {problem.task} is a "
            f"{type(problem.answer).__name__} and its worked solution has no <answer> block; choose another reward"
        )
    return gold


def known_gold(problem: Problem) -> str | None:
    """As `gold_text`, but None if the problem has no such text."""
    answer = problem.answer
    if isinstance(answer, (str, int, float)) and not isinstance(answer, bool) and str(answer).strip():
        return str(answer).strip()
    return (parse(problem.reference).answer or None) if problem.reference else None


def number(text: str) -> Fraction | None:
    """The value of a text that is a single number, optionally with a sign, `$` or `%`; else None."""
    plain = text.strip().strip("$%").strip()
    sign = -1 if plain[:1] in ("-", "\u2212") else 1
    plain = plain[1:] if plain[:1] in ("-", "\u2212", "+") else plain
    plain = plain.strip().removeprefix("$").strip()
    plain = plain[:-1] if plain.endswith(".") else plain  # the full stop of a sentence
    if len(plain) > MAX_DIGITS or not re.fullmatch(_UNSIGNED, plain):
        return None
    return sign * Fraction(plain.replace(",", ""))


def written_numbers(text: str) -> list[str]:
    """Every number of a text, as written: `["1,200", "-7"]`."""
    return _IN_TEXT.findall(text)


class NeedsGold(Part):
    """A reward that compares with the gold answer; `numeric`: the answer must be a number."""

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
