"""The ladder: what is asked, splits, traces, grading; no answer is right without work."""

import json
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from hone.base.settings import UserError
from hone.grade.parse import completion, parse
from hone.tasks import make_task
from hone.tasks.linear_algebra import matrices
from hone.tasks.linear_algebra.task import (
    LinearAlgebraConfig,
    LinearAlgebraTask,
    canonical_form,
    exact,
    parse_rung,
)

RUNGS = ("addition_5", "rref_2x3", "rref_3x4", "rref_6x5", "near_identity_2", "inverse_2", "inverse_3", "inverse_4")


def task(**config):
    sizes = {"train": 48, "validation": 16, "test": 24}
    return LinearAlgebraTask(LinearAlgebraConfig(**{"rungs": RUNGS, **sizes, **config}))


TASK = task()
TRAIN = TASK.problems("train")
OF = {rung: [problem for problem in TRAIN if problem.level == rung] for rung in RUNGS}


def form(problem):
    return canonical_form(problem.answer["kind"], exact(problem.answer["matrix"]))


def test_rungs_take_turns_and_share_the_sizes():
    assert Counter(problem.level for problem in TRAIN) == dict.fromkeys(RUNGS, 6)
    assert [problem.level for problem in TRAIN[:8]] == list(RUNGS)
    json.dumps([problem.answer for problem in TRAIN])


def test_answers_against_numpy():
    for problem in TRAIN:
        matrix, value = (np.array(exact(problem.answer[key]), dtype=float) for key in ("matrix", "value"))
        if problem.answer["kind"] == "addition":
            assert value.item() == matrix.sum()
        elif problem.answer["kind"] == "inverse":
            np.testing.assert_allclose(matrix @ value, np.eye(len(matrix)), atol=1e-9)
        else:  # the same row space; that it is reduced is tested with `matrices.rref`
            ranks = [np.linalg.matrix_rank(m) for m in (matrix, value, np.vstack([matrix, value]))]
            assert len(set(ranks)) == 1


def test_sizes_and_entries_are_as_asked():
    assert all(10_000 <= int(n) <= 99_999 for p in OF["addition_5"] for n in p.answer["matrix"][0])
    assert {matrices.shape(exact(p.answer["matrix"])) for p in OF["rref_6x5"]} == {(6, 5)}
    assert {matrices.shape(exact(p.answer["matrix"])) for p in OF["near_identity_2"]} == {(2, 2)}
    for problem in OF["near_identity_2"]:
        off = matrices.difference(exact(problem.answer["matrix"]), matrices.identity(2))
        assert max(abs(value) for row in off for value in row) <= Fraction(1, 2)
    entries = [Fraction(v) for r in RUNGS[1:] for p in OF[r] for row in p.answer["matrix"] for v in row]
    assert max(map(abs, entries)) <= 9
    assert LinearAlgebraTask(LinearAlgebraConfig(rungs=("rref_10x10",), train=2)).problems("train")


def test_splits_are_disjoint_by_form_whatever_the_seed():
    others = task(seed=4).problems("test"), LinearAlgebraTask(TASK.config, seed=9).problems("train")
    train = {form(p) for problems in (TRAIN, others[1]) for p in problems}
    held = {form(p) for problems in (TASK.problems("validation"), TASK.problems("test"), others[0]) for p in problems}
    assert not train & held
    assert [p.id for p in others[1]] != [p.id for p in TRAIN]
    assert [p.id for p in LinearAlgebraTask(TASK.config, seed=9).problems("test")] == [
        p.id for p in TASK.problems("test")
    ]


def test_forms_by_hand():
    def same(kind, a, b):
        return canonical_form(kind, matrices.parse_matrix(a)) == canonical_form(kind, matrices.parse_matrix(b))

    assert same("addition", "[[1, 2]]", "[[2, 1]]")
    assert not same("addition", "[[1, 2]]", "[[1, 3]]")
    assert same("rref", "[[1, 2, 3], [0, 2, 4]]", "[[0, -1, -2], [2, 4, 6]]")  # rows swapped, scaled
    assert not same("rref", "[[1, 2, 3], [0, 2, 4]]", "[[1, 2, 3], [0, 2, 5]]")
    assert same("inverse", "[[1, 2], [3, 4]]", "[[3, 4], [1, 2]]")  # rows swapped
    assert same("inverse", "[[1, 2], [3, 4]]", "[[1, 3], [2, 4]]")  # transposed
    assert same("inverse", "[[1, 2], [3, 4]]", "[[-2, -1], [-4, -3]]")  # columns swapped, negated
    assert not same("inverse", "[[1, 2], [3, 4]]", "[[1, 2], [4, 3]]")


def test_worked_answers_are_right_and_every_line_is_true():
    for problem in TRAIN:
        example = TASK.trace(problem, "careful", 0)
        assert TASK.grade(problem, example.text).verdict == "correct"
        assert parse(example.text).well_formed
    for line in (line for rung in ("rref_3x4", "inverse_3") for p in OF[rung] for line in p.reference.splitlines()):
        for term in line.partition(": ")[2].split(", ") if line.startswith("R") else ():
            left, equals, right = term.partition(" = ")
            if equals and not left.startswith("R"):
                assert abs(eval(left) - eval(right)) < 1e-9  # our own text
    assert TASK.trace(TRAIN[0], "hasty", 1) == TASK.trace(TRAIN[0], "hasty", 1)
    assert sum(TASK.grade(p, TASK.trace(p, "hasty", 0).text).verdict == "correct" for p in TRAIN) <= 1
    with pytest.raises(UserError, match="no trace style 'lucky'; there are careful, hasty"):
        TASK.trace(TRAIN[0], "lucky", 0)


