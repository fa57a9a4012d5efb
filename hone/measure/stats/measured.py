"""The results of one evaluation as columns, with one row per problem.

    before = measured("base", records)      # records: rows of an evaluation, {"problem_id", "verdict", ...}
    before.rates()                          # [P] share of correct samples of each problem
    before.where(np.array(before.levels) == "5").pass_curve([1, 8])

All functions of this package that compare models take these.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hone.base import stats
from hone.measure.stats import passk, reflection
from hone.types import VERIFIER_FAILURES, Interval

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

_INTEGER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)")
_DECIMAL = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d*)\.\d+")
_FRACTION = re.compile(r"[-+]?(?:\d+\s*/\s*\d+|\\[dt]?frac\s*(?:\{\d+\}|\d)\s*(?:\{\d+\}|\d))")


@dataclass(frozen=True)
class Measured:
    """P problems with their counts of samples, not including samples whose verifier failed."""

    label: str
    problems: tuple[str, ...]  # [P] ids, sorted
    drawn: Counts  # [P] samples that were graded, at least 1
    correct: Counts  # [P] of these
    levels: tuple[str, ...]  # [P], "" if the task has none
    domains: tuple[str, ...]  # [P]
    formats: tuple[str, ...]  # [P], see `answer_format`
    tokens: Array  # [P] mean length of the answers
    reflects: Array  # [P] share of answers with a reflection phrase
    gold_nll: Array  # [P, 2] -mean log p of the gold answer without and after the model's reasoning; NaN: not measured
    failures: int = 0  # samples left out because the verifier failed
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None  # of the random streams; None: not recorded, so independence is unknown
    facts: Mapping[str, Any] = field(default_factory=dict)  # model, split, ...
    truncated: Array | None = None  # [P] share of answers that were cut off; None: not recorded
    graded: bool = True  # False: the task has no grader, and `correct` has no meaning

    def __len__(self) -> int:
        return len(self.problems)

    def rates(self) -> Array:
        """[P] share of correct samples: an unbiased estimate of each problem's pass@1."""
        return self.correct / self.drawn

    def accuracy(self) -> Interval:
        """Mean over problems; Wilson's interval with one sample each, else a bootstrap over problems."""
        return stats.accuracy([_ones(n, c) for n, c in zip(self.drawn.tolist(), self.correct.tolist())])

    def pass_curve(self, ks: Sequence[int]) -> list[Interval]:
        return passk.pass_curve(self.drawn.tolist(), self.correct.tolist(), ks)

    def ks(self) -> list[int]:
        """1, 2, 4, ... up to what every problem's samples allow."""
        return passk.powers_of_two(int(self.drawn.min()))

    def where(self, keep: npt.NDArray[np.bool_]) -> Measured:
        """Only the problems for which `keep` [P] is true."""
        at = np.flatnonzero(keep)

        def pick(column: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(column[i] for i in at)

        return Measured(
            self.label, pick(self.problems), self.drawn[at], self.correct[at], pick(self.levels), pick(self.domains),
            pick(self.formats), self.tokens[at], self.reflects[at], self.gold_nll[at], self.failures, self.sampling,
            self.seed, self.facts, None if self.truncated is None else self.truncated[at], self.graded,
        )  # fmt: skip

    def by(self, column: str) -> dict[str, Measured]:
        """Split by `levels`, `domains` or `formats`; problems without a value are left out."""
        values = np.array(getattr(self, column))
        return {str(value): self.where(values == value) for value in sorted(set(values.tolist())) if value}


def measured(label: str, records: Iterable[Mapping[str, Any]], **about: Any) -> Measured:
    """Count records ({"problem_id", "verdict"}, and if known "level", "domain", "answer", "tokens", "text",
    "gold_nll" (without and after reasoning)).

    A problem whose samples all had a verifier failure has no accuracy and is left out. Raises ValueError if no problem
    remains. `about`: sampling, seed, facts.
    """
    rows: dict[str, list[tuple[bool, float, float]]] = {}
    golds: dict[str, list[tuple[float, float]]] = {}
    kinds: dict[str, tuple[str, str, str]] = {}
    cut: dict[str, list[bool | None]] = {}
    failures = 0
    graded = False
    for record in records:
        key = str(record["problem_id"])
        if record["verdict"] in VERIFIER_FAILURES:
            failures += 1
            continue
        graded |= record["verdict"] != "ungraded"
        finish = record.get("finish")
        cut.setdefault(key, []).append(None if finish is None else finish == "length")
        reflects = record["reflects"] if "reflects" in record else reflection.is_reflective(str(record.get("text", "")))
        length = float(record.get("tokens") or 0)
        rows.setdefault(key, []).append((record["verdict"] == "correct", length, float(reflects)))
        golds.setdefault(key, []).append(_gold(record))
        if key not in kinds:
            text = answer_format(record.get("answer"))
            kinds[key] = (str(record.get("level") or ""), str(record.get("domain") or ""), text)
    if not rows:
        raise ValueError(f"{label}: no graded sample ({failures} samples whose verifier failed)")
    ids = tuple(sorted(rows))
    shown = {one for i in ids for one in cut[i]}
    return Measured(
        label,
        ids,
        np.array([len(rows[i]) for i in ids]),
        np.array([sum(right for right, _, _ in rows[i]) for i in ids]),
        tuple(kinds[i][0] for i in ids),
        tuple(kinds[i][1] for i in ids),
        tuple(kinds[i][2] for i in ids),
        np.array([float(np.mean([length for _, length, _ in rows[i]])) for i in ids]),
        np.array([float(np.mean([r for _, _, r in rows[i]])) for i in ids]),
        np.array([np.mean(golds[i], axis=0) for i in ids]),
        failures=failures,
        truncated=None if None in shown else np.array([float(np.mean(np.array(cut[i], dtype=float))) for i in ids]),
        graded=graded,
        **about,
    )


def shared(*models: Measured) -> list[Measured]:
    """The same models, restricted to their common problems in the same order."""
    ids = set(models[0].problems).intersection(*(m.problems for m in models[1:]))
    return [m.where(np.array([i in ids for i in m.problems], dtype=bool)) for m in models]


def compare(before: Measured, after: Measured) -> stats.Comparison | None:
    """Compare two models, paired on their common problems; None if there are none."""
    a, b = shared(before, after)
    return stats.compare(a.rates(), b.rates()) if len(a) else None


def answer_format(answer: Any) -> str:
    """integer | decimal | fraction | latex | text | structure ("" if there is no answer).

    The subset that is not `integer` shows whether a model overfits to the usual format of its training answers.

        >>> [answer_format(a) for a in ("1,200", "0.5", r"\\frac{1}{2}", r"x^2+1", "East", [True])]
        ['integer', 'decimal', 'fraction', 'text', 'text', 'structure']
    """
    if answer is None or answer == "":
        return ""
    if isinstance(answer, (dict, list, tuple, bool)):
        return "structure"
    text = str(answer).strip().strip("$").strip()
    for name, pattern in (("integer", _INTEGER), ("decimal", _DECIMAL), ("fraction", _FRACTION)):
        if pattern.fullmatch(text):
            return name
    return "latex" if "\\" in text else "text"


def _gold(record: Mapping[str, Any]) -> tuple[float, float]:
    without, after = record.get("gold_nll") or (None, None)
    return math.nan if without is None else float(without), math.nan if after is None else float(after)


def _ones(n: int, c: int) -> list[float]:
    return [1.0] * c + [0.0] * (n - c)
