"""Formulas, numbers, times and dates in running text.

    >>> last_expression("From $3$ and 4 we get $\\\\frac{1}{2}$ at last."), last_expression("She has $1,200 left.")
    ('\\\\frac{1}{2}', '$1,200')

Every search is linear in the length of the text.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator

from hone.grade.kinds import DATE, NUMBER_WORDS, TIME
from hone.grade.units import LONG_NAMES

TAIL = 1000  # characters at the end of a text that are searched first
MAX_FORMULA = 2000  # characters

_DELIMITER = re.compile(r"\\\\|\\\$|\\[()\[\]]|\$\$?|\n[ \t]*\n")
_PAIRS = {"\\(": "\\)", "\\[": "\\]", "$": "$", "$$": "$$"}

_CURRENCY = r"(?:\\?\$|[€£¥₹])?"
_DIGITS = r"(?:\d(?:[\d,]{0,300}\d)?(?:\.\d+)?|\.\d+)"
# Letters that may directly follow a number. `AZYUK2A` and `H2O` contain no number.
_ENDS = r"(?![A-Za-z_\d])|(?=(?:st|nd|rd|th|[kcm]?m|km/h|k?g|mg|lbs?|oz|m?l|L|s|h|hrs?|mins?|ft|in|[kKMx]|mph)\b)"
_SIGN = r"(?:(?<![\w)\]}.])[-−])?"
_NUMBER = (
    rf"(?<![A-Za-z_\d.\\]){_SIGN}{_CURRENCY}{_SIGN}{_DIGITS}"
    rf"(?:(?:/|:| : |\^)-?\d+|\^\{{[^{{}}\n]{{1,40}}\}})*(?:{_ENDS})"
    rf"(?: ?\\?%| (?:hundred|thousand|[mbtr]{{1,2}}illion)\b)?"
    rf"(?: (?:(?:square|cubic) )?(?:{'|'.join(LONG_NAMES)})s?\b)?"
)
# LaTeX without dollars: 3\sqrt{13}, \frac{1}{2}, \pi.
_GROUP = r"\{[^{}\n]{0,60}(?:\{[^{}\n]{0,40}\}[^{}\n]{0,60}){0,2}\}"
_COMMAND = rf"\\(?!f?box)[A-Za-z]{{2,20}}(?:\[\w{{1,5}}\])?(?: ?(?:{_GROUP}|[_^]\w)){{0,3}}[\d.]{{0,20}}"
_LATEX = rf"(?<![\\\w])-?[\d.]{{0,20}}(?:{_COMMAND}){{1,9}}"
# A formula without dollars: x = 3, 2x + 5. One operand has a letter, so that `5 - 3` stays two numbers.
_POWER = r"(?:\^(?:\{[^{}\n]{1,40}\}|-?\w{1,8}))?"
_OPERAND = rf"-?(?:\d[\d,]{{0,30}}(?:\.\d{{1,30}})?[a-zA-Z]?|[a-zA-Z])(?![A-Za-z\d]){_POWER}"
_PLAIN_FORMULA = rf"(?<![A-Za-z\d_\\.'’]){_OPERAND}(?: ?[-+*/=] ?{_OPERAND}){{1,30}}"

_EXPRESSION = re.compile(
    # In any case, [A-Z] matches four other letters too (İ, ı, ſ and the Kelvin sign): none of a formula.
    rf"(?P<date>{DATE})|(?P<time>{TIME})|(?P<latex>{_LATEX})|(?P<formula>(?-i:{_PLAIN_FORMULA}))|(?P<number>{_NUMBER})",
    re.IGNORECASE,
)
_COUNTS = sorted(set(NUMBER_WORDS) - {"one"}, key=len, reverse=True)  # "this one" is not a number
_NUMBER_WORD = re.compile(rf"\b(?:{'|'.join(_COUNTS)})\b", re.IGNORECASE)
_JUST_LETTER = re.compile(r"\s*[A-Za-z]\s*")


def formulas(text: str) -> Iterator[tuple[int, int, str]]:
    r"""(begin, end, inside) of formulas between dollars, `\(` and `\)`, or `\[` and `\]`; not of money."""
    opened: re.Match[str] | None = None
    for mark in _DELIMITER.finditer(text):
        name = mark.group()
        if opened is not None and name == _PAIRS[opened.group()] and _is_formula(text, opened, mark):
            yield opened.start(), mark.end(), text[opened.end() : mark.start()]
            opened = None
        elif name in _PAIRS and not (opened is not None and opened.group() in ("\\(", "\\[") and "$" in name):
            opened = mark
        elif name.isspace() and opened is not None and "$" in opened.group():  # a formula cannot contain an empty line
            opened = None


def _is_formula(text: str, opened: re.Match[str], closed: re.Match[str]) -> bool:
    """Whether two delimiters enclose a formula, unlike the dollar signs of `$5 and $7`."""
    inside = text[opened.end() : min(closed.start(), opened.end() + MAX_FORMULA + 1)]
    if not inside.strip() or len(inside) > MAX_FORMULA:
        return False
    money = opened.group() == "$" and inside[0].isdigit()
    return not (money and (inside[-1].isspace() or text[closed.end() : closed.end() + 1].isdigit()))


def last_expression(text: str) -> str | None:
    """The last formula, number, time or date; failing that, a single-letter formula or a number in words."""
    if len(text) > TAIL:
        start = text.find(" ", len(text) - TAIL)
        answer = _last_expression(text[start:]) if start >= 0 else None
        if answer is not None:
            return answer
    return _last_expression(text)


def _last_expression(text: str) -> str | None:
    last, letter = None, None
    for formula in formulas(text):
        if _JUST_LETTER.fullmatch(formula[2]):
            letter = formula
        else:
            last = formula
    plain = next(iter(deque(_EXPRESSION.finditer(text), maxlen=1)), None)
    if plain is not None and (last is None or plain.end() > last[1]):
        return _of_plain(plain)
    if last is not None:
        return last[2]
    if letter is not None:
        return letter[2]
    word = next(iter(deque(_NUMBER_WORD.finditer(text), maxlen=1)), None)
    return None if word is None else word.group()


def _of_plain(match: re.Match[str]) -> str:
    """The matched text; of a formula of numbers only, its last number."""
    text = match.group()
    if match.lastgroup != "formula" or re.search(r"[A-Za-z]", text):
        return text
    last = next(iter(deque(re.finditer(rf"{_SIGN}{_DIGITS}(?:[/^]-?\d+|\^\{{[^{{}}]*\}})?", text), maxlen=1)))
    return last.group()
