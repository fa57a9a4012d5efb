"""Knights and knaves as logic: statement trees, solutions, canonical forms, random puzzles.

A statement is a nested tuple in the notation of the public rows (K-and-K, Xie et al., arXiv:2410.23123)::

    ("telling-truth", 1)                                    person 1 is a knight
    ("not", ("lying", 0))                                   person 0 is not a knave
    ("->", ("telling-truth", 1), ("lying", 2))              if ... then
    ("and" | "or", s, s, ...)   ("<=>", s, s)

Its truth table over the 2**n assignments is one Python int: bit a is its value in the assignment
where person i is a knight iff bit i of a is set. Solving a puzzle takes a few big-int operations.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

Statement = tuple[Any, ...]

LEAVES = ("telling-truth", "lying")
Operator = Literal["not", "and", "or", "->", "<=>"]
OPERATORS: tuple[Operator, ...] = ("not", "and", "or", "->", "<=>")
COMMUTATIVE = ("and", "or", "<=>")
MAX_PEOPLE = 16  # 2**16 assignments; a table of 8 KiB per statement
MAX_LITERAL = 20_000  # characters of a `statements` literal


@dataclass(frozen=True, slots=True)
class Puzzle:
    """Who says what, and the one consistent assignment (True: knight, who tells the truth)."""

    names: tuple[str, ...]  # [n]
    statements: tuple[Statement, ...]  # [n], by speaker
    solution: tuple[bool, ...]  # [n]; who tells the truth (in a flipped puzzle: is called a knave)
    flipped: bool = False  # the words knight and knave are swapped in the text


def parse_statements(literal: Any) -> tuple[Statement, ...]:
    """Read the `statements` column: a tuple literal as text, or nested lists.

    Raises ValueError for a text that is too long, not a literal, or has an unknown operator.
    """
    if isinstance(literal, str):
        if len(literal) > MAX_LITERAL:
            raise ValueError(f"statements: {len(literal)} characters, at most {MAX_LITERAL} are read")
        try:
            literal = ast.literal_eval(literal)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise ValueError(f"statements: not a tuple literal: {literal[:80]!r}") from error
    if not isinstance(literal, (tuple, list)) or not literal:
        raise ValueError(f"statements: expected a tuple of statements, found {str(literal)[:80]!r}")
    return tuple(_checked(tree, len(literal), depth=0) for tree in literal)


def _checked(tree: Any, people: int, depth: int) -> Statement:
    if depth > 50 or not isinstance(tree, (tuple, list)) or not tree:
        raise ValueError(f"statements: not a statement: {str(tree)[:80]!r}")
    op, *args = tree
    if op in LEAVES:
        if len(args) != 1 or type(args[0]) is not int or not 0 <= args[0] < people:
            raise ValueError(f"statements: {tree!r} must name one person from 0 to {people - 1}")
        return (op, args[0])
    arity = {"not": (1, 1), "->": (2, 2), "<=>": (2, 2), "and": (1, 50), "or": (1, 50)}.get(op, (1, 0))
    if not arity[0] <= len(args) <= arity[1]:
        allowed = "telling-truth, lying, not, and, or, ->, <=>"
        raise ValueError(f"statements: {str(tree)[:80]!r} is not one of {allowed} with its operands")
    return (op, *(_checked(arg, people, depth + 1) for arg in args))


@cache
def _columns(people: int) -> tuple[tuple[int, ...], int]:
    """Truth tables of `person i is a knight` for every i, and of `true`."""
    if not 1 <= people <= MAX_PEOPLE:
        raise ValueError(f"knights: {people} people, 1 to {MAX_PEOPLE} are possible")
    rows = 1 << people
    columns = tuple(sum(1 << a for a in range(rows) if a >> i & 1) for i in range(people))
    return columns, (1 << rows) - 1


def table(tree: Statement, people: int) -> int:
    """Truth table of a statement, as an int of 2**people bits."""
    columns, true = _columns(people)
    return _table(tree, columns, true)


def _table(tree: Statement, columns: tuple[int, ...], true: int) -> int:
    op = tree[0]
    if op == "telling-truth":
        return columns[tree[1]]
    if op == "lying":
        return true ^ columns[tree[1]]
    first = _table(tree[1], columns, true)
    if op == "not":
        return true ^ first
    if op == "->":
        return (true ^ first) | _table(tree[2], columns, true)
    if op == "<=>":
        return true ^ first ^ _table(tree[2], columns, true)
    for arg in tree[2:]:
        value = _table(arg, columns, true)
        first = first & value if op == "and" else first | value
    return first


def consistent(statements: Sequence[Statement]) -> int:
    """Truth table of the assignments in which each person is a knight iff their statement is true."""
    columns, true = _columns(len(statements))
    assignments = true
    for person, tree in enumerate(statements):
        assignments &= true ^ columns[person] ^ _table(tree, columns, true)
        if not assignments:
            break
    return assignments


def solve(statements: Sequence[Statement]) -> list[tuple[bool, ...]]:
    """All consistent assignments; a puzzle has exactly one."""
    remaining, people, solutions = consistent(statements), len(statements), []
    while remaining:
        assignment = (remaining & -remaining).bit_length() - 1
        solutions.append(tuple(bool(assignment >> i & 1) for i in range(people)))
        remaining &= remaining - 1
    return solutions


def holds(tree: Statement, roles: Sequence[bool]) -> bool:
    """Truth of a statement, given the roles of the people that it mentions."""
    op = tree[0]
    if op in LEAVES:
        return roles[tree[1]] is (op == "telling-truth")
    if op == "not":
        return not holds(tree[1], roles)
    if op == "->":
        return not holds(tree[1], roles) or holds(tree[2], roles)
    if op == "<=>":
        return holds(tree[1], roles) is holds(tree[2], roles)
    return (all if op == "and" else any)(holds(arg, roles) for arg in tree[1:])


def mentioned(tree: Statement) -> set[int]:
    """The people that a statement mentions."""
    if tree[0] in LEAVES:
        return {tree[1]}
    return set().union(*(mentioned(arg) for arg in tree[1:]))


# --- canonical form ------------------------------------------------------------------------


def canonical_form(statements: Sequence[Statement], ordered: bool = False) -> str:
    """A text that is equal for two puzzles iff renaming and reordering people maps one to the other.

    The order of the operands of `and`, `or` and `<=>` is ignored too, unless `ordered`; other
    equivalences are not ("X is not a knave" differs from "X is a knight"). Splits use the form
    that ignores order. Method: colour refinement, then individualisation of one person of an
    ambiguous class at a time (McKay & Piperno, arXiv:1301.1493), keeping the least relabelled
    text; of people who can be swapped freely only one is tried.
    """
    people = tuple(statements)
    return repr(_search(people, [0] * len(people), ordered))


def _relabel(tree: Statement, label: Sequence[int], ordered: bool) -> Statement:
    op = tree[0]
    if op == "telling-truth" or op == "lying":
        return (op, label[tree[1]])
    args = [_relabel(arg, label, ordered) for arg in tree[1:]]
    if not ordered and op in COMMUTATIVE:
        args.sort()
    return (op, *args)


def _refine(people: tuple[Statement, ...], colours: list[int], ordered: bool) -> list[int]:
    """Split classes of people by their statements and the statements about them, until stable."""
    n = len(people)
    said_of = [[j for j in range(n) if i != j and i in mentioned(people[j])] for i in range(n)]
    classes = len(set(colours))
    while classes < n:
        signatures = []
        for i in range(n):
            label = [2 * c for c in colours]
            label[i] += 1
            heard = sorted((colours[j], _relabel(people[j], label, ordered)) for j in said_of[i])
            signatures.append((colours[i], _relabel(people[i], label, ordered), heard))
        distinct: list[Any] = []
        for signature in sorted(signatures):
            if not distinct or signature != distinct[-1]:
                distinct.append(signature)
        colours = [distinct.index(signature) for signature in signatures]
        if len(distinct) == classes:
            break
        classes = len(distinct)
    return colours


def _search(people: tuple[Statement, ...], colours: list[int], ordered: bool) -> tuple[Statement, ...]:
    n = len(people)
    colours = _refine(people, colours, ordered)
    if len(set(colours)) == n:
        order = sorted(range(n), key=colours.__getitem__)
        rank = sorted(colours)
        label = [rank.index(c) for c in colours]
        return tuple(_relabel(people[i], label, ordered) for i in order)
    cell = min(c for c in colours if colours.count(c) > 1)
    members: list[int] = []
    for i in range(n):
        if colours[i] == cell and not any(_swappable(people, i, j, ordered) for j in members):
            members.append(i)
    forms = []
    for chosen in members:
        split = [2 * c for c in colours]
        split[chosen] -= 1
        forms.append(_search(people, split, ordered))
    return min(forms)


def _swappable(people: tuple[Statement, ...], i: int, j: int, ordered: bool) -> bool:
    """Whether swapping two people leaves the puzzle unchanged."""
    same = list(range(len(people)))
    swap = same.copy()
    swap[i], swap[j] = j, i
    return all(
        _relabel(people[k], swap, ordered) == _relabel(people[swap[k]], same, ordered) for k in range(len(people))
    )


# --- random puzzles ------------------------------------------------------------------------


def random_statement(
    rng: random.Random, speaker: int, people: int, depth: int, width: int, operators: Sequence[str] = OPERATORS
) -> Statement:
    """A statement of at most `depth` levels (a leaf is one), without `I am a knave` anywhere in it."""
    op = "leaf" if depth == 1 else rng.choice(("leaf", *operators))
    if op == "leaf":
        leaf = rng.randrange(2 * people - 1)  # the excluded one is moved past the end
        if leaf == 2 * speaker + 1:
            leaf = 2 * people - 1
        return (LEAVES[leaf % 2], leaf // 2)
    count = 1 if op == "not" else rng.randint(2, width) if op in ("and", "or") else 2
    return (op, *(random_statement(rng, speaker, people, depth - 1, width, operators) for _ in range(count)))


def random_puzzles(
    rng: random.Random, people: int, depth: int, width: int, operators: Sequence[str] = OPERATORS
) -> Iterator[tuple[Statement, ...] | None]:
    """Infinite attempts: the statements of a puzzle with exactly one solution, or None for a failed attempt."""
    while True:
        statements = tuple(random_statement(rng, i, people, depth, width, operators) for i in range(people))
        assignments = consistent(statements)
        yield statements if assignments and not assignments & (assignments - 1) else None
