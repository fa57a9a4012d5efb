"""The public row format of knights and knaves: read, written, checked, compared.

A row (JSONL or parquet) has `quiz, names, knight_knave, solution, solution_text,
solution_text_format, cot_head, cot_repeat_steps, cot_foot, statements, index`;
files prepared for other systems carry more columns, which are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.tasks.knights.logic import Puzzle, canonical_form, parse_statements, solve
from hone.tasks.knights.text import answer_text, read_roles, solution_sentence, swapped
from hone.tasks.rows.store import Row


def puzzle_of(row: Mapping[str, Any]) -> Puzzle:
    """The puzzle of a row. Raises ValueError naming the missing or invalid column."""
    for column in ("names", "solution", "statements", "quiz"):
        if row.get(column) is None:
            raise ValueError(f"knights row: no column {column!r}; found {', '.join(map(str, row))}")
    names, solution = tuple(row["names"]), tuple(row["solution"])
    if not all(isinstance(name, str) and name for name in names) or len({n.casefold() for n in names}) < len(names):
        raise ValueError(f"knights row: names must be distinct in any case: {names!r}")
    if not all(isinstance(role, bool) for role in solution):
        raise ValueError(f"knights row: solution must be true or false for each person: {solution!r}")
    statements = parse_statements(row["statements"])
    if not len(names) == len(solution) == len(statements):
        raise ValueError(
            f"knights row: {len(names)} names, {len(solution)} roles in solution, {len(statements)} statements"
        )
    words = row.get("knight_knave")
    return Puzzle(names, statements, solution, flipped=isinstance(words, Mapping) and words.get("knight") == "knave")


def roles_said(puzzle: Puzzle) -> tuple[bool, ...]:
    """For each person, whether the answer must call them a knight."""
    return tuple(role != puzzle.flipped for role in puzzle.solution)


def row_of(puzzle: Puzzle, quiz: str, steps: Sequence[str], index: int) -> Row:
    """A puzzle as a public row; `steps` are those of a worked solution.

    In a flipped puzzle, `solution` says who tells the truth, `knight_knave` maps the words, and the texts use the
    swapped words.
    """
    called = swapped if puzzle.flipped else str
    return {
        "quiz": quiz,
        "names": list(puzzle.names),
        "knight_knave": {
            "knight": called("knight"),
            "knave": called("knave"),
            "a_knight": called("a knight"),
            "a_knave": called("a knave"),
            "Knight": called("Knight"),
            "Knave": called("Knave"),
        },
        "solution": list(puzzle.solution),
        "solution_text": called(solution_sentence(puzzle.names, puzzle.solution)),
        "solution_text_format": called(answer_text(puzzle.names, puzzle.solution)),
        "cot_head": "Let's think step by step, assuming a role for one person after the other.",
        "cot_repeat_steps": [called(step) for step in steps[:-1]],
        "cot_foot": steps[-1] if steps else "",
        "statements": repr(puzzle.statements),
        "index": index,
    }


@dataclass(frozen=True, slots=True)
class Overlap:
    """How many rows of `a` occur in `b` up to names and order, for one number of people."""

    people: int
    rows_a: int
    rows_b: int
    shared: int  # rows of a whose canonical form is in b
    shared_exactly: int  # the same, with the order of the operands of and, or, <=>


def overlap(rows_a: Iterable[Mapping[str, Any]], rows_b: Iterable[Mapping[str, Any]]) -> list[Overlap]:
    """Rows of `a` that are isomorphic to a row of `b`, by number of people."""
    a, b = ([puzzle_of(row).statements for row in rows] for rows in (rows_a, rows_b))
    result = []
    for people in sorted({len(s) for s in a} | {len(s) for s in b}):
        ours = [s for s in a if len(s) == people]
        theirs = [s for s in b if len(s) == people]
        shared = []
        for ordered in (False, True):
            forms = {canonical_form(s, ordered) for s in theirs}
            shared.append(sum(canonical_form(s, ordered) in forms for s in ours))
        result.append(Overlap(people, len(ours), len(theirs), *shared))
    return result


def check_rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A message for each faulty row; empty if every row is usable.

    A row must load and have exactly one solution, the recorded one, both in `solution` and
    in `solution_text_format`.
    """
    faults = []
    for number, row in enumerate(rows, start=1):
        try:
            puzzle = puzzle_of(row)
        except ValueError as error:
            faults.append(f"row {number}: {error}")
            continue
        solutions = solve(puzzle.statements)
        if solutions != [puzzle.solution]:
            faults.append(f"row {number}: {len(solutions)} solutions {solutions[:2]}, recorded {puzzle.solution}")
        elif read_roles(row.get("solution_text_format") or "", puzzle.names) != roles_said(puzzle):
            faults.append(f"row {number}: solution_text_format does not say what solution does")
    return faults
