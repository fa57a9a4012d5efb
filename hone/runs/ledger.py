"""The ledger: which problems each step drew, and how they were graded. One row per step and round of refill.

{"step": 3, "round": 0, "problems": ["knights-17", "knights-4"], "graded": [8, 8], "correct": [3, 8], "replaced": [1]}

`graded` and `correct` count the answers to each problem; `replaced` lists the places of problems without a reward
difference that were replaced. Supervised steps only have the problems. A resumed run truncates the ledger to its
checkpoint, like the metrics, so every prompt occurs exactly once. `hone runs check` draws again and compares.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from hone.types import NOT_GRADED, Group


def row_of(
    step: int, number: int, drawn: Sequence[str], groups: Sequence[Group], replaced: Sequence[Group]
) -> dict[str, Any]:
    """The row of round `number`, which drew the problems `drawn` (ids). Raises ValueError for one without a group."""
    row: dict[str, Any] = {"step": step, "round": number, "problems": list(drawn)}
    if not groups and not replaced:
        return row
    outcomes: dict[str, list[tuple[int, int, bool]]] = defaultdict(list)
    for group, again in (*((g, False) for g in groups), *((g, True) for g in replaced)):
        verdicts = [r.verdict for r in group.rewards if r.verdict not in NOT_GRADED]
        outcomes[group.problem.id].append((len(verdicts), verdicts.count("correct"), again))
    missing = [name for name in drawn if name not in outcomes]
    if missing:
        raise ValueError(f"step {step} drew {missing[0]}, but there is no group of it")
    # A step may draw a problem twice, at the end of one epoch and the beginning of the next.
    drawn_outcomes = [outcomes[name].pop(0) if len(outcomes[name]) > 1 else outcomes[name][0] for name in drawn]
    row |= {
        "graded": [graded for graded, _, _ in drawn_outcomes],
        "correct": [correct for _, correct, _ in drawn_outcomes],
    }
    return row | {"replaced": [i for i, (_, _, again) in enumerate(drawn_outcomes) if again]}
