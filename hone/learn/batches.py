"""From the groups of a step to the micro-batches of its updates.

groups -> samples -> (reference and old log-probs) -> advantages -> mini-batches -> micro-batches
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from hone.learn.advantages import PerToken, advantages, gae_advantages, group_rewards
from hone.learn.forward import frozen_logprobs
from hone.learn.kl import kl_estimate
from hone.learn.pack import Packer
from hone.learn.policy import Policy
from hone.learn.reduce import token_weights
from hone.learn.samples import by_rollout, by_sample, chains, to_samples, with_advantages
from hone.learn.totals import split_by_sample
from hone.model.lora import adapter_off
from hone.recipe.sections.algo import AlgoConfig
from hone.recipe.sections.rollout import SamplingConfig
from hone.types import VERIFIER_FAILURES, FloatArray, Group, MicroBatch, Rollout, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PerSample = Sequence[FloatArray]  # [S] arrays [Lc], one value per trained token


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything that one step trains on, ready for `Policy.update`."""

    samples: tuple[Sample, ...]  # [S] of all groups in order, with advantages
    minibatches: tuple[tuple[MicroBatch, ...], ...]  # one per update, without samples that have no gradient
    metrics: Mapping[str, float] = field(default_factory=dict)  # what the signal adds to the step's row


def prepare(
    groups: Sequence[Group],
    policy: Policy,
    reference: PreTrainedModel | None,
    algo: AlgoConfig,
    sampling: SamplingConfig,
    packer: Packer,
) -> Batch:
    """Everything between rewards and the update.

    Old log-probs are computed only if several updates make them differ from the current ones, and then only for
    samples with a gradient; reference log-probs only if a KL penalty needs them; values only for a value head.
    """
    if not groups:
        return Batch((), ())
    samples = [s for group in groups for s in to_samples(group)]

    def logprobs_of(model: PreTrainedModel, wanted: Sequence[int] | None = None) -> list[FloatArray]:
        forward = partial(frozen_logprobs, model, temperature=sampling.temperature, world=policy.world)
        return per_sample(samples, forward, packer, wanted)

    ref = None
    if reference is not None and algo.kl.coef:
        with adapter_off(reference):  # with an adapter the reference is the policy without it, not a second copy
            ref = logprobs_of(reference)
    several, old = algo.updates_per_rollout > 1, None
    penalised = ref is not None and algo.kl.place == "reward"
    if several and (penalised or algo.needs_every_sample):
        old = logprobs_of(policy.model)
    broken: set[int] = set()  # samples with a non-finite log-prob or value
    kl = None
    if ref is not None and penalised:
        now = old or logprobs_of(policy.model)
        penalties = [_kl(p, q, algo.kl.estimator) for p, q in zip(now, ref, strict=True)]
        kl = by_rollout(groups, _without_broken(penalties, broken))
    per_token = {"old_logprobs": old, "ref_logprobs": ref}
    if algo.advantage == "gae":
        values = _without_broken(per_sample(samples, policy.values, packer), broken)
        by_token, targets = ppo_advantages(groups, by_rollout(groups, values), algo, kl)
        per_token |= {"old_values": values, "value_targets": by_sample(groups, targets)}
    else:
        by_token = advantages(groups, algo, kl)
    flat = by_sample(groups, by_token)
    # NaN advantages make the loss non-finite too, so the update is skipped and the guard names these samples.
    samples = with_advantages(samples, [np.full_like(a, np.nan) if i in broken else a for i, a in enumerate(flat)])
    if several and old is None:  # samples without a gradient do not need them
        per_token["old_logprobs"] = logprobs_of(policy.model, [i for i, s in enumerate(samples) if s.advantages.any()])
    members = updates_of(groups, algo)
    updates = minibatches(members, samples, algo, sampling.max_tokens, packer, **per_token)
    return Batch(tuple(samples), tuple(tuple(u) for u in updates))


