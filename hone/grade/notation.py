"""Normalises LaTeX and plain text to one notation.

    >>> normalise(r"\\left( \\dfrac{1}{2},\\, 10{,}000 \\right)")
    '( \\\\frac{1}{2}, 10,000 )'

Afterwards, `*` and `/` are the operators, `(`, `[`, `{` and `\\{` are the brackets, words are in `\\text{}`, and mere
formatting (sizes, spaces, styles) is removed. Every substitution is linear in the length of the text.
"""

from __future__ import annotations

import re

_PLAIN = {
    "−": "-", "–": "-", "—": "-", "×": "*", "·": "*", "⋅": "*", "∙": "*", "÷": "/", "⁄": "/", "π": "\\pi ",
    "∞": "\\infty ", "∪": "\\cup ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "±": "\\pm ", "∈": "\\in ",
    "°": "\\degree ", "√": "\\sqrt ", "θ": "\\theta ", "²": "^2", "³": "^3",
    "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}",
    "′": "'", "’": "'", "“": '"', "”": '"', "\u00a0": " ", "\u202f": " ", "\u2009": " ", "，": ",", "％": "%", "~": " ",
}  # fmt: skip
_TRANSLATION = str.maketrans(_PLAIN)

_SAME = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "leq": "le", "leqslant": "le", "geq": "ge", "geqslant": "ge",
    "neq": "ne", "cdot": "*", "times": "*", "ast": "*", "div": "/", "lbrace": "{", "rbrace": "}", "lt": "<", "gt": ">",
    "textdegree": "degree", "dbinom": "binom", "tbinom": "binom", "infin": "infty",
    "mathrm": "text", "textbf": "text", "textit": "text", "textrm": "text", "mbox": "text", "textsf": "text",
    "texttt": "text", "emph": "text", "mathit": "text", "mathbf": "text", "hbox": "text", "mathsf": "text",
    "colon": ":", "varnothing": "emptyset", "land": "and", "dotsc": "ldots", "dots": "ldots", "cdots": "ldots",
}  # fmt: skip
_LOOKS = (
    "left right bigl bigr big Big Bigl Bigr bigg Bigg biggl biggr Biggl Biggr displaystyle textstyle limits "
    "boldsymbol mathop operatorname displaylines nolimits quad qquad thinspace"
)
_GONE = frozenset(_LOOKS.split())
_COMMAND = re.compile(r"\\([A-Za-z]+)\s*|\\([,;:! \\])")
_PLAIN_FUNCTIONS = re.compile(r"(?<![A-Za-z\\])(sqrt|pi|infinity|infty|inf|oo|theta)(?![A-Za-z])")
_GROUPED = re.compile(r"(?<![\d.,])(\d{1,3}(?:[ ]\d{3})+)(?![\d.,]*\d)")


def normalise(text: str) -> str:
    """An answer in normal notation. Text that is not LaTeX is unchanged except for blanks."""
    text = re.sub(r"^\*\*(.*)\*\*$", r"\1", text.strip().translate(_TRANSLATION))  # Markdown
    if text.replace("\\$", "").count("$") % 2 == 0:  # otherwise dollars mean money
        text = re.sub(r"(?<!\\)\$", " ", text)
    text = re.sub(r"(?<!\\)\\[()\[\]]", " ", text)  # math mode
    text = re.sub(r"\{,\}|,\\!\s*|\\!,", ",", text).replace("\\$", "$").replace("\\%", "%").replace("\\_", "_")
    text = re.sub(r"(?<=\d)\\[, ](?=\d{3}(?!\d))", ",", text)
    text = _COMMAND.sub(_command, text)
    text = _PLAIN_FUNCTIONS.sub(_function, text)
    text = re.sub(r"\^\s*(?:\\circ\b|\{\s*\\circ\s*\})|\\degree\b", " \\\\degree ", text)
    text = text.replace("**", "^")
    text = re.sub(r"\s+", " ", text).strip()
    text = _GROUPED.sub(lambda m: m.group(1).replace(" ", ","), text)
    return _mixed(text.rstrip(".;:,!?").strip() if not text.endswith("!") else text)


def _command(match: re.Match[str]) -> str:
    name, symbol = match.groups()
    if symbol is not None:
        return "\\\\ " if symbol == "\\" else "" if symbol == "!" else " "
    if name in _GONE:
        return " "
    name = _SAME.get(name, name)
    if name in ("{", "}"):
        return f"\\{name}"
    return name if len(name) == 1 else f"\\{name} " if name not in ("text", "frac", "sqrt", "binom") else f"\\{name}"


def _function(match: re.Match[str]) -> str:
    name = match.group(1)
    return {"infinity": "\\infty ", "inf": "\\infty ", "oo": "\\infty "}.get(name, f"\\{name} ")


_MIXED = re.compile(
    r"(?<![\w.^/*)}])(\d+) ?(?:\\frac ?\{(\d+)\} ?\{(\d+)\}|\\frac ?(\d) ?(\d))"
    r"|(?<![\w./^*)}])(\d+) (\d+)/(\d+)(?![\d.])"
)


def _mixed(text: str) -> str:
    r"""Mixed numbers as sums: `1 1/2` and `1\frac{1}{2}` are (1+1/2)."""

    def total(match: re.Match[str]) -> str:
        parts = [group for group in match.groups() if group is not None]
        return "({}+{}/{})".format(*parts)

    return _MIXED.sub(total, text)


def squeeze(text: str) -> str:
    """Remove blanks except between digits; answers with equal results are equivalent."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,]*\d)")


def split(text: str, separators: str = ",;", thousands: bool = False) -> list[str]:
    """The parts between separators outside of all brackets; [text] without a separator.

    A comma within a number such as 58,500 is no separator if `thousands`, or if another comma is followed by a blank:
    `1,000, 2,000` has two parts, the inside of `(1,000)` too.
    """
    grouped = {
        i for match in (_THOUSANDS.finditer(text) if thousands or ", " in text else ())
        for i in range(*match.span()) if text[i] == ","
    }  # fmt: skip
    depth, start, parts = 0, 0, []
    for i, c in enumerate(text):
        if c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif depth == 0 and c in separators and i not in grouped:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()]


def closing(text: str, place: int) -> int:
    """The index of the bracket that closes the one at `place`, of any kind (intervals mix them), or -1."""
    depth = 0
    for i in range(place, len(text)):
        if text[i] in "([{":
            depth += 1
        elif text[i] in ")]}":
            depth -= 1
            if depth == 0:
                return i
    return -1
