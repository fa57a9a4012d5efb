"""Guards of the update: non-finite updates are skipped and saved; samples behind a gradient spike are named.

guard(writer, step, stats, updates, samples, watch)        # after every `writer.log`
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

from safetensors.torch import save

from hone.base import checksums, jsonl
from hone.base.settings import UserError
from hone.learn.batches import is_masked
from hone.recipe.sections.algo import AlgoConfig, WatchConfig
from hone.rewards.base import failures
from hone.runs.writer import RunWriter
from hone.types import NOT_GRADED, TOKEN_FIELDS, VERIFIER_FAILURES, Group, MicroBatch, Sample, StepStats

#: Samples that a warning names at most.
NAMED = 3
#: Share of a step's samples on which the user's reward and the grader may differ without a warning.
DISAGREEMENT = 0.05
TENSORS = ("inputs", "positions", "targets", *TOKEN_FIELDS)


class NonFiniteUpdate(UserError):
    """Several steps in a row had an update whose loss or gradient was not finite."""


def guard(
    writer: RunWriter,
    step: int,
    stats: StepStats,
    updates: Sequence[Sequence[MicroBatch]],
    samples: Sequence[Sample],
    watch: WatchConfig,
) -> None:
    """Record a skipped update, or a gradient far above the usual size, as an event that names samples.

    The policy has skipped the update already. Raises NonFiniteUpdate after `watch.max_skipped` such steps in a row.
    `writer.history` ends with this step's row.
    """
    if stats.metrics["skipped"]:
        name = f"skipped/step_{step:06d}.safetensors"
        path = writer.folder / name
        if writer.world.main:
            write_batches(writer.path(name), updates)
        writer.event(
            "update_skipped",
            f"step {step}: {stats.metrics['skipped']:.0f} of {len(updates)} updates had a loss or gradient that is not "
            f"finite and did not change the weights; the batch is in {path}. {_culprits(stats, samples)}",
            step,
            file=name,
        )
        if skipped_in_a_row(writer.history) >= watch.max_skipped:
            raise NonFiniteUpdate(
                f"{writer.folder}: {watch.max_skipped} steps in a row (watch.max_skipped) had an update that was not "
                f"finite: lower optim.lr, or look at {path.parent} and at the samples of these steps"
            )
        return
    usual = usual_grad_norm(writer.history[:-1], watch)
    if usual is not None and stats.grad_norm > watch.grad_norm_rise * usual:
        writer.event(
            "grad_spike",
            f"step {step}: gradient norm {stats.grad_norm:.3g} is {stats.grad_norm / usual:.1f} times the usual "
            f"{usual:.3g}. {_culprits(stats, samples)}",
            step,
        )


def guard_rewards(writer: RunWriter, step: int, groups: Sequence[Group], watch: WatchConfig) -> None:
    """Record the samples that were left out because their verifier failed, with the reasons.

    Raises UserError after `watch.max_unscored` steps in a row without a single scored sample.
    """
    message = failures(groups)
    if message is None:
        return
    writer.event("verifier", message, step)
    lost = [sum(row.get(f"verdict/{kind}", 0.0) for kind in VERIFIER_FAILURES) for row in writer.history]
    if len(lost) >= watch.max_unscored and min(lost[-watch.max_unscored :]) > 0.999:
        raise UserError(
            f"{writer.folder}: no sample had a reward in {watch.max_unscored} steps in a row "
            f"(watch.max_unscored): {message}. When the verifier works again, continue with --resume"
        )


def guard_grades(
    writer: RunWriter, step: int, groups: Sequence[Group], function: str | None, has_grading: bool
) -> None:
    """Record once per run that the user's reward, if it is 0 or 1, and the grader's verdicts differ on many samples.

    `function`: the name of the user's function that is the whole reward; None: there is none. `has_grading`: whether
    the task has the setting `grading`; others have one grader.
    """
    if function is None:
        return
    graded = [r for group in groups for r in group.rewards if r.verdict not in NOT_GRADED]
    pairs = [(r.parts[function], r.verdict == "correct") for r in graded if function in r.parts]
    paid = sum(value == 1.0 and not correct for value, correct in pairs)
    unpaid = sum(value == 0.0 and correct for value, correct in pairs)
    if {value for value, _ in pairs} - {0.0, 1.0} or paid + unpaid <= DISAGREEMENT * len(pairs):
        return
    if any(row.get("kind") == "grades_differ" for row in jsonl.read(writer.folder / "events.jsonl")):
        return
    remedy = "hone runs show and hone view show which of the two is right"
    if has_grading:
        remedy = "if the reward is right, set task.grading=none, or task.grading=text where answers are words"
    writer.event(
        "grades_differ",
        f"step {step}: the reward {function} and the grader differ on {paid + unpaid} of {len(pairs)} samples: "
        f"{unpaid} are graded correct and have no reward, {paid} have one and are graded wrong. The accuracy is the "
        f"grader's; {remedy}",
        step,
    )


def no_signal(groups: Sequence[Group], algo: AlgoConfig) -> str:
    """Why nothing was learned in a step without micro-batches, and what to change."""
    samples = [(group, i) for group in groups for i in range(len(group.rewards))]
    alike = (
        "no group had a reward difference: nothing was learned in this step. What helps: problems that are neither "
        "too hard nor too easy, and a higher sampling.temperature; a supervised stage first (stage: sft) if no answer "
        "was ever right; a lower optim.lr if it began during training"
    )
    if not samples:  # all were replaced, or there were none
        return alike
    scored = [(group, i) for group, i in samples if group.rewards[i].verdict not in VERIFIER_FAILURES]
    unscored = len(samples) - len(scored)
    masked = sum(is_masked(group.rollouts[i], algo) for group, i in scored)
    remaining = len(samples) - unscored - masked
    out = []
    if masked:
        out.append(f"{masked} were cut off at sampling.max_tokens, and algo.mask_truncated leaves those out")
    if unscored:
        out.append(f"{unscored} have no reward")
    if not out:
        return alike
    remedy = "; raise sampling.max_tokens, or set algo.mask_truncated: false" if masked > unscored else ""
    rest = f"the other {remaining} have no reward difference" if remaining else "no sample is left to learn from"
    return f"of {len(samples)} samples {' and '.join(out)}; {rest}: nothing was learned in this step{remedy}"


def skipped_in_a_row(history: Sequence[Mapping[str, Any]]) -> int:
    """The number of consecutive last steps with a skipped update, ignoring steps without an update."""
    tried = [row for row in history if row.get("trained_tokens") != 0]
    return len(list(takewhile(lambda row: bool(row.get("skipped")), reversed(tried))))


def usual_grad_norm(history: Sequence[Mapping[str, Any]], watch: WatchConfig) -> float | None:
    """Median over the last steps with a gradient; None if there are fewer than `watch.window`."""
    recent = [row["grad_norm"] for row in history[-4 * watch.window :]]
    norms = [x for x in recent if x is not None and math.isfinite(x) and x > 0.0]
    return median(norms) if len(norms) >= watch.window else None


def _culprits(stats: StepStats, samples: Sequence[Sample]) -> str:
    """The samples with the largest share of the squared gradient at the last hidden states; not finite ones first."""
    squares = {i: norm * norm if math.isfinite(norm) else math.inf for i, norm in stats.grad_norms.items()}
    broken = sorted(i for i, x in squares.items() if math.isinf(x))
    if broken:
        names = ", ".join(_name(i, samples) for i in broken[:NAMED])
        return f"Not finite in {len(broken)} of {len(squares)} samples: {names}"
    total = sum(squares.values()) or 1.0
    first = sorted(squares, key=lambda i: -squares[i])[:NAMED]
    return "Largest shares: " + ", ".join(f"{_name(i, samples)} {100 * squares[i] / total:.0f}%" for i in first)


def _name(i: int, samples: Sequence[Sample]) -> str:
    """The sample's problem and its number in the step, which in RL is its line in the rollouts file."""
    return f"{samples[i].problem_id} (sample {i + 1})"


# --- batches on disk --------------------------------------------------------------------------


def write_batches(path: Path, updates: Sequence[Sequence[MicroBatch]]) -> None:
    """Save the micro-batches of the updates of a step."""
    tensors, shapes = {}, []
    for u, batches in enumerate(updates):
        for b, batch in enumerate(batches):
            for name in TENSORS:
                if (value := getattr(batch, name)) is not None:
                    tensors[f"{u}.{b}.{name}"] = value.contiguous()
            layout = [(block.prompt_len, block.completion_lens) for block in batch.layout]
            shapes.append({"update": u, "layout": layout, "sample_ids": batch.sample_ids})
    checksums.put(path, save(tensors, metadata={"batches": json.dumps(shapes)}))
