"""Worked solutions of knights and knaves, to train a model from scratch.

`careful` assumes, checks, and backtracks at a contradiction; `hasty` guesses. The wording is
training data: it is defined here only.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Literal

from hone.grade.parse import completion
from hone.tasks.knights.logic import Puzzle, Statement, holds, mentioned
from hone.tasks.knights.text import ROLES, answer_text, in_words

Search = Literal["depth_first", "exhaustive"]


def careful(puzzle: Puzzle, search: Search = "depth_first") -> str:
    """A completion: the steps of a search as thinking, then the answer."""
    steps = {"depth_first": careful_steps, "exhaustive": exhaustive_steps}[search](puzzle)
    return completion(" ".join(steps), answer_text(puzzle.names, puzzle.solution))


def careful_steps(puzzle: Puzzle) -> list[str]:
    """A depth-first search over the people in order, in words; the last supposition is the solution.

    Statements are repeated verbatim, and every claim is followed by the role that the person is supposed to
    have, so that no step depends on anything further back than the last mention. A statement is checked once
    its speaker and all people it mentions have roles. Raises ValueError if there is no solution.
    """
    last = [max(mentioned(tree) | {i}) for i, tree in enumerate(puzzle.statements)]
    steps: list[str] = []
    roles = [True]
    back = ""
    while True:
        fits = True
        if len(roles) - 1 in last:  # else nothing can be checked yet, and the next supposition repeats this one
            steps.append(f"{back}Suppose {_assumed(puzzle, roles)}.")
            back = ""
            fits = _check(puzzle, roles, last, steps)
        if fits and len(roles) == len(puzzle.names):
            return [*steps, "Everything fits."]
        if fits:
            roles.append(True)
            continue
        while roles and not roles[-1]:
            roles.pop()
        if not roles:
            raise ValueError(f"knights: no consistent assignment for {puzzle.statements!r}")
        roles[-1] = False
        back = "Wait, go back. "


def exhaustive_steps(puzzle: Puzzle) -> list[str]:
    """Every assignment in order until one fits, in words.

    Longer than `careful_steps`, but each step is the same for any number of people, so that a small model learns it
    from fewer examples: all people have roles from the start, statements are checked in order up to the first that does
    not fit, and the next assignment depends only on the last one. Raises ValueError if there is no solution.
    """
    steps: list[str] = []
    for roles in product((True, False), repeat=len(puzzle.names)):
        steps.append(f"{'Wait, go back. ' if steps else ''}Suppose {_assumed(puzzle, roles)}.")
        if all(_fits(puzzle, speaker, roles, steps) for speaker in range(len(roles))):
            return [*steps, "Everything fits."]
    raise ValueError(f"knights: no consistent assignment for {puzzle.statements!r}")


def _fits(puzzle: Puzzle, speaker: int, roles: Sequence[bool], steps: list[str]) -> bool:
    """Check one statement, up to the operand that decides it; appends to `steps`."""
    tree, name = puzzle.statements[speaker], puzzle.names[speaker]
    fits = holds(tree, roles) is roles[speaker]
    words = in_words(_enough(tree, roles), puzzle.names, roles)
    verdict = " fits." if fits else ". Contradiction."
    steps.append(f"{name} says: {words}, {name} {ROLES[roles[speaker]]}{verdict}")
    return fits


def _enough(tree: Statement, roles: Sequence[bool]) -> Statement:
    """An `and` up to its first false operand, an `or` up to its first true one; others unchanged."""
    op, *operands = tree
    if op not in ("and", "or"):
        return tree
    deciding = (i for i, operand in enumerate(operands) if holds(operand, roles) is (op == "or"))
    return (op, *operands[: next(deciding, len(operands)) + 1])


def _assumed(puzzle: Puzzle, roles: Sequence[bool]) -> str:
    return ", ".join(f"{name} {ROLES[role]}" for name, role in zip(puzzle.names, roles, strict=False))


def _check(puzzle: Puzzle, roles: list[bool], last: list[int], steps: list[str]) -> bool:
    """Check the statements decided by the newest role; appends to `steps`; False on a contradiction."""
    for speaker in _decided(last, len(roles) - 1):
        tree, name = puzzle.statements[speaker], puzzle.names[speaker]
        true = holds(tree, roles)
        words, role = in_words(tree, puzzle.names, roles), ROLES[roles[speaker]]
        claim = f"{name} says: {words}: {'true' if true else 'false'}, {name} {role}"
        if true is not roles[speaker]:
            steps.append(f"{claim}. Contradiction.")
            return False
        steps.append(f"{claim} fits.")
    return True


def _decided(last: list[int], person: int) -> Iterator[int]:
    return (speaker for speaker, latest in enumerate(last) if latest == person)


def hasty(puzzle: Puzzle, rng: random.Random) -> str:
    """A completion with a uniformly random guess."""
    roles = [rng.random() < 0.5 for _ in puzzle.names]
    return completion("I will just guess.", answer_text(puzzle.names, roles))
