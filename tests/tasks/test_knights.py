"""Knights and knaves as a task: puzzles, splits, wording, grades, traces."""

import itertools
import random
import time
from collections import Counter

import pytest
from pydantic import ValidationError

from hone.base.settings import UserError
from hone.grade.parse import parse
from hone.tasks.knights.logic import LEAVES, Puzzle, canonical_form, random_puzzles, random_statement, solve
from hone.tasks.knights.task import KnightsConfig, KnightsTask, puzzle_of_problem
from hone.tasks.knights.text import SAYINGS, brief_quiz, full_quiz, in_words, read_roles
from hone.tasks.knights.trace import careful

K0, K1, N0, N1 = ("telling-truth", 0), ("telling-truth", 1), ("lying", 0), ("lying", 1)
PAIR = Puzzle(("Zoey", "Oliver"), (N1, ("and", K0, K1)), (True, False))


# --- generator and splits ------------------------------------------------------------------


def leaves(tree):
    return [tree] if tree[0] in LEAVES else [leaf for arg in tree[1:] for leaf in leaves(arg)]


def levels(tree):
    return 1 if tree[0] in LEAVES else 1 + max(levels(arg) for arg in tree[1:])


def task(**config):
    return KnightsTask(KnightsConfig(**{"quiz": "brief", **config}))


@pytest.mark.parametrize("people", range(2, 9))
def test_every_puzzle_has_one_solution_and_a_trace_that_reaches_it(people):
    made = task(people=(people,), train=50)
    problems = made.problems("train")
    assert len(problems) == len({p.id for p in problems}) == 50
    for problem in problems:
        puzzle = puzzle_of_problem(problem)
        assert solve(puzzle.statements) == [puzzle.solution]
        assert problem.level == str(people)
        assert len(set(puzzle.names)) == people
        for speaker, tree in enumerate(puzzle.statements):
            assert ("lying", speaker) not in leaves(tree)
            assert levels(tree) <= 2
            assert len(tree) <= 3
        example = made.trace(problem, "careful", seed=0)
        assert parse(example.text).well_formed
        assert parse(example.text).answer == problem.reference.split("<answer>")[1].removesuffix("</answer>")
        assert read_roles(parse(example.text).answer, puzzle.names) == puzzle.solution
        assert made.grade(problem, example.text).verdict == "correct"


def test_every_operator_and_leaf_is_drawn():
    rng = random.Random(0)
    trees = [random_statement(rng, 1, 3, 2, 2) for _ in range(2000)]
    assert set(Counter(tree[0] for tree in trees)) == {"telling-truth", "lying", "not", "and", "or", "->", "<=>"}
    every = {(role, person) for role in LEAVES for person in range(3)}
    assert set(itertools.chain.from_iterable(map(leaves, trees))) == every - {("lying", 1)}


def test_only_the_given_operators_are_drawn():
    made = task(people=(3,), train=60, operators=("and", "->"), depth=3)
    drawn = {tree[0] for p in made.problems("train") for tree in _parts(puzzle_of_problem(p).statements)}
    assert drawn == {"and", "->", *LEAVES}
    plain, explicit = (
        task(people=(3,), train=20),
        task(people=(3,), train=20, operators=("not", "and", "or", "->", "<=>")),
    )
    assert plain.problems("train") == explicit.problems("train")


def _parts(trees):
    return [part for t in trees for part in ([t] if t[0] in LEAVES else [t, *_parts(t[1:])])]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"operators": ()}, r"operators: \[\]: give distinct ones, and one that joins claims \(and, or, ->, <=>\)"),
        ({"operators": ("not",)}, "no puzzle would have just one solution"),
        ({"operators": ("and", "and")}, "give distinct ones"),
        ({"operators": ("xor",)}, "'not', 'and', 'or', '->' or '<=>'"),
        ({"search": "random"}, "'depth_first' or 'exhaustive'"),
    ],
)
def test_operators_and_search_that_cannot_be(config, message):
    with pytest.raises(ValidationError, match=message):
        KnightsConfig(**config)


def test_depth_and_width_are_bounds():
    rng = random.Random(0)
    trees = [random_statement(rng, 0, 4, 3, 4) for _ in range(500)]
    assert max(map(levels, trees)) == 3
    assert max(len(tree) - 1 for tree in trees) == 4


@pytest.mark.parametrize("people", range(2, 9))
def test_splits_are_disjoint_whatever_the_seeds_and_sizes(people):
    size = {"validation": 20, "test": 60}
    one = task(people=(people,), train=100, **size)
    other = KnightsTask(KnightsConfig(people=(people,), train=50, validation=10, test=30, seed=5), seed=9)
    forms = {
        split: [
            {canonical_form(puzzle_of_problem(p).statements) for p in made.problems(split)} for made in (one, other)
        ]
        for split in ("train", "validation", "test")
    }
    assert [len(forms[split][0]) for split in forms] == [100, 20, 60]  # distinct within a split
    for a, b in itertools.combinations(forms, 2):
        assert not (forms[a][0] | forms[a][1]) & (forms[b][0] | forms[b][1])


