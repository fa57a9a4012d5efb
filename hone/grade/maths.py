"""Grades mathematical answers: exactly and in process where possible, else by math-verify in killable workers.

    with Maths() as maths:
        maths.verdicts([("1/2", "0.5"), ("1", r"\\sin^2 x + \\cos^2 x"), ("4", None)])
        # ["correct", "correct", "malformed"]

A verdict is `correct`, `wrong` or `malformed` (no answer), or states that the verifier failed: then the sample has no
score, which differs from a score of 0.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from hone.base.extras import needed
from hone.base.settings import UserError
from hone.grade.answers import equivalent
from hone.grade.extract import extract
from hone.grade.workers import Failure, Workers
from hone.types import Grade, Verdict

TARGET = "hone.grade.library:equivalent"
MAX_REMEMBERED = 100_000  # decisions of the library

Pair = tuple[str, str]  # the recorded answer, the model's


class Maths:
    """Compares answers. Workers start when first needed.

    `library` False: pairs that the exact comparison cannot decide are `wrong`, which suits answers that are numbers.
    Raises UserError if math-verify is needed but not installed.
    """

    def __init__(self, *, library: bool = True, count: int = 2, deadline: float = 5.0, memory_mb: int = 2048) -> None:
        if library and importlib.util.find_spec("math_verify") is None:
            raise UserError("answers in LaTeX are compared by math-verify, which is not installed: "
                            f"{needed('math')}")  # fmt: skip
        self._workers = Workers(TARGET, count=count, deadline=deadline, memory_mb=memory_mb) if library else None
        self._decided: dict[Pair, bool] = {}

    def verdicts(self, pairs: Sequence[tuple[str, str | None]]) -> list[Verdict]:
        """One verdict per (recorded answer, model's answer or None), in one call to keep the workers busy."""
        return [grade.verdict for grade in self._compare(pairs)]

    def grades(self, items: Sequence[tuple[str, str]], strict: bool = False) -> list[Grade]:
        """One grade per (recorded answer, model output)."""
        return self._compare([(gold, extract(text, strict)) for gold, text in items])

    def _compare(self, pairs: Sequence[tuple[str, str | None]]) -> list[Grade]:
        exact = [None if answer is None else self._known(gold, answer) for gold, answer in pairs]
        open_pairs = list(
            dict.fromkeys((g, a) for (g, a), known in zip(pairs, exact) if a is not None and known is None)
        )
        decided = dict(zip(open_pairs, self._ask(open_pairs)))
        return [_grade(answer, decided[gold, answer] if known is None and answer is not None else known)
                for (gold, answer), known in zip(pairs, exact)]  # fmt: skip

    def close(self) -> None:
        """End the workers; a later call starts new ones."""
        if self._workers is not None:
            self._workers.close()

    def __enter__(self) -> Maths:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _known(self, gold: str, answer: str) -> bool | None:
        known = equivalent(gold, answer)
        return self._decided.get((gold, answer)) if known is None else known

    def _ask(self, pairs: Sequence[Pair]) -> list[bool | Failure]:
        if self._workers is None or not pairs:
            return [False] * len(pairs)
        results = self._workers.map(pairs)
        if len(self._decided) > MAX_REMEMBERED:
            self._decided.clear()
        self._decided.update((pair, result) for pair, result in zip(pairs, results) if isinstance(result, bool))
        return results


def _grade(answer: str | None, result: bool | Failure | None) -> Grade:
    if answer is None or result is None:
        return Grade("malformed")
    if isinstance(result, Failure):
        return Grade(result.kind, answer, result.message)
    return Grade("correct" if result else "wrong", answer)
