"""Policy losses: one number per trained token; `hone.learn.reduce` weights the tokens.

All take the same arguments, flat over the N trained tokens of a micro-batch, and return
`(loss [N], clipped [N])`. `clipped` marks the tokens whose gradient the clipping changed.
rho = exp(logprobs - old_logprobs); A is the advantage. `old_logprobs=None` is on-policy: rho is 1,
and its gradient is that of the log-prob. Worked example, `Clip(low=0.2, high=0.2)`:

    logprobs = log 0.6, old_logprobs = log 0.4: rho = 1.5
    A = +1: loss = -min(1.5, 1.2) = -1.2, clipped, no gradient
    A = -1: loss = -min(-1.5, -1.2) = +1.5, gradient 1.5 per unit of log-prob

Losses are not checked for being finite: the trainer counts and skips non-finite ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class TokenLoss(NamedTuple):
    loss: Tensor  # [N]
    clipped: Tensor  # [N] bool


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds of the ratio rho. Raises ValueError if they cannot be met."""

    low: float  # rho is clipped at 1 - low
    high: float  # and at 1 + high
    dual: float | None = None  # of tokens with A < 0, whose loss is at most -dual A

    def __post_init__(self) -> None:
        for name, bound in (("clip_low", self.low), ("clip_high", self.high)):
            if not 0.0 <= bound < math.inf:
                raise ValueError(f"{name} is {bound}, it must be 0 or more")
        if self.dual is not None and not self.dual > 1.0 + self.high:
            raise ValueError(f"dual_clip is {self.dual}, it must be above 1 + clip_high = {1.0 + self.high}")

    def __call__(self, ratio: Tensor) -> Tensor:
        """The ratio, clipped."""
        return ratio.clamp(1.0 - self.low, 1.0 + self.high)


class Loss(Protocol):
    def __call__(
        self,
        logprobs: Tensor,  # [N], with gradient
        old_logprobs: Tensor | None,  # [N], or None: on-policy
        advantages: Tensor,  # [N]
        samples: Tensor,  # [N] int64, which sequence a token belongs to
        clip: Clip,
    ) -> TokenLoss: ...


def clipped(
    logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor, samples: Tensor, clip: Clip
) -> TokenLoss:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A); with dual clip c and A < 0 at most -c A.

    PPO arXiv:1707.06347; separate bounds (clip-higher) DAPO arXiv:2503.14476; dual clip arXiv:1912.09729.
    """
    old = _check(logprobs, old_logprobs, advantages, samples)
    return _surrogate(torch.exp(logprobs - old), advantages, clip)


def gspo(logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor, samples: Tensor, clip: Clip) -> TokenLoss:
    """`clipped` with the sequence's ratio s = exp(mean log rho) in place of each token's.

    Zheng et al., arXiv:2507.18071, in the form s_t = sg(s) p_t / sg(p_t), so that every token has its own gradient.
    """
    old = _check(logprobs, old_logprobs, advantages, samples)
    log_ratio = (logprobs - old).detach()
    count = int(samples.max()) + 1 if len(samples) else 0  # a sequence is never split over micro-batches
    sums = torch.zeros(count, dtype=log_ratio.dtype, device=log_ratio.device).index_add_(0, samples, log_ratio)
    means = sums / torch.bincount(samples, minlength=count).clamp(min=1)
    ratio = torch.exp(means[samples] + logprobs - logprobs.detach())
    return _surrogate(ratio, advantages, clip)


def cispo(logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor, samples: Tensor, clip: Clip) -> TokenLoss:
    """-sg(clip(rho, 1 - low, 1 + high)) A log p: the weight is clipped, no token loses its gradient.

    MiniMax-M1, arXiv:2506.13585. The paper leaves the lower side open: low >= 1 does that.
    """
    if clip.dual is not None:
        raise ValueError(f"cispo has no dual clip (its weights are bounded already), got dual_clip={clip.dual}")
    old = _check(logprobs, old_logprobs, advantages, samples)
    ratio = torch.exp(logprobs - old).detach()
    weight = clip(ratio)
    return TokenLoss(-weight * advantages * logprobs, (weight != ratio) & (advantages != 0))


LOSSES: dict[str, Loss] = {"clipped": clipped, "gspo": gspo, "cispo": cispo}


def value_loss(values: Tensor, old_values: Tensor, targets: Tensor, clip: float | None) -> Tensor:
    """0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) per token [N]; without a clip 0.5 (V - R)^2.

    PPO's reference code (openai/baselines ppo2): moving a value further than c brings no gain.
    """
    if not values.shape == old_values.shape == targets.shape:
        raise ValueError(
            f"value_loss: values {tuple(values.shape)}, old_values {tuple(old_values.shape)}, targets "
            f"{tuple(targets.shape)} must be the same [N]"
        )
    squares = (values - targets).square()
    if clip is not None:
        near = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
        squares = torch.maximum(squares, (near - targets).square())
    return 0.5 * squares


def sampler_correction(logprobs: Tensor, sampled_logprobs: Tensor, kind: str, cap: float) -> Tensor:
    """Weights [N] without gradient for tokens that another program sampled; multiply the loss by them.

    With r = exp(trainer's - sampler's log-prob): tis min(r, cap), after IMPALA, arXiv:1802.01561; mis r, but 0
    above the cap (masked), arXiv:2510.18855. `logprobs` are the trainer's at the time of sampling.
    """
    if kind not in ("none", "tis", "mis"):
        raise ValueError(f"correction {kind!r}: allowed are none, tis, mis")
    if not cap > 0.0:
        raise ValueError(f"correction: cap is {cap}, it must be positive")
    if logprobs.shape != sampled_logprobs.shape:
        raise ValueError(f"correction: shapes {tuple(logprobs.shape)} and {tuple(sampled_logprobs.shape)} differ")
    if kind == "none":
        return torch.ones_like(sampled_logprobs)
    ratio = torch.exp(logprobs.detach() - sampled_logprobs)
    return ratio.clamp(max=cap) if kind == "tis" else torch.where(ratio <= cap, ratio, torch.zeros_like(ratio))


def _surrogate(ratio: Tensor, advantages: Tensor, clip: Clip) -> TokenLoss:
    loss = -torch.minimum(ratio * advantages, clip(ratio) * advantages)
    cut = ((advantages > 0) & (ratio > 1.0 + clip.high)) | ((advantages < 0) & (ratio < 1.0 - clip.low))
    if clip.dual is not None:
        far = (advantages < 0) & (ratio > clip.dual)
        loss, cut = torch.where(far, -clip.dual * advantages, loss), cut | far
    return TokenLoss(loss, cut.detach())


def _check(logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor, samples: Tensor) -> Tensor:
    """Check the arguments; returns the old log-probs (on-policy: the current ones), detached."""
    if logprobs.ndim != 1 or not logprobs.is_floating_point():
        raise ValueError(f"logprobs must be floating point [N], got {logprobs.dtype} {tuple(logprobs.shape)}")
    arrays = {"old_logprobs": old_logprobs, "advantages": advantages, "samples": samples}
    for name, value in arrays.items():
        if value is not None and value.shape != logprobs.shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, logprobs {tuple(logprobs.shape)}")
    if samples.dtype != torch.int64:
        raise ValueError(f"samples must be int64, got {samples.dtype}")
    return logprobs.detach() if old_logprobs is None else old_logprobs.detach()
