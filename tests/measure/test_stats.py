"""Intervals and paired tests against hand numbers and independent oracles."""

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from hone.base import stats


def test_wilson_by_hand() -> None:
    # p = 0.9, n = 10, z = 1.959964: centre (0.9 + z^2/20) / (1 + z^2/10), half-width by Wilson's formula
    z, p, n = 1.959963984540054, 0.9, 10
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    got = stats.wilson(9, 10)
    assert (got.value, got.n) == (0.9, 10)
    assert got.low == pytest.approx(centre - half, abs=1e-12)
    assert got.high == pytest.approx(centre + half, abs=1e-12)
    assert got.low == pytest.approx(0.5958, abs=1e-4)


def test_wilson_against_scipy_and_at_the_edges() -> None:
    for k, n in [(0, 1), (1, 1), (0, 20), (20, 20), (171, 200), (3, 1000)]:
        expected = scipy_stats.binomtest(k, n).proportion_ci(method="wilson")
        got = stats.wilson(k, n)
        assert (got.low, got.high) == (pytest.approx(expected.low, abs=1e-9), pytest.approx(expected.high, abs=1e-9))
        assert 0.0 <= got.low <= got.value <= got.high <= 1.0
    assert stats.wilson(20, 20).low < 1.0  # certainty is not claimed


@pytest.mark.parametrize(("k", "n"), [(1, 0), (-1, 5), (6, 5)])
def test_wilson_rejects_impossible_counts(k: int, n: int) -> None:
    with pytest.raises(ValueError, match="wilson"):
        stats.wilson(k, n)


def test_bootstrap_matches_the_normal_interval_of_a_large_sample() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, size=2000)
    got = stats.bootstrap_mean(values)
    half = 1.96 * values.std() / math.sqrt(2000)
    assert got.low == pytest.approx(values.mean() - half, rel=0.01)
    assert got.high == pytest.approx(values.mean() + half, rel=0.01)
    assert stats.bootstrap_mean(values) == got  # seeded
    assert stats.bootstrap_mean(values, seed=1) != got


def test_samples_of_one_problem_are_not_independent() -> None:
    # 40 problems, each always or never solved in 8 samples: the 320 samples are worth 40
    groups = [[float(i % 2)] * 8 for i in range(40)]
    naive, honest = stats.wilson(160, 320), stats.accuracy(groups)
    assert honest.value == naive.value == 0.5
    assert honest.n == 40
    width = (honest.high - honest.low) / (naive.high - naive.low)
    assert width == pytest.approx(math.sqrt(8), rel=0.06)


def test_accuracy_is_wilson_for_single_samples() -> None:
    assert stats.accuracy([[1.0]] * 9 + [[0.0]]) == stats.wilson(9, 10)


def test_clustered_does_not_claim_certainty_when_all_agree() -> None:
    assert stats.clustered([[1.0, 1.0]] * 10) == stats.wilson(10, 10)
    assert stats.clustered([[0.5, 0.5]] * 10).value == 0.5
    with pytest.raises(ValueError, match="at least one"):
        stats.clustered([[1.0], []])


def test_mcnemar_by_hand() -> None:
    # 8 problems went up, 1 down: two-sided exact p = 2 * (C(9,0) + C(9,1)) / 2^9
    before = [0] * 8 + [1] + [1] * 6 + [0] * 5
    after = [1] * 8 + [0] + [1] * 6 + [0] * 5
    got = stats.compare(before, after)
    assert got.method == "McNemar exact"
    assert got.p_value == pytest.approx(2 * 10 / 512)
    assert got.difference.value == pytest.approx(7 / 20)
    assert got.difference.n == 20
    assert 0 < got.difference.low < 7 / 20 < got.difference.high


def test_mcnemar_against_statsmodels() -> None:
    from statsmodels.stats.contingency_tables import mcnemar

    rng = np.random.default_rng(3)
    a, b = rng.integers(0, 2, 60), rng.integers(0, 2, 60)
    table = [[((a == i) & (b == j)).sum() for j in (0, 1)] for i in (0, 1)]
    assert stats.compare(a.tolist(), b.tolist()).p_value == pytest.approx(mcnemar(table, exact=True).pvalue)


def test_comparison_has_a_sign() -> None:
    up, down = stats.compare([0, 0, 1, 0], [1, 1, 1, 1]), stats.compare([1, 1, 1, 1], [0, 0, 1, 0])
    assert up.difference.value == 0.75 == -down.difference.value
    assert up.p_value == down.p_value


def test_sign_flip_by_hand() -> None:
    # differences 0.5 x 4: of 16 sign patterns 2 are as extreme
    got = stats.compare([0.25] * 4, [0.75] * 4)
    assert got.method == "sign-flip permutation"
    assert got.p_value == pytest.approx(2 / 16)
    assert stats.compare([0.5, 0.25], [0.5, 0.25]).p_value == 1.0


def test_sign_flip_agrees_with_the_t_test() -> None:
    rng = np.random.default_rng(0)
    a = rng.uniform(size=80)
    b = a + rng.normal(0.05, 0.2, size=80)
    expected = scipy_stats.ttest_rel(a, b).pvalue
    assert stats.compare(a.tolist(), b.tolist()).p_value == pytest.approx(expected, abs=0.02)