def test_a_split_that_cannot_be_filled_says_how_many_there_are():
    with pytest.raises(UserError, match=r"found \d\d distinct puzzles of 2 people for the validation split, 500 were"):
        task(people=(2,), validation=500).problems("validation")
    repeated = task(people=(2,), train=400, repeats=True).problems("train")
    forms = {canonical_form(puzzle_of_problem(p).statements) for p in repeated}
    assert len({p.id for p in repeated}) == 400 > len(forms)


def test_two_people_have_a_hundred_test_puzzles():
    assert len(task(people=(2,), test=100).problems("test")) == 100


def test_levels_take_turns_and_share_evenly():
    made = task(people=(3, 2, 4), train=8)
    assert [p.level for p in made.problems("train")] == ["3", "2", "4", "3", "2", "4", "3", "2"]


def test_the_same_settings_give_the_same_puzzles():
    def ids(split, recipe_seed=0, **config):
        return [p.id for p in KnightsTask(KnightsConfig(people=(4,), **config), recipe_seed).problems(split)]

    assert ids("train", train=30) == ids("train", train=30)
    assert ids("train", train=30)[:10] == ids("train", train=10)
    assert ids("train", train=30) != ids("train", recipe_seed=1, train=30)  # other training puzzles
    assert ids("test", test=30) == ids("test", recipe_seed=1, test=30)  # ... and the same test
    assert ids("test", test=30) != ids("test", test=30, seed=1)


def test_generation_is_quick():
    start = time.process_time()
    assert len(task(people=(5,), train=2000).problems("train")) == 2000
    assert time.process_time() - start < 12  # 10 000 in less than a minute


def test_a_try_that_fails_yields_none():
    tries = list(itertools.islice(random_puzzles(random.Random(0), 3, 2, 2), 300))
    good = [statements for statements in tries if statements is not None]
    assert 0 < len(good) < 300
    assert all(len(solve(statements)) == 1 for statements in good)


# --- wording -------------------------------------------------------------------------------


def test_brief_wording():
    assert brief_quiz(PAIR) == "Zoey says: Oliver is a knave. Oliver says: Zoey is a knight and Oliver is a knight."


def test_full_wording():
    quiz = full_quiz(PAIR, random.Random(0))
    assert quiz.startswith(
        "A very special island is inhabited only by knights and knaves. Knights always tell the truth, and knaves "
        "always lie. You meet 2 inhabitants: Zoey, and Oliver. "
    )
    assert quiz.endswith(" So who is a knight and who is a knave?")
    assert quiz.index("Oliver is a knave") < quiz.index("Zoey is a knight and Oliver is a knight")
    assert len({full_quiz(PAIR, random.Random(seed)) for seed in range(50)}) > 30
    for saying in SAYINGS:
        assert "{name}" in saying
        assert ("{s}" in saying) != ("{S}" in saying)


@pytest.mark.parametrize(
    "tree, words, annotated",
    [
        (K0, "A is a knight", "A is a knight? A knight, yes"),
        (("not", K1), "B is not a knight", "B is not a knight? B knave, yes"),
        (("not", N0), "A is not a knave", "A is not a knave? A knight, yes"),
        (
            ("->", K0, K1),
            "if A is a knight then B is a knight",
            "if A is a knight? A knight, yes, then B is a knight? B knave, no",
        ),
        (
            ("<=>", N0, N1),
            "A is a knave if and only if B is a knave",
            "A is a knave? A knight, no, if and only if B is a knave? B knave, yes",
        ),
        (
            ("not", ("or", K0, ("and", K1, N0))),
            "it is not the case that (A is a knight or (B is a knight and A is a knave))",
            "it is not the case that (A is a knight? A knight, yes, "
            "or (B is a knight? B knave, no, and A is a knave? A knight, no))",
        ),
    ],
)
def test_statements_in_words(tree, words, annotated):
    assert in_words(tree, "AB") == words
    assert in_words(tree, "AB", [True, False]) == annotated


# --- grade and traces ----------------------------------------------------------------------


def test_grades():
    made = task(train=1)
    problem = made.problems("train")[0]
    names, solution = problem.answer["names"], problem.answer["solution"]

    def says(roles):
        return "<answer>" + ", ".join(f"{n} is a {'knight' if r else 'knave'}" for n, r in zip(names, roles))

    assert made.grade(problem, says(solution) + "</answer>").verdict == "correct"
    assert made.grade(problem, says([not solution[0], *solution[1:]]) + "</answer>").verdict == "wrong"
    assert made.grade(problem, says(solution)).verdict == "malformed"  # not closed
    assert made.grade(problem, says(solution[:2]) + "</answer>").verdict == "malformed"
    assert made.grade(problem, "").extracted is None


