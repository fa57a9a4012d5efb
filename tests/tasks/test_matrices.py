"""Matrices: every notation, hostile text, exact arithmetic against numpy."""

import contextlib
import random
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.tasks.linear_algebra import matrices
from hone.tasks.linear_algebra.matrices import parse_matrix, parse_number

MEANT = ((Fraction(1), Fraction(-2)), (Fraction(1, 2), Fraction(4)))


@pytest.mark.parametrize(
    "text",
    [
        "[[1, -2], [1/2, 4]]",
        "[[1,-2],[.5,4.0]]",
        "[ [ 1 , - 2 ] , [ 1 / 2 , +4 ] ]",
        "[[1. -2. ]\n [0.5 4. ]]",  # numpy
        "array([[1, -2],\n       [0.5, 4]])",
        "[1, -2]\n[1/2, 4]",
        "[1 -2; 0.5 4]",  # MATLAB
        "[1, -2; 1/2, 4]",
        "1 -2\n1/2 4",
        "1, -2\n1/2, 4",
        "| 1  -2 |\n| 1/2  4 |",
        "[[1|-2],[1/2|4]]",
        "[[1e0, -2], [5e-1, 4]]",
        "[[(1), −2], [(1/2), 4]]",
        "The inverse is:\n\n1 -2\n1/2 4",
        "The matrix [[9, 9], [9, 9]] has the inverse [[1, -2], [1/2, 4]].",
        "```\n[[1, -2],\n [1/2, 4]]\n```",
        r"\begin{bmatrix} 1 & -2 \\ \frac{1}{2} & 4 \end{bmatrix}",
        r"$$A^{-1} = \begin{pmatrix}1&-2\\[4pt]\dfrac12&4\\ \end{pmatrix}$$",
        r"\boxed{\begin{bmatrix} 1 & -2 \\ \tfrac{1}{2} & 4 \end{bmatrix}}",
        r"\left[\begin{array}{cc} 1 & -2 \\ 1/2 & 4 \end{array}\right]",
        r"\[ \begin{bmatrix} 1 & -2 \\ 1/2 & 4 \end{bmatrix} \]",
        "A^-1 = 1/2 * [[2, -4], [1, 8]]",
        r"\frac{1}{2}\begin{bmatrix}2&-4\\1&8\end{bmatrix}",
        r"-\frac{1}{2} \cdot \left(\begin{array}{rr}-2&4\\-1&-8\end{array}\right)",
    ],
)
def test_notations(text):
    assert parse_matrix(text) == MEANT


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no matrix"),
        ("hello", "no matrix"),
        ("[]", "no matrix"),
        ("[[]]", "no matrix"),
        ("[[1, 2], [3]]", "rows of different lengths: 2, 1"),
        ("[[1, a], [3, 4]]", "'a' is not a readable number"),
        ("[[9**9**9]]", "not a readable number"),
        ("[[__import__('os'), 1]]", "not a readable number"),
        ("[[1, 2], [3, 4]", "not closed"),
        ("[[[1]]]", "nested too deep"),
        ("[[1, 2], x [3, 4]]", "between the rows"),
        ("[[1/0]]", "divides by zero"),
        ("[[1e999]]", "exponent of at most 30"),
        ("[[1e30, 1e29/0.001]]", "at most 1e30"),
        ("[[" + "1" * 26 + "]]", "not a readable number"),
        (r"\begin{bmatrix} 1 & 2", "not closed"),
        ("[" * 4000, "not closed"),
        ("[[1]]" * 2000, "at most 5000"),
        ("\n".join(["1 2"] * 30), "too large"),
    ],
)
def test_what_is_no_matrix_is_said(text, words):
    with pytest.raises(ValueError, match=words.replace("*", r"\*").replace("[", r"\[")):
        parse_matrix(text)


def test_numbers():
    assert [parse_number(t) for t in ("-1/3", r"\frac{-1}{3}", "0.25", "1e-3", "-2/-4")] == [
        Fraction(-1, 3), Fraction(-1, 3), Fraction(1, 4), Fraction(1, 1000), Fraction(1, 2),
    ]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.text(st.sampled_from("[](){}\\ 0123456789.-+/,;|&\nebfracginmtx$*"), max_size=300))
def test_any_text_is_read_or_refused(text):
    try:
        read = parse_matrix(text)
    except ValueError:
        return
    assert len({len(row) for row in read}) == 1


@pytest.mark.parametrize(
    "unit", ["[", "]", "[]", "[1],", "(", "(1", "1", "1,", "-", "1/", " ", "\\frac{", "\\begin{bmatrix}", "&", "\\\\"]
)
def test_hostile_text_takes_no_time(unit):
    text = unit * (matrices.MAX_LENGTH // len(unit))
    start = time.perf_counter()
    for candidate in (text, f"[{text}", f"[[{text}]]", text * 100):
        with contextlib.suppress(ValueError):
            parse_matrix(candidate)
    assert time.perf_counter() - start < 0.2  # four texts; one takes milliseconds


def test_elimination_by_hand():
    steps = list(matrices.eliminate(parse_matrix("[[0, 2, 4], [1, 3, 5], [2, 6, 10]]")))
    assert [step.text for step in steps] == ["swap R1 R2", "R3 - 2 R1", "R2 / 2", "R1 - 3 R2"]
    assert matrices.text_of(steps[-1].after) == "[[1, 0, -1], [0, 1, 2], [0, 0, 0]]"


def test_inverse_against_numpy():
    rng = random.Random(0)
    for size in (1, 2, 3, 5, 8):
        for _ in range(10):
            ints = [[rng.randint(-9, 9) for _ in range(size)] for _ in range(size)]
            matrix = tuple(tuple(map(Fraction, row)) for row in ints)
            inverse = matrices.inverse(matrix)
            if inverse is None:
                assert abs(np.linalg.det(np.array(ints))) < 1e-6
                continue
            np.testing.assert_allclose(np.array(inverse, dtype=float), np.linalg.inv(np.array(ints)), atol=1e-9)
            assert matrices.product(inverse, matrix) == matrices.identity(size)
    assert matrices.inverse(parse_matrix("[[1, 2], [2, 4]]")) is None


def test_reduced_form_has_the_row_space_and_the_shape():
    """Pivots of 1 alone in their columns, moving right, zero rows last; and the same row space, by rank."""
    rng = random.Random(1)
    for _ in range(60):
        rows, columns = rng.randint(1, 6), rng.randint(1, 6)
        matrix = tuple(tuple(Fraction(rng.randint(-2, 2)) for _ in range(columns)) for _ in range(rows))
        reduced = matrices.rref(matrix)
        leads = [next((j for j, value in enumerate(row) if value), None) for row in reduced]
        places = [lead for lead in leads if lead is not None]
        assert leads == [*places, *[None] * (rows - len(places))]
        assert places == sorted(set(places))
        for i, j in enumerate(places):
            assert [row[j] for row in reduced] == [Fraction(k == i) for k in range(rows)]
        both = np.array([*matrix, *reduced], dtype=float)
        ranks = {np.linalg.matrix_rank(np.array(m, dtype=float)) for m in (matrix, reduced, both)}
        assert ranks == {len(places)}


def test_norms_by_hand():
    matrix = parse_matrix("[[3, -4], [0, 1/2]]")
    assert matrices.norm_1(matrix) == Fraction(15, 2)
    assert matrices.frobenius(parse_matrix("[[3, -4], [0, 0]]")) == 5.0