def test_a_verifier_failure_is_not_a_zero() -> None:
    records = [
        {"problem_id": "a", "verdict": "correct"},
        {"problem_id": "a", "verdict": "verifier_timeout"},
        {"problem_id": "b", "verdict": "malformed"},
        {"problem_id": "c", "verdict": "verifier_error"},
    ]
    assert stats.outcomes(records) == {"a": [1.0], "b": [0.0]}


def test_compare_needs_pairs() -> None:
    with pytest.raises(ValueError, match="equally long"):
        stats.compare([1.0], [1.0, 0.0])


# --- the interval of shares --------------------------------------------------------------------


def _wilson(m: float, n: float) -> tuple[float, float]:
    z = 1.959963984540054
    centre = (m + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(m * (1 - m) / n + z * z / (4 * n * n))
    return centre - half, centre + half


@pytest.mark.parametrize(
    ("values", "m", "variance", "t", "capped"),
    [
        # 6 of 0.25 and 6 of 0.75: variance 12 / 16 / 11; 0.25 / (variance / 12) = 44 problems before t's adjustment
        ([0.25] * 6 + [0.75] * 6, 0.5, 0.75 / 11, 2.200985160082949, False),
        # five on either side are enough to believe the variance
        ([0.25] * 5 + [0.75] * 5, 0.5, 0.625 / 9, 2.2621571627409915, False),
        # fewer are not: at most as many as there are problems, here 4
        ([0.25, 0.25, 0.75, 0.75], 0.5, 0.25 / 3, 3.182446305284263, True),
        # and fewer than that where the problems differ much: (0.390625 + 2 * 0.140625 + 0.015625) / 3
        ([0.0, 1.0, 1.0, 0.5], 0.625, 0.6875 / 3, 3.182446305284263, False),
        # two problems
        ([0.25, 0.75], 0.5, 0.125, 12.706204736432095, False),
    ],
)
def test_the_score_interval_by_hand(values: list[float], m: float, variance: float, t: float, capped: bool) -> None:
    n = m * (1 - m) * len(values) / variance * (1.959963984540054 / t) ** 2
    assert (n > len(values)) is (capped or len(values) >= 10)
    got = stats.score_interval(np.array(values))
    assert (got.low, got.high) == pytest.approx(_wilson(m, len(values) if capped else n), abs=1e-9)
    assert (got.value, got.n) == (m, len(values))


def test_the_score_interval_of_right_and_wrong_is_wilsons() -> None:
    for values in ([1.0, 0.0, 1.0], [0.5], [0.5, 0.5], [1.0]):
        got = stats.score_interval(np.array(values))
        m = sum(values) / len(values)
        low, high = _wilson(m, len(values))
        assert (got.low, got.high) == pytest.approx((max(0.0, low), min(1.0, high)), abs=1e-9)
    narrow, wide = (stats.score_interval(np.array([1.0, 0.0]), confidence) for confidence in (0.5, 0.95))
    assert wide.low < narrow.low < narrow.high < wide.high


def test_shares_are_resampled_from_ten_problems_on_either_side() -> None:
    columns = np.zeros((21, 3))
    columns[:10, 0], columns[:9, 1], columns[:11, 2] = 1.0, 1.0, 1.0
    first, second, third = stats.shares(columns)
    assert first == stats.bootstrap_mean(columns[:, 0])
    assert second == stats.score_interval(columns[:, 1])
    assert third == stats.bootstrap_mean(columns[:, 2])


def test_resampled_means_are_means_of_rows_drawn_together() -> None:
    columns = np.array([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])
    means = stats.resampled_means(columns, seed=4, resamples=500)
    assert means.shape == (500, 2)
    np.testing.assert_allclose(means[:, 1], 10 * means[:, 0])
    assert set(np.round(3 * means[:, 0]).astype(int)) == {3, 4, 5, 6, 7, 8, 9, 10, 12}  # each sum of three of 1, 2, 4
    assert means[:, 0].mean() == pytest.approx(7 / 3, abs=0.15)


def test_mcnemar_of_few_changes_by_hand() -> None:
    # none: 1; one: 2 * 1/2; two in one direction: 2 * 1/4; one each: 1; three down: 2 * 1/8
    for before, after, p in (
        ([1, 0], [1, 0], 1.0),
        ([0, 0], [1, 0], 1.0),
        ([0, 0], [1, 1], 0.5),
        ([0, 1], [1, 0], 1.0),
        ([1, 1, 1], [0, 0, 0], 0.25),
    ):
        assert stats.compare(before, after).p_value == pytest.approx(p)


def test_one_sided_halves_of_an_interval() -> None:
    values = np.random.default_rng(2).normal(size=300)
    wide, narrow = stats.bootstrap_mean(values), stats.bootstrap_mean(values, confidence=0.5)
    se = values.std() / math.sqrt(300)
    assert narrow.high - narrow.low == pytest.approx(2 * 0.6745 * se, rel=0.05)
    assert wide.high - wide.low == pytest.approx(2 * 1.96 * se, rel=0.05)
    with pytest.raises(ValueError, match="at least one value"):
        stats.bootstrap_mean([])
    assert stats.clustered([[3.0, 5.0], [2.0]]).value == 3.0
    assert stats.clustered([[-1.0], [0.5]] * 20) == stats.bootstrap_mean([-1.0, 0.5] * 20)
