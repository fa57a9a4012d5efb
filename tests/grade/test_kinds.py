"""Ratios, times, dates, thousands, decimal commas, and depth that is bounded."""

import pytest

from hone.grade.algebra import TooLarge
from hone.grade.answers import equivalent
from hone.grade.formulas import value


@pytest.mark.parametrize(
    "gold, answer, same",
    [
        ("3:1", "3:1", True),
        ("3:1", "3 to 1", True),
        ("3:1", "6:2", True),
        ("3:1", "1:3", False),
        ("1", "3:1", False),
        ("3", "3:1", False),
        ("\\frac{2}{3}", "2:3", True),
        ("1:2:3", "1:2:4", False),
        ("1:03 PM", "1:03 p.m.", True),
        ("1:03 PM", "13:03", True),
        ("1:03 PM", "1:03 AM", False),
        ("\\text{5 PM}", "5:00 PM", True),
        ("June 20", "20th of June", True),
        ("June 20", "July 20", False),
        ("June 20, 2023", "June 20", True),
        ("June 20, 2023", "June 20, 2022", False),
        ("20", "June 20", False),
        ("2005", "2^{2005}", False),
        ("2^{2005}", "2^{2005}", True),
        ("58,500", "x = 58,500", True),
        ("58", "x = 58,500", False),
        ("1200", "P = \\$1,200", True),
        ("1234567", "N = 1{,}234{,}567", True),
        ("4, 5", "AB=4, CD=5", True),
        ("5", "AB=4, CD=5", False),
        ("3.5", "3,5", True),  # a decimal comma, where the recorded answer is one number that is not whole
        ("35", "3,5", False),
        ("3", "3,5", False),
        ("3, 5", "3,5", True),
        ("1.234", "1,234", False),
        ("42", "\\$42.00 per month", True),
        ("5000000", "\\$5 million", True),
        ("42", "forty-two", True),
        ("12", "(B) 12", True),
    ],
)
def test_answers_that_are_not_plain_numbers(gold, answer, same):
    assert equivalent(gold, answer) is same


@pytest.mark.parametrize(
    "text",
    [
        "2^" + "-" * 900 + "1",
        "2^" * 480 + "2",
        "\\sqrt" * 190 + "2",
        "{" * 480 + "2",
        "\\frac" * 190 + "12",
        "x^" * 490,
    ],
)
def test_depth_is_bounded_whatever_nests(text):
    """Never Python's own limit, however deep the caller already is."""

    def deep(levels):
        return equivalent(text, "3") if not levels else deep(levels - 1)

    assert deep(500) in (False, None)
    if "--" not in text:
        with pytest.raises(TooLarge):
            value(text)
