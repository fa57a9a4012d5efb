"""Splits a completion into thinking and answer. The only parser of training and evaluation.

    >>> parse("<think>2 + 2</think><answer>4</answer>").answer
    '4'

The input is only the model's own text (`Rollout.text`), so role words such as "Assistant:" in it
have no meaning. Tags are matched exactly; every search is linear in the length of the text.
"""

from __future__ import annotations

from dataclasses import dataclass

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@dataclass(frozen=True, slots=True)
class Parsed:
    """The blocks of one completion."""

    thinking: str | None  # between the first <think> (or the start) and the first </think> after it
    answer: str | None  # content of the last complete <answer> block, stripped; None without one
    well_formed: bool  # each of the four tags exactly once and in order


def parse(text: str) -> Parsed:
    """Read the blocks of a completion; never raises.

    The last complete `<answer>...</answer>` counts, wherever it is. A thinking block without an
    opening tag starts with the text; one without a closing tag is None.
    """
    opened = text.rfind("<answer>", 0, max(0, text.rfind("</answer>")))
    answer = None
    if opened >= 0:
        opened += len("<answer>")
        answer = text[opened : text.index("</answer>", opened)].strip()
    start = text.find("<think>")
    end = text.find("</think>", max(0, start))
    thinking = text[start + len("<think>") if start >= 0 else 0 : end].strip() if end >= 0 else None
    well_formed = answer is not None and 0 <= start < end and _once_in_order(text)
    return Parsed(thinking, answer, well_formed)


def completion(thinking: str, answer: str) -> str:
    """A completion in the format that `parse` calls well-formed."""
    return f"<think>{thinking}</think>\n<answer>{answer}</answer>"


def _once_in_order(text: str) -> bool:
    first, last = [text.find(tag) for tag in TAGS], [text.rfind(tag) for tag in TAGS]
    return first == last == sorted(first) and first[0] >= 0
