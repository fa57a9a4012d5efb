"""The rows and tokens of a step's samples, in the format of a run folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from hone.base import checksums
from hone.environments.record import episode_row
from hone.learn.samples import chains
from hone.rewards.gold import known_gold
from hone.types import FloatArray, Group, Sample, StepStats


def rollout_rows(groups: Sequence[Group], prompts: Sequence[str], samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """One row per sample; `prompts` [P] as text, `samples` [S] are those of the groups in order."""
    rows = []
    rest = iter(samples)  # one per chain of turns
    for group, prompt in zip(groups, prompts, strict=True):
        gold = known_gold(group.problem)
        for rollout, reward in zip(group.rollouts, group.rewards, strict=True):
            rows.append(
                {
                    "problem_id": rollout.problem_id,
                    "index": rollout.index,
                    "level": group.problem.level,
                    "prompt": prompt,
                    "text": rollout.text,
                    "parts": dict(reward.parts),
                    "total": reward.total,
                    "verdict": reward.verdict,
                    "extracted": reward.extracted,
                    **({"gold": gold} if gold is not None else {}),
                    "advantage": _mean_advantage([next(rest) for _ in chains(rollout)]),
                    "tokens": rollout.num_tokens,
                    "finish": rollout.finish,
                    **({"note": reward.note} if reward.note else {}),
                    "policy_version": rollout.turns[-1].policy_version,
                    **episode_row(rollout),
                }
            )
    return rows


def _mean_advantage(samples: Sequence[Sample]) -> float:
    values = np.concatenate([sample.advantages[sample.trained] for sample in samples])
    return float(values.mean()) if len(values) else 0.0


def write_tokens(path: Path, samples: Sequence[Sample], stats: StepStats, piece: Callable[[int], str]) -> None:
    """Completion tokens of all samples, one after the other; `lengths` tells them apart.

    The trainer's log-prob and entropy are NaN where they were not computed: samples without a gradient.
    """
    lengths = [int(s.trained.sum()) for s in samples]
    ids = np.concatenate([s.token_ids[s.trained] for s in samples]).astype(np.int32)

    def of_trainer(values: Mapping[int, FloatArray]) -> FloatArray:
        return np.concatenate([values.get(i, np.full(n, np.nan, np.float32)) for i, n in enumerate(lengths)])

    arrays = {
        "lengths": np.asarray(lengths, np.int32),
        "ids": ids,
        "sampled_logprobs": np.concatenate([s.logprobs[s.trained] for s in samples]),
        "trainer_logprobs": of_trainer(stats.logprobs),
        "entropies": of_trainer(stats.entropies),
        "advantages": np.concatenate([s.advantages[s.trained] for s in samples]),
    }
    pieces = {str(i): piece(i) for i in np.unique(ids).tolist()}
    # Not save_file: its disk errors are not OSErrors, and it leaves temporary files behind.
    checksums.put(path, save(arrays, metadata={"pieces": json.dumps(pieces, ensure_ascii=False)}))
