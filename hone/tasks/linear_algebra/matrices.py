"""Matrices of exact fractions: parsing model text, row reduction, inverse, formatting.

    >>> inverse(parse_matrix("[[2, 1], [1, 1]]"))
    ((Fraction(1, 1), Fraction(-1, 1)), (Fraction(-1, 1), Fraction(2, 1)))

Text is matched against patterns and never evaluated; its length, the size of a matrix and the digits of a number are
bounded, and every pass over the text takes linear time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

Row = tuple[Fraction, ...]
Matrix = tuple[Row, ...]  # [rows, columns]

MAX_LENGTH = 5000  # characters of a matrix
MAX_SIDE = 20  # rows or columns
MAX_DIGITS = 25  # of the whole part, of the fractional part, of a denominator
MAX_EXPONENT = 30
MAX_VALUE = Fraction(10) ** MAX_EXPONENT  # of an entry; sums of their squares still fit a float

_PART = rf"\d{{1,{MAX_DIGITS}}}(?:\.\d{{0,{MAX_DIGITS}}})?|\.\d{{1,{MAX_DIGITS}}}"
_NUMBER = re.compile(rf"([+-]?)(?:({_PART})(?:[eE]([+-]?\d{{1,3}}))?)(?:/([+-]?)({_PART}))?")
_LATEX_FRACTION = re.compile(r"\\frac ?(?:\{ ?([+-]?[\d.]{1,60}) ?\} ?\{ ?([+-]?[\d.]{1,60}) ?\}|(\d) ?(\d))")
_ENVIRONMENT = re.compile(r"\\begin ?\{([a-zA-Z]{0,6}matrix|array)\*?\}")
#: LaTeX and typography without meaning, and its replacement.
_REPLACED = (
    *((sign, "-") for sign in "−–—\u2010\u2011"),
    *((space, " ") for space in ("\u00a0", "\u2009", "\r", "\t", "\\,", "\\;", "\\!", "\\:", "\\ ", "~", "\\quad")),
    *((word, "") for word in ("\\left", "\\right", "\\displaystyle", "\\hline", "$", "\\[", "\\]", "\\(", "\\)")),
    *(("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\cdot", "*"), ("\\times", "*"), ("×", "*"), ("·", "*")),
)


# --- reading ---------------------------------------------------------------------------------------------------------


def parse_number(text: str) -> Fraction:
    """An integer, a decimal (`-0.5`, `1e-3`) or a fraction (`-1/3`, `\\frac{1}{3}`).

    Raises ValueError naming what is not one.
    """
    return _number(_plain(text).strip())


def parse_matrix(text: str) -> Matrix:
    """The last matrix of a text. Raises ValueError naming what is missing or wrong.

    Notations: `[[1, 2], [3, 4]]` with commas or blanks, one `[1, 2]` per row, `[1 2; 3 4]`, bare rows on lines,
    LaTeX `bmatrix`, `pmatrix`, `array`; optionally preceded by a scalar, as in `1/5 [[1, 2], [3, 4]]`.
    """
    text = _plain(text)
    scale, rows = _latex_rows(text) if "\\begin" in text else _bracket_rows(text) if "[" in text else (None, None)
    if rows is None:
        rows = list(_bare_rows(text))
    if not rows or not rows[0]:
        raise ValueError("no matrix in the text")
    if len(rows) > MAX_SIDE or len(rows[0]) > MAX_SIDE:
        raise ValueError(f"{len(rows)} x {len(rows[0])} is too large, at most {MAX_SIDE} x {MAX_SIDE} are read")
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"rows of different lengths: {', '.join(str(len(row)) for row in rows)}")
    factor = _number(scale) if scale else Fraction(1)
    return tuple(tuple(factor * _number(cell) for cell in row) for row in rows)


def _plain(text: str) -> str:
    if len(text) > MAX_LENGTH:
        raise ValueError(f"{len(text)} characters, at most {MAX_LENGTH} are read")
    text = re.sub(r"\\\\ ?\[[\d. a-z]{0,12}\]", r"\\\\", text)  # a line break with extra space: \\[4pt]
    text = text.replace("\\\\", "\x00")  # row ends of LaTeX, which begin like \( and \[
    for old, new in _REPLACED:
        text = text.replace(old, new)
    text = re.sub(" +", " ", text)
    text = _LATEX_FRACTION.sub(lambda m: f"{m[1] or m[3]}/{m[2] or m[4]}", text)
    text = re.sub(r" ?/ ?", "/", text)
    return re.sub(r"\( ?([-+\d./]{1,80}) ?\)", r"\1", text)


def _number(text: str) -> Fraction:
    match = _NUMBER.fullmatch(text.replace("- ", "-", 1) if text.startswith("- ") else text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is not a readable number")
    sign, value, exponent, sign_below, below = match.groups()
    number = Fraction(value)
    if exponent:
        if abs(int(exponent)) > MAX_EXPONENT:
            raise ValueError(f"{text[:40]!r}: an exponent of at most {MAX_EXPONENT} is read")
        number *= Fraction(10) ** int(exponent)
    if below:
        if not Fraction(below):
            raise ValueError(f"{text[:40]!r} divides by zero")
        number /= Fraction(below)
    if number > MAX_VALUE:
        raise ValueError(f"{text[:40]!r}: at most 1e{MAX_EXPONENT} is read")
    return -number if (sign == "-") != (sign_below == "-") else number


def _latex_rows(text: str) -> tuple[str | None, list[list[str]] | None]:
    """The scalar before the last environment, and the cells of the environment."""
    opening = next(reversed(list(_ENVIRONMENT.finditer(text))), None)
    end = text.find("\\end", opening.end()) if opening else -1
    if opening is None or end < 0:
        raise ValueError("a LaTeX matrix that is not closed")
    body = text[opening.end() : end]
    if opening[1] == "array":
        body = re.sub(r"^ ?\{[clr| ]{0,60}\}", "", body)
    rows = [row.strip() for row in body.split("\x00")]
    return _scalar_at_end(text[: opening.start()].rstrip("[( ")), [_cells(row, "&") for row in rows if row]


def _bracket_rows(text: str) -> tuple[str | None, list[list[str]] | None]:
    """The scalar before the last matrix in brackets, and the cells of the matrix."""
    groups = list(_groups(text))
    if not groups:
        raise ValueError("a bracket that is not closed")
    first = last = len(groups) - 1
    nested = "[" in text[groups[last][0] + 1 : groups[last][1]]
    if not nested:  # consecutive rows, each in brackets
        while first and not text[groups[first - 1][1] + 1 : groups[first][0]].strip(" ,;\n\x00"):
            first -= 1
    start, end = groups[first][0], groups[last][1]
    body = text[start + 1 : end] if nested else text[start : end + 1]
    inner = [body[a + 1 : b] for a, b in _groups(body)]
    if any("[" in row for row in inner):
        raise ValueError("brackets are nested too deep")
    if nested:
        outside = re.sub(r"\[[^\[\]]*\]", "", body).strip(" ,;\n\x00")
        if outside:
            raise ValueError(f"{outside[:40]!r} occurs between the rows")
    if len(inner) == 1 and not nested:  # [1 2; 3 4]
        inner = [row for row in re.split(r"[;\n\x00]", inner[0]) if row.strip()]
    return _scalar_at_end(text[:start]), [_cells(row, ",") for row in inner]


def _groups(text: str) -> Iterator[tuple[int, int]]:
    """Positions of the outermost bracket pairs, in order."""
    depth = start = 0
    for place, symbol in enumerate(text):
        if symbol == "[":
            start = place if depth == 0 else start
            depth += 1
        elif symbol == "]" and depth:
            depth -= 1
            if depth == 0:
                yield start, place


def _bare_rows(text: str) -> Iterator[list[str]]:
    """The last consecutive lines that hold only numbers."""
    rows: list[list[str]] = []
    for line in reversed(re.split(r"[\n;\x00]", text.strip())):
        cells = _cells(line.strip(" |").replace("&", ","), ",")
        if not cells or not all(_NUMBER.fullmatch(cell) for cell in cells):
            break
        rows.append(cells)
    return reversed(rows)


def _cells(row: str, separator: str) -> list[str]:
    row = row.replace("|", separator if separator == "," and "," in row else " ").replace("\n", " ").strip(" ,")
    return [cell.strip() for cell in row.split(separator)] if separator in row or separator == "&" else row.split()


def _scalar_at_end(text: str) -> str | None:
    """The number at the end of the text before a matrix, after a blank or an equals sign; it scales the matrix."""
    text = text.rstrip("* ")
    match = re.search(r"[-+\d./]{1,80}$", text)
    return match[0] if match and _NUMBER.fullmatch(match[0]) else None


# --- writing ---------------------------------------------------------------------------------------------------------


def text_of(matrix: Sequence[Sequence[Fraction]], places: int | None = None) -> str:
    """`[[1, 1/2], [0, 3]]`, or with that many decimal `places` `[[1, 0.5], [0, 3]]`."""
    return f"[{', '.join(row_text(row, places) for row in matrix)}]"


def row_text(row: Sequence[Fraction], places: int | None = None) -> str:
    return f"[{', '.join(number_text(value, places) for value in row)}]"


def number_text(value: Fraction, places: int | None = None) -> str:
    return str(value) if places is None else f"{float(round(value, places)):g}"


# --- computing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """One row operation of an elimination, with the matrix before and after."""

    text: str  # `swap R1 R2`, `R1 / 2`, `R2 - 3 R1`; rows are counted from 1
    row: int  # index of the changed row; for a swap, of the upper one
    before: Matrix
    after: Matrix


def eliminate(matrix: Matrix, pivot_columns: int | None = None) -> Iterator[Step]:
    """Gauss-Jordan elimination, column by column; pivots in the first `pivot_columns` columns (default: all).

    Rows are swapped only where necessary, with the nearest row below that has a nonzero entry.
    """
    columns = len(matrix[0]) if pivot_columns is None else pivot_columns
    top = 0
    for column in range(columns):
        pivot = next((i for i in range(top, len(matrix)) if matrix[i][column]), None)
        if pivot is None:
            continue
        if pivot != top:
            rows = list(matrix)
            rows[top], rows[pivot] = rows[pivot], rows[top]
            yield Step(f"swap R{top + 1} R{pivot + 1}", top, matrix, after := tuple(rows))
            matrix = after
        value = matrix[top][column]
        if value != 1:
            yield Step(f"R{top + 1} / {_factor(value)}", top, matrix, after := _with(matrix, top, 1 / value, top, 0))
            matrix = after
        for i in range(len(matrix)):
            factor = matrix[i][column]
            if i != top and factor:
                sign, size = ("-", factor) if factor > 0 else ("+", -factor)
                text = f"R{i + 1} {sign} {'' if size == 1 else f'{_factor(size)} '}R{top + 1}"
                yield Step(text, i, matrix, after := _with(matrix, i, Fraction(1), top, -factor))
                matrix = after
        top += 1


def _factor(value: Fraction) -> str:
    return str(value) if value.denominator == 1 and value >= 0 else f"({value})"


def _with(matrix: Matrix, row: int, scale: Fraction, other: int, factor: Fraction | int) -> Matrix:
    """`matrix` with its `row` replaced by `scale * row + factor * other`."""
    new = tuple(scale * a + factor * b for a, b in zip(matrix[row], matrix[other], strict=True))
    return (*matrix[:row], new, *matrix[row + 1 :])


def rref(matrix: Matrix) -> Matrix:
    """The reduced row echelon form, exactly."""
    for step in eliminate(matrix):
        matrix = step.after
    return matrix


def identity(size: int) -> Matrix:
    return tuple(tuple(Fraction(i == j) for j in range(size)) for i in range(size))


def beside(left: Matrix, right: Matrix) -> Matrix:
    return tuple((*a, *b) for a, b in zip(left, right, strict=True))


def inverse(matrix: Matrix) -> Matrix | None:
    """The inverse, exactly; None for a singular matrix."""
    size = len(matrix)
    reduced = beside(matrix, identity(size))
    for step in eliminate(reduced, pivot_columns=size):
        reduced = step.after
    if tuple(row[:size] for row in reduced) != identity(size):
        return None
    return tuple(row[size:] for row in reduced)


def product(left: Matrix, right: Matrix) -> Matrix:
    def dot(row: Row, column: Row) -> Fraction:
        return sum((a * b for a, b in zip(row, column, strict=True)), Fraction())

    return tuple(tuple(dot(row, column) for column in zip(*right, strict=True)) for row in left)


def difference(left: Matrix, right: Matrix) -> Matrix:
    return tuple(tuple(a - b for a, b in zip(p, q, strict=True)) for p, q in zip(left, right, strict=True))


def norm_1(matrix: Matrix) -> Fraction:
    """The sum of all absolute values."""
    return sum((abs(value) for row in matrix for value in row), Fraction())


def frobenius(matrix: Matrix) -> float:
    """The square root of the sum of all squares."""
    return float(sum((value * value for row in matrix for value in row), Fraction())) ** 0.5


def shape(matrix: Matrix) -> tuple[int, int]:
    return len(matrix), len(matrix[0])
