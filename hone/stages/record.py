"""Records a step: a row of metrics, every sample, and events for what looks wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import get_args

import numpy as np

from hone.environments.record import turn_seconds
from hone.grade.parse import parse
from hone.learn.advantages import group_rewards, is_zero_variance
from hone.learn.batches import Batch
from hone.learn.samples import chains, to_samples
from hone.learn.watch import collapse_warnings
from hone.measure.stats import reflection
from hone.rewards import only_function
from hone.rollout.prompts import Renderer
from hone.runs.writer import RunWriter
from hone.stages.guard import guard, guard_grades, guard_rewards, no_signal
from hone.stages.source import Sampled
from hone.types import NOT_GRADED, VERIFIER_FAILURES, End, Group, Reward, Rollout, StepStats, Turn, Verdict


@dataclass(frozen=True, slots=True)
class StepLog:
    """Everything about a finished step."""

    sampled: Sampled
    batch: Batch
    stats: StepStats
    metrics: Mapping[str, float | str]  # the columns of metrics.jsonl
    seconds: Mapping[str, float]  # by part

    @classmethod
    def of(
        cls,
        sampled: Sampled,
        batch: Batch,
        stats: StepStats,
        state: Mapping[str, float],
        seconds: Mapping[str, float],
    ) -> StepLog:
        """Collect the metrics. `state`: further columns, such as the number of hard resets before the step.

        Rewards, verdicts and lengths are those of all groups: without the replaced ones they would be biased.
        """
        staleness = {} if sampled.staleness is None else {"staleness": float(sampled.staleness)}
        metrics = {
            "phase": sampled.settings.stage,
            "trained_tokens": stats.num_tokens,
            **rollout_metrics(sampled.everyone),
            "groups/replaced": float(len(sampled.replaced)),
            "loss": stats.loss,
            "grad_norm": stats.grad_norm,
            **stats.metrics,
            **state,
            **sampled.shares,
            **batch.metrics,
            **staleness,
        }
        return cls(sampled, batch, stats, metrics, seconds)


def record(writer: RunWriter, log: StepLog, renderer: Renderer) -> None:
    """Write the step to the run folder, and record warnings as events."""
    sampled, batch, stats = log.sampled, log.batch, log.stats
    step, settings = sampled.step, sampled.settings
    writer.log_prompts(step, sampled.drawn, sampled.groups, sampled.replaced)
    writer.log(step, log.metrics, log.seconds, turn_seconds([r for g in sampled.everyone for r in g.rollouts]))
    prompts = [
        renderer.shown_prompt(group.problem, max(group.rollouts, key=lambda r: len(r.turns)))
        for group in sampled.everyone
    ]
    samples = [*batch.samples, *(sample for group in sampled.replaced for sample in to_samples(group))]
    writer.log_rollouts(step, sampled.everyone, prompts, samples, stats, renderer.piece)
    if sampled.replaced and len(sampled.groups) < settings.prompts_per_step:
        kept = f"{len(sampled.groups)} of {settings.prompts_per_step} groups have a reward difference"
        writer.event("refill_bound", f"after {settings.algo.refill_rounds} rounds of refill {kept}", step)
    if not batch.minibatches:
        writer.event("no_signal", no_signal(sampled.groups, settings.algo), step)
    guard_rewards(writer, step, sampled.everyone, settings.watch)
    if settings.stage == "rl":
        has_grading = "grading" in type(settings.task).model_fields
        guard_grades(writer, step, sampled.everyone, only_function(settings.reward), has_grading)
    guard(writer, step, stats, batch.minibatches, batch.samples, settings.watch)
    for warning in collapse_warnings(writer.history, settings.watch):
        writer.event("collapse", str(warning), step, name=warning.name)
    writer.log_costs(step, sampled.costs)


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Means over the groups: rewards, verdicts, lengths in tokens, groups without a reward difference, reflection.

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
    # One per problem. Texts without thinking tags do not count: they would all be equal.
    first_thoughts = [t for g in groups if (t := parse(g.rollouts[0].text).thinking) is not None]
    return {
        "reward/mean": float(totals.mean()),
        "reward/std": float(totals.std()),
        **{f"reward/{name}": float(np.mean([r.parts[name] for r in graded if name in r.parts])) for name in parts},
        **_accuracy(rewards),
        **{f"verdict/{v}": float(np.mean([r.verdict == v for r in rewards])) for v in verdicts},
        "length/min": float(lengths.min()),
        "length/mean": float(lengths.mean()),
        "length/p95": float(np.percentile(lengths, 95)),
        "length/max": float(lengths.max()),
        "length/truncated": float(np.mean([r.finish == "length" for r in rollouts])),
        **_episodes(rollouts),
        "zero_variance": float(np.mean([is_zero_variance(group_rewards(g)) for g in groups])),
        "reflection_rate": reflection.rate([r.text for r in rollouts]),
        "duplicate_thinking": reflection.duplicate_rate(first_thoughts),
    }


def _episodes(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Metrics of rollouts with several turns: their number, ends, branches, tool calls, and the environments' own
    metrics."""
    episodes = [r.episode for r in rollouts]
    ended = any(e.end not in ("done", "max_tokens") or any(step.parts for step in e.steps) for e in episodes)
    if not ended and all(len(r.turns) == 1 for r in rollouts):
        return {}
    names = sorted({name for e in episodes for step in e.steps for name in step.parts})
    calls = [sum(len(step.message.get("tool_calls") or ()) for step in e.steps) for e in episodes]
    return {
        "episode/turns": float(np.mean([len(r.turns) for r in rollouts])),
        "episode/branches": float(np.mean([len(chains(r)) - 1 for r in rollouts])),
        "episode/tool_calls": float(np.mean(calls)),
        "episode/malformed": float(np.mean([sum(step.error is not None for step in e.steps) for e in episodes])),
        **_reads(rollouts),
        **{f"episode/end/{end}": float(np.mean([e.end == end for e in episodes])) for end in get_args(End)},
        **{
            f"episode/{n}": float(np.mean([sum(s.parts.get(n, 0.0) for s in e.steps) for e in episodes])) for n in names
        },
    }


def _reads(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Of the native engine: prompt tokens that were computed, and turns whose conversation was read again."""
    if any(turn.read is None for r in rollouts for turn in r.turns):
        return {}
    pairs = [[pair for chain in chains(r) for pair in pairwise(chain)] for r in rollouts]
    # What was kept lacks the last token of the turn before.
    again = [sum((t.read or 0) > len(t.prompt_ids) - _length(b) + 1 for b, t in of_rollout) for of_rollout in pairs]
    tokens = [sum(turn.read or 0 for turn in r.turns) for r in rollouts]
    return {"episode/read_tokens": float(np.mean(tokens)), "episode/read_again": float(np.mean(again))}


def _length(turn: Turn) -> int:
    return len(turn.prompt_ids) + len(turn.completion_ids)


def _accuracy(rewards: Sequence[Reward]) -> dict[str, float]:
    """The column `accuracy` of the graded samples: NaN if a verifier failed on all, no column for a task without a
    grader."""
    graded = [r.verdict == "correct" for r in rewards if r.verdict not in NOT_GRADED]
    if not graded and any(r.verdict == "ungraded" for r in rewards):
        return {}
    return {"accuracy": float(np.mean(graded)) if graded else float("nan")}
