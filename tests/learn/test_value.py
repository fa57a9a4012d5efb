"""PPO's value head: advantages and targets by hand, a loss that trains the head alone, values that learn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hone.learn import checkpoint
from hone.learn.advantages import gae_advantages
from hone.learn.batches import prepare
from hone.learn.losses import value_loss
from hone.recipe.sections.algo import AlgoConfig, ValueConfig
from hone.recipe.sections.optim import OptimConfig
from tests.learn.policies import (
    OPTIM,
    REWARDS,
    SAMPLING,
    gradient_of,
    load,
    make_groups,
    packer,
    random_head,
)

PPO = AlgoConfig(advantage="gae", value=ValueConfig(lr=0.05, gamma=1.0, lam=1.0, clip=None))


def test_advantages_and_targets_by_hand() -> None:
    """One sequence, reward 1 at the end, values 0.5 and 0.25, gamma 0.9, lambda 0.5:
    delta_2 = 1 - 0.25 = 0.75; delta_1 = 0.9 * 0.25 - 0.5 = -0.275; A_1 = -0.275 + 0.45 * 0.75 = 0.0625."""
    values = [[np.asarray([0.5, 0.25], np.float32)]]
    whitened, targets = gae_advantages([np.asarray([1.0])], values, gamma=0.9, lam=0.5)
    np.testing.assert_allclose(targets[0][0], [0.5625, 1.0], rtol=1e-6)
    np.testing.assert_allclose(whitened[0][0], [-1.0, 1.0], rtol=1e-4)  # of 0.0625 and 0.75


def test_penalties_are_paid_where_they_arise_and_the_ungraded_have_no_advantage() -> None:
    values = [[np.zeros(2, np.float32), np.zeros(3, np.float32)]]
    penalties = [[np.asarray([0.25, 0.0]), np.zeros(3)]]
    whitened, targets = gae_advantages([np.asarray([1.0, np.nan])], values, penalties, gamma=1.0, lam=1.0)
    np.testing.assert_allclose(targets[0][0], [0.75, 1.0])
    np.testing.assert_allclose(whitened[0][0], [-1.0, 1.0], rtol=1e-4)
    np.testing.assert_array_equal(whitened[0][1], [0.0, 0.0, 0.0])
    np.testing.assert_array_equal(targets[0][1], [0.0, 0.0, 0.0])
    assert {a.dtype for a in (*whitened[0], *targets[0])} == {np.dtype(np.float32)}


def test_penalties_of_the_last_token_and_of_whole_numbers() -> None:
    """To go: 0.5 - 2 - 1 and 0.5 - 2."""
    values = [[np.zeros(2, np.float32)]]
    _, targets = gae_advantages([np.asarray([0.5])], values, [[np.asarray([1, 2])]], gamma=1.0, lam=1.0)
    np.testing.assert_allclose(targets[0][0], [-2.5, -1.5])
    with pytest.raises(ValueError, match="sample 0: kl needs 2"):
        gae_advantages([np.asarray([0.5])], values, [[np.zeros(1)]], gamma=1.0, lam=1.0)


def test_the_loss_of_a_value_by_hand() -> None:
    values, old, targets = torch.tensor([1.0, 1.0, 0.5]), torch.tensor([0.5, 0.5, 0.5]), torch.tensor([2.0, 0.0, 1.0])
    np.testing.assert_allclose(value_loss(values, old, targets, None), [0.5, 0.5, 0.125])
    # Clipped to 0.7: further from 2 than 1.0 is (1.3^2 / 2), nearer to 0 (so it does not count).
    np.testing.assert_allclose(value_loss(values, old, targets, 0.2), [0.845, 0.5, 0.125], rtol=1e-6)
    with pytest.raises(ValueError, match="same"):
        value_loss(values, old[:2], targets, None)


def test_the_head_does_not_train_the_policy(folder: Path) -> None:
    """Other targets for the values: another gradient of the head, the same one of the model."""
    policy = load(folder, OPTIM, PPO.value)
    random_head(policy)
    batch = prepare(make_groups(REWARDS), policy, None, PPO, SAMPLING, packer(10_000))
    other = [[replace(m, value_targets=m.value_targets + 5.0) for m in update] for update in batch.minibatches]  # type: ignore[operator]
    one, two = (gradient_of(policy, updates, PPO) for updates in (batch.minibatches, other))
    model = sum(p.numel() for p in policy.parameters)
    np.testing.assert_array_equal(one[:model], two[:model])
    assert np.abs(one[model:] - two[model:]).max() > 1e-3


def test_values_learn_what_the_rewards_are(folder: Path) -> None:
    groups = make_groups([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    policy = load(folder, OptimConfig(lr=1e-9), PPO.value)
    losses = []
    for _ in range(10):
        batch = prepare(groups, policy, None, PPO, SAMPLING, packer(60))
        losses.append(policy.update(batch.minibatches, PPO, 1.0).metrics["value/loss"])
    # At first every value is 0: the squares of the targets, weighted by tokens.
    ones, all_ = (sum(r.num_tokens for g in gs for r in g.rollouts) for gs in (groups[:1], groups))
    assert losses[0] == pytest.approx(0.5 * ones / all_, rel=1e-5)
    assert losses[-1] < 0.6 * losses[0]


def test_a_restored_head_continues_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    def train(policy, steps) -> None:  # type: ignore[no-untyped-def]
        for seed in steps:
            batch = prepare(make_groups(REWARDS, seed), policy, None, PPO, SAMPLING, packer(60))
            policy.update(batch.minibatches, PPO, 1.0)

    whole, first, second = (load(folder, OptimConfig(lr=1e-3), PPO.value) for _ in range(3))
    train(whole, range(4))
    train(first, range(2))
    checkpoint.save(tmp_path, 2, first, keep=1)
    saved = checkpoint.newest_good(tmp_path, print)
    assert saved is not None
    second.restore(saved, checkpoint.read_state(saved)["policy"])
    train(second, range(2, 4))
    for a, b in zip(second.optimizer.stepped(), whole.optimizer.stepped(), strict=True):
        assert torch.equal(a, b)
