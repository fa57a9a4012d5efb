"""From groups to training samples: tokens in, tokens out.

A rollout of several turns is one sample per *chain*: turns of which each continues the exact tokens of the one before.
Where a chat template rewrites the history, a new chain begins (a branch). Worked example, two turns of one chain:

    turn 1     prompt [5, 6]               completion [7, 2]
    turn 2     prompt [5, 6, 7, 2, 9, 6]   completion [8, 2]

    token_ids  [5, 6, 7, 2, 9, 6, 8, 2]
    trained    [F, F, T, T, F, F, T, T]     only sampled tokens
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from hone.types import BoolArray, FloatArray, Group, IntArray, Rollout, Sample, Turn


def chains(rollout: Rollout) -> list[list[Turn]]:
    """The turns, grouped into chains in which every prompt begins with all tokens of the turn before.

    Programs may hold several conversations at once: a turn continues the longest chain that it can.
    """
    result: list[list[Turn]] = []
    for turn in rollout.turns:
        before = [chain for chain in result if _continues(turn, chain[-1])]
        if before:
            max(before, key=lambda chain: len(chain[-1].prompt_ids)).append(turn)
        else:
            result.append([turn])
    return result


def _continues(turn: Turn, before: Turn) -> bool:
    start, end = len(before.prompt_ids), len(before.prompt_ids) + len(before.completion_ids)
    ids = turn.prompt_ids
    return (
        len(ids) >= end
        and np.array_equal(ids[:start], before.prompt_ids)
        and np.array_equal(ids[start:end], before.completion_ids)
    )


def to_samples(group: Group) -> list[Sample]:
    """One sample per chain of each rollout of the group, in order, with advantages still 0.

    What the sampler emitted is what is trained, stop tokens included; nothing is re-tokenised.
    """
    return [_chain_sample(rollout.problem_id, chain) for rollout in group.rollouts for chain in chains(rollout)]


def _chain_sample(problem_id: str, turns: Sequence[Turn]) -> Sample:
    token_ids = np.concatenate([turns[-1].prompt_ids, turns[-1].completion_ids])
    trained, logprobs = np.zeros(len(token_ids), bool), np.zeros(len(token_ids), np.float32)
    for turn in turns:
        sampled = slice(len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.completion_ids))
        trained[sampled], logprobs[sampled] = True, turn.logprobs
    return Sample(
        token_ids=token_ids,
        trained=trained,
        logprobs=logprobs,
        advantages=np.zeros(len(token_ids), np.float32),
        prompt_len=len(turns[0].prompt_ids),
        problem_id=problem_id,
        policy_version=min(turn.policy_version for turn in turns),
    )


def by_rollout(groups: Sequence[Group], values: Iterable[FloatArray]) -> list[list[FloatArray]]:
    """[S] arrays, one value per trained token of each sample -> [P][G] arrays [Lc], of all turns of each rollout."""
    rest = iter(values)
    return [[np.concatenate([next(rest) for _ in chains(rollout)]) for rollout in g.rollouts] for g in groups]


def by_sample(groups: Sequence[Group], values: Sequence[Sequence[FloatArray]]) -> list[FloatArray]:
    """The inverse of `by_rollout`."""
    return [
        part
        for group, of_group in zip(groups, values, strict=True)
        for rollout, of_rollout in zip(group.rollouts, of_group, strict=True)
        for part in np.split(of_rollout, np.cumsum(_sampled_tokens(rollout))[:-1])
    ]


def _sampled_tokens(rollout: Rollout) -> list[int]:
    return [sum(len(turn.completion_ids) for turn in chain) for chain in chains(rollout)]


def with_advantages(samples: Sequence[Sample], advantages: Iterable[FloatArray]) -> list[Sample]:
    """The samples with their advantages: [S] arrays, one value per trained token [Lc]."""

    def placed(sample: Sample, values: FloatArray) -> FloatArray:
        result = np.zeros(len(sample.token_ids), np.float32)
        result[sample.trained] = values
        return result

    return [replace(s, advantages=placed(s, a)) for s, a in zip(samples, advantages, strict=True)]


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
