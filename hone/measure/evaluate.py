"""Evaluation: sample, grade, and summarize with confidence intervals.

The same renderer, engine and grader as in training; only the split and the sampling differ.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hone.base import stats, streams
from hone.base.progress import Track
from hone.base.settings import UserError
from hone.base.world import ALONE, World
from hone.environments.play import Episodes
from hone.environments.record import episode_means, episode_row
from hone.grade.parse import parse
from hone.measure.rewarded import rewarded
from hone.measure.stats import passk, reflection
from hone.recipe.recipe import LoopStage, SampledStage
from hone.recipe.sections.evals import EvalConfig
from hone.rewards.base import Composed, judge_all, reward_groups
from hone.rewards.judge.client import Judge
from hone.rewards.judge.part import second_opinion
from hone.rollout.dates import date_for
from hone.rollout.engine import Engine
from hone.rollout.local import LocalModel, load_local
from hone.tasks.base import Task
from hone.types import Interval, Problem, Rollout

Evaluation = tuple[dict[str, Any], list[dict[str, Any]]]  # the row of evals.jsonl, and its samples


class Evaluator:
    """The evaluations of one run: `before` and `after` on `eval.split`, `validation` in between."""

    def __init__(
        self,
        recipe: LoopStage,
        task: Task,
        episodes: Episodes,
        engine: Engine,
        progress: Track,
        world: World = ALONE,
    ) -> None:
        self.recipe, self.task, self.episodes, self.engine, self.progress = recipe, task, episodes, engine, progress
        self.world = world

    def due(self, step: int) -> list[str]:
        """The labels of the evaluations that are due before step `step`."""
        every, last = self.recipe.eval.every, self.recipe.steps
        labels = ["before"] if step == 0 else ["after"] if step == last else []
        return labels + (["validation"] if every and step % every == 0 else [])

    def evaluate(self, label: str, reward: Composed | None = None) -> Evaluation:
        """Sample, grade and summarise one evaluation. `reward`: the training reward, computed for the held-out answers
        as well."""
        config = self.recipe.eval
        if label == "validation":
            config = config.model_copy(update={"split": "validation"})
        problems = eval_problems(self.task, config)
        row, records = evaluate(
            problems,
            self.task,
            self.episodes,
            self.engine,
            config,
            seed=streams.answers("evaluation", self.recipe.seed),
            progress=self.progress.inner,
            world=self.world,
            reward=reward,
        )
        self.progress.say(
            f"{label}: {_main_result(row)} on {len(problems)} {config.split} problems, {_lengths_text(row)}"
        )
        return row, records


def evaluate(
    problems: Sequence[Problem],
    task: Task,
    episodes: Episodes,
    engine: Engine,
    config: EvalConfig,
    *,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
    world: World = ALONE,
    reward: Composed | None = None,
) -> Evaluation:
    """Accuracy with its 95 % interval, overall and by level; lengths, truncation, reflection, verdicts; the reward.

    Without a grader there is no accuracy. Parts of `reward` that need a model or a server are left out, and then so is
    its mean; `outcome` alone is the accuracy. A sample whose verifier failed is left out of the accuracy and counted in
    `verdicts`.
    """
    answers = episodes.sample(problems, engine, config.sampling, samples=config.samples, seed=seed, progress=progress)
    items = [(problem, rollout) for problem, group in zip(problems, answers, strict=True) for rollout in group]
    rows = world.gather(graded(task, world.share(items)), "grades")
    renderer = episodes.renderer
    records = [
        {"prompt": renderer.shown_prompt(problem, rollout), **row}
        for (problem, rollout), row in zip(items, rows, strict=True)
    ]
    row = summary(records, config)
    if reward is not None and set(reward.parts) != {"outcome"}:
        offline = reward.offline()
        whole = len(offline.parts) == len(reward.parts)
        row |= rewarded(reward_groups(problems, answers, offline, world), whole)
    if config.judge.url is not None:
        judge = Judge(config.judge)
        row["judge"] = world.on_main(lambda: second_opinion(problems, records, judge, task), "the judge", patient=True)
    return row, records


def _main_result(row: dict[str, Any]) -> str:
    """The accuracy of an evaluation and the mean reward, if that is something else, for the progress line."""
    known = [(name, row[name]) for name in ("accuracy", "reward") if name in row]
    shown = [f"{name} {x['value']:.3f} [{x['low']:.3f}, {x['high']:.3f}]" for name, x in known]
    return ", ".join(shown) or "not graded (task.grading: none)"


def _lengths_text(row: dict[str, Any]) -> str:
    return (
        f"{row['response_tokens']:.0f} tokens, {row['truncation_rate']:.1%} cut off, "
        f"reflection {row['reflection_rate']:.2f}"
    )


def graded(task: Task, items: Sequence[tuple[Problem, Rollout]]) -> list[dict[str, Any]]:
    """Rows of an evaluation's samples, without their prompts."""
    return [
        {
            "problem_id": problem.id,
            "level": problem.level,
            "domain": problem.domain,
            "text": rollout.text,
            "verdict": judged.grade.verdict,
            "extracted": judged.grade.extracted,
            "answer": problem.answer,
            "tokens": rollout.num_tokens,
            "finish": rollout.finish,
            "index": rollout.index,
            **episode_row(rollout),
        }
        for (problem, rollout), judged in zip(items, judge_all(task, items), strict=True)
    ]


