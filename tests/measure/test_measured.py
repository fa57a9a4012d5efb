"""Columns from records, comparison of models, levels, histograms, OLS and perplexity: against hand and brute force."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from scipy import stats as scipy_stats

from hone.base import stats
from hone.measure.stats import levels, ols, perplexity
from hone.measure.stats.measured import Measured, answer_format, compare, measured, shared


def record(problem: str, verdict: str, **more: object) -> dict[str, object]:
    return {"problem_id": problem, "verdict": verdict, "tokens": 10, "text": "", **more}


def model(label: str, counts: dict[str, tuple[int, int]], **about: object) -> Measured:
    """problem -> (drawn, correct); the level is the part of the name before the dash."""
    rows = [
        record(name, "correct" if i < c else "wrong", level=name.split("-")[0])
        for name, (n, c) in counts.items()
        for i in range(n)
    ]
    return measured(label, rows, **about)


def test_records_become_columns_and_failures_are_not_zeros() -> None:
    rows = [
        record("b", "correct", level="5", domain="Algebra", answer="1/2", tokens=10, text="Wait, that is odd."),
        record("b", "malformed", tokens=30),
        record("b", "verifier_timeout"),
        record("a", "truncated", level="2", answer="7"),
        record("c", "verifier_error"),
    ]
    got = measured("m", rows)
    assert got.problems == ("a", "b")  # of c nothing is known
    assert (got.drawn.tolist(), got.correct.tolist(), got.failures) == ([1, 2], [0, 1], 2)
    assert (got.levels, got.domains, got.formats) == (("2", "5"), ("", "Algebra"), ("integer", "fraction"))
    assert got.tokens.tolist() == [10, 20]
    assert got.reflects.tolist() == [0, 0.5]
    assert got.accuracy().value == 0.25  # mean over problems, not over samples (1/3)
    assert {name: part.problems for name, part in got.by("domains").items()} == {"Algebra": ("b",)}
    with pytest.raises(ValueError, match="2 samples whose verifier failed"):
        measured("m", [record("c", "verifier_error")] * 2)


@pytest.mark.parametrize(
    "answer, kind",
    [
        ("12", "integer"), ("-3", "integer"), ("$1,234$", "integer"), ("1,23", "text"), ("0.5", "decimal"),
        ("1,234.5", "decimal"), (r"\frac{1}{2}", "fraction"), (r"\frac12", "fraction"), ("3 / 4", "fraction"),
        (r"\frac{\pi}{2}", "latex"), (r"\left( 3, \frac{\pi}{2} \right)", "latex"), ("Evelyn", "text"), (7, "integer"),
        (2.5, "decimal"), ({"a": 1}, "structure"), (True, "structure"), (None, ""), ("", ""),
    ],
)  # fmt: skip
def test_answer_formats(answer: object, kind: str) -> None:
    assert answer_format(answer) == kind


def test_comparison_pairs_the_problems_that_both_hold() -> None:
    a = model("a", {"p": (2, 0), "q": (2, 1), "only-a": (2, 2)})
    b = model("b", {"q": (4, 4), "p": (4, 1), "only-b": (4, 0)})
    assert [m.problems for m in shared(a, b)] == [("p", "q")] * 2
    found = compare(a, b)
    assert found is not None
    assert found.difference.value == pytest.approx((0.25 + 0.5) / 2)  # b - a
    assert compare(b, a).difference.value == pytest.approx(-0.375)  # type: ignore[union-attr]
    assert compare(a, model("c", {"z": (1, 1)})) is None


def test_permutation_p_equals_all_sign_flips_by_brute_force() -> None:
    rng = np.random.default_rng(5)
    difference = rng.normal(0.25, 0.4, 9).round(2)
    flips = np.array([np.mean(difference * signs) for signs in product((1, -1), repeat=9)])
    exact = np.mean(np.abs(flips) >= abs(difference.mean()) - 1e-12)
    got = stats.compare(np.zeros(9).tolist(), difference.tolist())
    assert got.method == "sign-flip permutation"
    assert got.p_value == pytest.approx(exact, abs=1e-9)


def test_macro_average_counts_every_level_the_same() -> None:
    counts = {f"2-{i}": (1, 1) for i in range(30)} | {f"8-{i}": (1, int(i < 2)) for i in range(10)}
    cells, average = levels.by_level(model("m", counts))
    assert average is not None
    assert (cells["2"].value, cells["8"].value) == (1.0, 0.2)
    assert average.value == pytest.approx(0.6)  # not 32/40
    assert average.n == 40
    # level 2 does not vary, so the average varies with half the standard error of level 8
    width = 2 * 1.96 * math.sqrt(0.2 * 0.8 / 10) / 2
    assert average.high - average.low == pytest.approx(width, rel=0.15)


def test_histogram_puts_zero_and_one_into_the_outer_bins() -> None:
    rows = levels.histogram(model("m", {"a": (10, 0), "b": (10, 10), "c": (10, 9), "d": (10, 5), "e": (10, 1)}))
    assert [n for _, _, n in rows] == [1, 1, 0, 0, 0, 1, 0, 0, 0, 2]
    assert rows[0][:2] == (0.0, 0.1)
    assert sum(n for _, _, n in rows) == 5


def test_ols_equals_the_normal_equations() -> None:
    rng = np.random.default_rng(0)
    domains = rng.choice(["Algebra", "Geometry", "Number Theory"], 120).tolist()
    number = rng.integers(1, 6, 120)
    base = {"Algebra": 0.9, "Geometry": 0.7, "Number Theory": 0.5}
    y = np.clip([base[d] - 0.1 * n for d, n in zip(domains, number)] + rng.normal(0, 0.1, 120), 0, 1)
    got = {c.name: c for c in ols.regress(y, [f"Level {n}" for n in number], domains)}
    names = ["level", *base]
    x = np.stack([number, *([d == name for d in domains] for name in base)], axis=1).astype(float)
    coefficients = np.linalg.solve(x.T @ x, x.T @ y)
    residual = y - x @ coefficients
    errors = np.sqrt(np.diag(np.linalg.inv(x.T @ x)) * (residual @ residual) / (120 - 4))
    for name, b, se in zip(names, coefficients, errors):
        assert got[name].value == pytest.approx(b, abs=1e-10)
        assert got[name].standard_error == pytest.approx(se, rel=1e-8)
        assert got[name].t == pytest.approx(b / se, rel=1e-8)
        assert got[name].p_value == pytest.approx(2 * scipy_stats.t.sf(abs(b / se), 116), rel=1e-6, abs=1e-300)
    order = [c.name for c in ols.regress(y, number.astype(str).tolist(), domains)]
    assert order == ["level", "Algebra", "Geometry", "Number Theory"]  # level first, then by size
    assert got["level"].value < 0
    assert got["level"].n == 120
    assert got["Geometry"].n == domains.count("Geometry")


def test_ols_says_what_it_cannot_tell() -> None:
    with pytest.raises(ValueError, match="follows from the domain"):
        ols.regress([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], list("112233"), list("aabbcc"))
    with pytest.raises(ValueError, match="3 problems do not determine 3"):
        ols.regress([0.1, 0.2, 0.3], list("121"), list("aab"))
    assert [c.name for c in ols.regress([0.1, 0.2, 0.4, 0.6], ["easy"] * 4, list("aabb"))] == ["b", "a"]


def test_perplexity_by_hand() -> None:
    half, tenth = math.log(0.5), math.log(0.1)
    assert perplexity.perplexity([half, half]) == pytest.approx(2.0)
    assert perplexity.perplexity([half, math.log(0.125)]) == pytest.approx(4.0)  # geometric: sqrt(2 * 8)
    before = {f"p{i}": [tenth, tenth] for i in range(8)}
    after = {f"p{i}": [half] for i in range(8)} | {"other": [tenth]}
    got = perplexity.change(before, after)
    assert (got.before.value, got.after.value) == pytest.approx((10.0, 2.0))
    assert got.ratio.value == pytest.approx(0.2)  # after / before: the gold answers became more likely
    assert got.p_value == pytest.approx(2 / 2**8)  # all signs alike
    with pytest.raises(ValueError, match="none above 0"):
        perplexity.perplexity([0.5])
    with pytest.raises(ValueError, match="share no problem"):
        perplexity.change(before, {"x": [half]})