def updates_of(groups: Sequence[Group], algo: AlgoConfig, graded: bool = True) -> list[list[int]]:
    """The indices of the samples of each update; whole groups are assigned to updates in turn.

    Left out are samples whose verifier failed, if their grade matters (`graded`), and, with `mask_truncated`,
    truncated ones.
    """
    places = [(p, g) for p, group in enumerate(groups) for g, r in enumerate(group.rollouts) for _ in chains(r)]
    updates: list[list[int]] = [[] for _ in range(algo.updates_per_rollout)]
    for i, (p, g) in enumerate(places):
        masked = is_masked(groups[p].rollouts[g], algo)
        failed = graded and groups[p].rewards[g].verdict in VERIFIER_FAILURES
        if not masked and not failed:
            updates[p % algo.updates_per_rollout].append(i)
    return updates


def is_masked(rollout: Rollout, algo: AlgoConfig) -> bool:
    """Whether `algo.mask_truncated` leaves the rollout out: its last turn was cut off."""
    return algo.mask_truncated and rollout.finish == "length"


def minibatches(
    updates: Sequence[Sequence[int]],
    samples: Sequence[Sample],
    algo: AlgoConfig,
    max_tokens: int,
    packer: Packer,
    **per_token: PerSample | None,
) -> list[list[MicroBatch]]:
    """One list of micro-batches per update, from the indices of its samples.

    Denominators are those of the whole update: they also count samples without a gradient, so that skipping the
    computation of those changes nothing.
    """
    packed = []
    for members in updates:
        lengths = [int(samples[i].trained.sum()) for i in members]
        weights = dict(zip(members, token_weights(lengths, algo.reduction, max_tokens), strict=True))
        # A zero advantage gives a zero policy gradient.
        kept = [i for i in members if algo.needs_every_sample or samples[i].advantages.any()]
        fields = {name: [values[i] for i in kept] for name, values in per_token.items() if values is not None}
        if kept:
            packed.append(packer([samples[i] for i in kept], [weights[i] for i in kept], ids=kept, **fields))
    return packed


def per_sample(
    samples: Sequence[Sample],
    forward: Callable[[Sequence[MicroBatch]], list[np.ndarray]],
    packer: Packer,
    wanted: Sequence[int] | None = None,
) -> list[FloatArray]:
    """[S] arrays [Lc]: the value of each trained token from `forward`, which maps micro-batches to arrays [N].

    `wanted`: indices of the samples to compute, the others get zeros; None: all.
    """
    chosen = list(range(len(samples)) if wanted is None else wanted)
    result: list[FloatArray] = [np.zeros(int(s.trained.sum()), np.float32) for s in samples]
    batches = packer([samples[i] for i in chosen], [0.0] * len(chosen), ids=chosen) if chosen else []
    for batch, values in zip(batches, forward(batches), strict=True):
        for i, part in split_by_sample(batch, values):
            result[i] = part
    return result


def ppo_advantages(
    groups: Sequence[Group],
    values: Sequence[Sequence[FloatArray]],
    algo: AlgoConfig,
    kl: Sequence[Sequence[FloatArray]] | None,
) -> tuple[PerToken, PerToken]:
    """Advantages and targets of the value head, both [P][G] arrays [Lc]."""
    penalties = None if kl is None else [[algo.kl.coef * k for k in group] for group in kl]
    rewards = [group_rewards(group) for group in groups]
    return gae_advantages(rewards, values, penalties, gamma=algo.value.gamma, lam=algo.value.lam)


def _without_broken(values: Sequence[FloatArray], broken: set[int]) -> list[FloatArray]:
    """Replace arrays that are not finite by zeros, and add their indices to `broken`."""
    broken |= {i for i, array in enumerate(values) if not np.isfinite(array).all()}
    return [np.zeros_like(array) if i in broken else array for i, array in enumerate(values)]


def _kl(logprobs: FloatArray, ref_logprobs: FloatArray, estimator: str) -> FloatArray:
    return kl_estimate(torch.from_numpy(logprobs), torch.from_numpy(ref_logprobs), estimator).numpy()
