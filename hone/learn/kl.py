"""Estimators of the KL divergence from the policy to a frozen reference, per sampled token.

With d = log p - log p_ref at tokens sampled from the policy (Schulman,
http://joschu.net/blog/kl-approx.html), the expectation of k1 and k3 is KL(p || p_ref):

    k1 = d                  unbiased, can be negative, noisy
    k2 = d^2 / 2            biased, low variance
    k3 = exp(-d) - 1 + d    unbiased, never negative

In the reward (detached) k1 is the usual choice. In the loss their *gradients* matter, and these
differ: on-policy the gradient of k2 is that of the KL on average, that of k3 agrees with
it only near the reference, and that of k1 averages to zero (arXiv:2510.01555).

Worked example: p = 0.5, p_ref = 0.25, d = log 2 = 0.693: k1 = 0.693, k2 = 0.240, k3 = 0.193.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def k1(log_ratio: torch.Tensor) -> torch.Tensor:
    """d."""
    return log_ratio


def k2(log_ratio: torch.Tensor) -> torch.Tensor:
    """d^2 / 2."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(-d) - 1 + d; expm1 keeps the digits that exp(-d) - 1 loses near d = 0."""
    return torch.expm1(-log_ratio) + log_ratio


ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: str) -> torch.Tensor:
    """Per-token estimate [N]. Gradients flow to `logprobs`: detach it to use the value as a penalty."""
    if estimator not in ESTIMATORS:
        raise ValueError(f"kl estimator {estimator!r}: allowed are {', '.join(ESTIMATORS)}")
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(f"kl: logprobs {tuple(logprobs.shape)} and ref_logprobs {tuple(ref_logprobs.shape)} differ")
    return ESTIMATORS[estimator](logprobs - ref_logprobs.detach())
