"""What a step's rollouts look like, as flat numbers for metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np

from hone.grade.parse import parse
from hone.learn.advantages import group_rewards, is_zero_variance
from hone.measure.stats import reflection
from hone.types import NOT_GRADED, VERIFIER_FAILURES, Group, Reward, Verdict


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, verdicts, lengths in tokens, share of groups without a reward difference, reflection.

    Samples whose verifier failed count in `verdict/*` and in lengths, not in rewards or accuracy.
    """
    rollouts = [r for g in groups for r in g.rollouts]
    rewards = [r for g in groups for r in g.rewards]
    graded = [r for r in rewards if r.verdict not in VERIFIER_FAILURES]
    totals = np.asarray([r.total for r in graded] or [np.nan])
    lengths = np.asarray([r.num_tokens for r in rollouts])
    ungraded = any(r.verdict == "ungraded" for r in rewards)
    verdicts = [v for v in get_args(Verdict) if v != "ungraded" or ungraded]
    parts = sorted({name for r in graded for name in r.parts})
    # One per problem, and only where there is any: a model without tags does not think the same, it does not think.
    first_thoughts = [t for g in groups if (t := parse(g.rollouts[0].text).thinking) is not None]
    return {
        "reward/mean": float(totals.mean()),
        "reward/std": float(totals.std()),
        **{f"reward/{name}": float(np.mean([r.parts[name] for r in graded if name in r.parts])) for name in parts},
        **_accuracy(rewards),
        **{f"verdict/{v}": float(np.mean([r.verdict == v for r in rewards])) for v in verdicts},
        "length/min": float(lengths.min()),
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "length/truncated": float(np.mean([r.finish == "length" for r in rollouts])),
        "zero_variance": float(np.mean([is_zero_variance(group_rewards(g)) for g in groups])),
        "reflection_rate": reflection.rate([r.text for r in rollouts]),
        "duplicate_thinking": reflection.duplicate_rate(first_thoughts),
    }


def _accuracy(rewards: Sequence[Reward]) -> dict[str, float]:
    """`accuracy` of the graded samples: NaN if a verifier failed on all, no column for a task that grades nothing."""
    graded = [r.verdict == "correct" for r in rewards if r.verdict not in NOT_GRADED]
    if not graded and any(r.verdict == "ungraded" for r in rewards):
        return {}
    return {"accuracy": float(np.mean(graded)) if graded else float("nan")}
