"""Make untrusted text (from models, servers, data files) safe to print and to store.

visible("\\x1b[2Jpaid")       # '⟨U+001B⟩[2Jpaid': printed raw, it would clear the screen
well_formed("\\ud83d")        # '\\ufffd': half of a surrogate pair cannot be written as UTF-8
"""

from __future__ import annotations

import re

#: Controls (except tab and newline), format characters (bidirectional overrides, zero-width, byte order
#: mark, tags), lone surrogates, private use and the separators U+2028/2029.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
    "\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufe00-\ufe0e\ufeff\uffa0\ufff0-\ufffb\U000e0000-\U000e0fff]"
)
_SURROGATE = re.compile("[\ud800-\udfff]")


def visible(text: object) -> str:
    """Replace invisible characters by their code point, e.g. ⟨U+202E⟩.

    All foreign text that hone prints goes through here, since terminals obey control characters.
    """
    return _HIDDEN.sub(_number, str(text))


def well_formed(text: str) -> str:
    """Join surrogate pairs and replace lone surrogates by U+FFFD, so that the text can be written as UTF-8."""
    if not _SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _number(match: re.Match[str]) -> str:
    return f"⟨U+{ord(match.group()):04X}⟩"
