"""The objective by hand: every term's sign, and what each metric sums."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hone.learn.objective import METRICS, objective
from hone.recipe.sections.algo import AlgoConfig
from hone.types import Block, MicroBatch


def _batch(**changes: Any) -> MicroBatch:
    """Two tokens of one sample, weights 0.5 and 0.25, advantages 1 and -2."""
    fields: dict[str, Any] = {
        "inputs": torch.tensor([1, 2, 3]),
        "positions": torch.arange(3),
        "layout": (Block(3, ()),),
        "sources": torch.tensor([0, 1]),
        "targets": torch.tensor([2, 3]),
        "sample_ids": (0,),
        "weights": torch.tensor([0.5, 0.25]),
        "advantages": torch.tensor([1.0, -2.0]),
        "samples": torch.zeros(2, dtype=torch.int64),
        "sampled_logprobs": torch.tensor([0.2, 0.4]).log(),
    }
    return MicroBatch(**fields | changes)


def _algo(**settings: Any) -> AlgoConfig:
    return AlgoConfig.model_validate({"updates_per_rollout": 1, **settings})


def _run(batch: MicroBatch, algo: AlgoConfig) -> tuple[float, list[float], list[float], dict[str, float]]:
    """loss, d loss / d logprobs, d loss / d entropy, metrics; p = [0.2, 0.4], H = [1, 3]."""
    logprobs = torch.tensor([0.2, 0.4]).log().requires_grad_()
    entropy = torch.tensor([1.0, 3.0]).requires_grad_()
    result = objective(batch, logprobs, entropy, algo)
    result.loss.backward()
    assert logprobs.grad is not None
    towards = [0.0, 0.0] if entropy.grad is None else entropy.grad.tolist()
    return result.loss.item(), logprobs.grad.tolist(), towards, dict(zip(METRICS, result.sums.tolist(), strict=True))


def test_the_policy_term_alone() -> None:
    # on-policy: -A each, weighted: 0.5 * -1 + 0.25 * 2 = 0; gradient -0.5 and +0.5
    loss, gradient, entropy, metrics = _run(_batch(), _algo())
    assert loss == pytest.approx(0.0, abs=1e-6)
    assert gradient == pytest.approx([-0.5, 0.5])
    assert entropy == [0.0, 0.0]
    assert metrics == pytest.approx(
        {"entropy": 4, "clip_fraction": 0, "clip_fraction/low": 0, "clip_fraction/high": 0, "mismatch/mean_abs": 0,
         "mismatch/k3": 0, "kl": 0, "ratio/mean": 2}, abs=1e-6
    )  # fmt: skip


def test_entropy_is_rewarded() -> None:
    # 0.1 * H is subtracted: -(0.5 * 0.1 * 1 + 0.25 * 0.1 * 3) = -0.125, and more entropy lowers the loss
    loss, _, entropy, _ = _run(_batch(), _algo(entropy_coef=0.1))
    assert loss == pytest.approx(-0.125, abs=1e-6)
    assert entropy == pytest.approx([-0.05, -0.025])


def test_the_correction_weighs_with_trainer_over_sampler() -> None:
    # sampler's p = [0.4, 0.1]: r = [0.5, 4], tis with cap 2: [0.5, 2]. 0.5 * 0.5 * -1 + 0.25 * 2 * 2 = 0.75
    batch = _batch(sampled_logprobs=torch.tensor([0.4, 0.1]).log())
    loss, gradient, _, metrics = _run(batch, _algo(correction={"kind": "tis", "cap": 2.0}))
    assert loss == pytest.approx(0.75, abs=1e-6)
    assert gradient == pytest.approx([-0.25, 1.0])
    assert metrics["mismatch/mean_abs"] == pytest.approx(math.log(2) + math.log(4))
    # k3 = r - 1 - log r, of log r = log trainer - log sampler
    assert metrics["mismatch/k3"] == pytest.approx((0.5 - 1 + math.log(2)) + (4 - 1 - math.log(4)))


def test_the_correction_compares_with_the_log_probs_at_sampling() -> None:
    # old p = [0.1, 0.4], sampler's [0.2, 0.4]: r = [0.5, 1]; rho = [2, 1] is clipped to 1.2:
    # 0.5 * 0.5 * -1.2 + 0.25 * 1 * 2 = 0.2
    batch = _batch(old_logprobs=torch.tensor([0.1, 0.4]).log())
    algo = _algo(correction={"kind": "tis", "cap": 2.0}, clip_low=0.2, clip_high=0.2)
    loss, gradient, _, metrics = _run(batch, algo)
    assert loss == pytest.approx(0.2, abs=1e-6)
    assert gradient == pytest.approx([0.0, 0.5])
    assert metrics["clip_fraction"] == metrics["clip_fraction/high"] == 1.0  # the first, with A = 1 and rho = 2
    assert metrics["clip_fraction/low"] == 0.0
    assert metrics["ratio/mean"] == pytest.approx(3.0)


def test_tokens_clipped_at_the_lower_bound() -> None:
    # old p = [0.2, 0.8]: rho = [1, 0.5], and A = [1, -2]: the second is clipped at 0.8
    batch = _batch(old_logprobs=torch.tensor([0.2, 0.8]).log())
    metrics = _run(batch, _algo(clip_low=0.2, clip_high=0.2))[3]
    assert [metrics[f"clip_fraction{side}"] for side in ("", "/low", "/high")] == [1.0, 1.0, 0.0]


def test_kl_is_a_cost() -> None:
    # k3 towards p_ref = [0.4, 0.4]: r = p_ref / p = [2, 1], r - 1 - log r = [0.3069, 0]; 0.5 * 0.1 * 0.3069
    batch, k3 = _batch(ref_logprobs=torch.tensor([0.4, 0.4]).log()), 1 - math.log(2)
    loss, _, _, metrics = _run(batch, _algo(kl={"coef": 0.1, "estimator": "k3", "place": "loss"}))
    assert loss == pytest.approx(0.5 * 0.1 * k3, abs=1e-6)
    assert metrics["kl"] == pytest.approx(k3)
    loss, _, _, metrics = _run(batch, _algo(kl={"coef": 0.1, "estimator": "k3", "place": "reward"}))
    assert loss == pytest.approx(0.0, abs=1e-6)
    assert metrics["kl"] == pytest.approx(k3)
