"""Advantages: from the rewards of a step to one number per completion token.

`grpo`, `dr_grpo` and `rloo` look at one group and give one number per sample, which every token
of the sample gets. `reinforce_pp` and `reinforce_pp_baseline` look at the whole batch. `gae` needs
the values of a value head: `gae_advantages`. The loop calls `advantages`, once per step:

    samples = with_advantages(samples, advantages(groups, algo))

A reward of NaN means that the verifier failed: such a sample is excluded from every mean and standard
deviation, and its advantage is 0. Worked example, `grpo` on one group of three samples with
2, 1 and 3 tokens: rewards [1, 0, NaN] have mean 0.5 and standard deviation 0.7071, so

    advantages = [[0.7071, 0.7071], [-0.7071], [0, 0, 0]]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hone.recipe.sections.algo import AlgoConfig
from hone.types import VERIFIER_FAILURES, FloatArray, Group

Array = npt.NDArray[np.float64]
PerToken = list[list[FloatArray]]  # [P][G] arrays [Lc]
#: Sums an array over all ranks; the identity where there is one process.
GlobalSum = Callable[[Array], Array]

EPS = 1e-6
#: Rewards of a group that differ by less than this count as equal.
SAME_REWARD = 1e-8


# --- one group: rewards [G] -> advantages [G] -------------------------------------------------


def grpo(rewards: Array) -> Array:
    """(R - mean) / (std + 1e-6) with the unbiased standard deviation; a group of one gets 0.

    Shao et al., DeepSeekMath, arXiv:2402.03300.
    """
    if len(rewards) < 2:
        return np.zeros(len(rewards))
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + EPS)


def dr_grpo(rewards: Array) -> Array:
    """R - mean: without the division, easy and hard prompts are not weighted up.

    Liu et al., Understanding R1-Zero-Like Training, arXiv:2503.20783.
    """
    return rewards - rewards.mean() if len(rewards) else np.zeros(0)


def rloo(rewards: Array) -> Array:
    """R_i minus the mean of the other samples.

    Ahmadian et al., Back to Basics, arXiv:2402.14740.
    """
    size = len(rewards)
    if size == 1:
        raise ValueError("rloo: a group of one has no other samples to compare with; set samples_per_prompt >= 2")
    return rewards - (rewards.sum() - rewards) / (size - 1)


# --- the whole batch: rewards [P][G], lengths [P][G], penalties [P][G][Lc] -> [P][G][Lc] ------


def reinforce_pp(
    rewards: list[Array], lengths: list[list[int]], penalties: PerToken, global_sum: GlobalSum
) -> PerToken:
    """Reward-to-go minus the remaining penalties, whitened over all tokens of the batch.

    Hu et al., REINFORCE++, arXiv:2501.03262.
    """
    scored = [_scored(group) for group in rewards]
    returns = [
        [reward_to_go(r, n, p) for r, n, p in zip(*group, strict=True)]
        for group in zip(rewards, lengths, penalties, strict=True)
    ]
    return _whiten_tokens(returns, scored, global_sum)


def reinforce_pp_baseline(
    rewards: list[Array], lengths: list[list[int]], penalties: PerToken, global_sum: GlobalSum
) -> PerToken:
    """As `reinforce_pp`, after subtracting its group's mean from each reward.

    Hu et al., REINFORCE++, arXiv:2501.03262, the variant with a group baseline.
    """
    centred = [group - group[_scored(group)].mean() if _scored(group).any() else group for group in rewards]
    return reinforce_pp(centred, lengths, penalties, global_sum)


def reward_to_go(reward: float, length: int, penalty: npt.NDArray[Any]) -> Array:
    """Sum over this and later tokens of (reward at the last token) - penalty -> [Lc]."""
    per_token = -np.asarray(penalty, dtype=np.float64)
    if length:
        per_token[-1] += reward
    return np.cumsum(per_token[::-1])[::-1]


def gae(rewards: Array, values: Array, gamma: float, lam: float) -> Array:
    """Generalised advantages of one sequence -> [L]; the targets of the value head are these + values.

    Schulman et al., arXiv:1506.02438. The value after the last token is 0, even for a truncated answer.
    """
    if rewards.shape != values.shape or rewards.ndim != 1:
        raise ValueError(f"gae: rewards {rewards.shape} and values {values.shape} must be the same [L]")
    for name, factor in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= factor <= 1.0:
            raise ValueError(f"gae: {name} is {factor}, allowed is 0..1")
    deltas = rewards + gamma * np.append(values[1:], 0.0)[: len(values)] - values
    result, running = np.zeros(len(rewards)), 0.0
    for t in reversed(range(len(rewards))):
        running = deltas[t] + gamma * lam * running
        result[t] = running
    return result


def gae_advantages(
    rewards: Sequence[npt.NDArray[Any]],
    values: Sequence[Sequence[FloatArray]],
    penalties: Sequence[Sequence[npt.NDArray[Any]]] | None = None,
    *,
    gamma: float,
    lam: float,
    global_sum: GlobalSum = lambda x: x,
) -> tuple[PerToken, PerToken]:
    """PPO's advantages, whitened over all tokens of the batch, and the targets of the value head; both [P][G] of [Lc].

    rewards [P][G] (NaN: not graded), values [P][G][Lc], penalties [P][G][Lc] (KL times its coefficient). The reward
    comes with the last token, after which the value is 0. Schulman et al., arXiv:1707.06347.
    """
    _check(rewards, [[len(value) for value in group] for group in values], penalties)
    raw: list[list[Array]] = []
    for p, (group, group_values) in enumerate(zip(rewards, values, strict=True)):
        raw.append([])
        for g, (reward, value) in enumerate(zip(group.tolist(), group_values, strict=True)):
            per_token = -np.asarray(penalties[p][g], np.float64) if penalties is not None else np.zeros(len(value))
            if len(value):
                per_token[-1] += 0.0 if np.isnan(reward) else reward
            raw[-1].append(gae(per_token, value.astype(np.float64), gamma, lam))
    targets = [
        [(a + v).astype(np.float32) for a, v in zip(group, group_values, strict=True)]
        for group, group_values in zip(raw, values, strict=True)
    ]
    return _whiten_tokens(raw, [_scored(group) for group in rewards], global_sum), targets


GROUP_LEVEL: dict[str, Callable[[Array], Array]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
BATCH_LEVEL: dict[str, Callable[[list[Array], list[list[int]], PerToken, GlobalSum], PerToken]] = {
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}


# --- what the loop calls ----------------------------------------------------------------------


def advantages(
    groups: Sequence[Group],
    algo: AlgoConfig,
    kl: Sequence[Sequence[npt.NDArray[Any]]] | None = None,
    global_sum: GlobalSum = lambda x: x,
) -> PerToken:
    """Advantages of every completion token: [P][G] arrays [Lc], aligned with `Group.rollouts`.

    `kl` [P][G][Lc] holds per-token estimates (`hone.learn.kl`), needed if `algo.kl.place` is "reward".
    """
    if algo.credit == "turn":
        return [turn_advantages(group, normalise=algo.divides_by_spread) for group in groups]
    rewards = [group_rewards(group) for group in groups]
    lengths = [[rollout.num_tokens for rollout in group.rollouts] for group in groups]
    return group_advantages(rewards, lengths, algo, kl, global_sum)


def turn_advantages(group: Group, normalise: bool) -> list[FloatArray]:
    """[G] arrays [Lc]: each token gets the sum of the centred rewards of its turn and of later turns.

    Rewards of turns are centred with the mean over all turns of the group and, if `normalise`, divided by their
    standard deviation: process supervision of GRPO, Shao et al., DeepSeekMath, arXiv:2402.03300, section 4.1.3, with
    turns as steps. Of one turn each it is `grpo`, or `dr_grpo`. Ungraded rollouts get 0.
    """
    graded = [r.verdict not in VERIFIER_FAILURES for r in group.rewards]
    by_turn = [np.asarray(reward.turns or (reward.total,)) for reward in group.rewards]
    every = np.concatenate([t for t, ok in zip(by_turn, graded, strict=True) if ok] or [np.zeros(0)])
    result = []
    for rollout, turns, ok in zip(group.rollouts, by_turn, graded, strict=True):
        centred = np.zeros(len(turns))
        if ok and not is_zero_variance(every):
            centred = (turns - every.mean()) / (every.std(ddof=1) + EPS if normalise else 1.0)
        to_go = np.cumsum(centred[::-1])[::-1]
        counts = [len(turn.completion_ids) for turn in rollout.turns]
        each = to_go if len(to_go) == len(counts) else np.full(len(counts), to_go[0])  # of a reward as a whole
        result.append(np.repeat(each, counts).astype(np.float32))
    return result


def group_advantages(
    rewards: Sequence[npt.NDArray[Any]],
    lengths: Sequence[Sequence[int]],
    algo: AlgoConfig,
    kl: Sequence[Sequence[npt.NDArray[Any]]] | None = None,
    global_sum: GlobalSum = lambda x: x,
) -> PerToken:
    """The same from plain arrays: rewards [P][G] (NaN: not graded), lengths [P][G] in tokens.

    Batch-level methods whiten over all ranks through `global_sum`, a collective: call this on every rank,
    even with no groups.
    """
    sizes = [list(map(int, group)) for group in lengths]
    _check(rewards, sizes, kl)
    coef = algo.kl.coef if algo.kl.place == "reward" else 0.0
    if coef and kl is None:
        raise ValueError('kl.place is "reward" but kl is None; compute reference log-probs first')
    penalties: PerToken = [
        [
            np.zeros(n, np.float32) if kl is None or not coef else (coef * kl[p][g]).astype(np.float32)
            for g, n in enumerate(group)
        ]
        for p, group in enumerate(sizes)
    ]
    totals = [np.asarray(group, dtype=np.float64) for group in rewards]
    if algo.advantage in BATCH_LEVEL:
        return BATCH_LEVEL[algo.advantage](totals, sizes, penalties, global_sum)
    # One number per sample: the summed penalty of a sequence is subtracted from its reward.
    totals = [
        group - np.array([p.sum(dtype=np.float64) for p in penalty])
        for group, penalty in zip(totals, penalties, strict=True)
    ]
    if algo.divides_by_spread:
        # Dividing by the standard deviation would blow the penalty's small differences up to full size.
        totals = [
            np.zeros(len(group)) if is_zero_variance(np.asarray(raw, dtype=np.float64)) else group
            for group, raw in zip(totals, rewards, strict=True)
        ]
    # Where every group has one sample the method decides (rloo raises); a lone graded one among ungraded gets 0.
    lone = all(len(group) == 1 for group in totals)
    per_sample = [_ignoring_ungraded(GROUP_LEVEL[algo.advantage], group, allow_lone=lone) for group in totals]
    return [
        [np.full(n, a, dtype=np.float32) for a, n in zip(group, counts, strict=True)]
        for group, counts in zip(per_sample, sizes, strict=True)
    ]


def group_rewards(group: Group) -> Array:
    """[G], NaN where the verifier failed."""
    return np.array([np.nan if r.verdict in VERIFIER_FAILURES else r.total for r in group.rewards])


def is_zero_variance(rewards: npt.NDArray[Any]) -> bool:
    """True if all graded samples have the same reward, so that the group has no gradient."""
    graded = rewards[_scored(rewards)]
    return len(graded) < 2 or float(np.ptp(graded)) < SAME_REWARD


def whiten(values: Array, global_sum: GlobalSum = lambda x: x) -> Array:
    """(x - mean) / (std + 1e-6) with the mean and standard deviation over all ranks."""
    count, total = global_sum(np.array([len(values), values.sum()]))
    mean = total / max(count, 1.0)
    (squares,) = global_sum(np.array([np.square(values - mean).sum()]))
    return (values - mean) / (np.sqrt(squares / max(count, 1.0)) + EPS)


# --- helpers ----------------------------------------------------------------------------------


def _scored(rewards: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    return ~np.isnan(rewards)


def _ignoring_ungraded(method: Callable[[Array], Array], rewards: Array, allow_lone: bool) -> Array:
    """Apply `method` to the graded samples; exactly 0, without rounding, if there is nothing to compare."""
    result, graded = np.zeros(len(rewards)), _scored(rewards)
    if not is_zero_variance(rewards) or (graded.any() and allow_lone):
        result[graded] = method(rewards[graded])
    return result


def _whiten_tokens(returns: list[list[Array]], scored: list[npt.NDArray[np.bool_]], global_sum: GlobalSum) -> PerToken:
    kept = [x for group, ok in zip(returns, scored, strict=True) for x, s in zip(group, ok, strict=True) if s]
    white = whiten(np.concatenate(kept) if kept else np.zeros(0), global_sum)
    parts = iter(np.split(white, np.cumsum([len(x) for x in kept])[:-1]))
    return [
        [(next(parts) if s else np.zeros(len(x))).astype(np.float32) for x, s in zip(group, ok, strict=True)]
        for group, ok in zip(returns, scored, strict=True)
    ]


def _check(
    rewards: Sequence[npt.NDArray[Any]], lengths: list[list[int]], kl: Sequence[Sequence[npt.NDArray[Any]]] | None
) -> None:
    if len(rewards) != len(lengths) or (kl is not None and len(kl) != len(lengths)):
        raise ValueError(f"{len(rewards)} groups of rewards, {len(lengths)} of lengths, {kl and len(kl)} of kl")
    for p, (group, counts) in enumerate(zip(rewards, lengths, strict=True)):
        if group.shape != (len(counts),):
            raise ValueError(f"group {p}: rewards have shape {group.shape}, but there are {len(counts)} lengths")
        if np.isinf(group).any():
            raise ValueError(f"group {p}: rewards {group.tolist()} must be finite, or NaN for not graded")
        if kl is None:
            continue
        for g, (values, n) in enumerate(zip(kl[p], counts, strict=True)):
            if values.shape != (n,) or not np.isfinite(values).all():
                raise ValueError(f"group {p}, sample {g}: kl needs {n} finite values, got shape {values.shape}")
