from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.learn.losses import LOSSES, Clip
from hone.learn.reduce import REDUCTIONS, token_weights


def test_by_hand() -> None:
    # Samples with 2 and 6 trained tokens.
    np.testing.assert_allclose(token_weights([2, 6], "token_mean"), [1 / 8, 1 / 8])
    np.testing.assert_allclose(token_weights([2, 6], "sequence_mean"), [1 / 4, 1 / 12])
    np.testing.assert_allclose(token_weights([2, 6], "constant", 10), [1 / 20, 1 / 20])


def test_one_sample_of_one_token_counts_whole() -> None:
    for name in REDUCTIONS:
        assert token_weights([1], name, 1).tolist() == [1.0]
    assert token_weights([2, 6], "sequence_mean").dtype == np.float64
    assert token_weights([3], "token_mean").tolist() == [1 / 3]
    assert token_weights([3], "constant", 4).tolist() == [1 / 4]
    with pytest.raises(ValueError, match="max_tokens is 0"):
        token_weights([0], "constant", 0)


def test_a_masked_sample_counts_as_a_sample() -> None:
    # Three samples, one without trained tokens: its weight meets no token, but S is 3.
    np.testing.assert_allclose(token_weights([2, 0, 6], "token_mean"), [1 / 8] * 3)
    np.testing.assert_allclose(token_weights([2, 0, 6], "sequence_mean")[[0, 2]], [1 / 6, 1 / 18])
    np.testing.assert_allclose(token_weights([2, 0, 6], "constant", 10)[[0, 2]], [1 / 30, 1 / 30])


@pytest.mark.parametrize("name", list(REDUCTIONS))
def test_nothing_to_train_on_is_no_error(name: str) -> None:
    assert token_weights([], name, 5).shape == (0,)
    assert np.isfinite(token_weights([0, 0], name, 5)).all()


def test_inputs_are_checked() -> None:
    with pytest.raises(ValueError, match="token_mean, sequence_mean, constant"):
        token_weights([1], "mean")
    with pytest.raises(ValueError, match="max_tokens is None"):
        token_weights([1], "constant")
    with pytest.raises(ValueError, match="has 7 trained tokens, max_tokens 6"):
        token_weights([1, 7], "constant", 6)
    with pytest.raises(ValueError, match="not negative"):
        token_weights([1, -1], "token_mean")


@pytest.mark.parametrize("reduction", list(REDUCTIONS))
@pytest.mark.parametrize("loss", list(LOSSES))
@given(lengths=st.lists(st.integers(1, 9), min_size=2, max_size=12), seed=st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_any_split_of_the_batch_gives_the_same_gradient(
    loss: str, reduction: str, lengths: list[int], seed: int
) -> None:
    """Into 1, 2 or 7 micro-batches, in any order of samples: packing is no hyper-parameter."""
    batch = _random_batch(lengths, seed)
    weights = token_weights(lengths, reduction, max_tokens=9)
    rng = np.random.default_rng(seed)
    gradients = []
    for parts in (1, 2, 7):
        theta = batch.theta.clone().requires_grad_()
        for chosen in np.array_split(rng.permutation(len(lengths)), parts):
            rows = [row for s in chosen for row in batch.rows[s]]
            if not rows:
                continue
            index = torch.tensor(rows)
            owner = torch.tensor([new for new, s in enumerate(chosen) for _ in batch.rows[s]])
            logprobs = -torch.nn.functional.softplus(batch.features[index] @ theta)
            per_token, _ = LOSSES[loss](logprobs, batch.old[index], batch.advantages[index], owner, Clip(0.2, 0.3))
            w = torch.tensor([weights[s] for s in chosen for _ in batch.rows[s]], dtype=torch.float32)
            (per_token * w).sum().backward()
        gradients.append(theta.grad)
    scale = max(1.0, gradients[0].abs().max().item())
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], atol=1e-6 * scale, rtol=0)


def _random_batch(lengths: list[int], seed: int) -> SimpleNamespace:
    """A model with 5 parameters: logprob = -softplus(features @ theta)."""
    generator, total = torch.Generator().manual_seed(seed), sum(lengths)
    theta = torch.randn(5, generator=generator)
    features = torch.randn(total, 5, generator=generator)
    old = -torch.nn.functional.softplus(features @ theta + 0.3 * torch.randn(total, generator=generator))
    starts = np.cumsum([0, *lengths])
    return SimpleNamespace(
        theta=theta,
        features=features,
        old=old,
        advantages=torch.randn(total, generator=generator),
        rows=[list(range(starts[s], starts[s + 1])) for s in range(len(lengths))],
    )
