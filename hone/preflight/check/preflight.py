"""What is checked before a run: the same list, in the same order, for `hone train`, its `--dry-run` and `hone check`.

    for check in CHECKS: ...          # cheap first; nothing is created, moved or sampled before the last one

A check yields findings. One that finds what makes a run impossible is `blocking`: of its failures `train` makes an
error before it touches anything. The other failures would make a run useless (a reward that pays for wrong answers):
`check` and `--dry-run` end with exit code 1 then, `train` says them and begins. A new check is a function of a
`Subject` and a line of CHECKS.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hone.base.settings import UserError
from hone.model.limits import longest_exact
from hone.model.load import load_model, load_tokenizer
from hone.preflight.check import content, probes
from hone.preflight.check.episodes import played
from hone.preflight.check.findings import Finding, distinct
from hone.preflight.plan.batch import longest_prompt
from hone.preflight.plan.shapes import config_of
from hone.recipe.recipe import Pipeline, Recipe, stages_of
from hone.recipe.schedule import Phases
from hone.rewards import REWARDS, check_functions, make_reward
from hone.rewards.base import Composed, failures, reward_groups
from hone.rewards.config import RewardConfig
from hone.rewards.functions import UserFunction
from hone.rewards.gold import gold_text
from hone.rewards.perplexity import Answerer
from hone.rollout.answerer import load_answerer
from hone.rollout.exactness import check_path
from hone.rollout.prompts import Renderer, made_tokenizer
from hone.runs.sinks import check_installed
from hone.tasks import keeping, make_task
from hone.tasks.base import Task
from hone.tasks.curriculum import Curriculum
from hone.types import VERIFIER_FAILURES, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Problems, spread over the training split, whose answers the user's functions are called with.
CALLED = 6
#: Seconds after which `train`, which is waited for, asks a slow reward no further; one call may take longer.
PATIENCE = 2.0


@dataclass
class Subject:
    """One stage, with what checks need of it: made when it is first asked for, and once."""

    recipe: Recipe | Pipeline
    stage: Recipe
    where: str | None = None  # the folder or hub id of the model that the stage starts from; None: it is not loaded
    seconds: float = float("inf")  # that a slow reward is asked at most
    scores: list[dict[str, Any]] = field(default_factory=list)  # of the probes of the first problem

    @property
    def folder(self) -> Path:
        return Path(self.recipe.runs) / self.recipe.name

    @cached_property
    def task(self) -> Task:
        return make_task(self.stage.task, self.stage.seed)

    @cached_property
    def renderer(self) -> Renderer:
        if self.where is not None:
            tokenizer = load_tokenizer(self.stage.model.at(self.where))
        elif self.stage.model.path == "tiny":
            tokenizer = made_tokenizer(self.stage)
        else:
            tokenizer = load_tokenizer(self.stage.model)
        return Renderer(tokenizer, self.stage.prompt, self.task.system)

    @cached_property
    def model(self) -> PreTrainedModel | None:
        return None if self.where is None else load_model(self.stage.model.at(self.where)).eval()

    @cached_property
    def frozen(self) -> Answerer | None:
        """What the perplexity reward asks."""
        if self.where is None:
            return None
        stage = self.stage
        return load_answerer(stage.reward, stage.model.at(self.where), stage.prompt, self.task.system, self.model)

    @cached_property
    def settings(self) -> list[Recipe]:
        """The stage in each of its phases."""
        if self.stage.stage != "rl":
            return [self.stage]
        phases = Phases(self.stage)
        return [phases.merged(lines) for lines in phases.sets()]

    @cached_property
    def context(self) -> int | None:
        """The longest sequence that the model computes exactly; None: its config does not say."""
        model = self.stage.model if self.where is None else self.stage.model.at(self.where)
        config, _ = config_of(model)
        return longest_exact(config)


@dataclass(frozen=True, slots=True)
class Check:
    """`needs`: the most expensive thing that it makes. `kinds`: of stages that it is about."""

    name: str
    needs: Literal["recipe", "data", "tokenizer", "answers", "model"]
    run: Callable[[Subject], Iterable[Finding]]
    kinds: tuple[str, ...] = ("sft", "rl", "generate", "distil")
    every: bool = True  # of every stage; else only of the one that the recipe is about
    blocking: bool = True  # its failures make the run impossible


@dataclass
class Result:
    """What was found, in the order of CHECKS."""

    findings: list[Finding]
    blocking: list[Finding]  # the failures that make the run impossible
    subject: Subject  # the stage that the recipe is about


def preflight(recipe: Recipe | Pipeline, main: Subject | None = None, seconds: float = float("inf")) -> Result:
    """All of CHECKS. Raises UserError for what cannot be read or imported at all.

    `main`: the stage that the recipe is about (the first of RL, else the first), if it has been made already.
    """
    with keeping():
        return _preflight(recipe, main, seconds)


def _preflight(recipe: Recipe | Pipeline, main: Subject | None, seconds: float) -> Result:
    stages = [stage for stage, _ in stages_of(recipe)]
    place = next((i for i, stage in enumerate(stages) if stage.stage == "rl"), 0)
    subjects = [Subject(recipe, stage, seconds=seconds) for stage in stages]
    main = subjects[place] = main or subjects[place]
    findings: list[Finding] = []
    blocking: list[Finding] = []
    for check in CHECKS:
        for subject in subjects:
            if subject.stage.stage in check.kinds and (check.every or subject is main):
                found = list(check.run(subject))
                findings += found
                blocking += [finding for finding in found if check.blocking and finding.level == "fail"]
    return Result(distinct(findings), distinct(blocking), main)


def before_training(recipe: Recipe | Pipeline) -> list[dict[str, str]]:
    """For `hone train`, before anything is created, moved or started; returns what was found.

    Raises UserError for what makes the run impossible; what makes it useless is said on stderr.
    """
    result = preflight(recipe, seconds=PATIENCE)
    if result.blocking:
        raise UserError("\n".join(f"{finding.name}: {finding.message}" for finding in result.blocking))
    for finding in result.findings:
        if finding.level == "fail":
            print(f"FAIL  {finding.name}  {finding.message}", file=sys.stderr)
    return [asdict(finding) for finding in result.findings]


# --- what needs the recipe alone -------------------------------------------------------------


def _folder(subject: Subject) -> Iterator[Finding]:
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


def _packages(subject: Subject) -> Iterator[Finding]:
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
    settings = getattr(stage.rollout, engine)
    # A server that runs already, or another machine's or interpreter's, is asked when the run starts it.
    elsewhere = settings.url is not None or settings.python is not None or stage.launch.kind != "local"
    if not elsewhere and find_spec(engine) is None:
        said = f"rollout.engine: {sys.executable} has no {engine}; install it there (pip install 'hone-rl[{engine}]')"
        yield Finding("fail", "packages", f"{said}, or name the interpreter that has it in rollout.{engine}.python")


def _functions(subject: Subject) -> Iterator[Finding]:
    check_functions(subject.stage.reward)
    yield from ()


# --- what needs the data ---------------------------------------------------------------------


def _splits(subject: Subject) -> Iterator[Finding]:
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


def _levels(subject: Subject) -> Iterator[Finding]:
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


def _graded(subject: Subject) -> Iterator[Finding]:
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


def _length(subject: Subject) -> Iterator[Finding]:
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


# --- what needs answers ----------------------------------------------------------------------


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """The global random numbers of a user's code go on afterwards as if it had not been called."""
    state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002  # what user code may draw from
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)  # noqa: NPY002


