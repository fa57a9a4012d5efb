"""Reflection phrases in model text: re-evaluating, going back, checking, contradictions, alternatives.

    >>> count("Suppose Zoey is a knight. That is a contradiction. Go back.")
    {'backtrack': 1, 'contradiction': 1}

A phrase list measures wording, not thought: use it to compare two states of one model on the same
problems, not to compare models. Patterns exclude common everyday uses ("wrote a check", "instead
of", "wait for the bus").
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_PHRASES = {
    "re-evaluate": (
        r"re-?(?:evaluat|consider|examin|think|assess|visit)\w*",
        r"look(?:ing)? again",
        r"think again",
        r"on second thoughts?",
        r"wait\b(?!\s+(?:for|until|till|to|in|at)\b)",
        r"hold on\b(?!\s+to\b)",
        r"hmm+",
        r"that(?:'s| is| was| can(?:no|')t be) (?:not right|wrong|incorrect)",
    ),
    "backtrack": (
        r"back-?track\w*",
        r"(?:go|going|goes|step|stepping) back\b(?!\s+(?:home|to (?:school|work|bed))\b)",
        r"start(?:ing)? (?:over|again|afresh)",
        r"try(?:ing)? again",
        r"(?:does not|doesn't|did not|didn't|will not|won't) work\b",
        r"my mistake",
        r"(?:made|making) an? (?:mistake|error)",
        r"oops",
    ),
    "check": (
        r"(?:double|cross)-?\s?check\w*",
        r"(?:let me|let's|let us|i will|i'll|i should|i must|we|to|now|and) (?:re-?)?(?:check|verify|confirm)",
        r"(?:re-?)?checking",
        r"verif(?:y|ies|ied|ying|ication)",
        r"sanity check",
    ),
    "contradiction": (
        r"contradict\w*",
        r"inconsisten\w*",
        r"conflicts? with",
        r"(?:is|was|'s) impossible",
        r"can(?:no|')t (?:both )?be (?:true|right|both)",
    ),
    "alternative": (
        r"alternatively",
        r"another (?:way|approach|option|possibility|case|idea|method)",
        r"(?:try|suppose|assume|consider|take|test) (?:instead|the (?:other|opposite|alternative))",
        r"the other (?:case|option|possibility)",
        r"on the other hand",
        r"what if",
    ),
}
#: Clauses that open with the word: "Check: Zoey says ..." is checking, "a cheque of 5" or "check-in" is not.
_OPENERS = {"check": r"(?:^|(?<=[.!?:;\n>])|(?<=[.!?:;\n>]\s))check(?!-)(?:s|ed)?\b"}

KINDS: tuple[str, ...] = tuple(_PHRASES)
PATTERNS: dict[str, re.Pattern[str]] = {
    kind: re.compile("|".join([rf"\b(?:{'|'.join(parts)})", *([_OPENERS[kind]] if kind in _OPENERS else [])]), re.I)
    for kind, parts in _PHRASES.items()
}


@dataclass(frozen=True, slots=True)
class Occurrence:
    """The first sample with a kind of reflection."""

    kind: str
    step: int
    problem_id: str
    index: int
    phrase: str
    before: str  # the text before it, on one line
    after: str


def spans(text: str) -> list[tuple[int, int, str]]:
    """(start, end, kind) of every phrase, in order; if two overlap, only the one that starts first."""
    matches = sorted((m.start(), -m.end(), kind) for kind in KINDS for m in PATTERNS[kind].finditer(text))
    kept: list[tuple[int, int, str]] = []
    for start, minus_end, kind in matches:
        if not kept or start >= kept[-1][1]:
            kept.append((start, -minus_end, kind))
    return kept


def count(text: str) -> dict[str, int]:
    """Number of phrases per kind that occurs, in the order of `KINDS`."""
    counts = Counter(kind for _, _, kind in spans(text))
    return {kind: counts[kind] for kind in KINDS if counts[kind]}


def is_reflective(text: str) -> bool:
    """Whether the text has at least one phrase of any kind."""
    return any(pattern.search(text) for pattern in PATTERNS.values())


def rate(texts: Sequence[str]) -> float:
    """Share of texts that reflect; 0 for an empty list."""
    return sum(map(is_reflective, texts)) / len(texts) if texts else 0.0


def first_occurrences(samples: Iterable[tuple[int, Mapping[str, Any]]], context: int = 90) -> list[Occurrence]:
    """The first sample of each kind, given (step, record) in order of training; stops reading when all are found."""
    first: dict[str, Occurrence] = {}
    for step, record in samples:
        text = str(record["text"])
        for kind in KINDS:
            match = None if kind in first else PATTERNS[kind].search(text)
            if match:
                start, end = match.span()
                before, after = _surroundings(text, start, end, context)
                where = str(record.get("problem_id", "")), int(record.get("index", 0))
                first[kind] = Occurrence(kind, step, *where, match.group(), before, after)
        if len(first) == len(KINDS):
            break
    return sorted(first.values(), key=lambda o: (o.step, KINDS.index(o.kind)))


def duplicate_rate(thoughts: Sequence[str]) -> float:
    """Share of thinking texts that another one repeats word for word (ignoring case, spacing and punctuation).

    Detects a collapse in which every answer opens with "this is the thinking process". Pass the
    thinking for different problems, because samples of one problem may well agree.
    """
    seen = Counter(" ".join(re.findall(r"\w+", thought.casefold())) for thought in thoughts)
    return sum(n for n in seen.values() if n > 1) / len(thoughts) if thoughts else 0.0


def _surroundings(text: str, start: int, end: int, context: int) -> tuple[str, str]:
    """The text before and after a phrase, each on one line, cut between words."""
    before, after = text[max(0, start - context) : start], text[end : end + context]
    if start > context:
        before = re.sub(r"^\S*\s+", "", before)
    if end + context < len(text):
        after = re.sub(r"\s+\S*$", "", after)
    return re.sub(r"\s+", " ", before), re.sub(r"\s+", " ", after)
