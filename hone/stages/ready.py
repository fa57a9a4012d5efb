"""What is checked before a run folder is touched: a start that fails leaves the run that is there as it is.

ready(recipe, folder)       # UserError, or nothing
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from hone.base.settings import UserError
from hone.measure.evaluate import eval_problems
from hone.model.load import load_tokenizer
from hone.recipe.recipe import Pipeline, Recipe, stages_of
from hone.recipe.stages import stage_named
from hone.rollout import check_server
from hone.stages.examples import examples
from hone.tasks import make_task


def ready(recipe: Recipe | Pipeline, folder: Path, done: int = 0) -> None:
    """Look for all that the stages after the first `done` need from elsewhere. Raises UserError for what is missing."""
    for stage, sub in stages_of(recipe)[done:]:
        _problems(stage, folder / sub)
        _models(stage)
        if stage.stage in ("rl", "distil"):
            _engine(stage, folder / sub)


def _problems(stage: Recipe, folder: Path) -> None:
    """Every split that the stage reads has problems."""
    task = make_task(stage.task, stage.seed)
    if stage.stage == "sft":
        if stage_named(stage.sft.data) is None:  # of an earlier stage: not there yet
            examples(stage, task, folder)
        return
    if not task.problems("train"):
        raise UserError(f"task {task.name}: the train split is empty; give it a size, e.g. task.train=1000")
    if stage.stage in ("rl", "distil"):
        eval_problems(task, stage.eval)
        if stage.eval.every:
            eval_problems(task, stage.eval.model_copy(update={"split": "validation"}))


def _models(stage: Recipe) -> None:
    """The models that the stage reads are there, by their tokenizers; their weights are large, and come later."""
    teacher = stage.teacher if stage.stage in ("generate", "distil") else None
    if teacher is not None and stage_named(teacher) is None and "://" not in teacher:
        load_tokenizer(stage.model.at(teacher).model_copy(update={"revision": None}))
    if stage.model.stage is None and stage.model.path != "tiny" and not (stage.stage == "generate" and teacher):
        load_tokenizer(stage.model)


def _engine(stage: Recipe, folder: Path) -> None:
    """What samples is installed here, or answers there; a machine of a cluster may have what this one has not."""
    rollout = stage.rollout
    if stage.launch.kind != "local" or rollout.engine == "native":
        return
    if rollout.engine == "vllm" and rollout.vllm.in_process:
        if find_spec("vllm") is None:
            raise UserError("rollout.vllm.in_process: vllm is not installed here; install it, or set it to false")
        return
    check_server(rollout, folder)