def _called(subject: Subject) -> Iterator[Finding]:
    """Does the user's reward give numbers, for whole groups of right, wrong and empty answers, as in training?

    Raises UserError where it gives something else, or no value at all.
    """
    seen: list[RewardConfig] = []
    for settings in subject.settings:
        if settings.reward in seen:
            continue
        seen.append(settings.reward)
        parts = {n: w for n, w in settings.reward.parts.items() if getattr(REWARDS.get(n), "offline", True)}
        if not any(":" in name or name not in REWARDS for name in parts):
            continue
        reward = make_reward(settings.reward.model_copy(update={"parts": parts}), subject.task)
        try:
            with undisturbed():
                yield from _answered(reward, subject.task, subject.seconds)
        finally:
            close(reward)


def _answered(reward: Composed, task: Task, seconds: float) -> Iterator[Finding]:
    problems = task.problems("train")
    chosen = [problems[i * len(problems) // CALLED] for i in range(min(CALLED, len(problems)))]
    groups, started = [], time.monotonic()
    for problem in chosen:
        texts = [*_gold_answers(problem), "I do not know.", ""]
        rollouts = [probes.rollout_of(problem, probes.Probe("", "none", text), len) for text in texts]
        groups += reward_groups([problem], [tuple(rollouts)], reward)
        if time.monotonic() - started > seconds:
            break
    rewards = [one for group in groups for one in group.rewards]
    if rewards and all(one.verdict in VERIFIER_FAILURES for one in rewards):
        raise UserError(
            f"reward: tried with {len(rewards)} right, wrong and empty answers to {len(groups)} training problems, it "
            f"has no value for any: {failures(groups)}. Training would leave every sample out; give a number, such as "
            "0, for what cannot be read"
        )
    silent = [
        name
        for name, part in reward.parts.items()
        if isinstance(part, UserFunction) and not any(name in one.parts for one in rewards)
    ]
    for name in silent:
        yield Finding(
            "warn", "called", f"{name} returned None for all {len(rewards)} answers that it was tried with", name
        )
    if not silent and rewards:
        yield Finding("pass", "called", f"the reward gives numbers: tried with {len(rewards)} answers")


def _gold_answers(problem: Problem) -> list[str]:
    """The gold answer in every shape, if the problem has one."""
    try:
        gold = gold_text(problem)
    except UserError:
        return []
    return [write(gold) for write in probes.writers(problem).values()]


def close(reward: Composed) -> None:
    """End the processes of its functions."""
    for part in reward.parts.values():
        if isinstance(part, UserFunction) and part.workers is not None:
            part.workers.close()


def _gold(subject: Subject) -> Iterator[Finding]:
    yield from content.data(subject.task)


def _template(subject: Subject) -> Iterator[Finding]:
    yield from content.template_of(subject.stage, subject.task, subject.renderer, subject.context, subject.model)


def _probes(subject: Subject) -> Iterator[Finding]:
    with undisturbed():
        stage, task, renderer = subject.stage, subject.task, subject.renderer
        yield from content.rewards(stage, task, renderer, subject.frozen, subject.scores, subject.seconds)


# --- what needs the model --------------------------------------------------------------------


def _exact(subject: Subject) -> Iterator[Finding]:
    """Do packed training, the engine and the model's own forward pass compute the same log-probs?"""
    model = subject.stage.model
    if subject.where is not None:
        model = model.at(subject.where)
    elif model.stage is not None or model.path == "tiny":  # made by the run, which checks it when it is there
        return
    try:
        check_path(model)
    except UserError as error:
        yield Finding("fail", "exact", str(error), model.path)


#: The order: what costs least first; a check that loads the model stands last.
def _episodes(subject: Subject) -> Iterator[Finding]:
    return played(subject.stage, subject.task, subject.renderer)


CHECKS = (
    Check("folder", "recipe", _folder, every=False),
    Check("packages", "recipe", _packages),
    Check("functions", "recipe", _functions, kinds=("rl",)),
    Check("splits", "data", _splits),
    Check("levels", "data", _levels, kinds=("rl", "distil")),
    Check("graded", "data", _graded, kinds=("rl", "distil")),
    Check("length", "tokenizer", _length, kinds=("rl", "distil")),
    Check("environment", "answers", _episodes, kinds=("rl", "distil")),
    Check("called", "answers", _called, kinds=("rl",)),
    Check("data", "answers", _gold, every=False, blocking=False),
    Check("template", "tokenizer", _template, every=False, blocking=False),
    Check("reward", "answers", _probes, kinds=("rl",), every=False, blocking=False),
    Check("exact", "model", _exact, kinds=("sft", "rl", "distil")),
)
