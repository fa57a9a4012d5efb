"""Guards of the quality of thinking: penalties for degenerate text that an outcome reward does not see.

A documented collapse (a 1.5B model, knights and knaves): the format is learned, and the thinking of every answer is
"this is thinking process". See `hone.rewards.config.ThinkingReward` for the settings.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

from hone.rewards.base import Judged, Part, Score
from hone.types import Problem

#: Words of placeholder thinking: "this is my thinking process", "reasoning goes here step by step".
FILLERS = frozenset(
    """
    a an and am are be by for go goes going here i in is it let me my now of ok okay on our process reason
    reasoning reasonings s so step steps that the then there think thinking thinkings this thought thoughts to us
    we will write your you
    """.split()  # noqa: SIM905
)

#: Scripts allowed in any text, for names and formulas.
COMMON_SCRIPTS = frozenset({"LATIN", "GREEK"})

_WORD = re.compile(r"\w+")


class Thinking(Part):
    """0 for thinking without faults; each fault subtracts its penalty (1 by default).

    `dummy`: no thinking block, or fewer than `min_words` distinct words in it, fillers aside.
    `foreign`: letters of a script that the problem does not use (Latin and Greek are always allowed).
    `unmentioned`: a person of the puzzle does not occur in the thinking (tasks with `names` only).
    `length_limit`: the answer was cut off. Logged in detail, each 0 or 1.
    """

    def __call__(self, problem: Problem, group: Sequence[Judged]) -> list[Score]:
        known = COMMON_SCRIPTS | scripts(" ".join(str(m["content"]) for m in problem.messages))
        return [self._score(problem, known, one) for one in group]

    def _score(self, problem: Problem, known: frozenset[str], one: Judged) -> Score:
        penalty = self.config.thinking
        thinking = one.parsed.thinking or ""
        names = problem.answer.get("names", ()) if isinstance(problem.answer, dict) else ()
        faults = {
            "dummy": is_dummy(thinking, penalty.min_words),
            "foreign": not scripts(one.rollout.text) <= known,
            "unmentioned": any(not mentions(thinking, str(name)) for name in names),
            "length_limit": one.rollout.finish == "length",
        }
        total = sum(getattr(penalty, name) for name, present in faults.items() if present)
        return Score(0.0 - total, {name: float(present) for name, present in faults.items()})


def is_dummy(thinking: str, min_words: int) -> bool:
    """Whether a text has too few distinct words, not counting fillers.

    >>> is_dummy("This is the thinking process. " * 50, 5)
    True
    """
    words: set[str] = set()
    for match in _WORD.finditer(thinking):
        word = match[0].casefold()
        if word not in FILLERS:
            words.add(word)
            if len(words) >= min_words:
                return False
    return len(words) < min_words or not thinking.strip()


def mentions(text: str, name: str) -> bool:
    """Whether the name occurs as a whole word, in any case."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text, re.IGNORECASE) is not None


def scripts(text: str) -> frozenset[str]:
    """The scripts of the letters in a text, as Unicode names them: LATIN, CJK, CYRILLIC, ...

    Variants of letters (mathematical, fullwidth) count as the letter itself.
    """
    return frozenset(script for c in set(text) if (script := _script(c)) is not None)


@lru_cache(maxsize=4096)
def _script(character: str) -> str | None:
    plain = unicodedata.normalize("NFKD", character)[:1]
    if unicodedata.category(plain) not in ("Lu", "Ll", "Lt", "Lo"):
        return None
    return unicodedata.name(plain, "UNKNOWN").split()[0].split("-")[0]
