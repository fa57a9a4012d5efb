"""Letters and short words in a row, such as the `a b f g` of a sorting task: their order is part of the answer.

    >>> is_row("a b f g"), is_row("$a b$"), is_row("2 a b")
    (True, False, False)

As mathematics they would be a product, in which the order does not matter.
"""

from __future__ import annotations

import re

from hone.grade.notation import normalise, squeeze

_ROW = re.compile(r"[A-Za-z]+(?:\s+[A-Za-z]+)+")
_NAME = re.compile(r"^[A-Za-z][A-Za-z ]*=\s*")
_TEXT = re.compile(r"\\text ?\{([^{}]*)\}")


def is_row(gold: str) -> bool:
    """Whether a recorded answer is nothing but letters with blanks between them: no dollars, commands or operators."""
    return _ROW.fullmatch(gold.strip()) is not None and "\\" not in normalise(gold)


def in_order(gold: str, answer: str) -> bool:
    """Whether a normalised answer has the letters of a row in its order. Signs of multiplication may be between them,
    quotes around them, and a name before them: `result = a b f g`."""
    plain = re.sub(r"[*\"]", " ", _TEXT.sub(r" \1 ", _NAME.sub("", answer)))
    return squeeze(plain.strip(" .'")) == squeeze(gold)
