"""Graded scores, computed by hand; what pays nothing."""

import math

import numpy as np
import pytest
from pydantic import ValidationError

from hone.grade.parse import completion
from hone.rewards import make_reward
from hone.rewards.config import RewardConfig
from hone.rewards.linear_algebra import graded
from hone.tasks.linear_algebra.matrices import parse_matrix
from hone.tasks.linear_algebra.task import LinearAlgebraConfig, LinearAlgebraTask
from hone.types import Problem, Rollout, Turn

TASK = LinearAlgebraTask(LinearAlgebraConfig())


def problem(kind, matrix, value):
    def texts(m):
        return [[str(v) for v in row] for row in parse_matrix(m)]

    answer = {"kind": kind, "matrix": texts(matrix), "value": texts(value), "tolerance": 0.1}
    return Problem("p", "linear_algebra", (), answer, "inverse_2")


INVERSE = problem("inverse", "[[2, 1], [1, 1]]", "[[1, -1], [-1, 2]]")
REDUCED = problem("rref", "[[1, 2, 3], [2, 4, 7], [0, 0, 0]]", "[[1, 2, 0], [0, 0, 1], [0, 0, 0]]")
SUM = problem("addition", "[[12, 30]]", "[[42]]")


def rollout(text):
    ids = np.zeros(3, dtype=np.int64)
    return Rollout("p", 0, (Turn(ids, ids, np.zeros(3, dtype=np.float32), "stop", 0),), text)


def parts(asked, text, **settings):
    config = RewardConfig(parts={"linear_algebra": 1.0}, **({"linear_algebra": settings} if settings else {}))
    (reward,) = make_reward(config, TASK)(asked, [rollout(text)])
    details = {k.partition("/")[2]: v for k, v in reward.parts.items() if "/" in k}
    assert reward.total == pytest.approx(sum(details.values()))
    return reward.total, details


def test_inverse_by_hand():
    assert parts(INVERSE, completion("hm", "[[1, -1], [-1, 2]]"))[0] == pytest.approx(5.25)
    # P - A^-1 = [[0.05, 0], [0, 0]]: norm 0.05; P A - I = [[0.1, 0.05], [0, 0]]: norm 0.15
    total, details = parts(INVERSE, completion("hm", "[[1.05, -1], [-1, 2]]"))
    expected = {"product": 2 * math.exp(-1.5), "nearness": 2 * math.exp(-0.5), "exact": 1.0, "format": 0.25}
    assert details == pytest.approx(expected)
    assert total == pytest.approx(sum(expected.values()))
    _, details = parts(INVERSE, completion("hm", "[[1, -0.9], [-1, 2]]"))  # P A - I = [[0.1, 0.1], [0, 0]]
    assert details["product"] == pytest.approx(2 * math.exp(-2))
    assert details["nearness"] == pytest.approx(2 * math.exp(-1))
    assert details["exact"] == 0.0  # 0.1 is not below 0.1


def test_reduced_form_by_hand():
    assert parts(REDUCED, completion("hm", "[[1, 2, 0], [0, 0, 1], [0, 0, 0]]"))[0] == pytest.approx(5.25)
    _, details = parts(REDUCED, completion("hm", "[[1, 2, 0], [0, 0.6, 1.8], [0, 0, 0]]"))  # off by 0.6 and 0.8
    assert details == pytest.approx({"rows": 1.0, "nearness": 1.0, "exact": 0.0, "format": 0.25})
    _, details = parts(REDUCED, completion("hm", "[[0, 0, 0], [0, 0, 0], [0, 0, 0]]"))  # its zero row earns nothing
    assert details == pytest.approx({"rows": 0.0, "nearness": 0.0, "exact": 0.0, "format": 0.25})  # off by sqrt(6)


def test_sum():
    assert parts(SUM, completion("hm", "42")) == (pytest.approx(5.25), {"exact": 5.0, "format": pytest.approx(0.25)})
    assert parts(SUM, completion("hm", "43"))[0] == pytest.approx(0.25)


def test_format_is_graded():
    def form(text):
        return parts(INVERSE, text)[1]["format"]

    assert form("hm") == 0.0
    assert form("<think>hm</think>") == pytest.approx(0.05)
    assert form("<answer>no</answer>") == pytest.approx(0.05)
    assert form("<think>hm</think><answer>no</answer>") == pytest.approx(0.15)
    assert form("<think>hm</think><answer>[[1]]</answer>") == pytest.approx(0.20)
    assert form("<answer>[[1, 2], [3, 4]]</answer>") == pytest.approx(0.15)
    assert form("<think>hm</think><answer>[[1, 2], [3, 4]]</answer>") == pytest.approx(0.25)


def test_thinking_pays_nothing_unless_set_and_then_little():
    long = completion("x" * 100_000, "no")
    assert parts(INVERSE, long)[0] == parts(INVERSE, completion("x", "no"))[0]
    assert parts(INVERSE, long, thinking=0.2)[1]["thinking"] == pytest.approx(0.2)
    assert parts(INVERSE, completion("x" * 50, "no"), thinking=0.2, thinking_chars=100)[1]["thinking"] == 0.1
    with pytest.raises(ValidationError, match=r"thinking"):
        RewardConfig(parts={"linear_algebra": 1.0}, linear_algebra={"thinking": 0.3})


@pytest.mark.parametrize(
    "answer",
    ["[[1e30, 0], [0, 1e30]]", "[[-1e30, 1e-30], [0, 0]]", "1e25 [[1e5, 1e30], [1, 1]]", "[[1/1e30, 0], [0, 0]]"],
)
def test_extreme_answers_have_finite_scores(answer):
    for question in (INVERSE, problem("rref", "[[1, 2], [2, 4]]", "[[1, 2], [0, 0]]")):
        total, _ = parts(question, completion("hm", answer))
        assert math.isfinite(total)
        assert total <= 0.26


def test_the_order_of_the_product_matters():
    matrix, true = parse_matrix("[[1, 0], [1, 1]]"), parse_matrix("[[1, 0], [-1, 1]]")
    answer = parse_matrix("[[1, 0], [-0.9, 1]]")  # P A - I = [[0, 0], [0.1, 0]]
    assert graded("inverse", matrix, true, answer, 0.1)["product"] == pytest.approx(2 * math.exp(-1))
    answer = parse_matrix("[[1.1, 0], [-1, 1]]")  # P A - I = [[0.1, 0], [0, 0]]; A P - I would have 0.1 twice
    assert graded("inverse", matrix, true, answer, 0.1)["product"] == pytest.approx(2 * math.exp(-1))
