"""Models that can be evaluated: a run, a checkpoint, a Hugging Face folder or hub id, a hosted model.

find("runs/demo", recipe)                        # the final model of its last stage
find("runs/demo/rl/checkpoints/step_000020", recipe)
find("runs/demo/rl@20", recipe)                  # the same; @best: the best on the validation split
find("Qwen/Qwen2.5-0.5B-Instruct", recipe)
find("http://127.0.0.1:8000/v1#name", recipe)    # OpenAI-compatible
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hone.base import checksums
from hone.base.settings import UserError
from hone.environments.make import make_episodes
from hone.measure.evaluate import load_evaluated
from hone.recipe.recipe import LoopStage
from hone.rollout.hosted import Endpoint, HostedModel
from hone.runs.layout import at_step, is_hub_id, label_of, model_folder
from hone.tasks.base import Task
from hone.types import Problem, Rollout

Answer = tuple[Problem, int, Rollout]  # problem, index of the sample in its block, answer
Progress = Callable[[int, int], None]


class AnswerSource(Protocol):
    """Draws answers to a block of problems."""

    def prompt_text(self, problem: Problem) -> str: ...

    def answers(
        self, block: Sequence[Problem], samples: int, seed: int, missing: set[tuple[str, int]], progress: Progress
    ) -> Iterator[Answer]:
        """`samples` answers to each problem; those not in `missing` (id, index in the block) may be left out."""
        ...


@dataclass(frozen=True)
class Model:
    """A model to evaluate, located but not loaded."""

    label: str
    where: str  # a folder, a hub id, or URL#name
    weights: str  # sha256 of the files; the name of a hub id or hosted model
    hosted: bool
    load: Callable[[], AnswerSource]


def find(target: str, stage: LoopStage, task: Task) -> Model:
    """The model at `target`. Raises UserError if there is none."""
    if "://" in target:
        if stage.has_turns:
            raise UserError(f"{target}: an endpoint cannot play episodes of several turns; give a model's folder or id")
        endpoint = Endpoint.parse(target)
        hosted = HostedModel(endpoint, stage.eval.sampling, stage.prompt.system_prompt(task.system))
        return Model(endpoint.model, target, target, True, lambda: _Hosted(hosted))
    path = at_step(target)
    if not path.exists():
        if not is_hub_id(target):
            remedy = "a run, a checkpoint, a Hugging Face folder, or a hub id with its owner, such as Qwen/Qwen3-0.6B"
            raise UserError(f"{target}: no such folder; give {remedy}")
        return Model(target, target, target, False, lambda: _Local(stage, Path(target), task))
    folder = model_folder(path)
    return Model(label_of(path), str(folder), weights_digest(folder), False, lambda: _Local(stage, folder, task))


def weights_digest(folder: Path) -> str:
    """sha256 over the names and contents of all files that determine the model's answers."""
    kinds = (".safetensors", ".bin", ".json", ".model", ".jinja")
    files = sorted(p for p in folder.iterdir() if p.suffix in kinds and p.name != checksums.FILE)
    whole = hashlib.sha256()
    for path in files:
        whole.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while part := file.read(2**24):
                whole.update(part)
    return whole.hexdigest()


class _Local:
    """The native engine."""

    def __init__(self, stage: LoopStage, path: Path, task: Task) -> None:
        self.config = stage.eval.sampling
        self.local = load_evaluated(stage, path, task)
        self.episodes = make_episodes(stage, self.local.renderer)

    def prompt_text(self, problem: Problem) -> str:
        return self.local.renderer.prompt_text(problem)

    def answers(
        self, block: Sequence[Problem], samples: int, seed: int, missing: set[tuple[str, int]], progress: Progress
    ) -> Iterator[Answer]:
        """Draws the whole block, because the random stream of an answer is keyed by its place in it."""
        engine = self.local.engine
        groups = self.episodes.sample(block, engine, self.config, samples=samples, seed=seed, progress=progress)
        for problem, group in zip(block, groups, strict=True):
            yield from ((problem, rollout.index, rollout) for rollout in group)


class _Hosted:
    """An endpoint; each answer is yielded as soon as it arrives."""

    def __init__(self, model: HostedModel) -> None:
        self.model = model

    def prompt_text(self, problem: Problem) -> str:
        return self.model.prompt_text(problem)

    def answers(
        self, block: Sequence[Problem], samples: int, seed: int, missing: set[tuple[str, int]], progress: Progress
    ) -> Iterator[Answer]:
        wanted = [(p, g) for p, problem in enumerate(block) for g in range(samples) if (problem.id, g) in missing]
        for done, ((p, g), rollout) in enumerate(self.model.answers(block, wanted, seed), start=1):
            yield block[p], g, rollout
            progress(done, len(wanted))
