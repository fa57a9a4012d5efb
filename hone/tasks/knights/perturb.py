"""Perturbed puzzles: small changes that mislead a model that memorised, not one that reasons.

    perturb(puzzle, quiz, "leaf", random.Random(0))    # Perturbed, or None if no such puzzle was found

The changes are those of Xie et al., arXiv:2410.23123, section 2: of the logic (`statement`, `leaf`: solved again, kept
only if there is exactly one solution, different from the old one), and of the words alone (`roles`, `names`, `order`:
the same logic, so the same people tell the truth).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

from hone.base import streams
from hone.tasks.knights.logic import LEAVES, Puzzle, Statement, random_statement, solve
from hone.tasks.knights.rows import row_of
from hone.tasks.knights.text import BRIEF_SAYING, SAYINGS, full_quiz, swapped, telling
from hone.tasks.knights.trace import careful_steps
from hone.tasks.rows.store import Row

Perturbation = Literal["statement", "leaf", "roles", "names", "order"]
PERTURBATIONS: tuple[Perturbation, ...] = get_args(Perturbation)

#: Names that the generated and the public puzzles do not use.
# fmt: off
UNCOMMON_NAMES: tuple[str, ...] = (
    "Zephyr", "Elowen", "Caspian", "Isolde", "Osiris", "Vesper", "Thaddeus", "Ondine", "Lysander", "Xanthe",
    "Oberon", "Calliope", "Leander", "Eulalia", "Florian", "Forsythe", "Nephele", "Peregrine", "Ianthe", "Lazarus",
    "Elodie", "Cillian", "Ottoline", "Evander", "Saffron", "Caius", "Zora", "Cyprian", "Amaryllis", "Theron",
)
# fmt: on

#: Statements tried per puzzle: many puzzles of two people have no neighbour with a single, different solution.
MAX_TRIES = 2000


class Perturbed(NamedTuple):
    puzzle: Puzzle
    quiz: str


def perturb(
    puzzle: Puzzle, quiz: str, kind: Perturbation, rng: random.Random, depth: int = 2, width: int = 2
) -> Perturbed | None:
    """The puzzle with one change of this kind, otherwise worded as `quiz`.

    `statement`: one person's statement is replaced by a random one of at most this depth and width; `leaf`: one claim
    `X is a knight` in it is replaced. Both give a puzzle with one solution, a different one; None if MAX_TRIES attempts
    find none. `roles`: truth-tellers are called knaves; `names`: people get uncommon names; `order`: the statements are
    told in another order. Raises ValueError for another kind, and if there are not enough names.
    """
    if kind not in PERTURBATIONS:
        raise ValueError(f"perturbation {kind!r}: there are {', '.join(PERTURBATIONS)}")
    if kind in ("statement", "leaf"):
        changed = _other_logic(puzzle, kind, rng, depth, width)
        return None if changed is None else Perturbed(changed, _retold(quiz, puzzle, changed, rng))
    if kind == "roles":
        return Perturbed(replace(puzzle, flipped=not puzzle.flipped), swapped(quiz))
    if kind == "names":
        others = [name for name in UNCOMMON_NAMES if name not in puzzle.names]
        if len(others) < len(puzzle.names):
            raise ValueError(f"perturbation names: {len(puzzle.names)} people, and {len(others)} uncommon names")
        new = dict(zip(puzzle.names, rng.sample(others, len(puzzle.names))))
        pattern = "|".join(re.escape(name) for name in sorted(new, key=len, reverse=True))
        renamed = re.sub(rf"(?<!\w)({pattern})(?!\w)", lambda m: new[m[1]], quiz)
        return Perturbed(replace(puzzle, names=tuple(new.values())), renamed)
    return Perturbed(puzzle, _reordered(quiz, puzzle, rng))


def _other_logic(puzzle: Puzzle, kind: str, rng: random.Random, depth: int, width: int) -> Puzzle | None:
    people = len(puzzle.names)
    for _ in range(MAX_TRIES):
        speaker = rng.randrange(people)
        old = puzzle.statements[speaker]
        if kind == "statement":
            new = random_statement(rng, speaker, people, depth, width)
        else:
            new = _with_other_leaf(old, rng.randrange(_leaves(old)), speaker, people, rng)
        statements = (*puzzle.statements[:speaker], new, *puzzle.statements[speaker + 1 :])
        solutions = solve(statements)
        if new != old and len(solutions) == 1 and solutions[0] != puzzle.solution:
            return replace(puzzle, statements=statements, solution=solutions[0])
    return None


def _leaves(tree: Statement) -> int:
    return 1 if tree[0] in LEAVES else sum(map(_leaves, tree[1:]))


def _with_other_leaf(tree: Statement, place: int, speaker: int, people: int, rng: random.Random) -> Statement:
    """`tree` with leaf number `place` (from 0) replaced by a random one."""
    if tree[0] in LEAVES:
        return random_statement(rng, speaker, people, depth=1, width=2)
    parts = []
    for part in tree[1:]:
        inside = 0 <= place < _leaves(part)
        parts.append(_with_other_leaf(part, place, speaker, people, rng) if inside else part)
        place -= _leaves(part)
    return (tree[0], *parts)


# --- words -----------------------------------------------------------------------------------------------------------


def sentences(quiz: str, puzzle: Puzzle) -> list[str] | None:
    """The sentence that reports each statement, verbatim; None unless each occurs exactly once."""
    reported: list[str] = []
    for person in range(len(puzzle.names)):
        here = {text for text in _tellings(puzzle, person) if quiz.count(text) == 1}
        if len(here) != 1:
            return None
        reported += here
    return reported


def _tellings(puzzle: Puzzle, person: int) -> Iterator[str]:
    """All wordings of one person's statement in a quiz; public rows also have `said that If`."""
    sayings = (BRIEF_SAYING, *SAYINGS)
    return (telling(form, puzzle, person) for saying in sayings for form in (saying, saying.replace("{s}", "{S}")))


