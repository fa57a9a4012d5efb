"""Runs the stages of a recipe in order: each starts from the model of the stage before, or of one that it names.

runs/NAME/                 a recipe of one stage: its run folder
runs/NAME/base/            the from-scratch model, if the recipe asks for `tiny`
runs/NAME/STAGE/           with `stages:`, one run folder each, with its own `base` in it if it starts a new model
runs/NAME/stages.json      the stages and their folders
runs/NAME/results.json     evaluations, seconds and peak memory
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.base import checksums, jsonl, sealed, streams
from hone.base.aside import reopen, set_aside
from hone.base.settings import UserError
from hone.base.stop import Halted, Interrupted, Preempted
from hone.base.visible import visible
from hone.base.world import ALONE, World, connected
from hone.model import tiny
from hone.preflight.check.preflight import before_training
from hone.preflight.plan.rehearse import compared, explained, line, peak_rss_bytes
from hone.recipe.explain import explain
from hone.recipe.load import leaves
from hone.recipe.recipe import Pipeline, Recipe, resolved, stages_of
from hone.recipe.sections.model import ModelConfig
from hone.recipe.stages import MODELLESS, beside
from hone.rollout.dates import date_of, pin, prompt_date
from hone.rollout.prompts import made_tokenizer
from hone.runs import card, lock
from hone.runs.retention import best_validated, measured
from hone.runs.sinks import check_installed, copying
from hone.stages import generate, loop, sft
from hone.stages.resume import Todo, complete_stages, damage, fill_defaults, outlook
from hone.stages.stage import Stage


def train_loop(recipe: Recipe, folder: Path, model: ModelConfig) -> None:
    loop.train(Stage.load(recipe, folder, model))


STAGES = {"sft": sft.train, "rl": train_loop, "generate": generate.train, "distil": train_loop}

#: The measurements of a session.
MEASURED = ("seconds", "cpu_seconds", "peak_rss_bytes")


def run(recipe: Recipe | Pipeline, resume: bool = False, findings: Sequence[Mapping[str, Any]] = ()) -> Path:
    """Train every stage; returns the run folder. `findings`: of the preflight, kept in preflight.json.

    A folder from an earlier run is set aside under another name, never overwritten; with `resume`
    it is continued instead. Raises `Interrupted` when the user asked to stop, after saving.
    """
    folder = Path(recipe.runs) / recipe.name
    stages = stages_of(recipe)
    check_installed({name for stage, _ in stages for name in stage.sinks})
    with connected(stages[0][0].parallel) as world, contextlib.ExitStack() as around:
        world.on_main(lambda: _enter(around, lock.held(folder)), "the lock of the run folder", patient=True)
        done = world.on_main(lambda: begin(recipe, folder, resume), "the run folder", patient=True)
        if done is not None:
            if world.main and findings:
                jsonl.replace(folder / "preflight.json", json.dumps(list(findings), indent=1, ensure_ascii=False))
            with prompt_date(date_of(folder)), session(folder, world), how_to_go_on(folder, world):
                for stage, sub in stages[done:]:
                    train_stage(recipe, stage, folder, sub, World.from_env(stage.parallel))
            world.on_main(lambda: write_results(folder, stages), "the results")
            if world.main:
                print(f"{folder} is done; to view it: hone report {folder}", file=sys.stderr)
    return folder


def checked(recipe: Recipe | Pipeline, resume: bool = False) -> list[dict[str, str]]:
    """The findings of the preflight, which precedes `run` and changes nothing.

    With `resume`, complete stages are skipped, except for the last, which may be extended. Raises UserError if the run
    is impossible.
    """
    stages = stages_of(recipe)
    done = len(complete_stages(stages, Path(recipe.runs) / recipe.name)) if resume else 0
    return before_training(recipe, min(done, len(stages) - 1))


def train_stage(recipe: Recipe | Pipeline, stage: Recipe, folder: Path, sub: Path, world: World) -> None:
    """One stage of the run in `folder`."""
    # The first stage uses the base of the whole run.
    base = folder / "base" if sub == stages_of(recipe)[0][1] else folder / sub / "base"
    model = world.on_main(lambda: str(first_model(stage, folder / sub, base)), "the initial model")
    sinks = stage.sinks if world.main else ()
    name = f"{recipe.name}-{sub}" if sub.parts else recipe.name
    with copying(folder / sub, sinks, name), explained(stage, folder / sub, world):
        STAGES[stage.stage](stage, folder / sub, stage.model.at(model))


def begin(recipe: Recipe | Pipeline, folder: Path, resume: bool) -> int | None:
    """Prepare the run folder; returns the number of stages that are already done, None if the run is finished.

    Settings with which it cannot continue are refused before anything is changed.
    """
    todo = prepared(recipe, folder, resume)
    if todo is None:
        return None
    stages = stages_of(recipe)
    if folder.exists() and not resume:
        set_aside(folder)
    if resume and not folder.exists():
        print(f"{folder}: there is no run to continue; starting a new one", file=sys.stderr)
    for _, sub in stages:
        fill_defaults(folder / sub / "config.resolved.json")
    if todo.reopened is not None:
        reopen(folder, folder / stages[-1][1], todo.reopened)
    for message in todo.lines:
        print(message, file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    pin(folder)
    rows = [
        {"name": stage.name, "kind": stage.stage, "folder": str(sub), "goes_on_with": stage.model.stage}
        for stage, sub in stages
    ]
    if isinstance(recipe, Pipeline):
        sealed.put(folder, "stages.json", json.dumps(rows, indent=1))
        sealed.put(folder, "config.resolved.json", json.dumps(resolved(recipe), indent=1))
    return todo.done


def prepared(recipe: Recipe | Pipeline, folder: Path, resume: bool) -> Todo | None:
    """What remains to be done in a run folder, without changing it; prints a message and returns None if it is
    finished.

    Raises UserError for settings with which a run cannot continue.
    """
    stages = stages_of(recipe)
    if folder.exists() and not resume:
        _check_inputs(recipe, folder)
    todo = outlook(stages, folder) if resume else Todo(0)
    for _, sub in stages[: len(stages) if todo is None else todo.done]:
        for fault in damage(folder / sub):
            print(visible(fault), file=sys.stderr)
    if todo is None:
        print(f"{folder} is finished; more steps (steps=...) extend it. Without --resume it is set aside and trained "
              "anew", file=sys.stderr)  # fmt: skip
    return todo


def _check_inputs(recipe: Recipe | Pipeline, folder: Path) -> None:
    """Raises UserError for a model or file inside the folder that this run sets aside, where it would no longer be
    found."""
    inside = os.path.join(os.path.abspath(folder), "")
    for stage, _ in stages_of(recipe):
        for path, value in leaves(stage):
            if isinstance(value, str) and os.path.abspath(os.path.expanduser(value)).startswith(inside):
                raise UserError(
                    f"{'.'.join(path)}: {value} lies in {folder}, which is set aside before another run of this name "
                    "starts; give this run another name"
                )


def _enter(around: contextlib.ExitStack, context: contextlib.AbstractContextManager[object]) -> None:
    """Enter the context in this process; returns nothing, as results are sent to the other processes."""
    around.enter_context(context)


@contextlib.contextmanager
def how_to_go_on(folder: Path, world: World) -> Iterator[None]:
    """Say, after a Ctrl-C or an error, what was saved and how to continue."""
    by_hand = sys.argv[1:2] == ["train"]  # not from Python, where the arguments are another program's
    arguments = [a for a in sys.argv[2:] if a != "--resume"] if by_hand else []
    how = shlex.join([sys.argv[0] if by_hand else "hone", "train", *(arguments or [str(folder)]), "--resume"])
    try:
        yield
    except (KeyboardInterrupt, Preempted) as stop:
        if not world.main:
            raise
        saved = stop if isinstance(stop, (Interrupted, Preempted)) else "stopped; what was saved is kept"
        print(f"{saved}. Continue with: {how}", file=sys.stderr)
        raise
    except Halted as stop:
        raise Halted(stop.step, stop.problem, how) from stop.__cause__


def first_model(recipe: Recipe, folder: Path, base: Path) -> str | Path:
    """The model that a stage with this run folder starts from, or its teacher if it needs no other model.

    That is the model of an earlier stage, `base` (created here) for `tiny`, else the path in the recipe.
    """
    if recipe.stage in MODELLESS and recipe.teacher is not None:
        return beside(recipe.teacher, folder, "model")
    if recipe.model.stage is not None:
        return folder.parent / recipe.model.stage / "model"
    if recipe.model.path != "tiny":
        return recipe.model.path
    # checksums.json is written last; runs of older versions have none.
    if not (base / checksums.FILE).exists() and not (base / "tokenizer.json").exists():
        tiny.create(base, recipe.model.tiny, made_tokenizer(recipe), streams.weights(recipe.seed))
    return base


@contextlib.contextmanager
def session(folder: Path, world: World = ALONE) -> Iterator[None]:
    """Record the wall and CPU time of this session and its peak memory, however it ends."""
    if not world.main:
        yield
        return
    path = folder / "sessions.jsonl"
    rows = [_ended(row, folder) for row in jsonl.read(path) if {"started", *MEASURED} <= row.keys()]
    started, worked = time.time(), time.process_time()
    rows.append({"started": started, "seconds": None, "cpu_seconds": None, "peak_rss_bytes": None})
    jsonl.write(path, rows)
    try:
        yield
    finally:
        took = {"seconds": round(time.time() - started, 2), "cpu_seconds": round(time.process_time() - worked, 2)}
        rows[-1] |= {**took, "peak_rss_bytes": peak_rss_bytes()}
        if not lock.lost(folder):
            jsonl.write(path, rows)


def _ended(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The row of a session; one that was killed lasted until the last row that it wrote."""
    if row["seconds"] is None:
        last = max((path.stat().st_mtime for path in folder.rglob("*.jsonl")), default=row["started"])
        return {**row, "seconds": round(max(0.0, last - row["started"]), 2)}
    return row


