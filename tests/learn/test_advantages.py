from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.learn.advantages import (
    BATCH_LEVEL,
    GROUP_LEVEL,
    advantages,
    dr_grpo,
    gae,
    group_advantages,
    grpo,
    is_zero_variance,
    reward_to_go,
    rloo,
    whiten,
)
from hone.recipe.sections.algo import AlgoConfig, KLConfig, OverStep, WithinGroup
from hone.types import Group, Problem, Reward, Rollout, Turn, Verdict

NAN = float("nan")


def make_group(rewards: list[float], lengths: list[int], verdicts: list[Verdict] | None = None) -> Group:
    problem = Problem(id="p", task="t", messages=(), answer=None)
    rollouts = []
    for g, n in enumerate(lengths):
        turn = Turn(np.array([1, 2]), np.arange(n), np.zeros(n, np.float32), "stop", 0)
        rollouts.append(Rollout("p", g, (turn,), ""))
    kinds: list[Verdict] = verdicts or ["correct"] * len(rewards)
    return Group(problem, tuple(rollouts), tuple(Reward(r, {}, v) for r, v in zip(rewards, kinds, strict=True)))


def test_the_names_in_recipes_are_those_of_the_functions() -> None:
    assert set(get_args(WithinGroup)) == set(GROUP_LEVEL)
    assert set(get_args(OverStep)) == {*BATCH_LEVEL, "gae"}


def test_grpo_by_hand() -> None:
    # [1, 0, 0, 1]: mean 0.5, deviations +-0.5, unbiased variance 4 * 0.25 / 3 = 1/3, std 0.5773503.
    # 0.5 / (0.5773503 + 1e-6) = 0.8660239
    np.testing.assert_allclose(
        grpo(np.array([1.0, 0, 0, 1])), [0.8660239, -0.8660239, -0.8660239, 0.8660239], atol=1e-6
    )


def test_grpo_without_differences_is_zero() -> None:
    np.testing.assert_array_equal(grpo(np.array([3.0])), [0.0])
    np.testing.assert_allclose(grpo(np.full(3, 0.1)), 0.0, atol=1e-9)


def test_dr_grpo_by_hand() -> None:
    # [2, -1, 2]: mean 1
    np.testing.assert_allclose(dr_grpo(np.array([2.0, -1, 2])), [1, -2, 1])


def test_rloo_by_hand() -> None:
    # [3, 0, 1.5]: 3 - (0 + 1.5)/2 = 2.25;  0 - (3 + 1.5)/2 = -2.25;  1.5 - (3 + 0)/2 = 0
    np.testing.assert_allclose(rloo(np.array([3.0, 0, 1.5])), [2.25, -2.25, 0])


def test_rloo_of_one_says_so() -> None:
    with pytest.raises(ValueError, match="group of one"):
        rloo(np.array([1.0]))
    with pytest.raises(ValueError, match="samples_per_prompt"):
        group_advantages([np.array([1.0]), np.array([0.0])], [[2], [3]], AlgoConfig(advantage="rloo"))


def test_rloo_group_that_shrank_to_one_carries_nothing() -> None:
    result = group_advantages(
        [np.array([1.0, NAN]), np.array([1.0, 0.0])], [[2, 1], [1, 1]], AlgoConfig(advantage="rloo")
    )
    np.testing.assert_array_equal(np.concatenate(result[0]), [0, 0, 0])
    np.testing.assert_allclose(np.concatenate(result[1]), [1, -1])


def test_reward_to_go_by_hand() -> None:
    # Per token: -0.1, -0.2, -0.3 + 2. To go: 2 - 0.6, 2 - 0.5, 2 - 0.3.
    np.testing.assert_allclose(reward_to_go(2.0, 3, np.array([0.1, 0.2, 0.3])), [1.4, 1.5, 1.7])
    assert reward_to_go(2.0, 0, np.zeros(0)).shape == (0,)


