"""`hone plan RECIPE`: memory and time of every stage, and the settings to write in the recipe."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import torch

from hone.base.parallel import ParallelConfig
from hone.preflight.plan.calibrate import calibrate
from hone.preflight.plan.cost import H100, Shape, Speeds, StepTime, shape_of, step_time, work_of
from hone.preflight.plan.lengths import lengths_of
from hone.preflight.plan.memory import GIB, Lengths, Plan, batch_of, device_of, stage_plan, total_of
from hone.preflight.plan.rehearse import as_row
from hone.preflight.plan.shapes import config_of
from hone.preflight.plan.size import Advice, advise
from hone.recipe.recipe import Pipeline, Recipe


@dataclass(frozen=True)
class Planned:
    """Everything that is shown for a stage."""

    plan: Plan
    advice: Advice
    seconds: StepTime | None  # None: the time of a step is unknown
    speeds: str


def plan_stage(
    stage: Recipe, device: str | None, total: int | None, timed: bool, lengths: Lengths | None = None
) -> Planned:
    """Plan one stage. `total`: bytes of the device; None: those it has. `timed`: measure the speed of this machine with
    a model of the same shape."""
    device, split = device or device_of(stage), stage.parallel
    total = total or total_of(device)
    lengths = lengths or lengths_of(stage)

    def planned(one: Recipe, split: ParallelConfig) -> Plan:
        return stage_plan(one, parallel=split, device=device, total_bytes=total, lengths=lengths)

    plan = planned(stage, split)
    advice = advise(stage, plan, planned, split)
    if stage.stage == "generate":
        return Planned(plan, advice, None, "")
    shape = shape_of(config_of(stage.model)[0], stage.model.dtype)
    work = work_of(stage, batch_of(stage), lengths.prompt, lengths.answer, plan.rows or stage.rollout.max_sequences)
    speeds = _speeds(stage, plan, shape, timed)
    if speeds is None:
        return Planned(plan, advice, None, "")
    return Planned(plan, advice, step_time(work, shape, speeds, split), speeds.name)


def _speeds(stage: Recipe, plan: Plan, shape: Shape, timed: bool) -> Speeds | None:
    here = "cuda" if torch.cuda.is_available() else "cpu"
    if timed and plan.device == here:
        work = work_of(stage, batch_of(stage), plan.prompt_tokens, plan.answer_tokens, plan.rows)
        speeds = calibrate(stage, batch_of(stage), plan, work, shape)
        if here == "cuda":  # a single device cannot measure these
            return replace(speeds, link=H100.link, network=H100.network)
        return speeds
    return H100 if plan.device == "cuda" else None


def cli_plan(recipe: Recipe | Pipeline, device: str | None, gib: float | None, timed: bool, as_json: bool) -> int:
    """Print the plans; returns the exit code: 1 if a stage does not fit as it is written, else 0."""
    total = None if gib is None else int(gib * GIB)
    plans = [plan_stage(stage, device, total, timed) for stage in recipe.stages]
    if as_json:
        print(json.dumps([row(one) for one in plans], indent=1))
    else:
        print("\n\n".join(text(one) for one in plans))
    return int(any(one.plan.peak_bytes > one.plan.total_bytes for one in plans))


def row(one: Planned) -> dict[str, Any]:
    """The plan for JSON, in bytes and seconds."""
    advice = {"fits": one.advice.fits, "settings": dict(one.advice.settings), "plan": as_row(one.advice.plan)}
    seconds = None if one.seconds is None else {**one.seconds.row(), "speeds": one.speeds}
    return {**as_row(one.plan), "advice": advice, "step_seconds": seconds}


def text(one: Planned) -> str:
    """A table of parts, the time of a step, and the settings to write."""
    plan = one.plan
    lines = [
        f"stage {plan.stage}: {plan.peak_bytes / GIB:.2f} GiB in each process at the peak, in {plan.moment}; "
        f"{plan.device} with {plan.total_bytes / GIB:.1f} GiB",
        f"  {plan.parameters / 1e6:,.1f} M parameters, {plan.trained / 1e6:,.1f} M trained; prompts up to "
        f"{plan.prompt_tokens} tokens, answers up to {plan.answer_tokens}; longest micro-batch "
        f"{plan.batch_tokens} tokens",
    ]
    names = list(dict.fromkeys(name for parts in plan.moments.values() for name in parts))
    lines.append("  " + " " * 14 + "".join(f"{moment:>14}" for moment in plan.moments) + "   GiB")
    for name in names:
        sizes = "".join(_cell(parts.get(name)) for parts in plan.moments.values())
        lines.append(f"  {name:14}{sizes}")
    lines.append("  " + f"{'together':14}" + "".join(_cell(sum(parts.values())) for parts in plan.moments.values()))
    if one.seconds is not None:
        t = one.seconds
        lines.append(
            f"  a step: {_seconds(t.total)} (generation {_seconds(t.generate)}, training {_seconds(t.train)}, sending "
            f"{_seconds(t.send + t.sync)}) with answers of full length; {one.speeds}"
        )
    lines += [f"  assumed: {line}" for line in plan.assumptions]
    return "\n".join([*lines, *(f"  {line}" for line in _advice(one))])


def _cell(size: int | None) -> str:
    return f"{'-':>14}" if size is None else f"{size / GIB:>14.2f}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def _advice(one: Planned) -> list[str]:
    advice = one.advice
    if not advice.fits:
        return ["does not fit at any size: choose a smaller model, LoRA (lora:), or more devices (parallel.shard)"]
    if not advice.settings:
        return ["fits as it is"]
    written = " ".join(f"{key}={json.dumps(value)}" for key, value in advice.settings.items())
    peak = advice.plan.peak_bytes / GIB
    return [f"write: {written}   (then {peak:.2f} GiB at the peak, for 90 % of the device)"]
