"""The objective of one micro-batch: policy loss, KL, entropy bonus and sampler correction.

    loss = sum_n weight_n * (correction_n * policy_loss_n + kl_coef * kl_n - entropy_coef * H_n)

`weight` is global over the batch of the optimizer step, so losses of micro-batches add up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hone.learn.kl import kl_estimate
from hone.learn.losses import LOSSES, Clip, sampler_correction
from hone.recipe.sections.algo import AlgoConfig
from hone.types import MicroBatch

#: Metrics of a step, each summed over tokens, in this order. `clip_fraction/high` counts the clipped tokens that have
#: become more likely, `clip_fraction/low` those that have become less likely.
METRICS = (
    *("entropy", "clip_fraction", "clip_fraction/low", "clip_fraction/high"),
    *("mismatch/mean_abs", "mismatch/k3", "kl", "ratio/mean"),
)


class Objective(NamedTuple):
    loss: torch.Tensor  # scalar, with gradient
    sums: torch.Tensor  # [len(METRICS)], sums over the tokens of the micro-batch


def objective(
    batch: MicroBatch,
    logprobs: torch.Tensor,  # [N], with gradient
    entropy: torch.Tensor,  # [N], with gradient if entropy_coef is not 0
    algo: AlgoConfig,
) -> Objective:
    """This micro-batch's part of the loss of the batch.

    If `old_logprobs` is None the update is on-policy: the sampler correction then compares the sampler
    with the current log-probs.
    """
    clip = Clip(algo.clip_low, algo.clip_high, algo.dual_clip)
    policy_loss = LOSSES[algo.loss](logprobs, batch.old_logprobs, batch.advantages, batch.samples, clip)
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    loss = policy_loss.loss
    if algo.correction.kind != "none":
        loss = loss * sampler_correction(old, batch.sampled_logprobs, algo.correction.kind, algo.correction.cap)
    kl = torch.zeros_like(logprobs)
    if batch.ref_logprobs is not None:
        kl = kl_estimate(logprobs, batch.ref_logprobs, algo.kl.estimator)
        if algo.kl.place == "loss":
            loss = loss + algo.kl.coef * kl
    if algo.entropy_coef:
        loss = loss - algo.entropy_coef * entropy
    with torch.no_grad():
        log_ratio = old - batch.sampled_logprobs  # of trainer and sampler
        sums = torch.stack(
            [
                entropy.detach().sum(),
                policy_loss.clipped.sum(),
                (policy_loss.clipped & (logprobs < old)).sum(),
                (policy_loss.clipped & (logprobs > old)).sum(),
                log_ratio.abs().sum(),
                (torch.expm1(log_ratio) - log_ratio).sum(),  # k3 of KL(sampler || trainer)
                kl.detach().sum(),
                torch.exp(logprobs.detach() - old).sum(),
            ]
        ).double()
    return Objective((batch.weights * loss).sum(), sums)


def imitation(batch: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> Objective:
    """Weighted cross-entropy, for supervised training."""
    sums = torch.zeros(len(METRICS), dtype=torch.float64, device=entropy.device)
    sums[METRICS.index("entropy")] = entropy.detach().sum()
    return Objective(-(batch.weights * logprobs).sum(), sums)