def _retold(quiz: str, old: Puzzle, new: Puzzle, rng: random.Random) -> str:
    """`quiz` with the changed statements; written anew if its wording is unknown."""
    told = sentences(quiz, old)
    if told is None:
        return full_quiz(new, rng)
    for person, sentence in enumerate(told):
        if old.statements[person] != new.statements[person]:
            which = list(_tellings(old, person)).index(sentence)
            quiz = quiz.replace(sentence, list(_tellings(new, person))[which])
    return quiz


def _reordered(quiz: str, puzzle: Puzzle, rng: random.Random) -> str:
    """`quiz` with its sentences in another order; written anew if its wording is unknown."""
    told = sentences(quiz, puzzle)
    if told is None:
        quiz = full_quiz(puzzle, rng)
        told = sentences(quiz, puzzle)
        assert told is not None
    order = list(range(len(told)))
    while order == sorted(order):
        rng.shuffle(order)
    places = sorted((quiz.index(sentence), sentence) for sentence in told)
    pieces, end = [], 0
    for (start, sentence), which in zip(places, order, strict=True):
        pieces += [quiz[end:start], told[which]]
        end = start + len(sentence)
    return "".join([*pieces, quiz[end:]])


def perturbed_rows(puzzles: Iterable[tuple[Puzzle, str]], kind: Perturbation | None, seed: int) -> list[Row]:
    """Public rows of perturbed (puzzle, quiz) pairs; kind None leaves them unchanged; `index` is that of the pair.

    Pairs without such a perturbation are left out. New statements have at most the puzzle's depth and width.
    """
    rows = []
    for index, (puzzle, quiz) in enumerate(puzzles):
        rng = streams.text("perturb", str(kind), seed, quiz)
        depth, width = max(map(_depth, puzzle.statements)), max(2, *map(_width, puzzle.statements))
        made = Perturbed(puzzle, quiz) if kind is None else perturb(puzzle, quiz, kind, rng, depth, width)
        if made is not None:
            rows.append(row_of(made.puzzle, made.quiz, careful_steps(made.puzzle), index))
    return rows


def _depth(tree: Statement) -> int:
    return 1 if tree[0] in LEAVES else 1 + max(map(_depth, tree[1:]))


def _width(tree: Statement) -> int:
    return 0 if tree[0] in LEAVES else max(len(tree) - 1, *map(_width, tree[1:]))
