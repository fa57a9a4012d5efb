from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hone.learn.losses import LOSSES, Clip, _surrogate, cispo, clipped, gspo, sampler_correction, value_loss
from hone.recipe.sections.algo import AlgoConfig

BOUNDS = Clip(0.2, 0.2)


def leaf(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log().requires_grad_()


def close(actual: Any, expected: list[float]) -> None:
    torch.testing.assert_close(torch.as_tensor(actual).detach(), torch.tensor(expected), atol=2e-6, rtol=0)


def one_sample(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int64)


def test_clipped_by_hand() -> None:
    # rho = [1.5, 1.5, 0.5, 0.5, 1.1], A = [1, -1, 1, -1, 2], bounds 0.8..1.2
    # -min(1.5, 1.2) = -1.2 clipped;      -min(-1.5, -1.2) = 1.5;    -min(0.5, 0.8) = -0.5
    # -min(-0.5, -0.8) = 0.8 clipped;     -min(2.2, 2.2) = -2.2
    # d loss / d logp = -rho A where not clipped: 0, 1.5, -0.5, 0, -2.2
    p = leaf(0.6, 0.6, 0.2, 0.2, 0.44)
    old = torch.full((5,), math.log(0.4))
    loss, cut = clipped(p, old, torch.tensor([1.0, -1, 1, -1, 2]), one_sample(5), BOUNDS)
    close(loss, [-1.2, 1.5, -0.5, 0.8, -2.2])
    assert cut.tolist() == [True, False, False, True, False]
    loss.sum().backward()
    close(p.grad, [0.0, 1.5, -0.5, 0.0, -2.2])


def test_clip_higher_by_hand() -> None:
    # clip_high 0.4: rho = 1.3 with A = 1 is now inside: loss -1.3, gradient -1.3. The lower bound stays 0.8:
    # rho = 0.7 with A = -1 is outside: loss -min(-0.7, -0.8) = 0.8, no gradient.
    p, old = leaf(0.52, 0.28), torch.full((2,), math.log(0.4))
    loss, cut = clipped(p, old, torch.tensor([1.0, -1]), one_sample(2), Clip(0.2, 0.4))
    close(loss, [-1.3, 0.8])
    loss.sum().backward()
    close(p.grad, [-1.3, 0.0])
    assert cut.tolist() == [False, True]


def test_dual_clip_by_hand() -> None:
    # A = -1: rho = 5 would give a loss of 5, at most c = 3; rho = 2 stays 2. A = +1 is not touched: -1.2.
    p, old = leaf(0.5, 0.2, 0.5), torch.full((3,), math.log(0.1))
    loss, cut = clipped(p, old, torch.tensor([-1.0, -1, 1]), one_sample(3), Clip(0.2, 0.2, 3.0))
    close(loss, [3.0, 2.0, -1.2])
    assert cut.tolist() == [True, False, True]
    loss.sum().backward()
    close(p.grad, [0.0, 2.0, 0.0])


@pytest.mark.parametrize("name", list(LOSSES))
def test_on_policy_is_the_plain_policy_gradient(name: str) -> None:
    # rho = 1: d loss / d logp = -A for every loss, so descent raises the log-prob of good tokens.
    p = leaf(0.3, 0.5, 0.9)
    loss, cut = LOSSES[name](p, None, torch.tensor([2.0, -1.0, 0.5]), torch.tensor([0, 0, 1]), BOUNDS)
    loss.sum().backward()
    close(p.grad, [-2.0, 1.0, -0.5])
    assert not cut.any()


def test_gspo_by_hand() -> None:
    # Sample 0: rho = [2, 0.5], mean log 0, s = 1. Sample 1: rho = [1.5, 1.5, 1.5], s = 1.5. A = 1 and 1.
    # Loss -1 and -1.2 (clipped) per token; gradient -s A = -1 where not clipped.
    p, old = leaf(0.4, 0.1, 0.3, 0.3, 0.3), torch.full((5,), math.log(0.2))
    loss, cut = gspo(p, old, torch.ones(5), torch.tensor([0, 0, 1, 1, 1]), BOUNDS)
    close(loss, [-1.0, -1.0, -1.2, -1.2, -1.2])
    assert cut.tolist() == [False, False, True, True, True]
    loss.sum().backward()
    close(p.grad, [-1.0, -1.0, 0.0, 0.0, 0.0])


def test_gspo_ratio_is_the_geometric_mean() -> None:
    # rho = [1.21, 1]: s = sqrt(1.21) = 1.1; A = 2: loss and gradient -2.2 per token.
    p = leaf(0.242, 0.2)
    loss, _ = gspo(p, torch.full((2,), math.log(0.2)), torch.full((2,), 2.0), one_sample(2), BOUNDS)
    close(loss, [-2.2, -2.2])
    loss.sum().backward()
    close(p.grad, [-2.2, -2.2])


def test_cispo_by_hand() -> None:
    # rho = [2, 0.5, 1], A = [1, -1, 3]; weights clipped to [1.2, 0.8, 1]; loss = -w A log p; gradient -w A.
    p, old = leaf(0.4, 0.1, 0.2), torch.full((3,), math.log(0.2))
    loss, cut = cispo(p, old, torch.tensor([1.0, -1, 3]), one_sample(3), BOUNDS)
    close(loss, [-1.2 * math.log(0.4), 0.8 * math.log(0.1), -3 * math.log(0.2)])
    assert cut.tolist() == [True, True, False]
    loss.sum().backward()
    close(p.grad, [-1.2, 0.8, -3.0])


def test_sampler_correction_by_hand() -> None:
    # r = trainer / sampler = [0.5, 1, 3], cap 2.
    trainer, sampler = torch.tensor([0.1, 0.2, 0.6]).log(), torch.full((3,), math.log(0.2))
    close(sampler_correction(trainer, sampler, "none", 2.0), [1.0, 1.0, 1.0])
    close(sampler_correction(trainer, sampler, "tis", 2.0), [0.5, 1.0, 2.0])
    close(sampler_correction(trainer, sampler, "mis", 2.0), [0.5, 1.0, 0.0])
    assert not sampler_correction(trainer.requires_grad_(), sampler, "tis", 2.0).requires_grad


@pytest.mark.parametrize("name", list(LOSSES))
def test_order_does_not_matter(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    p, old = torch.rand(2, 12, generator=generator).clamp(0.05).log()
    advantages, samples = torch.randn(12, generator=generator), torch.arange(12) // 4
    order = torch.randperm(12, generator=generator)
    plain = LOSSES[name](p, old, advantages, samples, BOUNDS)
    mixed = LOSSES[name](p[order], old[order], advantages[order], 2 - samples[order], BOUNDS)
    torch.testing.assert_close(mixed.loss, plain.loss[order], atol=1e-6, rtol=0)
    assert torch.equal(mixed.clipped, plain.clipped[order])


@pytest.mark.parametrize("name", list(LOSSES))
def test_no_tokens(name: str) -> None:
    empty = torch.zeros(0, requires_grad=True)
    loss, cut = LOSSES[name](empty, None, torch.zeros(0), torch.zeros(0, dtype=torch.int64), BOUNDS)
    loss.sum().backward()
    assert loss.shape == cut.shape == (0,)


@pytest.mark.parametrize("name", list(LOSSES))
def test_what_is_not_finite_is_a_loss_that_is_not_finite(name: str) -> None:
    """Never an error in the middle of a step, and never a token that quietly counts 0."""
    index, p = one_sample(2), leaf(0.5, 0.5)
    for old, advantages in ((None, [1.0, math.nan]), ([0.0, math.nan], [1.0, 1.0])):
        given = None if old is None else torch.tensor(old)
        loss, _ = LOSSES[name](p, given, torch.tensor(advantages), index, BOUNDS)
        assert not torch.isfinite(loss[1])


def test_inputs_are_checked() -> None:
    p, zeros, index = leaf(0.5, 0.5), torch.zeros(2), one_sample(2)
    with pytest.raises(ValueError, match=r"advantages has shape \(3,\), logprobs \(2,\)"):
        clipped(p, None, torch.zeros(3), index, BOUNDS)
    with pytest.raises(ValueError, match="samples must be int64"):
        gspo(p, None, zeros, zeros, BOUNDS)
    with pytest.raises(ValueError, match=r"clip_low is -0\.1"):
        clipped(p, None, zeros, index, Clip(-0.1, 0.2))
    with pytest.raises(ValueError, match=r"dual_clip is 1\.1"):
        clipped(p, None, zeros, index, Clip(0.2, 0.2, 1.1))
    with pytest.raises(ValueError, match="cispo has no dual clip"):
        cispo(p, None, zeros, index, Clip(0.2, 0.2, 3.0))
    with pytest.raises(ValueError, match="none, tis, mis"):
        sampler_correction(zeros, zeros, "is", 2.0)


def test_a_current_logprob_that_is_not_finite_reaches_the_trainer() -> None:
    loss, _ = clipped(torch.tensor([math.nan]), torch.zeros(1), torch.ones(1), one_sample(1), BOUNDS)
    assert loss.isnan().all()


def test_the_dual_clip_is_above_the_clip() -> None:
    with pytest.raises(ValueError, match="above 1 \\+ clip_high"):
        AlgoConfig(dual_clip=1.1)


# --- at the bounds -----------------------------------------------------------------------------


def test_at_a_bound_nothing_is_clipped_yet() -> None:
    # Binary fractions, so that rho is exact: bounds 0.5 and 1.5, rho = [1.5, 0.5], A = [1, -1]: -1.5 and +0.5.
    loss, cut = _exact([1.5, 0.5], [1.0, -1.0])
    close(loss, [-1.5, 0.5])
    assert cut.tolist() == [False, False]


def test_without_an_advantage_nothing_is_clipped() -> None:
    loss, cut = _exact([4.0, 0.25, 4.0], [0.0, 0.0, 0.0], dual=2.0)
    close(loss, [0.0, 0.0, 0.0])
    assert cut.tolist() == [False, False, False]


def test_small_advantages_are_clipped_on_their_own_side() -> None:
    # A = 0.5: rho = 0.25 is not clipped (-0.125); beyond 1 + high -0.5 * 1.5. A = -0.5: 0.5 * 0.5 below 1 - low.
    loss, cut = _exact([0.25, 4.0, 0.25], [0.5, 0.5, -0.5])
    close(loss, [-0.125, -0.75, 0.25])
    assert cut.tolist() == [False, True, True]


def test_dual_clip_scales_with_the_advantage_and_begins_above_its_bound() -> None:
    # c = 2, A = -0.5: rho = 4 gives c * 0.5 = 1; rho = 2 is at the bound, 1 as well, and not cut..
    loss, cut = _exact([4.0, 2.0, 4.0], [-0.5, -0.5, 0.5], dual=2.0)
    close(loss, [1.0, 1.0, -0.75])
    assert cut.tolist() == [True, False, True]


def _exact(ratios: list[float], advantages: list[float], dual: float | None = None) -> Any:
    """The surrogate at ratios that no logarithm has rounded; bounds 0.5 and 1.5."""
    return _surrogate(torch.tensor(ratios), torch.tensor(advantages), Clip(0.5, 0.5, dual))


def test_mis_keeps_a_weight_at_the_cap() -> None:
    # r = exp(0) = 1 exactly, cap 1: kept. A cap below 1 is allowed.
    zeros = torch.zeros(1)
    close(sampler_correction(zeros, zeros, "mis", 1.0), [1.0])
    close(sampler_correction(zeros, zeros, "mis", 0.5), [0.0])
    close(sampler_correction(zeros, zeros, "tis", 0.5), [0.5])
    with pytest.raises(ValueError, match=r"cap is 0\.0"):
        sampler_correction(zeros, zeros, "tis", 0.0)


def test_gspo_has_a_dual_clip_and_a_ratio_for_a_single_token() -> None:
    # One token, rho = 5, A = -1: the loss is 3, not 5.
    p, old = leaf(0.5), torch.full((1,), math.log(0.1))
    loss, cut = gspo(p, old, torch.tensor([-1.0]), one_sample(1), Clip(0.2, 0.2, 3.0))
    close(loss, [3.0])
    assert cut.tolist() == [True]
    with pytest.raises(ValueError, match=r"dual_clip is 1\.1"):
        gspo(p, old, torch.tensor([-1.0]), one_sample(1), Clip(0.2, 0.2, 1.1))


def test_gspo_keeps_double_precision() -> None:
    p = torch.full((3,), math.log(0.3), dtype=torch.float64)
    assert gspo(p, p, torch.ones(3, dtype=torch.float64), one_sample(3), BOUNDS).loss.dtype == torch.float64


def test_bounds_that_are_allowed_and_those_that_are_not() -> None:
    p, zeros, index = leaf(0.5, 0.5), torch.zeros(2), one_sample(2)
    clipped(p, None, zeros, index, Clip(0.0, 0.0, 1.5))
    for name in ("clip_low", "clip_high"):
        with pytest.raises(ValueError, match=f"{name} is inf"):
            Clip(**{"low": 0.2, "high": 0.2, name.removeprefix("clip_"): math.inf})
    with pytest.raises(ValueError, match=r"dual_clip is 1\.5"):
        clipped(p, None, zeros, index, Clip(0.5, 0.5, 1.5))


def test_shapes_are_named() -> None:
    p, zeros, index = leaf(0.5, 0.5), torch.zeros(2), one_sample(2)
    with pytest.raises(ValueError, match=r"old_logprobs has shape \(3,\), logprobs \(2,\)"):
        clipped(p, torch.zeros(3), zeros, index, BOUNDS)
    with pytest.raises(ValueError, match=r"advantages has shape \(3,\)"):
        clipped(p, zeros, torch.zeros(3), index, BOUNDS)
    with pytest.raises(ValueError, match=r"samples has shape \(3,\)"):
        clipped(p, None, zeros, one_sample(3), BOUNDS)
    for wrong in (zeros.long(), torch.zeros(2, 1)):
        with pytest.raises(ValueError, match=r"logprobs must be floating point \[N\]"):
            clipped(wrong, None, zeros, index, BOUNDS)
    with pytest.raises(ValueError, match="differ"):
        sampler_correction(zeros, torch.zeros(3), "tis", 2.0)


def test_values_are_clipped_on_both_sides() -> None:
    # V_old = 0, c = 1. V = -3, target 0: (-3)^2 beats (-1)^2: 4.5. V = -3, target -4: max(1, 9) / 2 = 4.5.
    # V = 3, target 4: max(1, 9) / 2 = 4.5. V = 0.5, target 2: 2.25 / 2.
    values, zeros = torch.tensor([-3.0, -3.0, 3.0, 0.5]), torch.zeros(4)
    close(value_loss(values, zeros, torch.tensor([0.0, -4.0, 4.0, 2.0]), 1.0), [4.5, 4.5, 4.5, 1.125])
