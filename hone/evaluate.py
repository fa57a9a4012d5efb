"""Evaluation: sample, grade, and say how sure we are.

The same renderer, engine and grader as in training; only the split and the sampling differ.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from hone.analysis import reflection, stats
from hone.data.render import Renderer
from hone.recipe import EvalConfig, Recipe
from hone.rollout.base import Engine
from hone.rollout.collect import rollouts
from hone.tasks.base import Task
from hone.train.progress import Track
from hone.types import Interval, Problem

Evaluation = tuple[dict[str, Any], list[dict[str, Any]]]  # the row of evals.jsonl, and its samples

#: Added to the recipe's seed, so that evaluation never draws the random numbers of a training step.
EVAL_SEED = 1 << 40


class Evaluator:
    """The evaluations of one run: `before` and `after` on `eval.split`, `validation` in between."""

    def __init__(self, recipe: Recipe, task: Task, renderer: Renderer, engine: Engine, progress: Track) -> None:
        self.recipe, self.task, self.renderer, self.engine, self.progress = recipe, task, renderer, engine, progress

    def due(self, step: int) -> list[str]:
        """The labels of what is to be evaluated before step `step`."""
        every, last = self.recipe.eval.every, self.recipe.steps
        labels = ["before"] if step == 0 else ["after"] if step == last else []
        return labels + (["validation"] if every and step % every == 0 else [])

    def evaluate(self, label: str) -> Evaluation:
        config = self.recipe.eval
        if label == "validation":
            config = config.model_copy(update={"split": "validation"})
        problems = self.task.problems(config.split)[: config.problems]
        row, records = evaluate(
            problems,
            self.task,
            self.renderer,
            self.engine,
            config,
            seed=self.recipe.seed + EVAL_SEED,
            progress=self.progress.inner,
        )
        a = row["accuracy"]
        self.progress.say(
            f"{label}: accuracy {a['value']:.3f} [{a['low']:.3f}, {a['high']:.3f}] on {len(problems)} {config.split} "
            f"problems, {row['response_tokens']:.0f} tokens, reflection {row['reflection_rate']:.2f}"
        )
        return row, records


def evaluate(
    problems: Sequence[Problem],
    task: Task,
    renderer: Renderer,
    engine: Engine,
    config: EvalConfig,
    *,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Accuracy with its 95 % interval, over all and by level; lengths, reflection, verdicts.

    A sample whose verifier failed is left out of the accuracy and counted in `verdicts`.
    """
    answers = rollouts(
        problems, renderer, engine, config.sampling, samples=config.samples, seed=seed, progress=progress
    )
    records: list[dict[str, Any]] = []
    for problem, group in zip(problems, answers, strict=True):
        prompt = renderer.prompt_text(problem)
        for rollout in group:
            grade = task.grade(problem, rollout.text)
            truncated = rollout.finish == "length" and grade.verdict == "malformed"
            records.append(
                {
                    "problem_id": problem.id,
                    "level": problem.level,
                    "domain": problem.domain,
                    "prompt": prompt,
                    "text": rollout.text,
                    "verdict": "truncated" if truncated else grade.verdict,
                    "extracted": grade.extracted,
                    "answer": problem.answer,
                    "tokens": rollout.num_tokens,
                    "finish": rollout.finish,
                    "index": rollout.index,
                }
            )
    return summary(records, config), records


def summary(records: Sequence[dict[str, Any]], config: EvalConfig) -> dict[str, Any]:
    """The row of evals.jsonl: every share with its interval."""
    by_level: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        by_level[record["level"]].append(record)
    lengths = [record["tokens"] for record in records]
    return {
        "split": config.split,
        "accuracy": asdict(_accuracy(records)),
        "response_tokens": sum(lengths) / len(lengths),
        "length": {"min": min(lengths), "max": max(lengths)},
        "reflection_rate": reflection.rate([record["text"] for record in records]),
        "verdicts": dict(Counter(record["verdict"] for record in records)),
        "by_level": {level: asdict(_accuracy(by_level[level])) for level in sorted(by_level)},
        "samples": config.samples,
        "sampling": config.sampling.model_dump(),
    }


def _accuracy(records: Sequence[dict[str, Any]]) -> Interval:
    groups = list(stats.outcomes(records).values())
    if not groups:
        raise RuntimeError(f"the verifier failed on all {len(records)} samples: there is no accuracy to report")
    return stats.accuracy(groups)
