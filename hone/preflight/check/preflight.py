"""The checks before a run: the same list, in the same order, for `hone train`, its `--dry-run` and `hone check`.

    for check in CHECKS: ...          # cheapest first; none of them creates, moves or samples anything

A check yields findings. A failure of a `blocking` check means that the run is impossible: `train` raises an error
before it touches anything. Other failures mean that the run would be useless (a reward that pays for wrong answers):
`check` and `--dry-run` return exit code 1, `train` prints them and begins. To add a check, write a function of a
`Subject` and add a line to CHECKS.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from hone.base.settings import UserError
from hone.preflight.check import content, needs
from hone.preflight.check.episodes import played
from hone.preflight.check.findings import Finding, distinct
from hone.preflight.check.subject import Subject
from hone.preflight.check.user_reward import returns_numbers, undisturbed
from hone.recipe.recipe import Pipeline, Recipe, stages_of
from hone.rollout.exactness import check_path
from hone.tasks import keeping

#: Time limit of `train` for calls of a slow reward, seconds; a single call may take longer.
PATIENCE = 2.0


@dataclass(frozen=True, slots=True)
class Check:
    """One check. `needs`: the most expensive thing that it loads; `kinds`: the kinds of stages that it applies to."""

    name: str
    needs: Literal["recipe", "data", "tokenizer", "answers", "model"]
    run: Callable[[Subject], Iterable[Finding]]
    kinds: tuple[str, ...] = ("sft", "rl", "generate", "distil")
    every: bool = True  # applies to every stage, else only to the main one
    blocking: bool = True  # a failure makes the run impossible


@dataclass
class Result:
    """The findings, in the order of CHECKS."""

    findings: list[Finding]
    blocking: list[Finding]  # the failures that make the run impossible
    subject: Subject  # the main stage


def preflight(
    recipe: Recipe | Pipeline, main: Subject | None = None, done: int = 0, seconds: float = float("inf")
) -> Result:
    """Run all of CHECKS on the stages after the first `done`. Raises UserError if something cannot be read or imported.

    `main`: the main stage (the first RL stage, else the first stage), if it has been loaded already.
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
                continue  # `splits` reports it
            if subject.stage.stage in check.kinds and (check.every or subject is main):
                new = list(check.run(subject))
                findings += new
                blocking += [finding for finding in new if check.blocking and finding.level == "fail"]
    return Result(distinct(findings), distinct(blocking), main)


def before_training(recipe: Recipe | Pipeline, done: int = 0) -> list[dict[str, str]]:
    """The checks of `hone train`, before anything is created, moved or started. Returns the findings as rows.

    `done`: number of stages that are complete. Raises UserError if the run is impossible; failures that make it useless
    are printed on stderr.
    """
    result = preflight(recipe, done=done, seconds=PATIENCE)
    if result.blocking:
        raise UserError("\n".join(f"{finding.name}: {finding.message}" for finding in result.blocking))
    for finding in result.findings:
        if finding.level == "fail":
            print(f"FAIL  {finding.name}  {finding.message}", file=sys.stderr)
    return [asdict(finding) for finding in result.findings]


# --- checks of answers -----------------------------------------------------------------------


def _gold(subject: Subject) -> Iterator[Finding]:
    yield from content.data(subject.task)


def _template(subject: Subject) -> Iterator[Finding]:
    yield from content.template_of(subject.stage, subject.task, subject.renderer, subject.context, subject.model)


def _probes(subject: Subject) -> Iterator[Finding]:
    with undisturbed():
        yield from content.rewards(subject)


# --- checks of the model --------------------------------------------------------------------


def _exact(subject: Subject) -> Iterator[Finding]:
    """Do packed training, the engine and the model's own forward pass compute the same log-probs?"""
    model = subject.stage.model
    if subject.where is not None:
        model = model.at(subject.where)
    elif model.stage is not None or model.path == "tiny":  # made by the run, which checks it then
        return
    try:
        check_path(model)
    except UserError as error:
        yield Finding("fail", "exact", str(error), model.path)


def _episodes(subject: Subject) -> Iterator[Finding]:
    return played(subject.stage, subject.task, subject.renderer)


#: In order of cost; the check that loads the model is last.
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
    Check("called", "answers", returns_numbers, kinds=("rl",)),
    Check("data", "answers", _gold, every=False, blocking=False),
    Check("template", "tokenizer", _template, every=False, blocking=False),
    Check("reward", "answers", _probes, kinds=("rl",), every=False, blocking=False),
    Check("exact", "model", _exact, kinds=("sft", "rl", "distil")),
)
