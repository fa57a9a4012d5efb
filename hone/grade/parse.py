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
    answer, thinking = answer_span(text), thinking_span(text)
    well_formed = answer is not None and thinking is not None and 0 <= text.find("<think>") < thinking[1]
    return Parsed(
        None if thinking is None else text[slice(*thinking)].strip(),
        None if answer is None else text[slice(*answer)].strip(),
        well_formed and _once_in_order(text),
    )


def answer_span(text: str) -> tuple[int, int] | None:
    """(start, end) of the answer's content in characters, blanks included; None without a complete block."""
    opened = text.rfind("<answer>", 0, max(0, text.rfind("</answer>")))
    if opened < 0:
        return None
    opened += len("<answer>")
    return opened, text.index("</answer>", opened)


def thinking_span(text: str) -> tuple[int, int] | None:
    """(start, end) of the thinking's content in characters, blanks included; None if it is not closed."""
    start = text.find("<think>")
    end = text.find("</think>", max(0, start))
    return (start + len("<think>") if start >= 0 else 0, end) if end >= 0 else None


def completion(thinking: str, answer: str) -> str:
    """A completion in the format that `parse` calls well-formed."""
    return f"<think>{thinking}</think>\n<answer>{answer}</answer>"


def _once_in_order(text: str) -> bool:
    first, last = [text.find(tag) for tag in TAGS], [text.rfind(tag) for tag in TAGS]
    return first == last == sorted(first) and first[0] >= 0