def write_results(folder: Path, stages: list[tuple[Recipe, Path]]) -> None:
    """Write the cards of the models, then results.json, which marks the run as finished."""
    trained = [card.Trained(stage, explain(stage), folder / sub) for stage, sub in stages]
    for n, (_, _, place) in enumerate(trained, start=1):
        if (place / "model").exists():
            card.write(place / "model", trained[:n])
    summary = results(folder, stages)
    if "memory" in summary:
        print(line(summary["memory"]), file=sys.stderr)
    sealed.put(folder, "results.json", json.dumps(summary, indent=1))


def results(folder: Path, stages: list[tuple[Recipe, Path]]) -> dict[str, Any]:
    """Time and peak memory over all sessions, and the evaluations before and after the last RL stage.

    `cpu_seconds`: of this process, not of servers or verifiers; None if a session was killed.
    `stages`: the evaluations of every stage that has some, and the first step of each warning of the collapse watch.
    """
    sessions = jsonl.read(folder / "sessions.jsonl")
    cpu: list[Any] = [s.get("cpu_seconds") for s in sessions]
    summary: dict[str, Any] = {
        "seconds": round(sum(s["seconds"] for s in sessions), 1),
        "cpu_seconds": None if None in cpu else round(float(sum(cpu)), 1),
        "peak_rss_bytes": max(s["peak_rss_bytes"] or 0 for s in sessions),
        "seed": stages[0][0].seed,
    }
    memory = compared([folder / sub for _, sub in stages])
    if memory is not None:
        summary["memory"] = memory
    for stage, sub in stages:
        evals = jsonl.read(folder / sub / "evals.jsonl")
        if best := best_validated(evals, stage.checkpoint.keep_best):
            row = next(row for row in evals if row["step"] == best[0] and row["label"] == "validation")
            measure = measured(row)
            assert measure is not None  # otherwise the step is not among the best
            summary["best"] = {"stage": stage.name, "steps": best, "split": "validation", measure[0]: measure[1]}
    each = {stage.name: rows for stage, sub in stages if (rows := evaluations(folder / sub))}
    for rows in each.values():
        summary |= rows
    if len(stages) > 1:
        named = {stage.name: collapses(folder / sub) for stage, sub in stages}
        summary["stages"] = {name: {**rows, "collapse": named[name]} for name, rows in each.items()}
    return summary


def evaluations(folder: Path) -> dict[str, dict[str, Any]]:
    """The evaluations `before` and `after` of a stage, without the keys that only the report needs."""
    keys = (
        "accuracy",
        "truncation_rate",
        "response_tokens",
        "reflection_rate",
        "well_formed_rate",
        "by_level",
        "verdicts",
        "pass_at_k",
        "reward",
    )
    rows = [row for row in jsonl.read(folder / "evals.jsonl") if row["label"] in ("before", "after")]
    return {
        row["label"]: {key: value for key, value in row.items() if key in keys or key.startswith("reward/")}
        for row in rows
    }


def collapses(folder: Path) -> dict[str, int]:
    """The warnings of the collapse watch in a stage -> the first step of each."""
    events = [e for e in jsonl.read(folder / "events.jsonl") if e["kind"] == "collapse" and "name" in e]
    return {event["name"]: event["step"] for event in reversed(events)}
