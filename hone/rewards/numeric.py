"""Rewards for answers that are numbers, as public recipes define them. Numbers are compared exactly, as fractions.

Every search is linear in the length of the text, and the model's text is never evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from hone.grade.parse import TAGS
from hone.rewards.base import Judged, Part, Score
from hone.rewards.gold import MAX_DIGITS, NeedsGold, gold_text, number, written_numbers
from hone.types import Problem

_BOX = re.compile(r"\\box(?:ed)?\s*\{")
_HASHES = re.compile(r"####[ \t]*([^\s]{1,200})")
_PLAIN = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)")


class BoxedNumeric(NeedsGold):
    r"""1 if the last `\boxed{...}` holds the gold number, else -1.

    The characters 0-9 . - of the box (with balanced braces) are kept and compared as a number: `\boxed{\$1,200}` is
    1200. So `\boxed{1/2}` reads as 12, as in the source of this rule; for fractions use a maths task.
    """

    numeric = True

    def __call__(self, problem: Problem, group: Sequence[Judged]) -> list[Score]:
        gold = kept_number(gold_text(problem))
        boxes = [boxed(one.rollout.text) for one in group]
        values = [None if text is None else kept_number(text) for text in boxes]
        return [
            Score(1.0 if value is not None and value == gold else -1.0, {"boxed": float(text is not None)})
            for value, text in zip(values, boxes, strict=True)
        ]


def boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` or `\box{...}`; None without a box.

    >>> boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    starts = [match.end() for match in _BOX.finditer(text)]
    closes: dict[int, int] = {}  # where each brace that opens a box is closed
    box_starts = set(starts)
    open_braces: list[int] = []
    for brace in re.finditer(r"(?<!\\)[{}]", text) if starts else ():
        if brace[0] == "{":
            open_braces.append(brace.end())
        elif open_braces:
            start = open_braces.pop()
            if start in box_starts:
                closes[start] = brace.start()
    last = max(closes, default=None)
    return None if last is None else text[last : closes[last]]


def kept_number(text: str) -> Fraction | None:
    """The number that remains of a text when only 0-9 . - are kept; None if it is not a number."""
    kept = "".join(c for c in text[: 10 * MAX_DIGITS] if c in "0123456789.-").rstrip(".")
    if len(text) > 10 * MAX_DIGITS or len(kept) > MAX_DIGITS or not _PLAIN.fullmatch(kept):
        return None
    return Fraction(kept)


class GSM8KStrict(NeedsGold):
    """1 if the number after the last `####` equals the gold answer, else 0."""

    numeric = True

    def __call__(self, problem: Problem, group: Sequence[Judged]) -> list[Score]:
        return _compared(problem, [after_hashes(one.rollout.text) for one in group])


class GSM8KFlexible(NeedsGold):
    """1 if the last number of the text equals the gold answer, else 0."""

    numeric = True

    def __call__(self, problem: Problem, group: Sequence[Judged]) -> list[Score]:
        return _compared(problem, [last_number(one.rollout.text) for one in group])


def after_hashes(text: str) -> Fraction | None:
    """The number after the last `####`, the notation of GSM8K; None without one."""
    at = text.rfind("####")
    match = _HASHES.match(text, at) if at >= 0 else None
    return None if match is None else number(match[1].rstrip(".,;:!*"))


def last_number(text: str) -> Fraction | None:
    """The last number of a text; None without one, or if it has more than MAX_DIGITS digits."""
    numbers = written_numbers(text)
    return number(numbers[-1]) if numbers else None


def _compared(problem: Problem, values: Sequence[Fraction | None]) -> list[Score]:
    gold = number(gold_text(problem))
    return [Score(float(v is not None and v == gold), {"number": float(v is not None)}) for v in values]


class SmallParts(Part):
    """Many small rewards for an answer and its format (W. Brown's GRPO demo, 2025), with this project's tags.

    Correct 2.0; a whole number in the answer block 0.5; strict format 0.5: the text is the four tags, each on its own
    line, and their contents; soft format 0.5: both blocks, one after the other, anywhere; 0.125 for each of the four
    tags that occurs exactly once, minus 0.001 for each character after the last `</answer>`, a final newline excepted.
    At most 4.0. A known weakness: format alone earns half as much as the right answer.
    """

    def __call__(self, problem: Problem, group: Sequence[Judged]) -> list[Score]:
        return [self._score(one) for one in group]

    def _score(self, one: Judged) -> Score:
        worth, text = self.config.small_parts, one.rollout.text
        parts = {
            "correctness": worth.correct * (one.grade.verdict == "correct"),
            "integer": worth.integer * bool(re.fullmatch(r"-?[0-9]+", one.parsed.answer or "", re.ASCII)),
            "strict_format": worth.strict_format * strict_format(text),
            "soft_format": worth.soft_format * soft_format(text),
            "tag_count": worth.tag * sum(text.count(tag) == 1 for tag in TAGS) - worth.trailing * trailing(text),
        }
        return Score(sum(parts.values()), parts)


def strict_format(text: str) -> bool:
    r"""`<think>\n...\n</think>\n<answer>\n...\n</answer>`, an optional newline, nothing else; each tag once."""
    if any(text.count(tag) != 1 for tag in TAGS):
        return False
    body = text.removesuffix("\n")
    inner = body.removeprefix("<think>\n").removesuffix("\n</answer>")
    return len(inner) == len(body) - len("<think>\n") - len("\n</answer>") and "\n</think>\n<answer>\n" in inner


def soft_format(text: str) -> bool:
    """A thinking block and, after white space, an answer block, somewhere in the text."""
    opened = text.find("<think>")
    between = re.compile(r"</think>\s*<answer>").search(text, opened + len("<think>")) if opened >= 0 else None
    return between is not None and text.find("</answer>", between.end()) >= 0


def trailing(text: str) -> int:
    """Characters after the last `</answer>`, a final newline excepted; 0 without one."""
    end = text.rfind("</answer>")
    return 0 if end < 0 else len(text[end + len("</answer>") :].removesuffix("\n"))
