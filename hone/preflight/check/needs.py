"""Checks that everything a stage needs exists: run folder, packages, server, problems, models, room for prompts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from hone.base.extras import needed
from hone.base.settings import UserError
from hone.learn.examples import examples as read_examples
from hone.model.load import load_tokenizer, require_weights
from hone.preflight.check import content
from hone.preflight.check.findings import Finding
from hone.preflight.check.subject import Subject
from hone.preflight.plan.batch import longest_prompt
from hone.recipe.recipe import LoopStage
from hone.recipe.sections.model import ModelConfig
from hone.recipe.stages import stage_named
from hone.rewards import check_functions, is_offline
from hone.rollout import check_server
from hone.runs.sinks import check_installed
from hone.tasks.curriculum import Curriculum

# --- of the recipe alone -------------------------------------------------------------


def folder(subject: Subject) -> Iterator[Finding]:
    """Can the run folder be created?"""
    for place in (subject.folder, *subject.folder.parents):
        if place.is_symlink() or place.exists():
            if not place.is_dir():
                message = f"{place} is a file, and the run folder would be {subject.folder}; set runs or name"
                yield Finding("fail", "folder", f"{message} to another")
            elif not os.access(place, os.W_OK | os.X_OK):
                message = f"{place} cannot be written to, and the run folder would be {subject.folder}"
                yield Finding("fail", "folder", f"{message}; set runs to another")
            return


def packages(subject: Subject) -> Iterator[Finding]:
    """Is everything installed that the stage needs?"""
    stage = subject.stage
    check_installed(stage.sinks)
    if stage.lora is not None and find_spec("peft") is None:
        yield Finding("fail", "packages", f"lora: peft is not installed; run `{needed('lora')}`")
    if stage.launch.kind == "ray" and find_spec("ray") is None:
        message = f"launch.kind: ray is not installed here; run `{needed('ray')}`, on every machine"
        yield Finding("fail", "packages", message)
    if stage.stage not in ("rl", "distil") or stage.rollout.engine == "native":
        return
    engine = stage.rollout.engine
    if not _runs_elsewhere(stage) and find_spec(engine) is None:
        remedy = f"install it there ({needed(engine)}), or name the interpreter that has it"
        message = f"rollout.engine: {sys.executable} has no {engine}; {remedy} in rollout.{engine}.python"
        yield Finding("fail", "packages", message)


def _runs_elsewhere(stage: LoopStage) -> bool:
    """Whether the engine is a running server, or belongs to another interpreter or machine."""
    settings = getattr(stage.rollout, stage.rollout.engine)
    return settings.url is not None or settings.python is not None or stage.launch.kind != "local"


def functions(subject: Subject) -> Iterator[Finding]:
    check_functions(subject.stage.reward)
    yield from ()


def server(subject: Subject) -> Iterator[Finding]:
    """Does the server answer, or is it installed where it will be started? Nothing is started."""
    rollout = subject.stage.rollout
    if rollout.engine == "native" or subject.stage.launch.kind != "local":
        return  # the machines of a cluster may differ from this one
    missing_here = not _runs_elsewhere(subject.stage) and find_spec(rollout.engine) is None  # reported by `packages`
    if not missing_here and not (rollout.engine == "vllm" and rollout.vllm.in_process):
        yield from _refused("server", lambda: check_server(rollout, subject.folder))


def _refused(name: str, check: Callable[[], object]) -> Iterator[Finding]:
    """The error of a check as a finding."""
    try:
        check()
    except UserError as error:
        yield Finding("fail", name, str(error))


# --- of the data ---------------------------------------------------------------------


def splits(subject: Subject) -> Iterator[Finding]:
    """Does every split that the stage will use have problems?"""
    stage = subject.stage
    splits = {} if stage.stage == "sft" and stage.sft.data is not None else {"train": "task.train=1000"}
    if stage.stage in ("rl", "distil"):
        size = max(1, min(100, len(subject.task.problems("train")) // 10))  # few rows cannot spare many
        splits |= {stage.eval.split: f"task.{stage.eval.split}={size}"}
        splits |= {"validation": f"task.validation={size}, or eval.every=0"} if stage.eval.every else {}
    for split, remedy in splits.items():
        if not subject.task.problems(split):  # type: ignore[arg-type]
            message = f"task {subject.task.name}: the {split} split is empty; give it a size, e.g. {remedy}"
            yield Finding("fail", "splits", message, split)


def examples(subject: Subject) -> Iterator[Finding]:
    """Are there examples for supervised training? Examples from an earlier stage do not exist yet."""
    stage = subject.stage
    if stage_named(stage.sft.data) is None and (stage.sft.data is not None or subject.task.problems("train")):
        yield from _refused("examples", lambda: read_examples(stage, subject.task, subject.folder))


def levels(subject: Subject) -> Iterator[Finding]:
    """Can the problems be drawn by the curriculum of every phase?"""
    problems = subject.task.problems("train")
    if not problems:
        return
    curriculum = Curriculum(problems, subject.stage.seed)
    for phase in subject.phases:
        try:
            curriculum.check(phase.curriculum)
        except UserError as error:
            yield Finding("fail", "levels", str(error), str(phase.curriculum))


def graded(subject: Subject) -> Iterator[Finding]:
    """Does the task grade, if a setting depends on the accuracy?

    The best checkpoints may be chosen by the mean reward instead, if evaluations compute the same reward in every step.
    """
    if content.is_graded(subject.task):
        return
    is_set = {
        "curriculum.kind: adaptive": any(phase.curriculum.kind == "adaptive" for phase in subject.phases),
        "checkpoint.keep_best": bool(subject.stage.checkpoint.keep_best) and not _has_one_reward(subject),
        "reset.on_stagnation": subject.stage.reset.on_stagnation is not None,
    }
    for key in (key for key, value in is_set.items() if value):
        message = f"{key}: needs an accuracy, which task.grading: none does not have; remove one of the two"
        if key == "checkpoint.keep_best":
            message += ". A reward will do that is the same during the whole run and needs no model or server"
        yield Finding("fail", "graded", message, key)


def _has_one_reward(subject: Subject) -> bool:
    """Whether every evaluation of the run computes the whole reward, and always the same one."""
    rewards = [phase.reward for phase in subject.phases]
    parts = rewards[0].parts
    same = subject.stage.stage == "rl" and all(one == rewards[0] for one in rewards)
    return same and set(parts) != {"outcome"} and all(map(is_offline, parts))


def models(subject: Subject) -> Iterator[Finding]:
    """Do the models exist? Only their tokenizers are loaded: weights are large, and are loaded by the stage."""
    stage = subject.stage

    def complete(model: ModelConfig) -> None:
        require_weights(model.path)
        load_tokenizer(model)

    teacher = stage.teacher if stage.stage in ("generate", "distil") else None
    if teacher is not None and stage_named(teacher) is None and "://" not in teacher:
        settings = stage.model.at(teacher).model_copy(update={"revision": None})
        yield from _refused("models", lambda: complete(settings))
    is_made = stage.model.stage is not None or stage.model.path == "tiny" or subject.where is not None
    if not is_made and not (stage.stage == "generate" and teacher):
        yield from _refused("models", lambda: complete(stage.model))


def length(subject: Subject) -> Iterator[Finding]:
    """Do the longest prompt and the longest answer fit the model's context, in every phase and in evaluation?"""
    stage, limit = subject.stage, subject.context
    if limit is None:
        return
    longest_answer = max(phase.sampling.max_tokens for phase in subject.phases)
    uses: list[tuple[str, str, int, int | None]] = [
        ("train", "sampling.max_tokens", longest_answer, None),
        (stage.eval.split, "eval.sampling.max_tokens", stage.eval.sampling.max_tokens, stage.eval.problems),
    ]
    too_long, remedies = [], []
    for split, key, answer, count in uses:
        problems = subject.task.problems(split)[:count]  # type: ignore[arg-type]
        prompt = longest_prompt(problems, subject.renderer) if problems else 0
        if prompt + answer > limit:
            too_long.append(f"prompts of up to {prompt} tokens ({split}) and answers of {answer} ({key})")
            remedy = f"set {key} to {limit - prompt} at most" if prompt < limit else f"shorten or drop {split} prompts"
            remedies.append(remedy)
    if too_long:
        message = f"{', and '.join(too_long)} are more than the {limit} positions of the model"
        yield Finding("fail", "length", f"{message}; {', and '.join(remedies)}")
