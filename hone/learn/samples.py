"""From groups to training samples: tokens in, tokens out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from hone.types import BoolArray, FloatArray, Group, IntArray, Sample


def to_samples(group: Group) -> list[Sample]:
    """One sample per rollout of the group, in order, with advantages still 0.

    What the sampler emitted is what is trained, its stop token included; nothing is re-tokenised.
    Raises ValueError for a rollout of several turns (not supported by any task yet).
    """
    samples = []
    for rollout in group.rollouts:
        if len(rollout.turns) != 1:
            raise ValueError(f"{rollout.problem_id}: {len(rollout.turns)} turns in a rollout; one is supported")
        turn = rollout.turns[0]
        prompt, total = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.completion_ids)
        samples.append(
            Sample(
                token_ids=np.concatenate([turn.prompt_ids, turn.completion_ids]),
                trained=_completion_mask(prompt, total),
                logprobs=np.concatenate([np.zeros(prompt, np.float32), turn.logprobs]),
                advantages=np.zeros(total, np.float32),
                prompt_len=prompt,
                problem_id=rollout.problem_id,
                policy_version=turn.policy_version,
            )
        )
    return samples


def with_advantages(samples: Sequence[Sample], advantages: Iterable[FloatArray]) -> list[Sample]:
    """The samples with their advantages: [S] arrays, one value per completion token [Lc]."""
    return [
        replace(s, advantages=np.concatenate([np.zeros(s.prompt_len, np.float32), a.astype(np.float32)]))
        for s, a in zip(samples, advantages, strict=True)
    ]


def supervised_sample(problem_id: str, prompt_ids: IntArray, completion_ids: IntArray) -> Sample:
    """A sample to imitate: with advantage 1 the policy-gradient loss is cross-entropy."""
    prompt, total = len(prompt_ids), len(prompt_ids) + len(completion_ids)
    mask = _completion_mask(prompt, total)
    return Sample(
        token_ids=np.concatenate([prompt_ids, completion_ids]),
        trained=mask,
        logprobs=np.zeros(total, np.float32),
        advantages=mask.astype(np.float32),
        prompt_len=prompt,
        problem_id=problem_id,
        policy_version=0,
    )


def _completion_mask(prompt: int, total: int) -> BoolArray:
    return np.arange(total) >= prompt