def test_a_worked_answer_by_hand():
    solution = LinearAlgebraTask(LinearAlgebraConfig())._problem(
        "inverse_2", "inverse", matrices.parse_matrix("[[2, 1], [1, 1]]"), matrices.parse_matrix("[[1, -1], [-1, 2]]")
    )
    assert solution.reference == completion(
        "[[2, 1, 1, 0], [1, 1, 0, 1]]\n"
        "R1 / 2: 2/2 = 1, 1/2 = 1/2, 1/2 = 1/2, 0/2 = 0, R1 = [1, 1/2, 1/2, 0]\n"
        "R2 - R1: 1 - 1 = 0, 1 - (1/2) = 1/2, 0 - (1/2) = -1/2, 1 - 0 = 1, R2 = [0, 1/2, -1/2, 1]\n"
        "R2 / (1/2): 0/(1/2) = 0, (1/2)/(1/2) = 1, (-1/2)/(1/2) = -1, 1/(1/2) = 2, R2 = [0, 1, -1, 2]\n"
        "R1 - (1/2) R2: 1 - (1/2)*0 = 1, 1/2 - (1/2)*1 = 0, 1/2 - (1/2)*(-1) = 1, 0 - (1/2)*2 = -1, "
        "R1 = [1, 0, 1, -1]\n"
        "Done: [[1, 0, 1, -1], [0, 1, -1, 2]]",
        "[[1, -1], [-1, 2]]",
    )


@pytest.mark.parametrize("rung", RUNGS)
def test_no_fixed_answer_is_ever_right(rung):
    """Zero, the identity, the matrix itself: the best of them earns nothing."""
    problems = LinearAlgebraTask(LinearAlgebraConfig(rungs=(rung,), train=40)).problems("train")
    for problem in problems:
        rows, columns = matrices.shape(exact(problem.answer["value"]))
        zero = ((Fraction(0),) * columns,) * rows
        one = tuple(tuple(Fraction(i == j) for j in range(columns)) for i in range(rows))
        for guess in (zero, one, exact(problem.answer["matrix"])):
            text = str(guess[0][0]) if rung == "addition_5" else matrices.text_of(guess)
            assert TASK.grade(problem, completion("", text)).verdict == "wrong"


def test_grades():
    def verdicts(problem, *answers):
        return [TASK.grade(problem, completion("hm", answer)).verdict for answer in answers]

    add = OF["addition_5"][0]
    total = int(add.answer["value"][0][0])
    right = [f"{total}", f" {total:,}.", f"The sum is {total}", f"1 + 2 = {total}", f"\\boxed{{{total}}}", f"{total}.0"]
    assert verdicts(add, *right) == ["correct"] * 6
    assert verdicts(add, f"{total + 1}", f"{total} or 7", "none", "1" * 6000) == ["wrong", "wrong", *["malformed"] * 2]
    near = OF["near_identity_2"][0]
    value = np.array(exact(near.answer["value"]), dtype=float)
    assert verdicts(near, str((value + 0.024).tolist()), str((value + 0.026).tolist())) == ["correct", "wrong"]
    assert verdicts(near, str(value.round(3).tolist()), "[[1, 0, 0], [0, 1, 0]]") == ["correct", "wrong"]
    reduced = OF["rref_3x4"][0]
    value = [[int(v) for v in row] for row in reduced.answer["value"]]
    value[0][0] += 0.001
    assert verdicts(reduced, str(reduced.answer["value"]).replace("'", ""), str(value)) == ["correct", "wrong"]
    assert TASK.grade(add, str(total)).verdict == "malformed"  # no answer block
    assert TASK.grade(near, completion("", "__import__('os').getcwd()")).extracted == "__import__('os').getcwd()"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rungs": ("inverse_11",)}, "'inverse_11' is not a rung; give addition_DIGITS"),
        ({"rungs": ("rref_3",)}, "'rref_3' is not a rung"),
        ({"rungs": ("rref_3x1",)}, "at least 2 columns"),
        ({"rungs": ("addition_0",)}, "1 to 18"),
        ({"rungs": ("inverse_2", "inverse_2")}, "a rung is named twice"),
        ({"rungs": ()}, "at least 1"),
        ({"tolerance": 0}, "greater than 0"),
        ({"max_entry": 1}, "greater than or equal to 3"),
    ],
)
def test_settings_that_cannot_be(config, words):
    with pytest.raises(ValueError, match=words):
        LinearAlgebraConfig(**config)
    assert parse_rung("rref_10x4") == ("rref", (10, 4))


def test_too_many_are_refused_with_the_number_found():
    few = LinearAlgebraConfig(rungs=("addition_1",), train=500)
    with pytest.raises(UserError, match=r"found \d\d distinct problems of addition_1 for the train split, 500 were"):
        make_task(few).problems("train")