def test_reinforce_pp_by_hand() -> None:
    # Samples: reward 1 with 2 tokens, reward 0 with 1 token, reward -1 with 1 token; no KL.
    # To go over tokens: [1, 1, 0, -1], mean 0.25, deviations [.75, .75, -.25, -1.25],
    # variance (0.5625 + 0.5625 + 0.0625 + 1.5625) / 4 = 0.6875, std 0.8291562
    # 0.75 / 0.8291562 = 0.9045340;  -0.25 / .. = -0.3015113;  -1.25 / .. = -1.5075567
    result = group_advantages(
        [np.array([1.0, 0.0]), np.array([-1.0])], [[2, 1], [1]], AlgoConfig(advantage="reinforce_pp")
    )
    np.testing.assert_allclose(result[0][0], [0.9045340, 0.9045340], atol=2e-6)
    np.testing.assert_allclose(result[0][1], [-0.3015113], atol=2e-6)
    np.testing.assert_allclose(result[1][0], [-1.5075567], atol=2e-6)


def test_reinforce_pp_with_kl_in_the_reward() -> None:
    # coef 0.5, k1 = [0.2, 0.4] and [-0.2]: to go [1 - 0.3, 1 - 0.2] = [0.7, 0.8] and [0 + 0.1] = [0.1].
    # mean 1.6/3 = 0.5333333, deviations [0.1666667, 0.2666667, -0.4333333],
    # variance (0.0277778 + 0.0711111 + 0.1877778) / 3 = 0.0955556, std 0.3091206
    # -> [0.5391638, 0.8626621, -1.4018260]
    algo = AlgoConfig(advantage="reinforce_pp", kl=KLConfig(coef=0.5, estimator="k1", place="reward"))
    result = group_advantages([np.array([1.0, 0.0])], [[2, 1]], algo, kl=[[np.array([0.2, 0.4]), np.array([-0.2])]])
    np.testing.assert_allclose(np.concatenate(result[0]), [0.5391638, 0.8626621, -1.4018260], atol=1e-5)


def test_reinforce_pp_baseline_by_hand() -> None:
    # Groups [3, 1] and [0, -2] lose their means 2 and -1: [1, -1] and [1, -1], lengths 1, 1, 2, 1.
    # Tokens [1, -1, 1, 1, -1]: mean 0.2, variance 1 - 0.04 = 0.96, std 0.9797959
    # 0.8 / 0.9797959 = 0.8164966;  -1.2 / 0.9797959 = -1.2247449
    result = group_advantages(
        [np.array([3.0, 1.0]), np.array([0.0, -2.0])], [[1, 1], [2, 1]], AlgoConfig(advantage="reinforce_pp_baseline")
    )
    flat = np.concatenate([np.concatenate(group) for group in result])
    np.testing.assert_allclose(flat, [0.8164966, -1.2247449, 0.8164966, 0.8164966, -1.2247449], atol=3e-6)


def test_kl_in_the_reward_of_a_group_method() -> None:
    # coef 0.1: rewards 1 - 0.1 * (1 + 2) = 0.7 and 0 - 0.1 * (-1) = 0.1, mean 0.4.
    algo = AlgoConfig(advantage="dr_grpo", kl=KLConfig(coef=0.1, place="reward"))
    result = group_advantages([np.array([1.0, 0.0])], [[2, 1]], algo, kl=[[np.array([1.0, 2.0]), np.array([-1.0])]])
    np.testing.assert_allclose(np.concatenate(result[0]), [0.3, 0.3, -0.3], atol=1e-6)


def test_kl_in_the_loss_is_none_in_the_reward() -> None:
    algo = AlgoConfig(advantage="dr_grpo", kl=KLConfig(coef=0.1, place="loss"))
    result = group_advantages([np.array([1.0, 0.0])], [[2, 1]], algo, kl=[[np.array([1.0, 2.0]), np.array([-1.0])]])
    np.testing.assert_allclose(np.concatenate(result[0]), [0.5, 0.5, -0.5])


def test_kl_is_no_reason_to_learn_from_equal_rewards() -> None:
    # The first group has equal rewards: 0, not +-0.7 from the penalties alone. The second, with coef 0.1: 0.9, -0.2,
    # -0.3, mean 0.1333333, deviations 0.7666667, -0.3333333, -0.4333333, unbiased std 0.6658328.
    algo = AlgoConfig(kl=KLConfig(coef=0.1, place="reward"))
    rewards = [np.array([1.0, 1.0, NAN]), np.array([1.0, 0.0, 0.0])]
    kl = [[np.array([k]) for k in group] for group in ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])]
    result = group_advantages(rewards, [[1, 1, 1]] * 2, algo, kl=kl)
    assert np.concatenate(result[0]).tolist() == [0.0, 0.0, 0.0]
    np.testing.assert_allclose(np.concatenate(result[1]), [1.151440, -0.500626, -0.650814], atol=3e-6)


