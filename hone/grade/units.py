"""Splits units off answers and compares them.

    >>> take_off("5 square cm"), take_off(r"18\\text{ dollars}"), take_off("$18")
    (('5', 'centimeter^2'), ('18', 'dollar'), ('18', 'dollar'))

A missing unit agrees with any; two units agree if they are the same unit in words or symbols. Units are not converted:
1 hour and 60 minutes differ.
"""

from __future__ import annotations

import re

_NAMES = {
    "meter": "m metre", "centimeter": "cm centimetre", "millimeter": "mm millimetre", "kilometer": "km kilometre",
    "inch": "in inche", "foot": "ft feet", "yard": "yd", "mile": "mi", "gram": "g gm", "kilogram": "kg kilo",
    "milligram": "mg", "pound": "lb", "ounce": "oz", "ton": "tonne", "liter": "l litre", "milliliter": "ml millilitre",
    "second": "s sec", "minute": "min", "hour": "h hr", "day": "", "week": "", "month": "", "year": "yr",
    "dollar": "$ usd buck", "cent": "¢", "euro": "€ eur", "gbp": "£", "degree": "deg \\degree", "mph": "",
    "radian": "rad", "percent": "", "newton": "n", "joule": "j", "watt": "w", "volt": "v", "kph": "km/h", "acre": "",
    "people": "person", "": "unit",
}  # fmt: skip
_CANONICAL = {alias: name for name, aliases in _NAMES.items() for alias in (name, *aliases.split())}
#: Names that have no other meaning in running text, unlike `in`.
LONG_NAMES = ("feet", "inches", *(name for name in _NAMES if len(name) > 3 and name not in ("people", "second", "ton")))
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "mod", "gcd", "lcm", "abs"}

_LEADING = re.compile(r"^(-?) ?(?:([$€£])|\\text\{ ?(?:USD|US) ?\} ?\$?) ?(-?)")
_TRAILING = re.compile(r"^(?P<core>.*?[\d)}.A-Za-z]) ?\\text ?\{(?P<unit>[^{}]*)\}(?: ?\^ ?\{?(?P<power>\d)\}?)? ?$")
_WORDS = re.compile(r"^(?P<core>.*?[\d)}.]) ?(?P<unit>[A-Za-z¢€][A-Za-z .,'/²³-]*)(?:\^ ?\{?(?P<power>\d)\}?)?$")
_DEGREE = re.compile(r"^(?P<core>.+?) ?\\degree ?(?P<scale>[CF]?)$")
_BASE = re.compile(r"^(\d+) ?_ ?(?:\{ ?(\d+) ?\}|(\d+))$")


def take_off(text: str) -> tuple[str, str]:
    """(text without its unit, canonical name of the unit or ""). The text must be normalised."""
    base = _BASE.match(text)
    if base:
        return base.group(1), f"base {base.group(2) or base.group(3)}"
    money = _LEADING.match(text)
    if money:
        amount, rest = take_off(text[money.end() :]) if text[money.end() : money.end() + 1].isdigit() else (None, "")
        scale_name = rest.partition(" ")[0]
        currency = canonical(money.group(2) or "$")
        unit = f"{scale_name} {currency}" if scale_name in _SCALES else currency  # ignores "per month"
        return money.group(1) + money.group(3) + (text[money.end() :] if amount is None else amount), unit
    degree = _DEGREE.match(text)
    if degree:
        return degree.group("core"), "degree" + degree.group("scale")
    match = _TRAILING.match(text)
    if match is None:
        match = _WORDS.match(text)
        if match is None or not _is_unit(match):
            return text, ""
    unit = canonical(match.group("unit"))
    return match.group("core"), f"{unit}^{match.group('power')}" if match.group("power") else unit


def _is_unit(match: re.Match[str]) -> bool:
    """Whether the match is a known unit or a word, after a blank if it could be a product of letters."""
    first = re.split(r"[ ,.]", match.group("unit").strip())[0]
    if first.lower() in _FUNCTIONS or match.group("core").count("{") != match.group("core").count("}"):
        return False
    apart = match.string[match.end("core")] == " "
    known = first.lower() in _CANONICAL or first.lower() in _SCALES
    return (known and (apart or len(first) > 1)) or (apart and len(first) > 2)


def canonical(unit: str) -> str:
    """The canonical name for all spellings of a unit."""
    words = [word for word in re.split(r"[ .,]+", unit.lower().strip()) if word]
    power = ""
    if words and words[0] in ("square", "sq", "cubic", "cu"):
        power, words = "^2" if words[0].startswith("sq") else "^3", words[1:]
    names = [_CANONICAL.get(word, _CANONICAL.get(word.removesuffix("s"), word.removesuffix("s"))) for word in words]
    return " ".join(names).strip() + power


def scale(unit: str) -> tuple[int, str]:
    """(10^6, "dollar") for "million dollar"."""
    first, _, rest = unit.partition(" ")
    return (_SCALES[first], rest) if first in _SCALES else (1, unit)


def agree(a: str, b: str) -> bool:
    """Whether a unit is missing, or both are equal up to trailing words ("clip", "clip in total")."""
    return not a or not b or a == b or f"{a} ".startswith(f"{b} ") or f"{b} ".startswith(f"{a} ")
