"""What remains to be done in a run folder, and whether the run can continue with the current settings.

todo = outlook(stages_of(recipe), folder)       # None: it is finished
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from hone.base import checksums, jsonl, sealed
from hone.base.settings import UserError
from hone.learn import checkpoint
from hone.recipe.recipe import Recipe, chosen, completed
from hone.runs import seal
from hone.runs.changes import Change, changes, check_possible, longer
from hone.stages.generate import DATASET

#: Settings of how a stage is run; they may differ from those of a finished stage.
ELSEWHERE = ("name", "runs", "sinks", "parallel", "launch")

#: The setting that extends a finished stage.
LENGTH = {"rl": "steps", "distil": "steps", "sft": "sft.epochs"}

Stages = Sequence[tuple[Recipe, Path]]


@dataclass(frozen=True)
class Todo:
    """What a start of a run has to do."""

    done: int  # number of stages that are complete
    reopened: int | None = None  # steps of the last stage, if it is complete and is extended
    lines: tuple[str, ...] = ()  # messages about that


def complete(stage: Recipe, folder: Path) -> bool:
    """Whether a stage is complete: the file or folder that it writes last exists."""
    return (folder / (DATASET if stage.stage == "generate" else "model")).exists()


def complete_stages(stages: Stages, folder: Path) -> list[tuple[Recipe, Path]]:
    """The first stages, as many as are complete in the folder of a run."""
    return list(takewhile(lambda s: complete(s[0], folder / s[1]), stages))


def outlook(stages: Stages, folder: Path) -> Todo | None:
    """What there is to do; None if the run is finished. Changes nothing.

    Raises UserError for settings with which the run cannot continue, or that differ from those of a finished stage.
    """
    if (folder / "results.json").exists():  # if it is missing, it is written again
        sealed.require_file(folder, "results.json")
    done = complete_stages(stages, folder)
    for stage, sub in done[:-1] if len(done) == len(stages) else done:
        check_unchanged(stage, folder / sub)
    if len(done) < len(stages):
        for stage, sub in stages[len(done) :]:
            check_going_on(stage, folder / sub)
        return Todo(len(done))
    stage, sub = stages[-1]
    before = stored(folder / sub)
    if before is None or not more(before, stage):
        if before is not None:
            check_unchanged(stage, folder / sub)
        return None if (folder / "results.json").exists() else Todo(len(done))
    changed = changes(before, stage.model_dump(mode="json"), ELSEWHERE)
    check_possible(changed, folder / sub)
    return Todo(len(done) - 1, steps_of(folder / sub), tuple(extension(before, stage, changed, folder / sub)))


def stored(folder: Path) -> dict[str, Any] | None:
    """The recorded settings of the stage in a folder, with defaults for settings that did not exist then."""
    path = folder / "config.resolved.json"
    if not path.exists():
        return None
    sealed.require_file(folder, path.name)
    return completed(checksums.read_json(path, dict, "restore it from a copy"))


def fill_defaults(resolved: Path) -> None:
    """Add settings that did not exist when the run began, at their defaults, so that they do not count as changed."""
    if not resolved.exists():
        return
    sealed.require_file(resolved.parent, resolved.name)
    before = checksums.read_json(resolved, dict, "restore it from a copy")
    if "stages" not in before:
        sealed.put(resolved.parent, resolved.name, json.dumps(completed(before), indent=1))


def check_unchanged(stage: Recipe, folder: Path) -> None:
    """Raises UserError if a finished stage was trained with other settings, or if its logs are damaged."""
    seal.require_logs(folder, "metrics.jsonl", "evals.jsonl", seal.EVENTS)
    before = stored(folder)
    changed = [] if before is None else changes(before, stage.model_dump(mode="json"), ELSEWHERE)
    if changed:
        lines = "\n".join(f"  {change}" for change in changed)
        key = LENGTH.get(stage.stage)
        extend = f", raise {key} to extend it if it is the last stage" if key else ""
        raise UserError(
            f"{folder} is finished, but with other settings:\n{lines}\nresume with the old ones{extend}, or give the "
            "run another name (name=...)"
        )


def check_going_on(stage: Recipe, folder: Path) -> None:
    """Raises UserError if a stage that has begun cannot continue with the current settings."""
    before = stored(folder)
    if before is None:
        return
    check_possible(changes(before, stage.model_dump(mode="json"), ELSEWHERE), folder)
    saved = checkpoint.saved_steps(folder / "checkpoints")
    done = checkpoint.step_of(saved[-1]) if saved else 0
    if stage.stage in ("rl", "distil") and stage.steps < done:
        raise UserError(f"{folder}: steps: {stage.steps}, but {done} are already done; give {done} or more")


def more(before: dict[str, Any], stage: Recipe) -> bool:
    """Whether the settings extend a finished stage. Raises UserError if they shorten it."""
    key = LENGTH.get(stage.stage)
    if key is None:
        return False
    old, new = (_value(values, key) for values in (before, stage.model_dump(mode="json")))
    if new < old:
        raise UserError(f"{key}: {new}, but the run is finished with {old}; give {old} or more, or another name")
    return bool(new > old)


def extension(before: dict[str, Any], stage: Recipe, changed: Sequence[Change], folder: Path) -> list[str]:
    """Messages for a finished stage that is extended."""
    old = Recipe.model_validate(chosen(before))
    lines = [f"{folder} was finished and continues: {', '.join(map(str, changed))}"]
    saved = checkpoint.saved_steps(folder / "checkpoints")
    first, steps = checkpoint.step_of(saved[-1]) if saved else 0, steps_of(folder)
    if first < steps:
        which = f"steps {first} to {steps - 1} come" if first < steps - 1 else f"step {first} comes"
        lines.append(f"{which} after the last checkpoint and will be computed again")
    if old.updates is not None and stage.updates is not None:
        change = longer(stage.optim, old.updates, stage.updates)
        lines += [change] if change else []
    if stage.stage == "rl" and stage.reset.on_stagnation is not None:
        lines.append(f"reset.on_stagnation was not checked before step {old.steps}, the last step")
    return lines


def damage(folder: Path) -> list[str]:
    """A line on damage of a finished stage that does not affect what remains to be computed; empty if there is none.

    Raises UserError if its model is damaged.
    """
    checksums.require(folder / "model")
    faults = [*seal.faults(folder), *seal.folder_faults(folder, without=("model",))]
    listed = "; ".join(f"{name} ({fault})" for name, fault in faults[:5])
    more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
    return (
        [f"{folder}: damaged, but nothing that remains to be computed depends on it: {listed}{more}"] if faults else []
    )


def steps_of(folder: Path) -> int:
    """The number of steps that a stage has done."""
    return sum(1 for _ in jsonl.read(folder / "metrics.jsonl"))


def _value(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values
