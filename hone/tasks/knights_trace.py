"""Worked solutions of knights and knaves, to teach a model from scratch.

`careful` assumes, checks, meets a contradiction and goes back; `hasty` guesses. The wording is
plain data for the learner: change it here and nowhere else.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from hone.data.parse import completion
from hone.tasks.knights_logic import Puzzle, holds, mentioned
from hone.tasks.knights_text import ROLES, answer_text, in_words


def careful(puzzle: Puzzle) -> str:
    """A depth-first search over the people in order, said aloud; ends in the solution.

    Every step names all assumptions in force, so that the next one needs to look no further back.
    A statement is checked as soon as everybody it mentions, and its speaker, has a role.
    Raises ValueError if no assignment is consistent.
    """
    last = [max(mentioned(tree) | {i}) for i, tree in enumerate(puzzle.statements)]
    lines: list[str] = []
    roles: list[bool] = []
    again = ""
    while len(roles) < len(puzzle.names):
        roles.append(True)
        if len(roles) - 1 not in last:
            continue  # nothing to check yet: the next assumption says this one too
        lines.append(f"{again}Suppose {_assumed(puzzle, roles)}.")
        while not _check(puzzle, roles, last, lines):
            while roles and not roles[-1]:
                roles.pop()
            if not roles:
                raise ValueError(f"knights: no consistent assignment for {puzzle.statements!r}")
            roles[-1] = False
            if len(roles) - 1 not in last:
                break
            lines.append(f"Wait, go back. Suppose {_assumed(puzzle, roles)}.")
        again = "Wait, go back. " if len(roles) - 1 not in last else ""
    lines.append("Everything fits.")
    return completion(" ".join(lines), answer_text(puzzle.names, roles))


def _assumed(puzzle: Puzzle, roles: list[bool]) -> str:
    return ", ".join(f"{name} {ROLES[role]}" for name, role in zip(puzzle.names, roles, strict=False))


def _check(puzzle: Puzzle, roles: list[bool], last: list[int], lines: list[str]) -> bool:
    """Check the statements decided by the newest role, appending to `lines`; False on a contradiction."""
    for speaker in _decided(last, len(roles) - 1):
        tree, name = puzzle.statements[speaker], puzzle.names[speaker]
        true = holds(tree, roles)
        said = f"{name} {ROLES[roles[speaker]]} says {in_words(tree, puzzle.names, roles)}: {'true' if true else 'false'}"
        if true is not roles[speaker]:
            lines.append(f"{said}. Contradiction.")
            return False
        lines.append(f"{said}, fits.")
    return True


def _decided(last: list[int], person: int) -> Iterator[int]:
    return (speaker for speaker, latest in enumerate(last) if latest == person)


def hasty(puzzle: Puzzle, rng: random.Random) -> str:
    """A uniformly random guess with no checking."""
    roles = [rng.random() < 0.5 for _ in puzzle.names]
    return completion("I will just guess.", answer_text(puzzle.names, roles))
