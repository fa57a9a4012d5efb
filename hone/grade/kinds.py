"""Times of day, dates and ratios: answers with digits that are not numbers. Also numbers in words.

    >>> read_kind("1:03 p.m.") == read_kind("1:03 PM"), read_kind("June 20th") == read_kind("20 June")
    (True, True)

Details that one answer omits (morning or afternoon, the year) agree with any value in the other, as a missing unit
does. Ratios are equal if they are proportional: 6:2 is 3:1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hone.grade.algebra import Undecided, Value
from hone.grade.formulas import value

_NAMES_OF_NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_NAMES_OF_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_NAMES_OF_MONTHS = "january february march april may june july august september october november december"
_SMALL = _NAMES_OF_NUMBERS.split()
_COMPOUND = [f"{ten}{one}" for ten in _NAMES_OF_TENS.split() for one in ("", *(f"-{n}" for n in _SMALL[1:10]))]

#: Whole numbers below 100 in words.
NUMBER_WORDS = {word: n for n, word in enumerate([*_SMALL, *_COMPOUND])}

_MONTHS = _NAMES_OF_MONTHS.split()
_MONTH = r"(?P<month>" + "|".join(f"{name[:3]}(?:{name[3:]}|{name[3:4]})?" for name in _MONTHS) + r")\.?"
_DAY = r"(?P<day>[0-3]?\d)(?:st|nd|rd|th)?"
_WEEKDAY = r"(?:(?:mon|tues|wednes|thurs|fri|satur|sun)day,? )?"

#: Patterns for running text; used with IGNORECASE.
TIME = (
    r"(?<![\w:.])[0-2]?\d"
    r"(?::[0-5]\d(?::[0-5]\d)? ?(?:[ap]\.?m\b\.?)|(?::[0-5]\d){1,2}(?![\d:])| ?(?:[ap]\.m\.|[ap]m\b))"
)
_NAMES = "|".join(f"{name[:3]}(?:{name[3:]})?" for name in _MONTHS)
DATE = (
    rf"\b(?:{_NAMES})\.? [0-3]?\d(?:st|nd|rd|th)?\b(?:,? [12]\d{{3}}\b)?"
    rf"|(?<![\w.,])[0-3]?\d(?:st|nd|rd|th)?(?: of)? (?:{_NAMES})\b(?:,? [12]\d{{3}}\b)?"
)

_TIME = re.compile(r"(?P<hour>[0-2]?\d)(?::(?P<minute>[0-5]\d))?(?::(?P<second>[0-5]\d))? ?(?P<half>[ap])\.?m\.?", re.I)
_DATES = (
    re.compile(rf"{_WEEKDAY}{_MONTH} {_DAY}(?:,? (?P<year>[12]\d{{3}}))?", re.I),
    re.compile(rf"{_WEEKDAY}(?:the )?{_DAY}(?: of)? {_MONTH}(?:,? (?P<year>[12]\d{{3}}))?", re.I),
    re.compile(rf"{_MONTH},? (?P<year>[12]\d{{3}})(?P<day>)", re.I),
)
_TEXT = re.compile(r"\\text ?\{([^{}]*)\}")


@dataclass(frozen=True)
class Time:
    second: int  # on a twelve-hour clock
    half: str  # a, p, or "" if unknown


@dataclass(frozen=True)
class Date:
    month: int
    day: int | None
    year: int | None


@dataclass(frozen=True)
class Ratio:
    parts: tuple[Value, ...]
    written: str  # without blanks

    @property
    def time(self) -> Time | None:
        """The ratio read as a time of day (10:30), if possible."""
        match = re.fullmatch(r"([0-2]?\d):([0-5]\d)", self.written)
        return None if match is None else _time(int(match[1]), int(match[2]), 0, "")


Kind = Time | Date | Ratio


def read_kind(text: str) -> Kind | None:
    """Read a normalised answer as a time of day, a date or a ratio; None if it is none of them."""
    if len(text) > 200 or not re.search(r"\d|:", text):
        return None
    plain = " ".join(_TEXT.sub(r" \1 ", text).split()).removeprefix("at ").removeprefix("on ")
    match = _TIME.fullmatch(plain)
    if match:
        return _time(int(match["hour"]), int(match["minute"] or 0), int(match["second"] or 0), match["half"].lower())
    for pattern in _DATES:
        match = pattern.fullmatch(plain)
        if match:
            short = match["month"][:3].casefold()  # "ſep" matches in any case
            month = next(i for i, name in enumerate(_MONTHS, 1) if name.startswith(short))
            return Date(month, *(int(match[part]) if match[part] else None for part in ("day", "year")))
    return _ratio(text)


def _time(hour: int, minute: int, second: int, half: str) -> Time | None:
    if hour > (12 if half else 24):
        return None
    return Time((hour % 12 * 60 + minute) * 60 + second, half or ("p" if hour > 12 else ""))


def _ratio(text: str) -> Ratio | None:
    parts = re.split(r" ?: ?|(?<=[\d})]) to (?=[\d\\({])", text)
    if not 2 <= len(parts) <= 5:
        return None
    try:
        values = tuple(value(part) for part in parts)
    except Undecided:
        return None
    if any(not one.top or one.letters - {"\\pi"} for one in values):  # "Area: 5" is not a ratio
        return None
    return Ratio(values, re.sub(r"\s", "", ":".join(parts)))


def agree(gold: Kind, answer: Kind) -> bool:
    """Whether both are the same time, date or ratio. May raise TooLarge."""
    if isinstance(gold, Ratio) and isinstance(answer, Ratio):
        if gold.time and answer.time:
            return gold.time == answer.time
        return _proportional(gold.parts, answer.parts)
    gold_time, answer_time = (one.time if isinstance(one, Ratio) else one for one in (gold, answer))
    if isinstance(gold_time, Time) and isinstance(answer_time, Time):
        return gold_time.second == answer_time.second and _open(gold_time.half, answer_time.half)
    if isinstance(gold, Date) and isinstance(answer, Date):
        return gold.month == answer.month and _open(gold.day, answer.day) and _open(gold.year, answer.year)
    return False


def is_quotient(ratio: Ratio, other: Value) -> bool:
    """Whether 2:3 is given as 2/3. A whole number does not equal a ratio: 3:1 is neither 3 nor 1."""
    x = other.rational
    if len(ratio.parts) != 2 or (x is not None and x.denominator == 1):
        return False
    return ratio.parts[0] == ratio.parts[1] * other


def _open(a: object, b: object) -> bool:
    return not a or not b or a == b


def _proportional(a: tuple[Value, ...], b: tuple[Value, ...]) -> bool:
    return len(a) == len(b) and all(a[0] * y == b[0] * x for x, y in zip(a[1:], b[1:]))
