"""Whether two written answers are equivalent; decided exactly where possible, in microseconds.

    >>> equivalent("1,000", "$1000"), equivalent("(1, 2)", r"\\{1, 2\\}"), equivalent("1", r"\\sin^2 x + \\cos^2 x")
    (True, False, None)

None means that it takes a computer algebra system to decide. Supported are numbers with units and percent, polynomials
and their quotients, square roots, equations, lists, tuples, sets, intervals, inequalities, matrices, ratios, times,
dates, words and choices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from hone.grade import units
from hone.grade.algebra import TooLarge, Undecided, Value, number
from hone.grade.formulas import MAX_LENGTH, value
from hone.grade.kinds import NUMBER_WORDS, Date, Ratio, Time, agree, is_quotient, read_kind
from hone.grade.letters import in_order, is_row
from hone.grade.notation import closing, normalise, split, squeeze


@dataclass(frozen=True)
class Scalar:
    value: Value  # without the unit; 50 for 50 %
    unit: str = ""
    percent: bool = False
    whole: Value | None = None  # with the unit read as letters: 5 m as 5 times m


@dataclass(frozen=True)
class Words:
    text: str


@dataclass(frozen=True)
class Items:
    brackets: str  # "()", "[)", ..., "{}" for a set, "" for a bare list, "u" for a union
    items: tuple[Answer, ...]


@dataclass(frozen=True)
class Matrix:
    rows: tuple[tuple[Answer, ...], ...]


@dataclass(frozen=True)
class Equation:
    left: Value
    right: Value
    name: str  # what the equation defines: "x" for x = 3, "f(x)"; "" if nothing


@dataclass(frozen=True)
class Unread:
    large: bool = False  # beyond the bounds of exact computation


Answer = Scalar | Words | Items | Matrix | Equation | Time | Date | Ratio | Unread

UNORDERED = ("{}", "", "u")


def equivalent(gold: str, answer: str) -> bool | None:
    """Whether an answer equals the recorded one; None if undecided. Never raises, whatever the text."""
    if len(answer) > MAX_LENGTH:
        return False if len(gold) <= MAX_LENGTH else squeeze(answer) == squeeze(gold) or None
    gold_text, answer_text = normalise(gold), normalise(answer)
    if squeeze(gold_text) == squeeze(answer_text):
        return bool(squeeze(answer_text))
    if not answer_text:
        return False
    choice = _choice(gold_text)
    if choice:
        chosen = _choice(answer_text, strict=False)
        if chosen or gold_text != choice:  # a single letter may also mean something else
            return chosen == choice
    else:
        answer_text = _OPTION.sub("", answer_text)
    gold_read = read(gold_text)
    if isinstance(gold_read, Scalar) and is_row(gold):
        return in_order(gold_text, answer_text) or same(Words(gold_text), read(answer_text))
    verdict = same(gold_read, read(answer_text))
    if verdict is not True and isinstance(gold_read, Scalar) and _DECIMAL_COMMA.match(answer_text):
        x = gold_read.value.rational
        if x is not None and x.denominator > 1:
            return same(gold_read, read(answer_text.replace(",", "."))) or verdict
    return verdict


#: (B) 12: the letter of an option before its text.
_OPTION = re.compile(r"^(?:\text ?\{ ?)?(?:\([A-J]\)|[A-J]\))(?: ?\})?[.:]? +(?=[^-+*/^=!<> ])")
#: 3,5 for 3.5. A comma before three digits separates thousands.
_DECIMAL_COMMA = re.compile(r"^[-+$€£ ]*\d+,(?:\d{1,2}|\d{4,})(?![\d,.])")


def _choice(text: str, strict: bool = True) -> str:
    """The letter of a multiple-choice answer, or "". If `strict`, no other text may be there."""
    plain = re.sub(r"\\text ?\{([^{}]*)\}", r"\1", text).strip()
    match = re.match(r"\(?([A-J])[).]?$", plain)
    if match is None and not strict:
        match = re.match(r"(?:option |choice |answer )?\(?([A-J])(?:[).:]|$)", plain, re.IGNORECASE)
    return match.group(1).upper() if match else ""


# --- reading ---------------------------------------------------------------------------------

_MATRIX = re.compile(r"^\\begin ?\{([a-zA-Z]*(?:matrix|array))\}(?: ?\{[clr| ]*\})?(.*)\\end ?\{\1\}$", re.DOTALL)
_AND = re.compile(
    r"(?<=[^A-Za-z\\])(?:and|or)(?=[^A-Za-z])|\\text ?\{ ?,? ?(?:and|or) ?\}|\\(?:and|lor)\b"
    r"|(?<=[A-Za-z]) (?:and|or) (?=[A-Za-z])"
)
_UNION = re.compile(r"\\cup\b|(?<=[\])]) ?[Uu] ?(?=[\[(])")
_RELATION = re.compile(r"(\\le\b|\\ge\b|\\ne\b|\\approx\b|<=|>=|!=|=|<|>)")
_ONLY_TEXT = re.compile(r"^\\text ?\{([^{}]*)\}$")
_MEMBER = re.compile(r"^[A-Za-z] ?\\in\b ?")
_GIVES = re.compile(
    r"^(?:[A-Za-z]|\\[a-z]+|[A-Za-z]_\{?\w+\}?|[A-Za-z](?:\^\{-1\})? ?\( ?[\w-]{1,6} ?\)|[A-Za-z]'?"
    r"|(?:\\(?:angle|triangle|overline|text|operatorname) ?\{? ?)?[A-Za-z]{2,}(?: [A-Za-z]+){0,3} ?\}?"  # AB
    r"|\|[A-Z]{1,3}\|)$"
)
_ABOUT = re.compile(r"^(?:approximately|about|exactly|only|\\approx|~|\\sim)\s*", re.IGNORECASE)


@lru_cache(maxsize=4096)
def read(text: str, depth: int = 0) -> Answer:
    """Parse a normalised answer. Deeply nested or unknown notation gives Unread."""
    if depth > 6 or not text:
        return Unread(large=bool(text))
    text = _ABOUT.sub("", _MEMBER.sub("", _ONLY_TEXT.sub(r"\1", text))).strip()
    matrix = _MATRIX.match(text)
    if matrix:
        return _matrix(matrix.group(2), depth)
    kind = read_kind(text)
    if kind is not None:
        return kind
    for pattern, brackets in ((_UNION, "u"), (_AND, "")):
        parts = [part.strip(" ,") for part in pattern.split(text)]
        if len(parts) > 1 and all(parts) and _balanced(parts):
            return _flat(brackets, parts, depth)
    bracketed = _bracketed(text, depth)
    if bracketed is not None:
        return bracketed
    parts = split(text, thousands=True)
    if len(parts) > 1 and all(parts):
        return _flat("", parts, depth)
    if _RELATION.search(text):
        return _relation(text)
    if "\\pm" in text or "\\mp" in text:
        both = [text.replace("\\pm", a).replace("\\mp", b) for a, b in (("+", "-"), ("-", "+"))]
        return Items("", tuple(read(one, depth + 1) for one in both))
    return _scalar(text)


def _balanced(parts: Sequence[str]) -> bool:
    return all(sum(map(part.count, "([{")) == sum(map(part.count, ")]}")) for part in parts)


def _flat(brackets: str, parts: Sequence[str], depth: int) -> Answer:
    """A list or a union; nested lists are flattened, as in `1, 2 and 3`."""
    items: list[Answer] = []
    for part in parts:
        item = read(part, depth + 1)
        items.extend(item.items if isinstance(item, Items) and item.brackets == "" == brackets else (item,))
    first = items[0]
    if isinstance(first, Scalar) and first.unit and all(isinstance(item, Words) for item in items[1:]):
        return first  # 8 apples and oranges
    return Items(brackets, tuple(items))


def _matrix(body: str, depth: int) -> Answer:
    rows = [row for row in re.split(r"\\\\ ?(?:\[[^][]*\])?", body) if row.strip() and row.strip() != "\\hline"]
    cells = tuple(tuple(read(cell.strip(), depth + 1) for cell in row.split("&")) for row in rows)
    return Matrix(cells) if cells and len({len(row) for row in cells}) == 1 else Unread()


def _bracketed(text: str, depth: int) -> Answer | None:
    """A tuple, a set, an interval, or a matrix in plain brackets; None if no brackets enclose the whole."""
    is_set = text.startswith("\\{") and text.endswith("\\}")
    if is_set:
        inner = text[2:-2]
    elif text[:1] in ("(", "[", "{") and closing(text, 0) == len(text) - 1:
        inner = text[1:-1]
    elif text in ("\\emptyset",):
        return Items("{}", ())
    else:
        return None
    parts = split(inner) if inner.strip() else []
    if text[0] == "{" and len(parts) > 1:  # {1, 2}: plain text
        is_set = True
    if not is_set and len(parts) == 1:
        return read(inner.strip(), depth + 1) if text[0] != "[" else None
    if not all(parts):
        return Unread()
    items = tuple(read(part, depth + 1) for part in parts)
    if is_set:
        lists = (item.items if isinstance(item, Items) and not item.brackets else (item,) for item in items)
        return Items("{}", tuple(one for members in lists for one in members))  # {0, +-1} has three elements
    rows = [item for item in items if isinstance(item, Items) and item.brackets == "[]"]
    if text[0] == "[" and rows and len(rows) == len(items) and len({len(row.items) for row in rows}) == 1:
        return Matrix(tuple(row.items for row in rows))
    return Items(text[0] + text[-1] if len(items) == 2 else "()", items)


def _relation(text: str) -> Answer:
    """An equation, or an inequality in one variable, as an interval."""
    sides = [part.strip() for part in _RELATION.split(text)]
    signs, parts = [{"<=": "\\le", ">=": "\\ge"}.get(s, s) for s in sides[1::2]], sides[0::2]
    if not all(parts):
        return read(parts[-1], 5) if len(parts) == 2 and signs == ["="] and parts[-1] else Unread()
    if set(signs) == {"="}:
        return _equation(parts)
    if any(sign in ("=", "\\ne", "!=", "\\approx") for sign in signs):
        return Unread()
    if any(sign in (">", "\\ge") for sign in signs):
        if not all(sign in (">", "\\ge") for sign in signs):
            return Unread()
        parts, signs = parts[::-1], [{">": "<", "\\ge": "\\le"}[sign] for sign in signs[::-1]]
    low, high = "-\\infty", "\\infty"
    if len(parts) == 2 and _GIVES.match(parts[1]):
        low, signs = parts[0], [signs[0], "<"]
    elif len(parts) == 2 and _GIVES.match(parts[0]):
        high, signs = parts[1], ["<", signs[0]]
    elif len(parts) == 3 and _GIVES.match(parts[1]):
        low, high = parts[0], parts[2]
    else:
        return Unread()
    brackets = ("[" if signs[0] == "\\le" else "(") + ("]" if signs[1] == "\\le" else ")")
    return Items(brackets, (_scalar(low), _scalar(high)))


def _equation(parts: Sequence[str]) -> Answer:
    """An equation from its first and last side, as in `x = 1 + 2 = 3`."""
    first, last = parts[0], parts[-1]
    if not _GIVES.match(first) and _GIVES.match(last) and len(parts) == 2:
        first, last = last, first
    right = read(last, 5)
    if not isinstance(right, Scalar):
        return right if _GIVES.match(first) and not isinstance(right, Unread) else Unread()
    try:
        left = value(first)
    except TooLarge:
        return Unread(large=True)
    except Undecided:  # such as f'(x), which is only a name
        return right if _GIVES.match(first) else Unread()
    if not left.letters and not right.value.letters:  # 2 + 3 = 5
        return right
    return Equation(left, right.whole or right.value, squeeze(first) if _GIVES.match(first) else "")


def _scalar(text: str) -> Answer:
    plain = re.sub(r"\\text ?\{([^{}]*)\}", r" \1 ", text)
    words = re.sub(r"[\s.\"]+", " ", plain).strip().casefold()
    if words in NUMBER_WORDS:
        return Scalar(number(NUMBER_WORDS[words]))
    large = False
    whole = core_value = None
    core, unit = units.take_off(text)
    percent = core.endswith("%") or unit == "percent"
    core = core.removesuffix("%").strip()
    times, unit = units.scale(unit)
    for source in dict.fromkeys((text, core)):
        try:
            core_value = value(source)
        except TooLarge:
            large = True
            continue
        except (Undecided, RecursionError):
            continue
        whole = core_value if source == text else whole
    if core_value is not None and not _is_word(plain, core_value):
        return Scalar(core_value * number(times), "" if percent else unit, percent, whole)
    if re.search(r"[\\^*/=+|_]", plain) is None and re.search(r"[^\W\d_]{2}|\d:\d\d", plain):
        return Words(_words(plain))
    return Unread(large)


def _is_word(plain: str, read_as: Value) -> bool:
    """Whether a text is a word like `east`, although it could be read as a product of letters."""
    return (
        re.fullmatch(r"[^\W\d_]([^\W\d_]|[ '-])*", plain.strip()) is not None
        and re.search(r"[^\W\d_]{3}", plain) is not None
        and len(read_as.letters) > 1
    )


def _words(text: str) -> str:
    words = re.findall(r"[\w:'-]+", text.casefold().replace("p.m.", "pm").replace("a.m.", "am"))
    return " ".join(word for word in words if word not in ("the", "a", "an"))


# --- comparing -------------------------------------------------------------------------------


def same(gold: Answer, answer: Answer) -> bool | None:
    """Whether two answers are equivalent; None if that cannot be decided here."""
    if isinstance(gold, Items) and isinstance(answer, Items):
        return _same_items(gold, answer)
    for one, other in ((gold, answer), (answer, gold)):
        if isinstance(one, Items) and one.brackets in ("{}", "") and len(one.items) == 1:
            return same(one.items[0], other)
        if isinstance(one, Matrix) and isinstance(other, Items):  # a vector as a tuple
            cells = [cell for row in one.rows for cell in row]
            is_vector = len(one.rows) == 1 or len(one.rows[0]) == 1
            return is_vector and other.brackets == "()" and _in_order(cells, other.items)
        if isinstance(one, Equation) and isinstance(other, Scalar):
            return same(Scalar(one.right), other) if one.name else (False if not other.value.letters else None)
        if isinstance(one, Ratio) and isinstance(other, Scalar):
            return is_quotient(one, other.value)
        if isinstance(one, Unread):
            known_small = isinstance(other, Scalar) and other.value.rational is not None
            return False if one.large and known_small else None
    if isinstance(gold, Scalar) and isinstance(answer, Scalar):
        return _same_scalars(gold, answer)
    if isinstance(gold, Equation) and isinstance(answer, Equation):
        return _same_equations(gold, answer)
    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        shapes = [(len(m.rows), len(m.rows[0])) for m in (gold, answer)]
        ours, theirs = ([cell for row in m.rows for cell in row] for m in (gold, answer))
        return shapes[0] == shapes[1] and _in_order(ours, theirs)
    if isinstance(gold, Time | Date | Ratio) and isinstance(answer, Time | Date | Ratio):
        return agree(gold, answer)
    if isinstance(gold, Words) and isinstance(answer, Words):
        # Words with digits, such as a ratio or a time, can be written in several ways.
        return gold.text == answer.text or (None if re.search(r"\d", gold.text + answer.text) else False)
    return False  # of different kinds


def _same_scalars(gold: Scalar, answer: Scalar) -> bool | None:
    try:
        if gold.whole is not None and answer.whole is not None and gold.whole == answer.whole:
            return True
        a, b = gold.value, answer.value
        if gold.percent != answer.percent:
            hundredth = number(Fraction(1, 100))
            if a * (hundredth if gold.percent else number(1)) == b * (hundredth if answer.percent else number(1)):
                return True
            # "What percent ...?" 50 and 50 % are both usual; below 1 the sign matters.
            return a == b and a.rational is not None and abs(a.rational) >= 1
        return a == b and units.agree(gold.unit, answer.unit)
    except TooLarge:
        return None


def _same_equations(gold: Equation, answer: Equation) -> bool | None:
    try:
        if (gold.left + -gold.right).proportional(answer.left + -answer.right):
            return True
        if gold.name and answer.name:
            is_other = gold.name != answer.name
            return False if not is_other or not (gold.right.letters or answer.right.letters) else None
    except Undecided:
        pass
    return None


def _same_items(gold: Items, answer: Items) -> bool | None:
    unordered = [one.brackets in UNORDERED for one in (gold, answer)]
    if "u" in (gold.brackets, answer.brackets) and gold.brackets != answer.brackets:
        return None  # [1, 2] u [2, 3] may be one interval
    if all(unordered):
        return _as_sets(gold.items, answer.items)
    if not any(unordered):
        return gold.brackets == answer.brackets and _in_order(gold.items, answer.items)
    if "{}" in (gold.brackets, answer.brackets):
        return False  # a set and a tuple
    # One is without brackets: those of a point may be omitted, and a list may be put in brackets.
    if unordered[0]:
        return _as_sets(gold.items, answer.items) if answer.brackets in ("()", "[]") else False
    return gold.brackets == "()" and _in_order(gold.items, answer.items)


def _in_order(gold: Sequence[Answer], answer: Sequence[Answer]) -> bool | None:
    if len(gold) != len(answer):
        return False
    return _all(same(a, b) for a, b in zip(gold, answer))


def _as_sets(gold: Sequence[Answer], answer: Sequence[Answer]) -> bool | None:
    if len(gold) * len(answer) > 2500:
        return None
    table = [[same(a, b) for b in answer] for a in gold]
    columns = list(zip(*table)) if table else [() for _ in answer]
    return _all(_any(line) for line in (*table, *columns))


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    results = list(verdicts)
    return False if False in results else None if None in results else True


def _any(verdicts: Iterable[bool | None]) -> bool | None:
    results = list(verdicts)
    return True if True in results else None if None in results else False
