"""The layout of a run folder: the paths of its models, checkpoints, rollouts, resets and requests.

at_step("runs/demo/rl@20")          # the folder of that checkpoint; @best: the best on the validation split
model_folder(Path("runs/demo"))     # the newest model of the last stage that has one
rollout_files(Path("runs/demo/rl")) # [(0, .../rollouts/step_000000.jsonl), ...]

Importing it loads no torch: the live page and the listing of runs read folders with it.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from hone.base import checksums, jsonl, places
from hone.base.settings import UserError
from hone.recipe.recipe import StageSettings
from hone.runs import seal
from hone.runs.retention import best_validated

REQUEST = "reset.request"
_ROLLOUTS = re.compile(r"step_(\d+)\.jsonl")

StageT = TypeVar("StageT", bound=StageSettings)


def which_model(stages: Sequence[tuple[StageT, Path]], folder: Path, checkpoint: Path | None) -> tuple[StageT, Path]:
    """The stage whose settings apply, and the folder of the model: the given one, or else the run's newest.

    `stages`: with their folders, relative to the run's `folder`. Raises UserError if there is no model.
    """
    stage, _ = stages[-1]
    if checkpoint is not None:
        for candidate in (checkpoint / "model", checkpoint):
            if (candidate / "config.json").exists():
                return stage, candidate
        raise UserError(f"{checkpoint}: no model here; give a folder that holds config.json or model/config.json")
    for sub in reversed([folder / place for _, place in stages]):
        for candidate in (sub, *sorted((sub / "checkpoints").glob("step_*"), reverse=True)):
            if (candidate / "model" / "config.json").exists():
                return stage, candidate / "model"
    if stage.model.path != "tiny":
        return stage, places.locate(stage.model.path)
    raise UserError(f"{folder}: nothing is trained there yet; run `hone train` first, or give --checkpoint")


def is_hub_id(target: str) -> bool:
    """Whether `target` is `owner/name` and not a path on this disk."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", target) or target.endswith((".yaml", ".yml", ".json")):
        return False
    return not Path(target).exists() and not Path(target.split("/")[0]).is_dir()


def model_folder(path: Path) -> Path:
    """The Hugging Face folder for a path: itself, its `model`, or the newest model of a run's last stage."""
    for candidate in (path, path / "model"):
        if (candidate / "config.json").is_file():
            return candidate
    for sub in reversed(seal.stage_folders(path)):
        newest = sorted((sub / "checkpoints").glob("step_*"), reverse=True)
        for candidate in (sub / "model", *(step / "model" for step in newest)):
            if (candidate / "config.json").is_file():
                return candidate
    raise UserError(f"{path}: no model here; give a run that has trained, a checkpoint, or a folder with config.json")


def at_step(target: str) -> Path:
    """The checkpoint folder for RUN@STEP or RUN@best; other paths stay as they are. Raises UserError if it is missing.

    Which one is the best: `hone.runs.retention`.
    """
    path = Path(target).expanduser()
    run, _, which = target.rpartition("@")
    if path.exists() or not run or "/" in which:
        return path
    from hone.learn.checkpoint import saved_steps, step_of

    folder = Path(run).expanduser()
    trained = [sub for sub in seal.stage_folders(folder) if saved_steps(sub / "checkpoints")]
    saved = {step_of(p): p for sub in trained[-1:] for p in saved_steps(sub / "checkpoints")}
    if not saved:
        raise UserError(f"{target}: {folder} has no checkpoints; give a run, or leave out @{which}")
    steps = ", ".join(map(str, sorted(saved)))
    if which == "best":
        seal.require_logs(trained[-1], "evals.jsonl")
        ranked = best_validated(jsonl.read(trained[-1] / "evals.jsonl"), 1)
        if not ranked:
            why = "has no validation with an accuracy or a reward; set eval.every"
            raise UserError(f"{target}: {trained[-1]} {why}, or name a step: {steps}")
        if ranked[0] not in saved:
            raise UserError(
                f"{target}: the best on validation was step {ranked[0]}, whose checkpoint was removed; there are "
                f"{steps}. checkpoint.keep_best keeps it"
            )
        return saved[ranked[0]]
    if not which.isdecimal() or int(which) not in saved:
        raise UserError(f"{target}: no checkpoint {which}; there are {steps}, and best")
    return saved[int(which)]


