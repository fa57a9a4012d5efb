"""Is everything there that a stage needs: its folder, packages, problems, models and server, room for its prompts?"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from hone.base.settings import UserError
from hone.learn.examples import examples as read_examples
from hone.model.load import load_tokenizer
from hone.preflight.check import content
from hone.preflight.check.findings import Finding
from hone.preflight.check.subject import Subject
from hone.preflight.plan.batch import longest_prompt
from hone.recipe.recipe import Recipe
from hone.recipe.stages import stage_named
from hone.rewards import check_functions
from hone.rollout import check_server
from hone.runs.sinks import check_installed
from hone.tasks.curriculum import Curriculum

# --- what needs the recipe alone -------------------------------------------------------------


def folder(subject: Subject) -> Iterator[Finding]:
    """Can the run folder be made?"""
    for place in (subject.folder, *subject.folder.parents):
        if place.is_symlink() or place.exists():
            if not place.is_dir():
                said = f"{place} is a file, and the run folder would be {subject.folder}; set runs or name to another"
                yield Finding("fail", "folder", said)
            elif not os.access(place, os.W_OK | os.X_OK):
                said = (
                    f"{place} cannot be written to, and the run folder would be {subject.folder}; set runs to another"
                )
                yield Finding("fail", "folder", said)
            return


def packages(subject: Subject) -> Iterator[Finding]:
    """Is everything installed that the stage asks for?"""
    stage = subject.stage
    check_installed(stage.sinks)
    if stage.lora is not None and find_spec("peft") is None:
        yield Finding("fail", "packages", "lora: peft is not installed; run `pip install 'hone-rl[lora]'`")
    if stage.launch.kind == "ray" and find_spec("ray") is None:
        said = "launch.kind: ray is not installed here; run `pip install 'hone-rl[ray]'`, on every machine"
        yield Finding("fail", "packages", said)
    if stage.stage not in ("rl", "distil") or stage.rollout.engine == "native":
        return
    engine = stage.rollout.engine
    if not _runs_elsewhere(stage) and find_spec(engine) is None:
        said = f"rollout.engine: {sys.executable} has no {engine}; install it there (pip install 'hone-rl[{engine}]')"
        yield Finding("fail", "packages", f"{said}, or name the interpreter that has it in rollout.{engine}.python")


def _runs_elsewhere(stage: Recipe) -> bool:
    """Whether the engine is a server that runs already, or is of another interpreter or machine."""
    settings = getattr(stage.rollout, stage.rollout.engine)
    return settings.url is not None or settings.python is not None or stage.launch.kind != "local"


def functions(subject: Subject) -> Iterator[Finding]:
    check_functions(subject.stage.reward)
    yield from ()


def server(subject: Subject) -> Iterator[Finding]:
    """Does the server answer, or is it installed where it will be started? Nothing is started."""
    rollout = subject.stage.rollout
    if rollout.engine == "native" or subject.stage.launch.kind != "local":
        return  # a machine of a cluster may have what this one has not
    missing_here = not _runs_elsewhere(subject.stage) and find_spec(rollout.engine) is None  # said by `packages`
    if not missing_here and not (rollout.engine == "vllm" and rollout.vllm.in_process):
        yield from _refused("server", lambda: check_server(rollout, subject.folder))


def _refused(name: str, check: Callable[[], object]) -> Iterator[Finding]:
    """The error of a check as a finding."""
    try:
        check()
    except UserError as error:
        yield Finding("fail", name, str(error))


# --- what needs the data ---------------------------------------------------------------------


def splits(subject: Subject) -> Iterator[Finding]:
    """Has every split problems that the stage will ask for, at its start or hours later?"""
    stage = subject.stage
    splits = {} if stage.stage == "sft" and stage.sft.data is not None else {"train": "task.train=1000"}
    if stage.stage in ("rl", "distil"):
        splits |= {stage.eval.split: f"task.{stage.eval.split}=100"}
        splits |= {"validation": "task.validation=100, or eval.every=0"} if stage.eval.every else {}
    for split, remedy in splits.items():
        if not subject.task.problems(split):  # type: ignore[arg-type]
            said = f"task {subject.task.name}: the {split} split is empty; give it a size, e.g. {remedy}"
            yield Finding("fail", "splits", said, split)


def examples(subject: Subject) -> Iterator[Finding]:
    """Are there examples for supervised training? Those of an earlier stage are not there yet."""
    stage = subject.stage
    if stage_named(stage.sft.data) is None and (stage.sft.data is not None or subject.task.problems("train")):
        yield from _refused("examples", lambda: read_examples(stage, subject.task, subject.folder))


def levels(subject: Subject) -> Iterator[Finding]:
    """Can the problems be drawn as the curriculum of every phase says?"""
    problems = subject.task.problems("train")
    if not problems:
        return
    course = Curriculum(problems, subject.stage.seed)
    for settings in subject.settings:
        try:
            course.check(settings.curriculum)
        except UserError as error:
            yield Finding("fail", "levels", str(error), str(settings.curriculum))


def graded(subject: Subject) -> Iterator[Finding]:
    """Whatever follows the accuracy needs a task that grades."""
    if content.is_graded(subject.task):
        return
    asked = {
        "curriculum.kind: adaptive": any(one.curriculum.kind == "adaptive" for one in subject.settings),
        "checkpoint.keep_best": bool(subject.stage.checkpoint.keep_best),
        "reset.on_stagnation": subject.stage.reset.on_stagnation is not None,
    }
    for key in (key for key, is_asked in asked.items() if is_asked):
        said = f"{key}: needs an accuracy, and with task.grading: none there is none; remove one of the two"
        yield Finding("fail", "graded", said, key)


def models(subject: Subject) -> Iterator[Finding]:
    """Are the models there? Only their tokenizers are loaded: the weights are large, and come with the stage."""
    stage = subject.stage
    teacher = stage.teacher if stage.stage in ("generate", "distil") else None
    if teacher is not None and stage_named(teacher) is None and "://" not in teacher:
        settings = stage.model.at(teacher).model_copy(update={"revision": None})
        yield from _refused("models", lambda: load_tokenizer(settings))
    is_made = stage.model.stage is not None or stage.model.path == "tiny" or subject.where is not None
    if not is_made and not (stage.stage == "generate" and teacher):
        yield from _refused("models", lambda: load_tokenizer(stage.model))


def length(subject: Subject) -> Iterator[Finding]:
    """Do the longest prompt and the longest answer fit the model together, in every phase and in evaluation?"""
    stage, limit = subject.stage, subject.context
    if limit is None:
        return
    longest_answer = max(one.sampling.max_tokens for one in subject.settings)
    asked: list[tuple[str, str, int, int | None]] = [("train", "sampling.max_tokens", longest_answer, None)]
    asked.append((stage.eval.split, "eval.sampling.max_tokens", stage.eval.sampling.max_tokens, stage.eval.problems))
    for split, key, most, count in asked:
        problems = subject.task.problems(split)[:count]  # type: ignore[arg-type]
        longest = longest_prompt(problems, subject.renderer) if problems else 0
        if longest + most > limit:
            room = f"set {key} to {limit - longest} at most" if longest < limit else "shorten or drop such prompts"
            said = (
                f"prompts of up to {longest} tokens ({split}) and answers of {most} ({key}) are more than the {limit}"
            )
            yield Finding("fail", "length", f"{said} positions of the model; {room}", key)
