"""From the groups of a step to the micro-batches of its updates.

groups -> samples -> (reference and old log-probs) -> advantages -> mini-batches -> micro-batches
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from hone.algo.advantages import advantages
from hone.algo.config import AlgoConfig
from hone.algo.kl import kl_estimate
from hone.algo.reduce import token_weights
from hone.data.pack import pack
from hone.data.samples import to_samples, with_advantages
from hone.model.config import ModelConfig
from hone.model.load import load_model
from hone.rollout.config import SamplingConfig
from hone.train.policy import Policy, frozen_logprobs, split_by_sample
from hone.types import VERIFIER_FAILURES, FloatArray, Group, MicroBatch, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PerSample = Sequence[FloatArray]  # [S] arrays [Lc], one value per trained token


@dataclass(frozen=True, slots=True)
class Batch:
    """All that one step trains on, ready for `Policy.update`."""

    samples: tuple[Sample, ...]  # [S] of all groups in order, with advantages
    minibatches: tuple[tuple[MicroBatch, ...], ...]  # one per update; samples that cannot teach are left out


def prepare(
    groups: Sequence[Group],
    policy: Policy,
    reference: PreTrainedModel | None,
    algo: AlgoConfig,
    sampling: SamplingConfig,
    tokens_per_microbatch: int,
) -> Batch:
    """Everything between rewards and the update.

    Old log-probs are computed only when several updates make them differ from the current ones,
    reference log-probs only when a KL penalty needs them.
    """
    samples = [s for group in groups for s in to_samples(group)]
    temperature, budget = sampling.temperature, tokens_per_microbatch

    def scored_by(model: PreTrainedModel) -> list[FloatArray]:
        return sample_logprobs(samples, lambda b: frozen_logprobs(model, b, temperature), budget)

    ref = None if reference is None else scored_by(reference)
    old = scored_by(policy.model) if algo.updates_per_rollout > 1 else None
    kl = None
    if ref is not None and algo.kl.place == "reward":
        now = old or scored_by(policy.model)
        kl = _by_group(groups, [_kl(p, q, algo.kl.estimator) for p, q in zip(now, ref, strict=True)])
    flat = [a for group in advantages(groups, algo, kl) for a in group]
    samples = with_advantages(samples, flat)
    updates = minibatches(groups, samples, algo, budget, sampling.max_tokens, old, ref)
    return Batch(tuple(samples), tuple(tuple(u) for u in updates))


def load_reference(model: ModelConfig, algo: AlgoConfig) -> PreTrainedModel | None:
    """The frozen model that the KL penalty is measured against: the start of the stage. None without a penalty."""
    if not algo.kl.coef:
        return None
    return load_model(model).eval().requires_grad_(False)


def counted(group: Group, index: int, algo: AlgoConfig) -> bool:
    """Whether a sample is part of the batch at all.

    Out are samples whose verifier failed, and truncated ones where `mask_truncated` says so.
    """
    masked = algo.mask_truncated and group.rollouts[index].finish == "length"
    return not masked and group.rewards[index].verdict not in VERIFIER_FAILURES


def minibatches(
    groups: Sequence[Group],
    samples: Sequence[Sample],
    algo: AlgoConfig,
    tokens_per_microbatch: int,
    max_tokens: int,
    old_logprobs: PerSample | None = None,
    ref_logprobs: PerSample | None = None,
) -> list[list[MicroBatch]]:
    """One list of micro-batches per update; whole groups, dealt out in turn.

    Denominators are those of the whole update: they count the samples that carry no gradient too,
    so that leaving those out of the computation changes nothing.
    """
    # A zero advantage gives a zero policy gradient; KL in the loss and the entropy bonus need no advantage.
    always = (algo.kl.coef > 0 and algo.kl.place == "loss") or algo.entropy_coef != 0
    places = [(p, g) for p, group in enumerate(groups) for g in range(len(group.rollouts))]
    updates = []
    for u in range(algo.updates_per_rollout):
        members = [
            i for i, (p, g) in enumerate(places) if p % algo.updates_per_rollout == u and counted(groups[p], g, algo)
        ]
        lengths = [int(samples[i].trained.sum()) for i in members]
        weights = dict(zip(members, token_weights(lengths, algo.reduction, max_tokens), strict=True))
        kept = [i for i in members if always or samples[i].advantages.any()]
        if kept:
            updates.append(
                pack(
                    [samples[i] for i in kept],
                    [weights[i] for i in kept],
                    tokens_per_microbatch,
                    ids=kept,
                    old_logprobs=None if old_logprobs is None else [old_logprobs[i] for i in kept],
                    ref_logprobs=None if ref_logprobs is None else [ref_logprobs[i] for i in kept],
                )
            )
    return updates


def sample_logprobs(
    samples: Sequence[Sample],
    forward: Callable[[Sequence[MicroBatch]], list[np.ndarray]],
    tokens_per_microbatch: int,
) -> list[FloatArray]:
    """[S] arrays [Lc] under some model: `forward` maps micro-batches to their log-probs [N]."""
    batches = pack(samples, [0.0] * len(samples), tokens_per_microbatch)
    result: list[FloatArray] = [np.zeros(0, np.float32)] * len(samples)
    for batch, values in zip(batches, forward(batches), strict=True):
        for i, part in split_by_sample(batch, values):
            result[i] = part
    return result


def _kl(logprobs: FloatArray, ref_logprobs: FloatArray, estimator: str) -> FloatArray:
    return kl_estimate(torch.from_numpy(logprobs), torch.from_numpy(ref_logprobs), estimator).numpy()


def _by_group(groups: Sequence[Group], values: Sequence[FloatArray]) -> list[list[FloatArray]]:
    """[S] -> [P][G]"""
    rest = iter(values)
    return [[next(rest) for _ in group.rollouts] for group in groups]
