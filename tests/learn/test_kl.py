from __future__ import annotations

import math

import pytest
import torch

from hone.learn.kl import kl_estimate


def test_by_hand() -> None:
    # p = 0.5, p_ref = 0.25: d = log 2 = 0.6931472
    # k1 = d;  k2 = d^2 / 2 = 0.2402265;  k3 = 1/2 - 1 + d = 0.1931472
    # and the other way round, d = -log 2: k1 = -0.6931472;  k2 the same;  k3 = 2 - 1 - 0.6931472 = 0.3068528
    p, ref = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.5]).log()
    torch.testing.assert_close(kl_estimate(p, ref, "k1"), torch.tensor([0.6931472, -0.6931472]))
    torch.testing.assert_close(kl_estimate(p, ref, "k2"), torch.tensor([0.2402265, 0.2402265]))
    torch.testing.assert_close(kl_estimate(p, ref, "k3"), torch.tensor([0.1931472, 0.3068528]))


def test_gradients_by_hand() -> None:
    # d/d logp: k1 1;  k2 d;  k3 1 - exp(-d). At d = log 2: 1, 0.6931472, 0.5: all pull p down towards p_ref.
    for name, expected in (("k1", 1.0), ("k2", math.log(2)), ("k3", 0.5)):
        p = torch.tensor([0.5]).log().requires_grad_()
        kl_estimate(p, torch.tensor([0.25]).log(), name).sum().backward()
        assert p.grad is not None
        torch.testing.assert_close(p.grad, torch.tensor([expected]))


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased(name: str) -> None:
    # Exactly: the expectation under p over the whole vocabulary is the KL divergence.
    p, q = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    expected = (p.exp() * (p - q)).sum()
    assert expected > 0.1
    torch.testing.assert_close((p.exp() * kl_estimate(p, q, name)).sum(), expected)


def test_gradient_of_k2_is_that_of_the_divergence() -> None:
    # On-policy E_p[d k2 / d theta] = E_p[d * grad logp] = grad KL(p || q); for k1 it is 0.
    logits = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    q = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
    p = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
    weights = p.detach().exp()
    (of_k2,) = torch.autograd.grad((weights * kl_estimate(p, q, "k2")).sum(), logits, retain_graph=True)
    (of_k1,) = torch.autograd.grad((weights * kl_estimate(p, q, "k1")).sum(), logits)
    torch.testing.assert_close(of_k2, exact)
    torch.testing.assert_close(of_k1, torch.zeros_like(exact), atol=1e-12, rtol=0)


def test_k3_keeps_its_digits_near_zero() -> None:
    # d = 1e-4: k3 = d^2 / 2 = 5e-9 to first order; exp(-d) - 1 + d in float32 gives about 0 or 6e-8.
    value = kl_estimate(torch.tensor([1e-4]), torch.tensor([0.0]), "k3")
    assert 4e-9 < value.item() < 6e-9


def test_inputs_are_checked() -> None:
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(ValueError, match="differ"):
        kl_estimate(torch.zeros(1), torch.zeros(2), "k1")
