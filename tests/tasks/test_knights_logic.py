"""Knights and knaves as logic: truth tables, solutions, canonical forms."""

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.tasks.knights.logic import (
    COMMUTATIVE,
    LEAVES,
    canonical_form,
    consistent,
    holds,
    parse_statements,
    random_statement,
    solve,
    table,
)

K0, K1, N0, N1 = ("telling-truth", 0), ("telling-truth", 1), ("lying", 0), ("lying", 1)
PAIR = (N1, ("and", K0, K1))  # "2 is a knave", "1 and 2 are knights"


# --- logic ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tree, expected",
    [  # bits from assignment 3 (both knights) down to 0 (both knaves); person 0 is the lowest bit
        (K0, 0b1010),
        (K1, 0b1100),
        (N1, 0b0011),
        (("not", K0), 0b0101),
        (("and", K0, K1), 0b1000),
        (("or", K0, K1), 0b1110),
        (("->", K0, K1), 0b1101),
        (("->", K1, K0), 0b1011),
        (("<=>", K0, K1), 0b1001),
        (("or", K0, N0), 0b1111),
        (("and", K0, ("not", K1)), 0b0010),
    ],
)
def test_truth_tables(tree, expected):
    assert table(tree, 2) == expected


def test_solutions_by_hand():
    assert solve(PAIR) == [(True, False)]
    assert solve((N0,)) == []  # "I am a knave"
    assert solve((K0,)) == [(False,), (True,)]
    assert solve((N1, N0)) == [(True, False), (False, True)]
    assert consistent(PAIR) == 0b0010


@given(st.integers(1, 5), st.integers(0, 10**9))
def test_tables_agree_with_evaluation(people, seed):
    rng = random.Random(seed)
    tree = random_statement(rng, rng.randrange(people), people, depth=4, width=3)
    for assignment in range(2**people):
        roles = [bool(assignment >> i & 1) for i in range(people)]
        assert bool(table(tree, people) >> assignment & 1) is holds(tree, roles)


@pytest.mark.parametrize(
    "literal",
    [
        "",
        "()",
        "(('lying', 2), ('lying', 0))",  # there is no person 2
        "(('lying', -1), ('lying', 0))",
        "(('lying', True), ('lying', 0))",
        "(('xor', ('lying', 0), ('lying', 1)),)",
        "(('not', ('lying', 0), ('lying', 0)),)",
        "(('->', ('lying', 0)),)",
        "__import__('os').getcwd()",
        "(" * 5000 + ")" * 5000,
        "(('lying', 0)," + " " * 30_000 + ")",
        "('not'," * 60 + "('lying', 0)" + ",)" * 60,
        7,
    ],
)
def test_bad_statement_literals_are_errors(literal):
    with pytest.raises(ValueError, match="statements"):
        parse_statements(literal)


def test_statement_literals_are_read():
    assert parse_statements(repr(PAIR)) == PAIR
    assert parse_statements([["lying", 1], ["and", ["telling-truth", 0], ["telling-truth", 1]]]) == PAIR


# --- canonical form ------------------------------------------------------------------------


def relabelled(tree, to, rng=None):
    if tree[0] in LEAVES:
        return (tree[0], to[tree[1]])
    args = [relabelled(arg, to, rng) for arg in tree[1:]]
    if rng and tree[0] in COMMUTATIVE:
        rng.shuffle(args)
    return (tree[0], *args)


def moved(statements, to, rng=None):
    """The same puzzle with person i called to[i]; with rng, operands shuffled as well."""
    result = [()] * len(statements)
    for i, tree in enumerate(statements):
        result[to[i]] = relabelled(tree, to, rng)
    return tuple(result)


def random_statements(rng, people, depth):
    return tuple(random_statement(rng, i, people, depth, 2) for i in range(people))


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(1, 3), st.integers(0, 10**9))
def test_canonical_form_ignores_names_and_order(people, depth, seed):
    rng = random.Random(seed)
    statements = random_statements(rng, people, depth)
    to = rng.sample(range(people), people)
    assert canonical_form(statements, ordered=True) == canonical_form(moved(statements, to), ordered=True)
    assert canonical_form(statements) == canonical_form(moved(statements, to, rng))


@settings(deadline=None, max_examples=300)
@given(st.integers(2, 4), st.integers(1, 2), st.integers(0, 10**9))
def test_equal_canonical_forms_are_isomorphic(people, depth, seed):
    rng = random.Random(seed)
    a, b = random_statements(rng, people, depth), random_statements(rng, people, depth)
    isomorphic = any(moved(a, to) == b for to in itertools.permutations(range(people)))
    assert (canonical_form(a, ordered=True) == canonical_form(b, ordered=True)) is isomorphic


def test_canonical_form_is_itself_an_isomorphic_puzzle():
    rng = random.Random(0)
    for people in range(2, 6):
        statements = random_statements(rng, people, 2)
        form = parse_statements(canonical_form(statements, ordered=True))
        assert any(moved(statements, to) == form for to in itertools.permutations(range(people)))


def test_what_the_canonical_form_tells_apart():
    assert canonical_form((("and", K0, N1), K0)) == canonical_form((("and", N1, K0), K0))
    assert canonical_form((("and", K0, N1), K0), ordered=True) != canonical_form((("and", N1, K0), K0), ordered=True)
    assert canonical_form((("->", K0, N1), K0)) != canonical_form((("->", N1, K0), K0))
    assert canonical_form((("and", K0, N1), K0)) != canonical_form((("or", K0, N1), K0))
    assert canonical_form((("not", K1), K0)) != canonical_form((N1, K0))
    assert canonical_form((K0, K0)) != canonical_form((K1, K0))


@pytest.mark.parametrize("partner", [lambda i: (i + 1) % 8, lambda i: i ^ 1, lambda i: 0, lambda i: (i + 2) % 8])
def test_canonical_form_of_symmetric_puzzles_is_quick(partner):
    statements = tuple(("lying", partner(i)) for i in range(8))
    other = moved(statements, random.Random(1).sample(range(8), 8))
    start = time.process_time()
    assert canonical_form(statements) == canonical_form(other)
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize(
    "statements",
    [
        # rings of three and of five: all people look alike, but not all are
        tuple(("lying", partner) for partner in (1, 2, 0, 4, 5, 6, 7, 3)),
        # seven people, and seven more who each speak of two of them: a triangle and a square
        (
            *(("and", ("telling-truth", i), ("telling-truth", i)) for i in range(7)),
            *(("or", ("lying", a), ("lying", b)) for a, b in [(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 6), (6, 3)]),
        ),
    ],
)
def test_canonical_form_where_refinement_is_not_enough(statements):
    rng = random.Random(0)
    people = len(statements)
    forms = {canonical_form(moved(statements, rng.sample(range(people), people), rng)) for _ in range(20)}
    assert len(forms) == 1