def test_groups_bring_their_kl_and_their_sums_along() -> None:
    algo = AlgoConfig(advantage="dr_grpo", kl=KLConfig(coef=0.1, place="reward"))
    result = advantages([make_group([1.0, 0.0], [2, 1])], algo, [[np.array([1.0, 2.0]), np.array([-1.0])]])
    np.testing.assert_allclose(np.concatenate(result[0]), [0.3, 0.3, -0.3], atol=1e-6)
    calls: list[np.ndarray] = []
    algo = AlgoConfig(advantage="reinforce_pp")
    result = advantages([make_group([1.0, 0.0], [2, 1])], algo, None, lambda x: (calls.append(x), x)[1])
    assert [x.shape for x in calls] == [(2,), (1,)]
    assert {x.dtype for group in result for x in group} == {np.dtype(np.float32)}


def test_kl_in_the_reward_needs_kl() -> None:
    algo = AlgoConfig(kl=KLConfig(coef=0.1, place="reward"))
    with pytest.raises(ValueError, match="reference log-probs"):
        group_advantages([np.array([1.0, 0.0])], [[1, 1]], algo)


def test_gae_by_hand() -> None:
    # gamma 0.5, lambda 0.5, rewards [0, 1], values [0.4, 0.2]:
    # delta_1 = 1 - 0.2 = 0.8;  delta_0 = 0 + 0.5 * 0.2 - 0.4 = -0.3;  A_0 = -0.3 + 0.25 * 0.8 = -0.1
    np.testing.assert_allclose(gae(np.array([0.0, 1]), np.array([0.4, 0.2]), 0.5, 0.5), [-0.1, 0.8])
    # Without a future, gamma 0: reward - value.
    np.testing.assert_allclose(gae(np.array([0.0, 1]), np.array([0.4, 0.2]), 0.0, 0.0), [-0.4, 0.8])
    with pytest.raises(ValueError, match=r"lam is 1\.5"):
        gae(np.zeros(1), np.zeros(1), 1.0, 1.5)
    with pytest.raises(ValueError, match=r"gae: gamma is -0\.5"):
        gae(np.zeros(1), np.zeros(1), -0.5, 1.0)
    with pytest.raises(ValueError, match=r"rewards \(3,\) and values \(2,\) must be the same"):
        gae(np.zeros(3), np.zeros(2), 1.0, 1.0)


def test_gae_with_lambda_one_is_return_minus_value() -> None:
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=9), rng.normal(size=9)
    np.testing.assert_allclose(gae(rewards, values, 1.0, 1.0), np.cumsum(rewards[::-1])[::-1] - values)


def test_every_token_of_a_sample_gets_its_advantage() -> None:
    result = advantages([make_group([1.0, 0.0], [3, 2])], AlgoConfig(advantage="dr_grpo"))
    assert [x.tolist() for x in result[0]] == [[0.5, 0.5, 0.5], [-0.5, -0.5]]
    assert result[0][0].dtype == np.float32


@pytest.mark.parametrize("name", [*GROUP_LEVEL, *BATCH_LEVEL])
def test_verifier_failures_do_not_touch_the_others(name: str) -> None:
    # A failed verifier must neither score 0 nor shift the mean: the rest is as if it were absent.
    algo = AlgoConfig(advantage=name)
    with_failure = make_group([1.0, 0.0, 0.0, 0.5], [2, 3, 1, 2], ["correct", "verifier_timeout", "wrong", "wrong"])
    without = make_group([1.0, 0.0, 0.5], [2, 1, 2])
    got, expected = advantages([with_failure], algo)[0], advantages([without], algo)[0]
    np.testing.assert_array_equal(got[1], np.zeros(3))
    for a, b in zip([got[0], got[2], got[3]], expected, strict=True):
        np.testing.assert_allclose(a, b)
    assert got[0][0] > 0 > got[2][0]


@pytest.mark.parametrize("name", [*GROUP_LEVEL, *BATCH_LEVEL])
def test_nothing_graded_and_nothing_at_all(name: str) -> None:
    algo = AlgoConfig(advantage=name)
    assert group_advantages([], [], algo) == []
    result = group_advantages([np.array([NAN, NAN])], [[1, 2]], algo)
    assert [x.tolist() for x in result[0]] == [[0], [0, 0]]


