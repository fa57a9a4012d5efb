"""What is checked before a run: the same list, in the same order, for `hone train`, its `--dry-run` and `hone check`.

    for check in CHECKS: ...          # cheap first; nothing is created, moved or sampled before the last one

A check yields findings. One that finds what makes a run impossible is `blocking`: of its failures `train` makes an
error before it touches anything. The other failures would make a run useless (a reward that pays for wrong answers):
`check` and `--dry-run` end with exit code 1 then, `train` says them and begins. A new check is a function of a
`Subject` and a line of CHECKS.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from hone.base.settings import UserError
from hone.preflight.check import content, needs, probes
from hone.preflight.check.episodes import played
from hone.preflight.check.findings import Finding, distinct
from hone.preflight.check.subject import Subject
from hone.recipe.recipe import Pipeline, Recipe, stages_of
from hone.rewards import REWARDS, make_reward
from hone.rewards.base import Composed, failures, reward_groups
from hone.rewards.config import RewardConfig
from hone.rewards.functions import UserFunction
from hone.rewards.gold import gold_text
from hone.rollout.exactness import check_path
from hone.tasks import keeping
from hone.tasks.base import Task
from hone.types import VERIFIER_FAILURES, Problem

#: Problems, spread over the training split, whose answers the user's functions are called with.
CALLED = 6
#: Seconds after which `train`, which is waited for, asks a slow reward no further; one call may take longer.
PATIENCE = 2.0


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


def preflight(
    recipe: Recipe | Pipeline, main: Subject | None = None, done: int = 0, seconds: float = float("inf")
) -> Result:
    """All of CHECKS, of the stages after the first `done`. Raises UserError for what cannot be read or imported at all.

    `main`: the stage that the recipe is about (the first of RL, else the first), if it has been made already.
    """
    with keeping():
        return _preflight(recipe, main, done, seconds)


def _preflight(recipe: Recipe | Pipeline, main: Subject | None, done: int, seconds: float) -> Result:
    stages = stages_of(recipe)[done:]
    place = next((i for i, (stage, _) in enumerate(stages) if stage.stage == "rl"), 0)
    subjects = [Subject(recipe, stage, seconds=seconds) for stage, _ in stages]
    main = subjects[place] = main or subjects[place]
    findings: list[Finding] = []
    blocking: list[Finding] = []
    for check in CHECKS:
        for subject in subjects:
            if not check.blocking and not subject.task.problems("train"):
                continue  # `splits` says so; there is nothing to look at
            if subject.stage.stage in check.kinds and (check.every or subject is main):
                found = list(check.run(subject))
                findings += found
                blocking += [finding for finding in found if check.blocking and finding.level == "fail"]
    return Result(distinct(findings), distinct(blocking), main)


def before_training(recipe: Recipe | Pipeline, done: int = 0) -> list[dict[str, str]]:
    """For `hone train`, before anything is created, moved or started; returns what was found. `done`: of `preflight`.

    Raises UserError for what makes the run impossible; what makes it useless is said on stderr.
    """
    result = preflight(recipe, done=done, seconds=PATIENCE)
    if result.blocking:
        raise UserError("\n".join(f"{finding.name}: {finding.message}" for finding in result.blocking))
    for finding in result.findings:
        if finding.level == "fail":
            print(f"FAIL  {finding.name}  {finding.message}", file=sys.stderr)
    return [asdict(finding) for finding in result.findings]


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


def _episodes(subject: Subject) -> Iterator[Finding]:
    return played(subject.stage, subject.task, subject.renderer)


#: The order: what costs least first; a check that loads the model stands last.
CHECKS = (
    Check("folder", "recipe", needs.folder, every=False),
    Check("packages", "recipe", needs.packages),
    Check("server", "recipe", needs.server, kinds=("rl", "distil")),
    Check("functions", "recipe", needs.functions, kinds=("rl",)),
    Check("splits", "data", needs.splits),
    Check("examples", "data", needs.examples, kinds=("sft",)),
    Check("levels", "data", needs.levels, kinds=("rl", "distil")),
    Check("graded", "data", needs.graded, kinds=("rl", "distil")),
    Check("models", "tokenizer", needs.models),
    Check("length", "tokenizer", needs.length, kinds=("rl", "distil")),
    Check("environment", "answers", _episodes, kinds=("rl", "distil")),
    Check("called", "answers", _called, kinds=("rl",)),
    Check("data", "answers", _gold, every=False, blocking=False),
    Check("template", "tokenizer", _template, every=False, blocking=False),
    Check("reward", "answers", _probes, kinds=("rl",), every=False, blocking=False),
    Check("exact", "model", _exact, kinds=("sft", "rl", "distil")),
)