def label_of(path: Path) -> str:
    """runs/demo/rl/checkpoints/step_000020 -> demo/rl step 20; runs/demo/rl/model -> demo/rl; runs/demo -> demo"""
    parts = list(path.resolve().parts)
    if parts[-1] == "model" and len(parts) > 2:
        parts.pop()
    step = ""
    if parts[-1].startswith("step_") and parts[-1][5:].isdigit():
        step = f" step {int(parts.pop()[5:])}"
        parts = parts[:-1] if parts[-1] == "checkpoints" else parts
    parent = Path(*parts[:-1])
    pipeline = (parent / "stages.json").is_file()
    return (f"{parent.name}/{parts[-1]}" if pipeline else parts[-1]) + step


def rollouts_name(step: int) -> str:
    """Every sample of a step as text, one row each: see `hone.runs.tokens`. The name is relative to the stage."""
    return f"rollouts/step_{step:06d}.jsonl"


def tokens_name(step: int) -> str:
    """The tokens of the same samples, in the same order."""
    return f"tokens/step_{step:06d}.safetensors"


def step_of(name: str) -> int | None:
    """The step of a file in rollouts/; None for another file."""
    match = _ROLLOUTS.fullmatch(name)
    return int(match[1]) if match else None


def rollout_files(stage: Path) -> list[tuple[int, Path]]:
    """(step, file) of the steps that have rollouts, in order."""
    steps = ((step_of(path.name), path) for path in (stage / "rollouts").glob("step_*.jsonl"))
    return sorted((step, path) for step, path in steps if step is not None)


def inside(folder: Path, name: str) -> Path | None:
    """The file of this name in a folder; None if it is not there, or lies outside because of a link or of `..`."""
    path = folder / name
    try:
        resolved = path.resolve(strict=True)
    except (OSError, RuntimeError):  # absent, or a loop of links
        return None
    return path if resolved.is_relative_to(folder.resolve()) and resolved.is_file() else None


def reset_folder(run: Path, number: int) -> Path:
    from hone.learn.checkpoint import reset_name

    return run / "resets" / reset_name(number)


def drop_resets(run: Path, number: int) -> None:
    """Remove the folders of resets after the first `number`, which a resumed run repeats. Other files stay."""
    for path in (run / "resets").glob("*"):
        ours = re.fullmatch(r"(\.?)reset_(\d+)", path.name)
        if ours is not None and (ours[1] or int(ours[2]) > number):
            checksums.remove(path)


def ask(target: Path) -> str:
    """`hone reset`: write a request into the folder of the unfinished stage; returns a message.

    Raises UserError if there is no such stage.
    """
    folder = _stage_folder(target)
    config = checksums.read_json(folder / "config.resolved.json", dict, "restore it from a copy")
    kind = config.get("stage")
    if kind != "rl":
        raise UserError(f"{folder}: hard resets are for reinforcement learning, but this stage is {kind}")
    jsonl.replace(folder / REQUEST, json.dumps({"id": uuid.uuid4().hex}) + "\n")
    return f"{folder}: a hard reset will follow the step in progress (in a stopped run, its next step)"


def read_request(folder: Path) -> str | None:
    """The id of the request in a run folder, or None."""
    path = folder / REQUEST
    if not path.exists():
        return None
    request = checksums.read_json(path, dict, f"remove it, and ask again with `hone reset {folder}`")
    if not isinstance(request.get("id"), str):
        raise UserError(f"{path} holds no request; remove it, and ask again with `hone reset {folder}`")
    return str(request["id"])


def _stage_folder(target: Path) -> Path:
    """The folder of the stage that has started and is not finished."""
    begun = [folder for folder in seal.stage_folders(target) if (folder / "manifest.json").exists()]
    if not begun:
        raise UserError(f"{target}: no run was started there; give a run folder, such as runs/demo")
    open_ = [folder for folder in begun if not (folder / "model").exists()]
    if not open_:
        raise UserError(f"{target}: the run is finished, so it cannot be reset")
    return open_[0]