def eval_problems(task: Task, config: EvalConfig) -> Sequence[Problem]:
    """The first `config.problems` problems of the split, or all if it has fewer. Raises UserError if it is empty."""
    problems = task.problems(config.split)[: config.problems]
    if not problems:
        raise UserError(f"eval: the {config.split} split of task {task.name} is empty; give it a size, e.g. 100")
    return problems


def summary(records: Sequence[dict[str, Any]], config: EvalConfig) -> dict[str, Any]:
    """The row of evals.jsonl; every share has its interval."""
    by_level: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        by_level[record["level"]].append(record)
    lengths = [record["tokens"] for record in records]
    is_graded = any(record["verdict"] != "ungraded" for record in records)
    return {
        "split": config.split,
        **({"accuracy": asdict(_accuracy(records))} if is_graded else {}),
        "response_tokens": sum(lengths) / len(lengths),
        "truncation_rate": sum(record["finish"] == "length" for record in records) / len(records),
        "length": {"min": min(lengths), "max": max(lengths)},
        "reflection_rate": reflection.rate([record["text"] for record in records]),
        "well_formed_rate": sum(parse(record["text"]).well_formed for record in records) / len(records),
        "verdicts": dict(Counter(record["verdict"] for record in records)),
        # A level on which the verifier always failed has no accuracy; `verdicts` counts the failures.
        "by_level": {
            level: asdict(_accuracy(by_level[level])) for level in sorted(by_level) if stats.outcomes(by_level[level])
        },
        **_pass_at_k(records, config.samples),
        **({"episode": means} if (means := episode_means(records)) else {}),
        "samples": config.samples,
        "sampling": config.sampling.model_dump(),
    }


def _pass_at_k(records: Sequence[dict[str, Any]], samples: int) -> dict[str, Any]:
    """k -> interval, for the k that the graded samples allow; empty with one sample per problem."""
    groups = list(stats.outcomes(records).values())
    fewest = min(map(len, groups), default=0)
    if samples == 1 or fewest < 2:
        return {}
    ks = passk.powers_of_two(fewest)
    points = passk.pass_curve([len(group) for group in groups], [int(sum(group)) for group in groups], ks)
    return {"pass_at_k": {str(k): asdict(point) for k, point in zip(ks, points, strict=True)}}


def _accuracy(records: Sequence[dict[str, Any]]) -> Interval:
    groups = list(stats.outcomes(records).values())
    if not groups:
        raise RuntimeError(f"the verifier failed on all {len(records)} samples: there is no accuracy to report")
    return stats.accuracy(groups)


# --- on the command line ---------------------------------------------------------------------


def load_evaluated(stage: SampledStage, path: Path, task: Task) -> LocalModel:
    """Load the model at `path`, with the stage's settings and the date of its run."""
    config = stage.model.model_copy(update={"path": str(path)})
    return load_local(config, stage.rollout, stage.prompt, task.system, date_for(Path(stage.runs) / stage.name))
