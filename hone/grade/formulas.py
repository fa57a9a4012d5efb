"""Reads written mathematics, normalised LaTeX or plain text, into exact values (`hone.grade.algebra`).

    >>> value(r"\\frac{1}{2 + \\sqrt{3}}") == value(r"2 - \\sqrt3")
    True

Nothing is evaluated as code, and every input takes bounded time.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from hone.grade.algebra import IMAGINARY, TooLarge, Undecided, Value, letter, number, power

MAX_LENGTH = 1000  # characters
MAX_DEPTH = 40  # nested groups

_TOKEN = re.compile(r"\s*([0-9]+(?:,[0-9]{3})+(?:\.[0-9]+)?(?![0-9])|[0-9]+\.?[0-9]*|\.[0-9]+|\\[A-Za-z]+|[A-Za-z]|\S)")
_LETTERS = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega pi infty ell"
)
_GREEK = frozenset(_LETTERS.split())


def _digits(text: str) -> bool:
    """Whether all characters are 0 to 9; Python's functions disagree on other digits."""
    return text.isascii() and text.isdigit()


def value(text: str) -> Value:
    """The value of normalised LaTeX or plain text. Raises Undecided or TooLarge, with the reason."""
    if len(text) > MAX_LENGTH:
        raise TooLarge(f"{len(text)} characters")
    reader = _Reader([match.group(1) for match in _TOKEN.finditer(text)])
    result = reader.sum()
    if reader.next:
        raise Undecided(f"{reader.next!r} is not expected")
    return result


class _Reader:
    """A recursive descent parser of bounded depth."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.place, self.depth = tokens, 0, 0

    @property
    def next(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def take(self, expected: str = "") -> str:
        token = self.next
        if not token or (expected and token != expected):
            raise Undecided(f"{token or 'the end'!r} where {expected or 'more'!r} is expected")
        self.place += 1
        return token

    def deeper(self) -> None:
        """Count a level of recursion. Raises TooLarge before Python's own limit is reached."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooLarge("nested too deep")

    def sum(self) -> Value:
        total = self.signed()
        while self.next in ("+", "-"):
            total = total + self.signed()
        return total

    def signed(self) -> Value:
        negative = False
        while self.next in ("+", "-"):
            negative ^= self.take() == "-"
        product = self.product()
        return -product if negative else product

    def product(self) -> Value:
        result = self.factor()
        while True:
            if self.next in ("*", "/"):
                operator = self.take()
                negative = False
                while self.next in ("+", "-"):
                    negative ^= self.take() == "-"
                right = self.factor()
                right = -right if negative else right
                result = result * right if operator == "*" else result / right
            elif self.starts_factor():
                result = result * self.factor()
            else:
                return result

    def starts_factor(self) -> bool:
        """Whether an implicit factor follows; a number, as in `x 2`, is not one."""
        token = self.next
        return token in ("(", "{") or token.isalpha() or (token.startswith("\\") and len(token) > 1)

    def factor(self) -> Value:
        base = self.atom()
        while self.next in ("^", "!"):
            if self.take() == "!":
                n = base.rational
                if n is None or n.denominator != 1 or n < 0:
                    raise Undecided("a factorial of something else than a whole number")
                if n > 200:
                    raise TooLarge("a factorial too large")
                base = number(math.factorial(int(n)))
            else:
                exponent = self.exponent().rational
                if exponent is None:
                    raise Undecided("an exponent that is not a rational number")
                base = power(base, exponent)
        return base

    def exponent(self) -> Value:
        negative = False
        while self.next in ("+", "-"):
            negative ^= self.take() == "-"
        result = self.atom()
        if self.next == "^":  # right-associative: 2^3^2 is 2^(3^2)
            self.take()
            self.deeper()
            exponent = self.exponent().rational
            self.depth -= 1
            if exponent is None:
                raise Undecided("an exponent that is not a rational number")
            result = power(result, exponent)
        return -result if negative else result

    def atom(self) -> Value:
        self.deeper()
        result = self._atom()
        self.depth -= 1
        return result

    def _atom(self) -> Value:
        token = self.take()
        if _digits(token[0]) or (token[0] == "." and len(token) > 1):
            return self.decimal(token)
        if token in ("(", "{"):
            inner = self.sum()
            self.take(")" if token == "(" else "}")
            return inner
        if token.isascii() and token.isalpha():
            return IMAGINARY if token == "i" and self.next != "_" else letter(token + self.subscript())
        if token == "\\frac":
            top = self.argument()
            return top / self.argument()
        if token == "\\binom":
            n, k = (self.argument().rational for _ in range(2))
            if n is None or k is None or n.denominator != 1 or k.denominator != 1 or not 0 <= k <= n <= 300:
                raise Undecided("a binomial of something else than small whole numbers")
            return number(math.comb(int(n), int(k)))
        if token == "\\sqrt":
            return self.root()
        if token[:1] == "\\" and token[1:] in _GREEK:
            return letter(token + self.subscript())
        raise Undecided(f"{token!r} is not computed exactly")

    def decimal(self, token: str) -> Value:
        """A number, optionally with a repeating decimal: 0.1\\overline{6}."""
        x = Fraction(token.replace(",", "").rstrip(".") or "0")
        if self.next != "\\overline" or "." not in token:
            return number(x)
        self.take()
        self.take("{")
        digits = self.take()
        self.take("}")
        if not _digits(digits):
            raise Undecided("a period that does not consist of digits")
        places = len(token.split(".")[1])
        return number(x + Fraction(int(digits), (10 ** len(digits) - 1) * 10**places))

    def argument(self) -> Value:
        """The argument of \\frac or \\sqrt: a group, or one digit or letter, as in \\frac12."""
        token = self.next
        if _digits(token[:1]) and len(token) > 1:
            self.tokens[self.place : self.place + 1] = [token[0], token[1:]]
        return self.atom()

    def root(self) -> Value:
        degree = 2
        if self.next == "[":
            self.take()
            token = self.take()
            self.take("]")
            if not _digits(token) or not 2 <= int(token[:4]) <= 64:
                raise Undecided("a root whose degree is not a small number")
            degree = int(token)
        whole = _digits(self.next[:1])  # \sqrt13 as people type it: the whole number
        return power(self.atom() if whole else self.argument(), Fraction(1, degree))

    def subscript(self) -> str:
        if self.next != "_":
            return ""
        self.take()
        if self.next == "{":
            end = self.tokens.index("}", self.place) if "}" in self.tokens[self.place :] else len(self.tokens)
            inner = self.tokens[self.place + 1 : end]
            self.place = min(end + 1, len(self.tokens))
            return "_" + "".join(inner)
        return "_" + self.take()