def test_careful_trace_word_for_word():
    assert careful(PAIR) == (
        "<think>Suppose Zoey knight, Oliver knight. "
        "Zoey says: Oliver is a knave? Oliver knight, no: false, Zoey knight. Contradiction. "
        "Wait, go back. Suppose Zoey knight, Oliver knave. "
        "Zoey says: Oliver is a knave? Oliver knave, yes: true, Zoey knight fits. "
        "Oliver says: Zoey is a knight? Zoey knight, yes, and Oliver is a knight? Oliver knave, no: "
        "false, Oliver knave fits. "
        "Everything fits.</think>\n"
        "<answer>(1) Zoey is a knight\n(2) Oliver is a knave</answer>"
    )


def test_careful_trace_goes_back_over_several_people():
    # A says "B is a knave"; B and C both say "A is a knave": with A a knight, C cannot be a knight.
    statements = (N1, N0, ("and", N0, K1))
    puzzle = Puzzle(("A", "B", "C"), statements, solve(statements)[0])
    text = careful(puzzle)
    assert text.count("Contradiction.") == text.count("Wait, go back.")
    with pytest.raises(ValueError, match="no consistent assignment"):
        careful(Puzzle(("A",), (N0,), (True,)))


def test_exhaustive_trace_word_for_word():
    assert careful(PAIR, "exhaustive") == (
        "<think>Suppose Zoey knight, Oliver knight. "
        "Zoey says: Oliver is a knave? Oliver knight, no, Zoey knight. Contradiction. "
        "Wait, go back. Suppose Zoey knight, Oliver knave. "
        "Zoey says: Oliver is a knave? Oliver knave, yes, Zoey knight fits. "
        "Oliver says: Zoey is a knight? Zoey knight, yes, and Oliver is a knight? Oliver knave, no, Oliver knave fits. "
        "Everything fits.</think>\n"
        "<answer>(1) Zoey is a knight\n(2) Oliver is a knave</answer>"
    )
    with pytest.raises(ValueError, match="no consistent assignment"):
        careful(Puzzle(("A",), (N0,), (True,)), "exhaustive")


def test_exhaustive_trace_leaves_out_operands_that_change_nothing():
    either = Puzzle(("Zoey", "Oliver"), (("or", N1, K1, K0), ("and", N0, K1, K1)), (True, False))
    assert solve(either.statements) == [either.solution]
    assert careful(either, "exhaustive").startswith(
        "<think>Suppose Zoey knight, Oliver knight. "
        "Zoey says: Oliver is a knave? Oliver knight, no, or Oliver is a knight? Oliver knight, yes, Zoey knight fits. "
        "Oliver says: Zoey is a knave? Zoey knight, no, Oliver knight. Contradiction. "
    )


@pytest.mark.parametrize("people", range(2, 6))
def test_exhaustive_search_tries_every_assignment_before_the_solution(people):
    made = task(people=(people,), train=30, depth=3, search="exhaustive")
    for problem in made.problems("train"):
        text, puzzle = made.trace(problem, "careful", seed=0).text, puzzle_of_problem(problem)
        order = list(itertools.product((True, False), repeat=people))  # knights first
        assert text.count("Suppose") == order.index(puzzle.solution) + 1
        assert text.count("Contradiction. Wait, go back.") == text.count("Suppose") - 1
        assert text == problem.reference
        assert made.grade(problem, text).verdict == "correct"


def test_hasty_trace_is_a_uniform_guess():
    made = task(people=(2,), train=1)
    problem = made.problems("train")[0]
    texts = [made.trace(problem, "hasty", seed).text for seed in range(400)]
    assert made.trace(problem, "hasty", 3).text == texts[3]
    assert all(parse(text).well_formed for text in texts)
    guesses = Counter(read_roles(parse(text).answer, problem.answer["names"]) for text in texts)
    assert len(guesses) == 4
    assert all(60 < count < 140 for count in guesses.values())  # 100 expected, standard deviation 8.7
    with pytest.raises(UserError, match="no trace style 'lazy'; there are careful, hasty"):
        made.trace(problem, "lazy", 0)


# --- settings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, message",
    [
        ({"people": (1,)}, "people"),
        ({"people": (3, 3)}, "people"),
        ({"people": ()}, "people"),
        ({"names": 2}, "names: 2: give at least 3"),
        ({"names": 500}, "names: 500"),
        ({"names": ("Ann", "Bob", "ANN")}, "distinct"),
        ({"names": ("Ann", "Bob", "Sir Knight")}, "knight or knave"),
        ({"size": 3}, "size"),
    ],
)
def test_settings_that_cannot_be(config, message):
    with pytest.raises(ValidationError, match=message):
        KnightsConfig(**config)


def test_names_come_from_the_pool():
    made = task(names=("Ann", "Bob", "Cy"), train=20)
    assert {name for p in made.problems("train") for name in p.answer["names"]} == {"Ann", "Bob", "Cy"}
    assert len(KnightsConfig(names=8).name_pool) == 8
