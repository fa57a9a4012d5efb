"""Checks of sampled answers: whether the initial model solves anything, and whether the rewards give a gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hone.learn.advantages import group_rewards, is_zero_variance
from hone.preflight.check.findings import Finding
from hone.types import NOT_GRADED, VERIFIER_FAILURES, Group


def measured(groups: Sequence[Group]) -> dict[str, Any]:
    """Statistics of groups that were sampled as in training."""
    rewards = [r for g in groups for r in g.rewards]
    rollouts = [r for g in groups for r in g.rollouts]
    graded = [r for r in rewards if r.verdict not in NOT_GRADED]
    return {
        "problems": len(groups),
        "samples": len(rewards),
        "solve_rate": float(np.mean([r.verdict == "correct" for r in graded])) if graded else None,
        "groups_with_gradient": float(np.mean([not is_zero_variance(group_rewards(g)) for g in groups])),
        "verdicts": dict(Counter(r.verdict for r in rewards)),
        "truncated": float(np.mean([r.finish == "length" for r in rollouts])),
        "tokens": float(np.mean([r.num_tokens for r in rollouts])),
    }


def judge_base(groups: Sequence[Group], refill: bool) -> Iterator[Finding]:
    """Findings about the groups. `refill`: training replaces groups without a reward difference by others."""
    stats = measured(groups)
    share = stats["groups_with_gradient"]
    message = f"{share:.0%} of {stats['problems']} groups have a reward difference"
    if share == 0:
        solved = stats["solve_rate"]
        remedy = "harder problems" if solved and solved > 0.5 else "easier problems, a supervised stage first"
        yield Finding("fail", "gradient", f"{message}: nothing would be learned; {remedy}, or more samples_per_prompt")
    elif share < 0.3 and not refill:
        remedy = "set algo.refill_rounds, or give problems that are solved sometimes"
        yield Finding("warn", "gradient", f"{message}: most samples would not be trained on; {remedy}")
    else:
        yield Finding("pass", "gradient", message)
    if stats["solve_rate"] is not None:
        solved = f"{stats['solve_rate']:.0%} of {stats['samples']} answers are correct"
        yield Finding("pass", "solved", f"{solved}; {stats['tokens']:.0f} tokens each")
    failed = sum(v in VERIFIER_FAILURES for g in groups for v in [r.verdict for r in g.rewards])
    if failed:
        yield Finding("fail", "verifier", f"{failed} of {stats['samples']} answers could not be verified; see verdicts")
    if stats["truncated"] > 0.2:
        yield Finding("warn", "cut off", f"{stats['truncated']:.0%} of answers are cut off; raise sampling.max_tokens")
    yield _unreadable(groups)


def _unreadable(groups: Sequence[Group]) -> Finding:
    pairs = [(o, r) for g in groups for o, r in zip(g.rollouts, g.rewards, strict=True)]
    malformed = [rollout.text for rollout, reward in pairs if reward.verdict == "malformed"]
    message = f"{len(malformed)} of {len(pairs)} answers cannot be read"
    if len(malformed) > len(pairs) / 2:
        tail = malformed[0].strip()[-120:]
        return Finding("warn", "readable", f"{message}; one ends in {tail!r}. Say in prompt.system how to answer")
    return Finding("pass", "readable", message)
