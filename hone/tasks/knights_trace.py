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

    A statement is checked as soon as everybody it mentions, and its speaker, has a role.
    Raises ValueError if no assignment is consistent.
    """
    last = [max(mentioned(tree) | {i}) for i, tree in enumerate(puzzle.statements)]
    lines: list[str] = []
    roles: list[bool] = []
    while len(roles) < len(puzzle.names):
        lines.append(f"Assume {puzzle.names[len(roles)]} is a knight.")
        roles.append(True)
        while not _check(puzzle, roles, last, lines):
            while roles and not roles[-1]:
                roles.pop()
            if not roles:
                raise ValueError(f"knights: no consistent assignment for {puzzle.statements!r}")
            roles[-1] = False
            lines.append(f"Wait, go back. {puzzle.names[len(roles) - 1]} is a knave instead.")
    lines.append("Everything fits.")
    return completion("\n".join(lines), answer_text(puzzle.names, roles))


def _check(puzzle: Puzzle, roles: list[bool], last: list[int], lines: list[str]) -> bool:
    """Check the statements decided by the newest role, appending to `lines`; False on a contradiction."""
    for speaker in _decided(last, len(roles) - 1):
        tree, name = puzzle.statements[speaker], puzzle.names[speaker]
        true = holds(tree, roles)
        said = f"{name} says {in_words(tree, puzzle.names, roles)}: {'true' if true else 'false'}"
        if true is not roles[speaker]:
            lines.append(f"{said}, but {name} is a {ROLES[roles[speaker]]}. Contradiction.")
            return False
        lines.append(f"{said}, fits.")
    return True


def _decided(last: list[int], person: int) -> Iterator[int]:
    return (speaker for speaker, latest in enumerate(last) if latest == person)


def hasty(puzzle: Puzzle, rng: random.Random) -> str:
    """A uniformly random guess with no checking."""
    roles = [rng.random() < 0.5 for _ in puzzle.names]
    return completion("I will just guess.", answer_text(puzzle.names, roles))