rewards_of_groups = st.lists(
    st.lists(st.floats(-3, 3).map(lambda x: round(x, 3)), min_size=2, max_size=6), min_size=1, max_size=4
)


@pytest.mark.parametrize("name", [*GROUP_LEVEL, *BATCH_LEVEL])
@settings(max_examples=30, deadline=None)
@given(rewards=rewards_of_groups, shift=st.floats(-10, 10))
def test_a_constant_added_to_every_reward_changes_nothing(name: str, rewards: list[list[float]], shift: float) -> None:
    algo = AlgoConfig(advantage=name)
    lengths = [[1 + g % 3 for g in range(len(group))] for group in rewards]
    plain = group_advantages([np.array(group) for group in rewards], lengths, algo)
    moved = group_advantages([np.array(group) + shift for group in rewards], lengths, algo)
    for a, b in zip(chain(*plain), chain(*moved), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
def test_a_constant_added_to_one_group_changes_nothing(name: str) -> None:
    algo = AlgoConfig(advantage=name)
    lengths = [[1, 2], [2, 1]]
    plain = group_advantages([np.array([1.0, 0.0]), np.array([0.0, 2.0])], lengths, algo)
    moved = group_advantages([np.array([1.0, 0.0]), np.array([5.0, 7.0])], lengths, algo)
    for a, b in zip(chain(*plain), chain(*moved), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert plain[0][0][0] > 0 > plain[0][1][0]


@pytest.mark.parametrize("name", [*GROUP_LEVEL, *BATCH_LEVEL])
@settings(max_examples=30, deadline=None)
@given(rewards=st.lists(st.floats(-3, 3).map(lambda x: round(x, 3)), min_size=2, max_size=7), seed=st.integers(0, 99))
def test_order_within_a_group_does_not_matter(name: str, rewards: list[float], seed: int) -> None:
    algo = AlgoConfig(advantage=name)
    order = np.random.default_rng(seed).permutation(len(rewards))
    lengths = [1 + g % 3 for g in range(len(rewards))]
    plain = group_advantages([np.array(rewards)], [lengths], algo)[0]
    mixed = group_advantages([np.array(rewards)[order]], [[lengths[i] for i in order]], algo)[0]
    for new, old in enumerate(order):
        np.testing.assert_allclose(mixed[new], plain[old], atol=1e-5)


def test_whitening_over_two_ranks_is_whitening_over_all() -> None:
    whole = np.array([1.0, 4.0, -2.0, 0.5, 3.0])
    shards = [whole[:2], whole[2:]]

    # Ranks run in lockstep: the first call of each is summed with the first call of the other.
    calls: list[list[np.ndarray]] = [[], []]
    for rank in (0, 1):
        whiten(shards[rank], lambda x, rank=rank: (calls[rank].append(x), x)[1])
    mean = whole.mean()

    def global_sum_of(rank: int):
        answers = iter([calls[0][0] + calls[1][0], np.array([np.square(whole - mean).sum()])])
        return lambda x: next(answers)

    both = np.concatenate([whiten(shards[rank], global_sum_of(rank)) for rank in (0, 1)])
    np.testing.assert_allclose(both, whiten(whole), atol=1e-12)
    assert [len(c) for c in calls] == [2, 2]


def test_an_empty_rank_takes_part_in_the_sums() -> None:
    calls: list[np.ndarray] = []
    group_advantages([], [], AlgoConfig(advantage="reinforce_pp"), global_sum=lambda x: (calls.append(x), x)[1])
    assert [x.tolist() for x in calls] == [[0.0, 0.0], [0.0]]


def test_whitening_by_hand() -> None:
    # [0, 2e-6]: mean 1e-6, std 1e-6, so +-1e-6 / (1e-6 + 1e-6). One value is its own mean.
    np.testing.assert_allclose(whiten(np.array([0.0, 2e-6])), [-0.5, 0.5])
    assert whiten(np.array([5.0])).tolist() == [0.0]


@pytest.mark.filterwarnings("error")
def test_nothing_is_centred_without_a_warning() -> None:
    assert dr_grpo(np.zeros(0)).shape == rloo(np.zeros(0)).shape == (0,)
    algo = AlgoConfig(advantage="reinforce_pp_baseline")
    result = group_advantages([np.array([NAN, NAN]), np.array([1.0, 0.0])], [[1, 1], [1, 1]], algo)
    np.testing.assert_allclose(np.concatenate([*result[0], *result[1]]), [0, 0, 1, -1], atol=3e-6)


@pytest.mark.parametrize("name", [*GROUP_LEVEL])
def test_a_group_without_differences_is_exactly_zero(name: str) -> None:
    # 0.1 + 0.1 + 0.1 is not 0.3 in floating point; `advantages.any()` must still see that nothing can be learned.
    algo = AlgoConfig(advantage=name)
    result = group_advantages([np.array([0.1, 0.1, 0.1]), np.array([1.0, 0.0, 0.0])], [[2, 1, 1], [1, 1, 1]], algo)
    assert not np.concatenate(result[0]).any()
    assert np.concatenate(result[1]).any()


def test_zero_variance() -> None:
    assert is_zero_variance(np.array([1.0, 1.0, 1.0]))
    assert is_zero_variance(np.array([1.0, NAN]))
    assert not is_zero_variance(np.array([1.0, 0.0, NAN]))
    assert is_zero_variance(np.array([0.0, 0.9e-8]))
    assert not is_zero_variance(np.array([0.0, 1e-8]))


def test_inputs_are_checked() -> None:
    with pytest.raises(ValueError, match="2 lengths"):
        group_advantages([np.zeros(3)], [[1, 1]], AlgoConfig())
    with pytest.raises(ValueError, match="inf"):
        group_advantages([np.array([np.inf, 0.0])], [[1, 1]], AlgoConfig())
    with pytest.raises(ValueError, match="sample 1: kl needs 2"):
        group_advantages([np.zeros(2)], [[1, 2]], AlgoConfig(), kl=[[np.zeros(1), np.zeros(1)]])


# --- credit by turn ---------------------------------------------------------------------------------------------------


def played(*episodes: tuple[tuple[float, ...], tuple[int, ...]]) -> Group:
    """A group of rollouts: what each turn earned, and the tokens of each turn."""
    rollouts, rewards = [], []
    for index, (earned, counts) in enumerate(episodes):
        turns = [Turn(np.zeros(1, np.int64), np.ones(n, np.int64), np.zeros(n, np.float32), "stop", 0) for n in counts]
        rollouts.append(Rollout("p", index, tuple(turns), ""))
        rewards.append(Reward(sum(earned), {}, "correct", turns=earned if len(earned) > 1 else ()))
    return Group(Problem("p", "t", (), None), tuple(rollouts), tuple(rewards))


def test_the_credit_of_turns_by_hand():
    """Rewards of turns: 1, 0 | 0, 3; mean 1; each turn's tokens get the centred rewards from their turn on."""
    group = played(((1.0, 0.0), (2, 1)), ((0.0, 3.0), (1, 2)))
    by_turn = advantages([group], AlgoConfig(advantage="dr_grpo", credit="turn"))[0]
    assert [a.tolist() for a in by_turn] == [[-1.0, -1.0, -1.0], [1.0, 2.0, 2.0]]
    std = np.sqrt(2.0)  # of 1, 0, 0, 3, unbiased: ((0 + 1 + 1 + 4) / 3) ** 0.5
    scaled = advantages([group], AlgoConfig(advantage="grpo", credit="turn"))[0]
    np.testing.assert_allclose(scaled[1], np.array([1.0, 2.0, 2.0]) / (std + 1e-6), rtol=1e-6)


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo"])
def test_with_one_turn_each_the_credit_of_turns_is_that_of_episodes(advantage):
    group = played(((1.0,), (2,)), ((0.0,), (1,)), ((0.5,), (3,)))
    each = [advantages([group], AlgoConfig(advantage=advantage, credit=credit))[0] for credit in ("turn", "episode")]
    for a, b in zip(*each, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_the_credit_of_turns_leaves_failed_rollouts_out():
    group = played(((1.0, 0.0), (1, 1)), ((0.0, 0.0), (1, 1)), ((9.0, 9.0), (1, 1)))
    failed = replace(group, rewards=(*group.rewards[:2], Reward(0.0, {}, "verifier_error")))
    by_turn = advantages([failed], AlgoConfig(advantage="dr_grpo", credit="turn"))[0]
    assert [a.tolist() for a in by_turn] == [[0.5, -0.25], [-0.5, -0.25], [0.0, 0.0]]


def test_a_reward_as_a_whole_is_the_credit_of_every_turn():
    """Rewards 2 (of two turns together) and 0: centred 1 and -1."""
    group = played(((2.0,), (3,)), ((0.0,), (1,)))
    long = group.rollouts[0]
    turns = tuple(
        replace(long.turns[0], completion_ids=np.ones(n, int), logprobs=np.zeros(n, np.float32)) for n in (1, 2)
    )
    group = replace(group, rollouts=(replace(long, turns=turns), group.rollouts[1]))
    by_turn = advantages([group], AlgoConfig(advantage="dr_grpo", credit="turn"))[0]
    assert [a.tolist() for a in by_turn] == [[1.0, 1.0, 1.0], [-1.0]]
    assert {a.dtype for a in by_turn} == {np.dtype(np.float32)}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo"])
def test_turns_without_differences_and_ungraded_groups_teach_nothing(advantage):
    algo = AlgoConfig(advantage=advantage, credit="turn")
    equal = played(((0.1, 0.1), (1, 2)), ((0.1,), (1,)))
    assert [a.tolist() for a in advantages([equal], algo)[0]] == [[0, 0, 0], [0]]
    failed = replace(equal, rewards=(Reward(1.0, {}, "verifier_error"), Reward(0.0, {}, "verifier_timeout")))
    assert [a.tolist() for a in advantages([failed], algo)[0]] == [[0, 0, 0], [0]]


def test_groups_lengths_and_penalties_are_of_one_number() -> None:
    reward, kl = np.zeros(1), [np.zeros(1)]
    with pytest.raises(ValueError, match="2 groups of rewards, 1 of lengths, None of kl"):
        group_advantages([reward, reward], [[1]], AlgoConfig())
    with pytest.raises(ValueError, match="1 groups of rewards, 1 of lengths"):
        group_advantages([reward], [[1]], AlgoConfig(), kl=[kl, kl])
    with pytest.raises(ValueError, match="group 1: rewards have shape"):
        group_advantages([reward, np.zeros((1, 1))], [[1], [1]], AlgoConfig())
    for values in (np.zeros(2), np.array([np.nan]), np.array([np.inf])):
        with pytest.raises(ValueError, match="group 1, sample 0: kl needs 1"):
            group_advantages([reward, reward], [[1], [1]], AlgoConfig(), kl=[kl, [values]])
    with pytest.raises(ValueError, match="zip"):
        group_advantages([reward], [[1]], AlgoConfig(), kl=[[np.zeros(1), np.zeros(1)]])


@pytest.mark.parametrize("name", [*GROUP_LEVEL, *BATCH_LEVEL])
def test_every_method_gives_float32_for_every_token(name: str) -> None:
    algo = AlgoConfig(advantage=name, kl=KLConfig(coef=0.5, place="reward"))
    kl = [[np.array([0.5, 0.25]), np.zeros(1), np.zeros(0)]]
    (result,) = group_advantages([np.array([1.0, NAN, 0.0])], [[2, 1, 0]], algo, kl=kl)
    assert [(a.dtype, a.shape) for a in result] == [(np.float32, (2,)), (np.float32, (1,)), (np.float32, (0,))]


def test_one_sequence_at_a_time() -> None:
    with pytest.raises(ValueError, match=r"must be the same \[L\]"):
        gae(np.zeros((2, 2)), np.zeros((2, 2)), 1.0, 1.0)
    assert gae(np.zeros(0), np.zeros(0), 1.0, 1.0).shape == (0,)


def test_sums_are_taken_in_double_precision() -> None:
    """60000 + 60000 is infinite in float16; 2 ** 24 + 1 + 1 is 2 ** 24 in float32."""
    halves = np.array([60000.0, 60000.0, 0.0], np.float16)
    (result,) = group_advantages([halves], [[1, 1, 1]], AlgoConfig(advantage="rloo"))
    np.testing.assert_allclose(np.concatenate(result), [30000.0, 30000.0, -60000.0], rtol=1e-3)
    algo = AlgoConfig(advantage="dr_grpo", kl=KLConfig(coef=1.0, place="reward"))
    kl = [[np.array([2.0**24, 1.0, 1.0]), np.array([2.0**24])]]
    (result,) = group_advantages([np.zeros(2)], [[3, 1]], algo, kl=kl)
    assert [a.tolist() for a in result] == [[-1.0, -1.0, -1.0], [1.0]]
