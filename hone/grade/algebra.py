"""Exact values of written mathematics: quotients of polynomials over the rationals, with square roots, i and letters.

    >>> number(1) / (number(2) + square_root(number(3))) == number(2) + -square_root(number(3))
    True

Equality is decided exactly: products of square roots of squarefree numbers are linearly independent over the rationals,
pi is transcendental, and quotients are compared by cross multiplication. Other expressions (sines, cube roots, letters
as exponents) raise `Undecided`; sizes beyond the bounds raise `TooLarge`, so that every operation takes bounded time.
`hone.grade.formulas` reads such values from text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

MAX_TERMS = 200  # of one polynomial
MAX_BITS = 4000  # of a numerator or a denominator
MAX_RADICAND = 10**9

#: Radicand (squarefree), power of i (0 or 1), letters with exponents: 3 sqrt(2) i x^2 is {(2, 1, (("x", 2),)): 3}.
Monomial = tuple[int, int, tuple[tuple[str, int], ...]]
Polynomial = dict[Monomial, Fraction]

ONE: Monomial = (1, 0, ())


class Undecided(ValueError):
    """An expression that cannot be computed exactly here."""


class TooLarge(Undecided):
    """A value beyond the bounds."""


@dataclass(frozen=True, eq=False)
class Value:
    """`top / bottom`; a bottom with a single term is always folded into the top."""

    top: Polynomial
    bottom: Polynomial

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Value):
            return NotImplemented
        return _times(self.top, other.bottom) == _times(other.top, self.bottom)

    __hash__ = None  # type: ignore[assignment]  # equal values have many forms

    def __add__(self, other: Value) -> Value:
        if self.bottom == other.bottom:
            return _quotient(_plus(self.top, other.top), self.bottom)
        top = _plus(_times(self.top, other.bottom), _times(other.top, self.bottom))
        return _quotient(top, _times(self.bottom, other.bottom))

    def __neg__(self) -> Value:
        return Value({m: -c for m, c in self.top.items()}, self.bottom)

    def __mul__(self, other: Value) -> Value:
        return _quotient(_times(self.top, other.top), _times(self.bottom, other.bottom))

    def __truediv__(self, other: Value) -> Value:
        """Raises Undecided for a division by zero."""
        if not other.top:
            raise Undecided("a division by zero")
        return _quotient(_times(self.top, other.bottom), _times(self.bottom, other.top))

    @property
    def rational(self) -> Fraction | None:
        """The value if it is a rational number."""
        if self.bottom != {ONE: Fraction(1)} or set(self.top) - {ONE}:
            return None
        return self.top.get(ONE, Fraction(0))

    @property
    def letters(self) -> set[str]:
        return {name for part in (self.top, self.bottom) for _, _, letters in part for name, _ in letters}

    def proportional(self, other: Value) -> bool:
        """Whether the values differ by a nonzero rational factor."""
        a, b = _times(self.top, other.bottom), _times(other.top, self.bottom)
        return bool(a) and a.keys() == b.keys() and len({a[m] / b[m] for m in a}) == 1


def number(x: Fraction | int) -> Value:
    return Value({ONE: Fraction(x)} if x else {}, {ONE: Fraction(1)})


def letter(name: str) -> Value:
    return Value({(1, 0, ((name, 1),)): Fraction(1)}, {ONE: Fraction(1)})


IMAGINARY = Value({(1, 1, ()): Fraction(1)}, {ONE: Fraction(1)})


# --- polynomials -----------------------------------------------------------------------------


def _plus(a: Polynomial, b: Polynomial) -> Polynomial:
    total = dict(a)
    for monomial, coefficient in b.items():
        total[monomial] = total.get(monomial, Fraction(0)) + coefficient
    return _bounded({m: c for m, c in total.items() if c})


def _times(a: Polynomial, b: Polynomial) -> Polynomial:
    if len(a) * len(b) > MAX_TERMS * 10:
        raise TooLarge("a product of too many terms")
    total: Polynomial = {}
    for (r1, i1, x1), c1 in a.items():
        for (r2, i2, x2), c2 in b.items():
            common = math.gcd(r1, r2)
            sign = -1 if i1 and i2 else 1
            exponents = dict(x1)
            for name, exponent in x2:
                exponents[name] = exponents.get(name, 0) + exponent
            letters = tuple(sorted((n, e) for n, e in exponents.items() if e))
            monomial = (r1 * r2 // common**2, (i1 + i2) % 2, letters)
            if monomial[0] > MAX_RADICAND**2 or any(abs(e) > MAX_BITS for _, e in letters):
                raise TooLarge("a root or an exponent too large")
            total[monomial] = total.get(monomial, Fraction(0)) + sign * common * c1 * c2
    return _bounded({m: c for m, c in total.items() if c})


def _bounded(terms: Polynomial) -> Polynomial:
    if len(terms) > MAX_TERMS:
        raise TooLarge(f"more than {MAX_TERMS} terms")
    if any(max(c.numerator.bit_length(), c.denominator.bit_length()) > MAX_BITS for c in terms.values()):
        raise TooLarge(f"more than {MAX_BITS} bits")
    return terms


def _quotient(top: Polynomial, bottom: Polynomial) -> Value:
    """Raises Undecided for a bottom of 0."""
    if not bottom:
        raise Undecided("a division by zero")
    if len(bottom) > 1:
        return Value(top, bottom)
    (((radicand, imaginary, letters), coefficient),) = bottom.items()
    # 1 / (c sqrt(r) i x) = sqrt(r) (-i) / (c r x)
    sign = -1 if imaginary else 1
    inverse = {(radicand, imaginary, tuple((n, -e) for n, e in letters)): sign / (coefficient * radicand)}
    return Value(_times(top, inverse), {ONE: Fraction(1)})


def power(base: Value, exponent: Fraction) -> Value:
    """Raises Undecided for roots other than square roots of rational numbers, TooLarge beyond the bounds."""
    if exponent.denominator == 2:
        base, exponent = square_root(base), exponent * 2
    if exponent.denominator != 1:
        return _rational_root(base, exponent)
    if exponent < 0:
        return power(number(1) / base, -exponent)
    x = base.rational
    if x is not None and abs(x) in (0, 1):  # for any exponent, however large
        odd = bool(exponent % 2)
        return number(1 if not exponent else x if odd else abs(x))
    biggest = max((_bits(c) for part in (base.top, base.bottom) for c in part.values()), default=1)
    if exponent * biggest > MAX_BITS or (len(base.top) + len(base.bottom) > 2 and exponent > 30):
        raise TooLarge("a power too large")
    result = number(1)
    for bit in bin(int(exponent))[2:]:
        result = result * result
        if bit == "1":
            result = result * base
    return result


def _bits(c: Fraction) -> int:
    return max(c.numerator.bit_length(), c.denominator.bit_length())


def square_root(value: Value) -> Value:
    x = value.rational
    if x is None:
        raise Undecided("a square root of more than a number")
    if not x:
        return number(0)
    n = abs(x.numerator) * x.denominator  # sqrt(p/q) = sqrt(pq) / q
    outside, inside = _squares(n)
    return Value({(inside, int(x < 0), ()): Fraction(outside, x.denominator)}, {ONE: Fraction(1)})


@lru_cache(maxsize=4096)
def _squares(n: int) -> tuple[int, int]:
    """n = a^2 b with b squarefree. Raises Undecided if that would take long."""
    root = math.isqrt(n)
    if root * root == n:
        return root, 1
    if n > MAX_RADICAND:
        raise Undecided(f"a square root of more than {MAX_RADICAND}")
    outside, inside, p = 1, 1, 2
    while p * p <= n:
        while n % (p * p) == 0:
            outside, n = outside * p, n // (p * p)
        if n % p == 0:
            inside, n = inside * p, n // p
        p += 1
    return outside, inside * n


def _rational_root(base: Value, exponent: Fraction) -> Value:
    """Roots such as 8^(1/3), if rational."""
    x, k = base.rational, exponent.denominator
    if x is None or x < 0 or k > 64:
        raise Undecided("a root that is not rational")
    roots = [round(n ** (1 / k)) if n.bit_length() < 1000 else 0 for n in (x.numerator, x.denominator)]
    if [r**k for r in roots] != [x.numerator, x.denominator]:
        raise Undecided("a root that is not rational")
    return power(number(Fraction(*roots)), Fraction(exponent.numerator))
