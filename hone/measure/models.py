"""What can be evaluated: a run, a checkpoint, a Hugging Face folder or hub id, a hosted model.

find("runs/demo", recipe)                        # the final model of its last stage
find("runs/demo/rl/checkpoints/step_000020", recipe)
find("runs/demo/rl@20", recipe)                  # the same; @best: the best on the validation split
find("Qwen/Qwen2.5-0.5B-Instruct", recipe)
find("http://127.0.0.1:8000/v1#name", recipe)    # OpenAI-compatible
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from hone.base import checksums, jsonl
from hone.base.settings import UserError
from hone.learn.checkpoint import found, step_of
from hone.measure import hosted
from hone.measure.evaluate import served
from hone.recipe.recipe import Recipe
from hone.rollout.collect import rollouts
from hone.runs import seal
from hone.runs.retention import best_validated
from hone.tasks.base import Task
from hone.types import Problem, Rollout, Turn

#: Requests to a hosted model that are under way at once.
CONCURRENCY = 8
Answer = tuple[Problem, int, Rollout]  # problem, index of the sample in its block, what was said
Progress = Callable[[int, int], None]


class Sampler(Protocol):
    """Draws answers to a block of problems."""

    def prompt_text(self, problem: Problem) -> str: ...

    def answers(
        self, block: Sequence[Problem], samples: int, seed: int, missing: set[tuple[str, int]], progress: Progress
    ) -> Iterator[Answer]:
        """`samples` answers to each problem; those not in `missing` (id, index in the block) may be left out."""
        ...


@dataclass(frozen=True)
class Model:
    """Something to evaluate, found but not loaded."""

    label: str
    where: str  # a folder, a hub id, or URL#name
    weights: str  # sha256 of the files; of a hub id or a hosted model its name
    hosted: bool
    load: Callable[[], Sampler]


def find(target: str, stage: Recipe, task: Task) -> Model:
    """Raises UserError if there is no model at `target`."""
    if "://" in target:
        endpoint = hosted.Endpoint.parse(target)
        return Model(endpoint.model, target, target, True, lambda: _Hosted(endpoint, stage, task))
    path = at_step(target)
    if not path.exists():
        if not is_hub_id(target):
            remedy = "a run, a checkpoint, a Hugging Face folder, or a hub id with its owner, as in Qwen/Qwen3-0.6B"
            raise UserError(f"{target}: no such folder; give {remedy}")
        return Model(target, target, target, False, lambda: _Local(stage, Path(target)))
    folder = model_folder(path)
    return Model(label_of(path), str(folder), weights_digest(folder), False, lambda: _Local(stage, folder))


def is_hub_id(target: str) -> bool:
    """`owner/name` that is nothing on this disk."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", target) or target.endswith((".yaml", ".yml", ".json")):
        return False
    return not Path(target).exists() and not Path(target.split("/")[0]).is_dir()


def model_folder(path: Path) -> Path:
    """The Hugging Face folder that a path means: itself, its `model`, or the newest of a run's last stage."""
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
    """The folder that RUN@STEP or RUN@best means; any other path is itself. Raises UserError if it is not there.

    Best is the highest accuracy on the validation split, never on another.
    """
    path = Path(target).expanduser()
    run, _, which = target.rpartition("@")
    if path.exists() or not run or "/" in which:
        return path
    folder = Path(run).expanduser()
    trained = [sub for sub in seal.stage_folders(folder) if found(sub / "checkpoints")]
    saved = {step_of(p): p for sub in trained[-1:] for p in found(sub / "checkpoints")}
    if not saved:
        raise UserError(f"{target}: {folder} has no checkpoints; give a run, or leave out @{which}")
    steps = ", ".join(map(str, sorted(saved)))
    if which == "best":
        seal.require_logs(trained[-1], "evals.jsonl")
        ranked = best_validated(jsonl.read(trained[-1] / "evals.jsonl"), 1)
        if not ranked:
            raise UserError(f"{target}: {trained[-1]} has no validation; set eval.every, or name a step: {steps}")
        if ranked[0] not in saved:
            raise UserError(
                f"{target}: the best on validation was step {ranked[0]}, whose checkpoint has gone; there are {steps}. "
                "checkpoint.keep_best keeps it"
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


def weights_digest(folder: Path) -> str:
    """sha256 over the names and contents of everything that decides what the model says."""
    kinds = (".safetensors", ".bin", ".json", ".model", ".jinja")
    found = sorted(p for p in folder.iterdir() if p.suffix in kinds and p.name != checksums.FILE)
    whole = hashlib.sha256()
    for path in found:
        whole.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while part := file.read(2**24):
                whole.update(part)
    return whole.hexdigest()


class _Local:
    """Our own engine."""

    def __init__(self, stage: Recipe, path: Path) -> None:
        self.config = stage.eval.sampling
        _, self.renderer, self.engine = served(stage, path)

    def prompt_text(self, problem: Problem) -> str:
        return self.renderer.prompt_text(problem)

    def answers(
        self, block: Sequence[Problem], samples: int, seed: int, missing: set[tuple[str, int]], progress: Progress
    ) -> Iterator[Answer]:
        """All of the block: the random stream of an answer is keyed by its place in it."""
        groups = rollouts(block, self.renderer, self.engine, self.config, samples=samples, seed=seed, progress=progress)
        for problem, group in zip(block, groups, strict=True):
            yield from ((problem, rollout.index, rollout) for rollout in group)


class _Hosted:
    """Requests to an endpoint, several at once; an answer is handed on as soon as it is there."""

    def __init__(self, endpoint: hosted.Endpoint, stage: Recipe, task: Task) -> None:
        self.endpoint, self.config = endpoint, stage.eval.sampling
        self.system = task.system if stage.prompt.system is None else stage.prompt.system

    def messages(self, problem: Problem) -> list[dict[str, str]]:
        own = [dict(message) for message in problem.messages]
        if not self.system or any(message["role"] == "system" for message in own):
            return own
        return [{"role": "system", "content": self.system}, *own]

    def prompt_text(self, problem: Problem) -> str:
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in self.messages(problem))

    def answers(
        self, block: Sequence[Problem], samples: int, seed: int, missing: set[tuple[str, int]], progress: Progress
    ) -> Iterator[Answer]:
        work = [(p, problem, g) for p, problem in enumerate(block) for g in range(samples)]
        work = [(p, problem, g) for p, problem, g in work if (problem.id, g) in missing]

        def ask(p: int, problem: Problem, g: int) -> Answer:
            number = (seed + 1000 * p + g) % 2**31  # what most endpoints take
            said = hosted.complete(self.endpoint, self.messages(problem), self.config, number)
            nothing = np.zeros(said.tokens, np.int64)  # an endpoint returns no tokens, only how many there were
            turn = Turn(np.zeros(1, np.int64), nothing, nothing.astype(np.float32), said.finish, 0)
            return problem, g, Rollout(problem.id, g, (turn,), said.text)

        with ThreadPoolExecutor(CONCURRENCY) as pool:
            futures = [pool.submit(ask, *one) for one in work]
            try:
                for done, future in enumerate(as_completed(futures), start=1):
                    yield future.result()
                    progress(done, len(work))
            finally:
                for future in futures:  # after an error, do not pay for the rest
                    future.cancel()
