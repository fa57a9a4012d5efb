"""From logits to tokens and their log-probabilities.

The log-probability returned with a token is that of the distribution it was drawn from: with the
temperature applied, renormalised over the tokens that top-k, top-p and min-p keep. At temperature 0
the most likely token is taken and its log-probability is the model's own (temperature 1, no
filters): under the point mass it was drawn from, it would always be 0.

Randomness is one uniform number per token, a hash of (seed, prompt, sample, position), turned into a
token by the inverse of the cumulative distribution. A sample's numbers therefore do not depend on
what else is in the batch; its tokens are equal wherever the model's arithmetic is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from hone.recipe.sections.rollout import SamplingConfig
from hone.types import FloatArray

_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = 0xFFFFFFFFFFFFFFFF
_UInt64Array = npt.NDArray[np.uint64]


def _mix(x: _UInt64Array) -> _UInt64Array:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every output bit depends on every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seed: int | Sequence[int], prompts: npt.ArrayLike, samples: npt.ArrayLike, length: int) -> FloatArray:
    """Numbers [N, length] in [0, 1 - 2**-24], one row per (prompt, sample); one seed for all, or one per row."""
    golden = np.uint64(_GOLDEN)
    seeds = [seed] if isinstance(seed, int) else seed
    key = _mix(np.array([(s + _GOLDEN) & _MASK64 for s in seeds], dtype=np.uint64))  # [1] or [N]
    for part in (prompts, samples):
        key = _mix(key ^ _mix((np.asarray(part, dtype=np.uint64) + np.uint64(1)) * golden))  # [N]
    counter = np.arange(1, length + 1, dtype=np.uint64) * golden  # [length]
    bits = _mix(key[:, None] + counter[None, :]) >> np.uint64(40)  # [N, length], 24 bits
    return bits.astype(np.float32) * np.float32(2.0**-24)


#: Sampling settings, each with the rows [n] that use them; None: all rows.
Mix = Sequence[tuple[SamplingConfig, Tensor | None]]


def mix(settings: Sequence[SamplingConfig], device: torch.device) -> Mix:
    """Group the rows by their settings [B]. With one kind only, as in training, no gather is needed."""
    kinds: dict[tuple[float, ...], list[int]] = {}
    for row, s in enumerate(settings):
        kinds.setdefault((s.temperature, s.top_p, s.top_k, s.min_p), []).append(row)
    if len(kinds) <= 1:
        return [(s, None) for s in settings[:1]]
    return [(settings[rows[0]], torch.tensor(rows, device=device)) for rows in kinds.values()]


def sample_mix(logits: Tensor, draws: Tensor | None, kinds: Mix) -> tuple[Tensor, Tensor]:
    """As `sample`, each row with its own settings."""
    if len(kinds) == 1:
        return sample(logits, draws, kinds[0][0])
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(len(logits), device=logits.device)
    for sampling, rows in kinds:
        tokens[rows], logprobs[rows] = sample(logits[rows], None if draws is None else draws[rows], sampling)
    return tokens, logprobs


def likeliest(logits: Tensor, kinds: Mix, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens [B, count] of each row, and their log-probabilities, likeliest first.

    From the same distribution as in `sample`, equal to the bit; -inf where the filters leave fewer.
    """
    count = min(count, logits.shape[1])
    tokens = torch.zeros(len(logits), count, dtype=torch.int64, device=logits.device)
    logprobs = torch.full((len(logits), count), -math.inf, device=logits.device)
    for sampling, rows in kinds:
        at = slice(None) if rows is None else rows
        scores, candidates = logits[at].float(), None
        if sampling.temperature == 0.0:
            values, index = scores.topk(count, dim=-1)
            values = values - scores.logsumexp(dim=-1, keepdim=True)
        else:
            if sampling.temperature != 1.0:
                scores = scores / sampling.temperature
            scores, candidates = _keep(scores, sampling)
            values, index = scores.softmax(dim=-1).topk(min(count, scores.shape[1]), dim=-1)
            values = values.log()
        logprobs[at, : values.shape[1]] = values
        tokens[at, : values.shape[1]] = index if candidates is None else candidates.gather(1, index)
    return tokens, logprobs


