"""What a recipe's data, template and reward are like: findings that need no model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from hone.base.settings import UserError
from hone.model.load import stop_token_ids
from hone.preflight.check import probes, template
from hone.preflight.check.findings import Finding
from hone.recipe.recipe import Recipe
from hone.rewards import REWARDS, make_reward
from hone.rewards.gold import gold_text
from hone.rewards.perplexity import Answerer
from hone.rollout.prompts import Renderer
from hone.tasks.base import Task
from hone.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBED = 3  # problems whose probes are scored
SCANNED = 200  # problems whose gold answer is graded


def data(task: Task) -> Iterator[Finding]:
    """Can every gold answer be read by the grader that will judge the model's?"""
    problems = task.problems("train")[:SCANNED]
    if not is_graded(task):
        yield Finding("pass", "data", "task.grading is none: no answer is graded, only your reward judges")
        return
    unread = [(p, why) for p in problems if (why := _unreadable_gold(task, p))]
    if unread:
        problem, why = unread[0]
        more = f"{len(unread)} of {len(problems)} gold answers cannot earn a reward, the first: {problem.id}: {why}"
        level = Finding(
            "fail" if len(unread) > len(problems) / 20 else "warn", "data", f"{more}; remove or repair them"
        )
        yield level
    else:
        yield Finding("pass", "data", f"{len(problems)} gold answers are read and graded correct")


def _unreadable_gold(task: Task, problem: Problem) -> str | None:
    try:
        fits = probes.worked(task, problem) is not None or probes.writer_of(task, problem) is not None
    except UserError as error:
        return str(error)
    return None if fits else f"{gold_text(problem)[:60]!r} is graded correct in no shape"


def template_of(
    stage: Recipe, task: Task, renderer: Renderer, longest: int | None, model: PreTrainedModel | None = None
) -> Iterator[Finding]:
    """`longest`: the positions of the model, if known."""
    problems = task.problems("train")[:50]
    solutions = [text for p in problems if (text := probes.worked(task, p))]
    yield from template.check_template(renderer, problems, stage.sampling.max_tokens, solutions, longest)
    if model is not None:
        stops = stop_token_ids(model, renderer.tokenizer)
        if renderer.tokenizer.pad_token_id in stops and len(stops) == 1:
            yield Finding(
                "pass", "pad", "the padding token is the end-of-text token; hone masks by position, not by token"
            )


def rewards(
    stage: Recipe,
    task: Task,
    renderer: Renderer,
    frozen: Answerer | None,
    scores: list[dict[str, Any]],
    seconds: float = float("inf"),
) -> Iterator[Finding]:
    """Probes through the reward; without the model that a part asks, through the other parts.

    `scores` is given those of the first problem. After `seconds` a slow reward is asked no further.
    """
    asks = {name for name in stage.reward.parts if not getattr(REWARDS.get(name), "offline", True)}
    parts = dict(stage.reward.parts)
    if asks and frozen is None:
        parts = {name: weight for name, weight in parts.items() if name not in asks}
        said = f"reward {', '.join(sorted(asks))} asks a model and was not checked"
        yield Finding("warn", "reward", f"{said}; run without --no-model once there is one")
    if not parts:
        return
    reward = make_reward(stage.reward.model_copy(update={"parts": parts}), task, frozen)
    count, started = counter(renderer), time.monotonic()
    for n, problem in enumerate(task.problems("train")[:PROBED]):
        left = seconds - (time.monotonic() - started)
        if left <= 0:
            break
        try:
            write = None if is_graded(task) else probes.best_paid(problem, reward, count)
            chosen = probes.probes(task, problem, task.problems("train")[1:], write)
        except UserError as error:
            yield Finding("fail" if is_graded(task) else "warn", "gold", str(error))
            continue
        rows = probes.score(problem, chosen, reward, count, left)
        yield from probes.judge_scores(rows, bool(asks) and frozen is not None, is_graded(task))
        if n == 0:
            scores += [_row(row) for row in rows]


def is_graded(task: Task) -> bool:
    """Whether the task has a grader: rows with `grading: none` have only the user's reward."""
    return getattr(task, "grading", "") != "none"


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
