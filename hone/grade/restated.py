"""Does an answer only repeat an expression of its question instead of working it out?

    >>> is_restated("What is 3 + 4?", "7", "3+4"), is_restated("What is 3 + 4?", "7", "7")
    (True, False)

Equal in value, and no answer: a model that is paid for it learns to copy.
"""

from __future__ import annotations

import re

from hone.grade.notation import normalise

_NUMBER = re.compile(r"[-+]?(\d[\d,]*(\.\d*)?|\.\d+)")
#: Digits, operators and brackets, and the commands that compute: neither letters nor words.
_EXPRESSION = re.compile(r"(\\(frac|sqrt|binom)|[-+*/^!{}()\[\].,\d])+")
#: Forms in which a number that is not whole is written: 3/4, 1 1/2.
_QUOTIENT = re.compile(r"-?\(?(\d+\+)?(\d+/\d+|\\frac\{\d+\}\{\d+\})\)?")


def is_restated(question: str, gold: str, answer: str) -> bool:
    """Whether `answer`, which equals `gold`, is an expression of the question that is not worked out.

    Only if `gold` is a plain number: else the expression may be what is wanted. A quotient of whole numbers counts as
    worked out if `gold` is not whole.
    """
    number, expression = _bare(gold), _bare(answer)
    if not _NUMBER.fullmatch(number) or _NUMBER.fullmatch(expression) or not _EXPRESSION.fullmatch(expression):
        return False
    if not re.fullmatch(r"[-+]?[\d,]+(\.0*)?", number) and _QUOTIENT.fullmatch(expression):
        return False
    return re.search(rf"(?<![\d.]){re.escape(expression)}(?!\.?\d)", _bare(question)) is not None


def _bare(text: str) -> str:
    """One notation without blanks, dollars, and the sign that asks for a value."""
    return re.sub(r"[\s$]+", "", normalise(text)).rstrip("=")