def sample(logits: Tensor, draws: Tensor | None, sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Logits [B, V] and uniform numbers [B] (None at temperature 0). Returns tokens [B] and log-probabilities [B]."""
    if sampling.temperature == 0.0:
        scores = logits.float()
        top, tokens = scores.max(dim=-1)
        return tokens, top - scores.logsumexp(dim=-1)
    assert draws is not None, "sampling needs one uniform number per row"
    scores = logits.float()
    if sampling.temperature != 1.0:
        scores = scores / sampling.temperature
    scores, candidates = _keep(scores, sampling)
    probs = scores.softmax(dim=-1)  # [B, N]
    index = _invert_blocked(probs, draws)[:, None]  # [B, 1]
    logprobs = probs.gather(1, index).log().squeeze(1)
    tokens = index if candidates is None else candidates.gather(1, index)
    return tokens.squeeze(1), logprobs


def _keep(scores: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor | None]:
    """Scores [B, V] -> scores [B, N] with -inf for what is not kept, and their token ids [B, N] (None: 0..V-1).

    In the order of `transformers`: top-k, then top-p of the remainder, then min-p.
    """
    candidates = None
    if 0 < sampling.top_k < scores.shape[1]:
        scores, candidates = scores.topk(sampling.top_k, dim=-1)
    elif sampling.top_p < 1.0:
        scores, candidates = scores.sort(dim=-1, descending=True, stable=True)
    if sampling.top_p < 1.0:
        probs = scores.softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs  # mass of the more likely tokens
        before[:, 0] = -1.0  # the most likely token always stays
        scores = scores.masked_fill(before >= sampling.top_p, -math.inf)
    if sampling.min_p > 0.0:
        floor = scores.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)
        scores = scores.masked_fill(scores < floor, -math.inf)
    return scores, candidates


def _invert_blocked(probs: Tensor, draws: Tensor) -> Tensor:
    """Inverse of the cumulative distribution of `probs` [B, N] at `draws` [B]: first the block, then the entry in it.

    One pass over the vocabulary; only the few block sums are added in float64 (a single-precision
    cumulative sum over 150 000 tokens would lose the tail).
    """
    batch, n = probs.shape
    width = 1 << max(0, (n.bit_length() // 2))
    if n % width:
        probs = F.pad(probs, (0, width - n % width))
    blocks = probs.view(batch, -1, width)  # [B, N / width, width]
    exact = torch.float32 if probs.device.type == "mps" else torch.float64  # mps has no float64
    sums = blocks.sum(dim=-1).to(exact)
    block, rest = _invert(sums, draws.to(exact) * sums.sum(dim=-1))
    inner = blocks[torch.arange(batch, device=probs.device), block].to(exact)  # [B, width]
    entry, _ = _invert(inner, rest)
    return block * width + entry


def _invert(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """First index whose running sum of `weights` [B, N] exceeds `target` [B], and the target minus the sum before it.

    A weight of zero is never chosen, and some index always is, whatever the rounding: sums are compared
    only where the weight is positive, and the target is kept below the largest of them (x * (1 - eps / 2)
    is below x for every positive float x).
    """
    running = weights.cumsum(dim=-1)
    reach = running.masked_fill(weights <= 0, 0.0)
    limit = reach.amax(dim=-1) * (1.0 - torch.finfo(weights.dtype).eps / 2)
    target = torch.minimum(target, limit)
    index = (reach > target[:, None]).to(torch.uint8).argmax(dim=-1)  # the first of the largest
    at = index[:, None]
    before = (running.gather(1, at) - weights.gather(1, at)).squeeze(1)
    return index, (target - before).clamp_min(0.0)
