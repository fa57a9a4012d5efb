"""A few answers of the model that training would start from: does it solve anything, and would it learn?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hone.learn.advantages import group_rewards, is_zero_variance
from hone.preflight.check.findings import Finding
from hone.types import NOT_GRADED, VERIFIER_FAILURES, Group


def measured(groups: Sequence[Group]) -> dict[str, Any]:
    """Numbers over groups that were sampled as in training."""
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
    """Findings from the same; `refill`: groups without a reward difference are replaced by others."""
    found = measured(groups)
    share, n = found["groups_with_gradient"], found["problems"]
    said = f"{share:.0%} of {n} groups have a reward difference"
    if share == 0:
        solved = found["solve_rate"]
        remedy = "harder problems" if solved and solved > 0.5 else "easier problems, a supervised stage first"
        yield Finding("fail", "gradient", f"{said}: nothing would be learned; {remedy}, or more samples_per_prompt")
    elif share < 0.3 and not refill:
        yield Finding("warn", "gradient", f"{said}: most sampling is for nothing; give algo.refill_rounds, or problems "
                      "that are solved now and then")  # fmt: skip
    else:
        yield Finding("pass", "gradient", said)
    if found["solve_rate"] is not None:
        solved = f"{found['solve_rate']:.0%} of {found['samples']} answers are correct"
        yield Finding("pass", "solved", f"{solved}; {found['tokens']:.0f} tokens each")
    failed = sum(v in VERIFIER_FAILURES for g in groups for v in [r.verdict for r in g.rewards])
    if failed:
        yield Finding("fail", "verifier", f"{failed} of {found['samples']} answers could not be verified; see verdicts")
    if found["truncated"] > 0.2:
        yield Finding("warn", "cut off", f"{found['truncated']:.0%} of answers are cut off; raise sampling.max_tokens")
    yield _unreadable(groups)


def _unreadable(groups: Sequence[Group]) -> Finding:
    pairs = [(o, r) for g in groups for o, r in zip(g.rollouts, g.rewards, strict=True)]
    unread = [rollout.text for rollout, reward in pairs if reward.verdict == "malformed"]
    said = f"{len(unread)} of {len(pairs)} answers cannot be read"
    if len(unread) > len(pairs) / 2:
        tail = unread[0].strip()[-120:]
        return Finding("warn", "readable", f"{said}; one ends in {tail!r}. Say in prompt.system how to answer")
    return Finding("pass", "readable", said)
