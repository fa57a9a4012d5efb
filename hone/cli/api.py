"""The public Python API, for scripts and notebooks. `hone/__init__.py` loads it on first use.

run = hone.train("recipes/demo/recipe.yaml", steps=20, reward=my_function)
run.metrics                      # a pandas DataFrame if pandas is installed, else a dict of columns
run.samples(step=12)             # the rollouts of a step, as dicts
hone.evaluate(run, samples=8).accuracy
hone.sample(run, "Why is the sky blue?")
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hone.base import jsonl
from hone.base.settings import UserError
from hone.measure.stats.measured import Measured
from hone.report.read import RunRecord, StageRecord
from hone.report.read import load_run as read_run
from hone.types import Interval

#: The module that functions given as objects are looked up in: a reward named `hone_given:NAME`.
GIVEN = "hone_given"

Row = dict[str, Any]


@dataclass(frozen=True)
class TrainedRun:
    """A run folder, finished or not. Everything is read from its files on access."""

    folder: Path

    @property
    def record(self) -> RunRecord:
        """The run as the report reads it: stages, metrics, evaluations, events."""
        return read_run(self.folder)

    @property
    def finished(self) -> bool:
        return self.record.finished

    @property
    def metrics(self) -> Any:
        """The rows of metrics.jsonl of the last stage that has any: a DataFrame if pandas is installed, else columns by
        name."""
        stage = self._last()
        columns = {"step": list(stage.metrics.steps), **stage.metrics.columns}
        if find_spec("pandas") is None:
            return columns
        import pandas

        return pandas.DataFrame(columns)

    @property
    def evaluations(self) -> list[Row]:
        """The rows of evals.jsonl of the last stage."""
        return self._last().evals

    def samples(self, step: int) -> list[Row]:
        """The rollouts of a step: prompt, text, reward and its parts, verdict, advantage. Raises UserError if there are
        none."""
        files = dict(self._last().rollout_files())
        if step not in files:
            steps = f"there are steps {min(files)} to {max(files)}" if files else "no rollouts were recorded"
            raise UserError(f"{self.folder}: no rollouts of step {step}; {steps}")
        return [dict(row) for row in jsonl.read(files[step])]

    def _last(self) -> StageRecord:
        stages = [stage for stage in self.record.stages if stage.metrics.steps]
        if not stages:
            raise UserError(f"{self.folder}: no step has been recorded yet")
        return stages[-1]


@dataclass(frozen=True)
class EvaluatedModels:
    """The results of `hone.evaluate`; the samples are in `folder`."""

    folder: Path
    models: tuple[Measured, ...]
    rewards: tuple[Interval | None, ...]  # mean reward of each model; None: it is the accuracy, or was not measured

    @property
    def accuracy(self) -> Interval | None:
        """The accuracy of the first model, with its 95 % interval; None if the task does not grade answers."""
        return self.models[0].accuracy() if self.models[0].graded else None

    @property
    def reward(self) -> Interval | None:
        """The mean reward of the first model, with its 95 % interval; see `rewards`."""
        return self.rewards[0]


def train(
    recipe: str | Path,
    *overrides: str,
    reward: Callable[..., Any] | str | None = None,
    task: Sequence[Mapping[str, Any]] | str | None = None,
    resume: bool = False,
    **settings: Any,
) -> TrainedRun:
    """Run all stages of a recipe in this process; returns its run.

    `overrides` are written as on the command line ("sampling.top_p=0.9"), `settings` as Python values (steps=20,
    sampling={"top_p": 0.9}). `reward`: a function with one of the signatures of docs/rewards.md, or the name of a part;
    it replaces the parts of the recipe. `task`: rows as dicts, a file of rows, or the name of a task.
    Raises UserError if the recipe cannot be trained, and `hone.base.stop.Interrupted` after a Ctrl-C, once the run is
    saved.
    """
    from hone import launch
    from hone.base import device
    from hone.recipe.load import load
    from hone.stages import pipeline
    from hone.tasks import keeping

    texts = [*overrides, *(f"{key}={json.dumps(value)}" for key, value in settings.items())]
    texts += [] if reward is None else [f"reward={json.dumps([_part(reward)])}"]  # a list: replaces the recipe's parts
    texts += [] if task is None else [f"task={json.dumps(_task(task))}"]
    loaded = load(recipe, texts)
    device.select(loaded.stages[0].device)
    if not launch.alone(loaded.stages):
        raise UserError("hone.train runs in this process only; start several with `hone train` on the command line")
    with keeping():
        findings = pipeline.checked(loaded, resume)
        return TrainedRun(pipeline.run(loaded, resume=resume, findings=findings))


def load_run(folder: str | Path) -> TrainedRun:
    """The run in `folder`. Raises UserError if there is none."""
    run = TrainedRun(Path(folder))
    run.record  # noqa: B018  # raises where there is none
    return run


def evaluate(run: TrainedRun | str | Path, *models: str, seed: int = 0, **settings: Any) -> EvaluatedModels:
    """Evaluate a run's model, or `models`, on its held-out problems; `settings` are of its eval section (samples=8)."""
    from hone.measure.run import cli_eval
    from hone.measure.store import read_measured, stored
    from hone.recipe.load import load

    recipe = load(_folder(run), [f"eval.{key}={json.dumps(value)}" for key, value in settings.items()])
    folder = cli_eval(recipe, models, seed)
    folders = stored(folder)
    return EvaluatedModels(folder, tuple(map(read_measured, folders)), tuple(map(_mean_reward, folders)))


def sample(run: TrainedRun | str | Path, prompt: str, *overrides: str, seed: int = 0) -> str:
    """The model's answer to one message. `run`: a run, a checkpoint, a Hugging Face folder or a hub id."""
    from hone.serve.model import load_served

    model = load_served(str(_folder(run)), overrides)
    ids = model.renderer.messages_ids([{"role": "user", "content": prompt}])
    sampling = model.sampling.model_copy(update={"max_tokens": model.room(len(ids))})
    ((turn,),) = model.engine.generate([ids], sampling, samples=1, seed=seed)
    return model.renderer.text(turn.completion_ids)


def _mean_reward(folder: Path) -> Interval | None:
    path = folder / "summary.json"  # not there yet for a model whose evaluation was interrupted
    row = json.loads(path.read_text(encoding="utf-8")).get("reward") if path.exists() else None
    return None if row is None else Interval(**row)


def _folder(run: TrainedRun | str | Path) -> Path:
    return run.folder if isinstance(run, TrainedRun) else Path(run)


def _part(reward: Callable[..., Any] | str) -> str:
    """The name of a reward as a recipe writes it; a function is kept under its own name in the module GIVEN."""
    if isinstance(reward, str):
        return reward
    name = getattr(reward, "__name__", type(reward).__name__)
    name = name if name.isidentifier() else "reward"
    module = sys.modules.get(GIVEN)
    if module is None:
        module = sys.modules[GIVEN] = types.ModuleType(GIVEN)
        module.__spec__ = ModuleSpec(GIVEN, None)
    setattr(module, name, reward)
    return f"{GIVEN}:{name}"


def _task(task: Sequence[Mapping[str, Any]] | str) -> Row:
    """The `task:` section. Rows are written to a file named after their content, of which the run folder keeps a
    copy."""
    from hone.recipe.load import is_data

    if isinstance(task, str):
        return {"name": "dataset", "source": task} if is_data(task) else {"name": task}
    text = "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in task)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hone" / "given"
    path = cache / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    cache.mkdir(parents=True, exist_ok=True)
    jsonl.replace(path, text)
    return {"name": "dataset", "source": str(path)}
