"""Checks of a recipe's data, chat template and reward; none of them needs a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hone.base.settings import UserError
from hone.model.load import stop_token_ids
from hone.preflight.check import probes, template
from hone.preflight.check.findings import Finding
from hone.preflight.check.subject import Subject
from hone.recipe.recipe import RLStage
from hone.rewards import is_offline, make_reward
from hone.rewards.gold import gold_text
from hone.rollout.prompts import Renderer
from hone.tasks.base import Task
from hone.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBED = 3  # problems whose probes are scored
SCANNED = 200  # problems whose gold answer is graded


def data(task: Task) -> Iterator[Finding]:
    """Does the grader accept the gold answers?"""
    problems = task.problems("train")[:SCANNED]
    if not is_graded(task):
        yield Finding("pass", "data", "task.grading is none: answers are not graded, only your reward scores them")
        return
    if hasattr(task, "grading"):  # the grader of another task knows best
        yield from _order(task, problems)
    rejected = [(p, why) for p in problems if (why := _rejected_gold(task, p))]
    if not rejected:
        yield Finding("pass", "data", f"{len(problems)} gold answers are read and graded correct")
        return
    problem, why = rejected[0]
    yield Finding(
        "fail" if len(rejected) > len(problems) / 20 else "warn",
        "data",
        f"{len(rejected)} of {len(problems)} gold answers cannot earn a reward, the first: {problem.id}: {why}; remove "
        "or repair them",
    )


def _order(task: Task, problems: Sequence[Problem]) -> Iterator[Finding]:
    """Are gold answers of words or letters graded correct in another order, too?"""
    accepted = [(gold, turned) for p in problems if (gold := str(p.answer)) and (turned := _accepted_turned(task, p))]
    if len(accepted) > len(problems) / 20:
        gold, turned = accepted[0]
        yield Finding(
            "warn",
            "order",
            f"{len(accepted)} of {len(problems)} gold answers are graded correct in another order too: {turned!r} for "
            f"{gold!r}. If the order matters, set task.grading=text, or none if only your own reward is to judge",
        )


def _accepted_turned(task: Task, problem: Problem) -> str | None:
    """The gold answer in another order, if that is graded correct."""
    turned = probes.reordered(problem.answer) if isinstance(problem.answer, str) else None
    write = probes.writer_of(task, problem) if turned else None
    if turned is None or write is None:
        return None
    return turned if task.grade(problem, write(turned)).verdict == "correct" else None


def _rejected_gold(task: Task, problem: Problem) -> str | None:
    """Why no form of the gold answer is graded correct; None if one is."""
    try:
        fits = probes.worked(task, problem) is not None or probes.writer_of(task, problem) is not None
    except UserError as error:
        return str(error)
    return None if fits else f"{gold_text(problem)[:60]!r} is graded correct in no format"


def template_of(
    stage: RLStage, task: Task, renderer: Renderer, longest: int | None, model: PreTrainedModel | None = None
) -> Iterator[Finding]:
    """Check the chat template on a few problems. `longest`: the positions of the model, if known."""
    problems = task.problems("train")[:50]
    solutions = [text for p in problems if (text := probes.worked(task, p))]
    yield from template.check_template(renderer, problems, stage.sampling.max_tokens, solutions, longest)
    if renderer.is_raw and stage.prompt.style == "auto":
        yield from template.check_absence(stage.model.path, has_messages(task))
    if model is not None:
        stops = stop_token_ids(model, renderer.tokenizer)
        if renderer.tokenizer.pad_token_id in stops and len(stops) == 1:
            yield Finding(
                "pass", "pad", "the padding token is the end-of-text token; hone masks by position, not by token"
            )


def rewards(subject: Subject) -> Iterator[Finding]:
    """Score probes with the reward; parts that need a model are left out if there is none.

    Stores the scores of the first problem in `subject.scores`. Stops after `subject.seconds`.
    """
    stage, task, answerer = subject.stage, subject.task, subject.answerer
    needs_model = {name for name in stage.reward.parts if not is_offline(name)}
    parts = dict(stage.reward.parts)
    if needs_model and answerer is None:
        parts = {name: weight for name, weight in parts.items() if name not in needs_model}
        message = f"reward {', '.join(sorted(needs_model))} needs a model and was not checked"
        yield Finding("warn", "reward", f"{message}; run without --no-model once there is one")
    if parts.pop("environment", None) is not None:
        yield Finding("pass", "reward", "the environment's reward is earned in episodes: see the lines `environment`")
    if not parts:
        return
    reward = make_reward(stage.reward.model_copy(update={"parts": parts}), task, answerer)
    count, started = counter(subject.renderer), time.monotonic()
    for n, problem in enumerate(task.problems("train")[:PROBED]):
        remaining = subject.seconds - (time.monotonic() - started)
        if remaining <= 0:
            break
        try:
            write = None  # a model that scores reasoning is not asked about the format of answers
            if not (is_graded(task) and needs_model):
                write = probes.best_paid(problem, reward, count, task if is_graded(task) else None)
            chosen = probes.probes(task, problem, task.problems("train")[1:], write)
            if not needs_model and not _asks_for_box(subject, problem):
                chosen = [p for p in chosen if p.name != probes.WORKED or problem.reference or "\\boxed" not in p.text]
        except UserError as error:
            yield Finding("fail" if is_graded(task) else "warn", "gold", str(error))
            continue
        rows = probes.score(problem, chosen, reward, count, remaining)
        yield from probes.judge_scores(rows, bool(needs_model) and answerer is not None, is_graded(task))
        if n == 0:
            subject.scores += [_row(row) for row in rows]


def _asks_for_box(subject: Subject, problem: Problem) -> bool:
    """Whether the prompt asks for a box: an answer that the task writes in one is no form to expect otherwise."""
    return "boxed" in subject.renderer.prompt_text(problem)


def is_graded(task: Task) -> bool:
    """Whether the task has a grader: rows with `grading: none` have only the user's reward."""
    return getattr(task, "grading", "") != "none"


def has_messages(task: Task) -> bool:
    """Whether the rows of the task hold messages, rather than questions."""
    columns = getattr(task, "columns", None)
    return columns is not None and "messages" in columns.of


def counter(renderer: Renderer) -> Callable[[str], int]:
    return lambda text: len(renderer.tokenizer.encode(text, add_special_tokens=False))


def _row(row: probes.Probed) -> dict[str, Any]:
    r = row.reward
    return {
        "probe": row.probe.name,
        "kind": row.probe.kind,
        "total": r.total,
        "verdict": r.verdict,
        "milliseconds": round(row.seconds * 1000, 2),
        "parts": dict(r.parts),
    }
