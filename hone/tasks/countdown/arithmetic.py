"""Arithmetic written by a model: parsed and computed exactly, never evaluated as code.

    >>> compute(parse("(1 + 2) / 3"))
    Fraction(1, 1)

Integers, + - * / and parentheses; a sign may stand before an operand. Parsing is iterative
(Dijkstra's shunting yard) and the length is bounded, so no text takes long or recurses deep.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_LENGTH = 500  # characters

_TOKEN = re.compile(r"\s*(?:([0-9]+)|([-+*/()]))")
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "negate": 3}

Postfix = list[int | str]


def parse(text: str) -> Postfix:
    """Numbers and operators in postfix order. Raises ValueError naming what is not arithmetic."""
    if len(text) > MAX_LENGTH:
        raise ValueError(f"{len(text)} characters, at most {MAX_LENGTH} are read")
    text = text.rstrip()
    output: Postfix = []
    waiting: list[str] = []
    operand_next, place = True, 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise ValueError(f"{text[place:].strip()[0]!r} is not an integer, operator or parenthesis")
        place = match.end()
        number, symbol = match.groups()
        if operand_next != (number is not None or symbol == "(") and not (operand_next and symbol in ("+", "-")):
            raise ValueError(f"{number or symbol!r} where {'a number' if operand_next else 'an operator'} is expected")
        if number is not None:
            output.append(int(number))
            operand_next = False
        elif symbol == "(":
            waiting.append(symbol)
        elif symbol == ")":
            _close(output, waiting)
        elif operand_next:
            if symbol == "-":
                waiting.append("negate")
        else:
            while waiting and waiting[-1] != "(" and _PRECEDENCE[waiting[-1]] >= _PRECEDENCE[symbol]:
                output.append(waiting.pop())
            waiting.append(symbol)
            operand_next = True
    if operand_next:
        raise ValueError("ends where a number is expected")
    if "(" in waiting:
        raise ValueError("a parenthesis is not closed")
    return output + waiting[::-1]


def _close(output: Postfix, waiting: list[str]) -> None:
    while waiting and waiting[-1] != "(":
        output.append(waiting.pop())
    if not waiting:
        raise ValueError("a parenthesis is closed that was not opened")
    waiting.pop()


def numbers(postfix: Postfix) -> list[int]:
    """The numbers of the expression, in order, repeats included."""
    return [token for token in postfix if isinstance(token, int)]


def compute(postfix: Postfix) -> Fraction:
    """The exact value. Raises ZeroDivisionError."""
    stack: list[Fraction] = []
    for token in postfix:
        if isinstance(token, int):
            stack.append(Fraction(token))
        elif token == "negate":
            stack.append(-stack.pop())
        else:
            right, left = stack.pop(), stack.pop()
            stack.append(apply(token, left, right))
    (value,) = stack
    return value


def apply(operator: str, left: Fraction, right: Fraction) -> Fraction:
    """One of the four operations. Raises ZeroDivisionError."""
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    return left / right
