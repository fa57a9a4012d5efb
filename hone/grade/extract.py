"""The answer that a text gives: the one reader of mathematical answers, in training and in evaluation.

    >>> extract("3 * 4 = 12, so\\n#### 12"), extract("Thus the area is $\\\\boxed{\\\\frac{1}{2}}$.")
    ('12', '\\\\frac{1}{2}')

Read is what stands in the last `<answer>` block, else what follows the thinking, else everything. In it the last of
`\\boxed{...}`, `#### ...` and `Answer: ...` counts. Without any of them, and unless reading is strict: what
"the answer is" says, else all of it if that is no more than an answer, else its last formula or number.
Every search is linear in the length of the text.
"""

from __future__ import annotations

import re
from collections import deque

from hone.grade.answers import Unread, Words, read
from hone.grade.notation import normalise
from hone.grade.parse import parse

MAX_ANSWER = 2000  # characters; what is longer is no answer

_BRACES = re.compile(r"\\(?:boxed|box|fbox) *\{|\\.|[{}]", re.DOTALL)
_HASHES = re.compile(r"####[ \t]*([^\n#]+)")
_LABEL = re.compile(r"\banswer(?: ?is)?[*_ ]*:[*_]*\s*(?=([^\n]{1,2000}))", re.IGNORECASE)
_PHRASE = re.compile(r"\b(?:answers?|solutions?|result) +(?:is|are|=)[ :]*(?=([^\n]{1,2000}))", re.IGNORECASE)
_SENTENCE = re.compile(r"(?:[.?]|(?<=[A-Za-z])!)(?=\s|$)|,? (?:so|because|since|which|where|hence)\b")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}(?![A-Za-z{])")
_FORMULA = re.compile(r"(?<!\\)\$\$?((?:[^$\\]|\\.)+)\$\$?|\\[(\[]((?:[^\n\\]|\\(?![()\[\]]))+)\\[)\]]")
_NUMBER = re.compile(r"[-−]?[$€£]?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?")


def extract(text: str, strict: bool = False) -> str | None:
    """The answer, or None if there is none. Strictly only a marked one counts. Never raises."""
    parsed = parse(text)
    block = parsed.answer
    after = text.rpartition("</think>")[2] if "</think>" in text else text
    found = _marked(block if block is not None else after)
    if found is None and block is not None:
        found = block if strict else _unmarked(block) or block
    elif found is None and not strict and ("</think>" in text or "<think>" not in text):
        found = _unmarked(after)
    found = _clean(found or "")
    return found if found and len(found) <= MAX_ANSWER else None


def boxed(text: str) -> str | None:
    """The inside of the last `\\boxed{...}` (or `\\box{}`) whose braces are balanced."""
    span = _last_box(text)
    return None if span is None else text[slice(*span)]


def _last_box(text: str) -> tuple[int, int] | None:
    """The last box to be closed that is in no other."""
    waiting: list[int] = []  # where the inside of a box begins, or -1 for another brace
    boxes = 0  # of those waiting
    last = None
    for match in _BRACES.finditer(text):
        piece = match.group()
        if piece[-1] == "{" and len(piece) != 2:  # not \{
            is_box = len(piece) > 1
            waiting.append(match.end() if is_box else -1)
            boxes += is_box
        elif piece == "}" and waiting:
            start = waiting.pop()
            if start >= 0:
                boxes -= 1
                last = (start, match.start())
    return last


def _marked(text: str) -> str | None:
    """What the last marker marks."""
    found: list[tuple[int, str]] = []
    span = _last_box(text)
    if span is not None:
        found.append((span[0], text[slice(*span)]))
    for pattern in (_HASHES, _LABEL):
        match = _last(pattern, text)
        if match is not None and match.group(1).strip(" *_"):
            found.append((match.start(1), _first_sentence(match.group(1)) if pattern is _LABEL else match.group(1)))
    return max(found)[1] if found else None


def _unmarked(text: str) -> str | None:
    match = _last(_PHRASE, text)
    if match is not None:
        return _first_sentence(match.group(1))
    text = text.strip()
    if len(text) <= 200 and _is_answer(text):
        return text
    matches = [match for match in (_last(_FORMULA, text), _last(_NUMBER, text)) if match is not None]
    if not matches:
        return None
    last = max(matches, key=lambda match: match.end())
    return next((group for group in last.groups() if group), last.group())


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def _first_sentence(text: str) -> str:
    """Up to its end: a period after which nothing or a blank comes, or a clause that explains."""
    end = _SENTENCE.search(text)
    return text[: end.start()] if end and end.start() else text


def _is_answer(text: str) -> bool:
    """A value or a few words: not a sentence with a number somewhere in it."""
    words = len(_WORD.findall(text))
    if text.endswith(":") or words > (2 if re.search(r"[\d$\\]", text) else 4):
        return False
    answer = read(normalise(text))
    if isinstance(answer, Words):
        return not re.search(r"\d", answer.text)
    return not isinstance(answer, Unread) or ("\\" in text and not words)


def _clean(answer: str) -> str:
    answer = answer.strip().strip("*_").strip()
    inner = boxed(answer)
    return _clean(inner) if inner is not None and len(inner) < len(answer) else answer
