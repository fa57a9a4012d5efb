"""An answer that only repeats an expression of its question."""

import pytest

from hone.grade.restated import is_restated


@pytest.mark.parametrize(
    "question, gold, answer",
    [
        ("3+4", "7", "3+4"),
        ("3 + 4 = ?", "7", "3+4="),
        ("What is $3 \\times 4$?", "12", "3 \\cdot 4"),
        ("What is 12/4?", "3", "12/4"),
        ("Compute $\\dfrac{12}{4}$", "3", "\\frac{12}{4}"),
        ("Compute 2^{10}.", "1,024", "2^{10}"),
        ("Find \\(\\sqrt{16}\\).", "$4$", "\\sqrt{16}"),
        ("Evaluate 1.5 + 2.25", "3.75", "1.5+2.25"),
        ("(2+3)*4", "20", "(2+3)*4"),
        ("What is 5 - 10?", "-5", "5-10"),
    ],
)
def test_repeated(question: str, gold: str, answer: str) -> None:
    assert is_restated(question, gold, answer)


@pytest.mark.parametrize(
    "question, gold, answer",
    [
        ("What is 3 + 4?", "7", "7"),
        ("Is 1,000 or 7 larger?", "1000", "1,000"),  # a number is worked out
        ("Which of -5 and -7 is larger?", "-5", "-5"),
        ("Which is larger, 1/2 or 3/4?", "0.75", "3/4"),  # so is a fraction that is no whole number
        ("How many hours are 1 1/2 hours?", "1.5", "1 1/2"),
        ("Write 1024 as 2^{10} or 4^5", "2^{10}", "2^{10}"),  # no number is wanted
        ("Expand (x+1)^2", "x^2+2x+1", "(x+1)^2"),
        ("How many are seven?", "7", "seven"),
        ("Add 13 + 45 to it", "48", "3+45"),  # a part of other numbers
        ("Add 3 + 4.5", "7", "3+4"),
        ("What is 3 plus 4?", "7", "3+4"),  # not what the question says
    ],
)
def test_not_repeated(question: str, gold: str, answer: str) -> None:
    assert not is_restated(question, gold, answer)
