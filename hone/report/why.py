"""Why an answer got its reward: what the parser read, the score of each part, and the verdict in words.

    why = why_of(row, {"outcome": 1.0, "format": 0.2})      # a row of rollouts/step_N.jsonl, weights of reward.parts
    why.pieces          # [("<think>", "tag"), ("2 + 2", "thinking"), ..., ("4", "answer"), ...]: the whole text
    why.sentences       # ["The task's grader read an answer and found it wrong.", "Reward −0.2: ...", ...]
    why.gold            # the right answer as text; None if the run did not record one

For the live page, the static report and the terminal alike. The text is the model's: show it through `visible`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hone.grade.parse import TAGS, answer_span, parse, thinking_span
from hone.report.text import minus
from hone.rewards.config import part_label

VERDICTS = {
    "correct": "The task's grader read an answer and found it correct.",
    "wrong": "The task's grader read an answer and found it wrong.",
    "malformed": "No answer could be read from the text.",
    "truncated": "The text was cut off at the token limit before an answer ended.",
    "ungraded": "The task does not grade answers: the reward comes from its parts alone.",
    "verifier_timeout": "The verifier did not finish in time: the sample has no reward and is left out of its group.",
    "verifier_error": "The verifier failed: the sample has no reward and is left out of its group.",
}
#: Instead of the above, if there is an answer block.
UNREADABLE = "An answer was given, but not in the form that the task asks for."
_TAGS = re.compile("|".join(map(re.escape, TAGS)))


@dataclass(frozen=True)
class PartScore:
    """One part of a reward."""

    name: str
    value: float | None  # None: it did not apply to this answer
    weight: float | None  # None: it is only recorded, and not added up

    @property
    def points(self) -> float | None:
        """What the part adds to the reward."""
        return None if self.value is None or self.weight is None else self.value * self.weight


@dataclass(frozen=True)
class Why:
    pieces: list[tuple[str, str]]  # the whole text, each piece with its kind: "thinking", "answer", "tag" or ""
    parts: list[PartScore]
    sentences: list[str]
    gold: str | None = None


def weights_of(config: Mapping[str, Any]) -> dict[str, float]:
    """The weights of the reward's parts, by their names in rollouts, from a stage's config.resolved.json."""
    reward = config.get("reward")
    parts = reward.get("parts") if isinstance(reward, Mapping) else None
    items = parts.items() if isinstance(parts, Mapping) else ()
    numbers = {str(name): weight for name, weight in items if _number(weight) is not None}
    return {part_label(name, numbers): float(weight) for name, weight in numbers.items()}


def why_of(row: Mapping[str, Any], weights: Mapping[str, float]) -> Why:
    text = row["text"] if isinstance(row.get("text"), str) else ""
    parts = part_scores(row, weights)
    sentences = [*_reward(row, parts), *_verdict(row, text), *_advantage(row)]
    gold = row["gold"] if isinstance(row.get("gold"), str) else None
    return Why(pieces(text, row.get("extracted")), parts, sentences, gold)


def part_scores(row: Mapping[str, Any], weights: Mapping[str, float]) -> list[PartScore]:
    """Every weighted part, then the parts that were only recorded."""
    values = row["parts"] if isinstance(row.get("parts"), Mapping) else {}
    names = dict.fromkeys([*weights, *map(str, values)])
    return [PartScore(name, _number(values.get(name)), weights.get(name)) for name in names]


def pieces(text: str, extracted: object = None) -> list[tuple[str, str]]:
    """The text, split as the parser splits it.

    >>> pieces("<answer>4</answer>")
    [('<answer>', 'tag'), ('4', 'answer'), ('</answer>', 'tag')]
    """
    marks = [(match.start(), match.end(), "tag") for match in _TAGS.finditer(text)]
    answer, thinking = answer_span(text), thinking_span(text)
    if answer is None and isinstance(extracted, str) and extracted.strip():  # read without tags, such as \boxed{4}
        start = text.rfind(extracted.strip())
        answer = (start, start + len(extracted.strip())) if start >= 0 else None
    kinds = [(*span, kind) for span, kind in ((answer, "answer"), (thinking, "thinking")) if span is not None]
    edges = sorted({0, len(text), *(edge for start, end, _ in (*marks, *kinds) for edge in (start, end))})
    labelled = []
    for start, end in pairwise(edges):
        kind = next((kind for low, high, kind in (*marks, *kinds) if low <= start and end <= high), "")
        labelled.append((text[start:end], kind))
    return labelled


def groups_of(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Rows of a step by group: consecutive rows of the same problem, with rising index."""
    groups: list[list[dict[str, Any]]] = []
    for row in rows:
        last = groups[-1][-1] if groups else {}
        goes_on = last.get("problem_id") == row.get("problem_id") and last.get("index", 0) < row.get("index", 0)
        if goes_on:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _verdict(row: Mapping[str, Any], text: str) -> list[str]:
    verdict = str(row.get("verdict", ""))
    sentences = [VERDICTS.get(verdict, f"The verdict is {verdict or 'missing'}.")]
    if verdict == "malformed" and (row.get("extracted") is not None or answer_span(text) is not None):
        sentences = [UNREADABLE]
    if verdict == "malformed" and any(tag in text for tag in TAGS) and not parse(text).well_formed:
        counts = {tag: text.count(tag) for tag in TAGS}
        wrong = [f"{tag} is missing" if n == 0 else f"{tag} occurs {n} times" for tag, n in counts.items() if n != 1]
        sentences += [f"Of the expected tags, {', '.join(wrong)}."] if wrong else ["The tags are not in order."]
    if row.get("end") == "max_turns":
        sentences.append("The episode ended at its limit of turns.")
    if row.get("note"):
        sentences.append(f"The verifier reports: {row['note']}")
    return sentences


def _reward(row: Mapping[str, Any], parts: list[PartScore]) -> list[str]:
    total = _number(row.get("total"))
    if total is None:
        return []
    counted = [part for part in parts if part.points is not None]
    terms = [minus(f"{part.value:.3g} × {part.weight:.3g}") for part in counted]
    terms = [f"{part.name} {term}" for part, term in zip(counted, terms)]
    reward = f"Reward {minus(f'{total:.3g}')}"
    if not terms:
        return [f"{reward}."]
    sentences = [f"{reward} = {' + '.join(terms)}."]
    if abs(sum(part.points or 0.0 for part in counted) - total) > 1e-4 * max(1.0, abs(total)):
        sentences = [f"{reward}; its parts ({', '.join(terms)}) do not add up to it."]
    if skipped := [part.name for part in parts if part.weight is not None and part.value is None]:
        sentences.append(f"Not applied to this answer: {', '.join(skipped)}.")
    return sentences


def _advantage(row: Mapping[str, Any]) -> list[str]:
    advantage = _number(row.get("advantage"))
    if advantage is None:
        return []
    if advantage == 0:
        return ["Advantage 0: the update learns nothing from this answer."]
    direction = "more" if advantage > 0 else "less"
    return [f"Advantage {minus(f'{advantage:+.3g}')}: the update makes this answer {direction} likely."]


def _number(value: object) -> float | None:
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else None  # type: ignore[arg-type]  # a number by the line above
