"""What is wrong with rows, in few lines: equal faults are shown once, with their places.

>>> grouped(["row 1: no question", "row 2: the answer is empty", "row 7: no question"])
['row 1, row 7: no question', 'row 2: the answer is empty']
"""

from __future__ import annotations

from collections.abc import Sequence

#: The fault of a row with a solution that marks no answer, and without a column for the answer.
NO_ANSWER = "no answer: the solution has neither #### nor \\boxed{}"
LISTED = 20  # places of equal faults


def grouped(faults: Sequence[str], listed: int = LISTED) -> list[str]:
    """One line for each kind of fault, with the first places and the number of others. `faults`: place: what."""
    places: dict[str, list[str]] = {}
    for fault in faults:
        place, _, what = fault.partition(": ")
        places.setdefault(what, []).append(place)
    return [f"{', '.join(at[:listed])}{_others(len(at[listed:]))}: {what}" for what, at in places.items()]


def _others(count: int) -> str:
    return f" and {count} other row{'' if count == 1 else 's'}" if count else ""


def summary(faults: Sequence[str], num_rows: int, solution: str | None) -> str:
    """Why rows cannot be used, and the remedy. `num_rows`: of the source; `solution`: the column of solutions, if there
    is one."""
    if sum(NO_ANSWER in fault for fault in faults) > num_rows / 2:
        first = next(line for line in grouped(faults, listed=1) if NO_ANSWER in line)
        return f"{first}; {remedy(solution)}"
    others = len(faults) - 1
    listed = f"\n(and {others} more row{'' if others == 1 else 's'}; hone data check lists them)" if others else ""
    return f"{faults[0]}; repair or remove it{listed}"


def remedy(solution: str | None) -> str:
    """The settings for rows whose solutions mark no answer."""
    judged = "set task.grading=none if only your own reward is to judge"
    if solution is None:
        return judged
    return f"set task.columns.answer={solution} if {solution} is the answer itself, or {judged}"
