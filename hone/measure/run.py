"""`hone eval`: draw the missing samples, block by block, then print the results.

Every model answers the same problems, and sample i of problem p uses the same random stream: the engine keys its
numbers by (seed, place in the block, sample, position), and a block's seed depends only on --seed and the block.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from hone.base import jsonl, stats, streams
from hone.base.progress import Track
from hone.base.settings import UserError
from hone.base.visible import visible
from hone.measure import gold
from hone.measure.evaluate import eval_problems, graded
from hone.measure.models import AnswerSource, Model, find
from hone.measure.rewarded import StoredReward
from hone.measure.stats.measured import Measured, compare, measured
from hone.measure.stats.perplexity import gold_logprobs, gold_perplexity
from hone.measure.store import Store, about, gold_nlls
from hone.recipe.recipe import Pipeline, Recipe, stages_of
from hone.recipe.sections.evals import EvalConfig
from hone.rewards.judge.client import Judge
from hone.rewards.judge.part import opinion_line, second_opinion
from hone.runs.layout import which_model
from hone.runs.manifest import code_version
from hone.tasks import make_task
from hone.tasks.base import Task
from hone.types import Interval, Problem, Rollout

#: Problems and samples drawn at a time. Other sizes give other random streams, and so other samples.
BLOCK_PROBLEMS, BLOCK_SAMPLES = 64, 8
SAVE_EVERY = 5.0  # seconds between appends while the answers of a block arrive


def cli_eval(
    recipe: Recipe | Pipeline,
    models: Sequence[str] = (),
    seed: int = 0,
    ks: Sequence[int] = (),
    out: Path | None = None,
    score_gold: bool = False,
) -> Path:
    """Evaluate `models` (default: the recipe's own) with the eval section; returns the folder of the evaluations.

    `score_gold`: also measure the perplexity of the gold answers, see `hone.measure.gold`. `seed` only chooses the
    random streams; two seeds give two independent samples of the same model.
    Raises UserError, before anything is loaded, if a model does not exist.
    """
    stage = recipe.stages[-1]
    config = stage.eval
    check_ks(ks, config.samples)
    task = make_task(stage.task, stage.seed)
    problems = eval_problems(task, config)
    targets = list(models) or [str(which_model(stages_of(recipe), Path(recipe.runs) / recipe.name, None)[1])]
    located = [find(target, stage, task) for target in targets]
    if score_gold:
        gold.check(located, problems)
    reward = StoredReward.of(stage, task)
    folder = out or Path(recipe.runs) / recipe.name / "evaluations"
    results, notes = [], []
    for model in located:
        store = Store.open(folder, settings(stage, task, model, seed))
        load = cache(model.load)  # once, and only if something is missing
        draw(store, replace(model, load=load), problems, task, config, seed)
        if score_gold:
            gold.measure(store, load(), problems, stage.reward, config.samples)
        rows = store.chosen([problem.id for problem in problems], config.samples)
        rewards = {} if reward is None else reward.measure(problems, rows)
        results.append(finish(store, problems, config, ks, rewards))
        if reward is not None:
            notes.append(reward.report(store.settings["label"], rewards))
        if config.judge.url is not None:
            notes.append(ask_judge(store, problems, config, task))
    print(visible("\n".join([report(results, problems, config, seed, ks), *gold.report_lines(results), *notes])))
    print(f"samples and summaries: {folder}; figures and tables: hone report {folder}")
    return folder


def check_ks(ks: Sequence[int], samples: int) -> None:
    wrong = [k for k in ks if not 1 <= k <= samples]
    if wrong:
        raise UserError(
            f"--k {', '.join(map(str, wrong))}: pass@k needs at least k samples per problem, but eval.samples is "
            f"{samples}; raise eval.samples, or give a k from 1 to {samples}"
        )


def settings(stage: Recipe, task: Task, model: Model, seed: int) -> dict[str, Any]:
    """All settings that determine the samples, except how many are drawn."""
    return {
        "label": model.label if seed == 0 else f"{model.label} seed {seed}",
        "model": model.where,
        "weights": model.weights,
        "hosted": model.hosted,
        "dtype": None if model.hosted else stage.model.dtype,
        "task": stage.task.model_dump(mode="json"),
        "task_seed": stage.seed,
        "prompt": stage.prompt.model_dump(mode="json"),
        "split": stage.eval.split,
        "sampling": stage.eval.sampling.model_dump(mode="json"),
        "seed": seed,
        "code_version": code_version(),
    }


def draw(store: Store, model: Model, problems: Sequence[Problem], task: Task, config: EvalConfig, seed: int) -> None:
    """Draw the samples that the store lacks. An interrupted evaluation continues after its last whole block (hosted:
    answer)."""
    blocks = [
        (p, g)
        for p in range(0, len(problems), BLOCK_PROBLEMS)
        for g in range(0, config.samples, BLOCK_SAMPLES)
        if wanted(store, problems, config.samples, p, g)
    ]
    if not blocks:
        return
    sampler = model.load()
    rows = ({"id": q.id, "level": q.level, "domain": q.domain, "answer": q.answer, "prompt": sampler.prompt_text(q)}
            for q in problems)  # fmt: skip
    store.describe(rows)
    with Track(f"evaluating {model.label}", len(blocks)) as progress:
        for p, g in blocks:
            draw_block(store, sampler, problems, task, config.samples, p, g, seed, progress)
            progress.advance(f"{len(store.rows)} samples")


def wanted(store: Store, problems: Sequence[Problem], samples: int, p: int, g: int) -> set[tuple[str, int]]:
    """(id, index) of the samples that a block should hold and the store does not."""
    block = problems[p : p + BLOCK_PROBLEMS]
    keys = {(q.id, i) for q in block for i in range(g, min(g + BLOCK_SAMPLES, samples))}
    return keys - store.rows.keys()


def draw_block(
    store: Store,
    sampler: AnswerSource,
    problems: Sequence[Problem],
    task: Task,
    samples: int,
    p: int,
    g: int,
    seed: int,
    progress: Track,
) -> None:
    block = problems[p : p + BLOCK_PROBLEMS]
    missing = {(i, index - g) for i, index in wanted(store, problems, samples, p, g)}
    stream = streams.eval_block(seed, p, g)
    fresh: list[tuple[Problem, Rollout]] = []
    saved = time.monotonic()
    count = min(BLOCK_SAMPLES, samples - g)
    try:
        for problem, index, rollout in sampler.answers(block, count, stream, missing, progress.inner):
            if (problem.id, index) in missing:
                fresh.append((problem, replace(rollout, index=g + index)))
            if time.monotonic() - saved > SAVE_EVERY:
                store.add(stored(task, fresh, stream))
                fresh, saved = [], time.monotonic()
    finally:
        store.add(stored(task, fresh, stream))  # keep finished answers, even after an error


def stored(task: Task, items: Sequence[tuple[Problem, Rollout]], stream: int) -> list[dict[str, Any]]:
    """Rows of samples.jsonl, without the fields of problems.jsonl."""
    left_out = ("level", "domain", "answer")
    return [{**{k: v for k, v in row.items() if k not in left_out}, "seed": stream} for row in graded(task, items)]


# --- results -------------------------------------------------------------------------------------


def finish(
    store: Store,
    problems: Sequence[Problem],
    config: EvalConfig,
    ks: Sequence[int],
    rewards: Mapping[str, Any] | None = None,
) -> Measured:
    """Write summary.json of the requested samples. `rewards`: of `StoredReward.measure`."""
    kinds = {q.id: {"level": q.level, "domain": q.domain, "answer": q.answer} for q in problems}
    scored = gold_nlls(store.folder)
    rows = [
        {**row, **kinds[i := row["problem_id"]], "gold_nll": (scored.get((i, None)), scored.get((i, row["index"])))}
        for row in store.chosen(list(kinds), config.samples)
    ]
    result = measured(store.settings["label"], rows, **about(store.settings))
    ks = usable(ks, result)
    summary = {
        "label": result.label, "split": config.split, "problems": len(result), "samples": config.samples,
        "sampling": dict(result.sampling), "seed": result.seed, **(_graded(result, ks) if result.graded else {}),
        "truncation_rate": None if result.truncated is None else float(result.truncated.mean()),
        "response_tokens": float(result.tokens.mean()), "reflection_rate": float(result.reflects.mean()),
        "verifier_failures": result.failures, **(rewards or {}),
        "gold_perplexity": {
            name: asdict(gold_perplexity(own)) if (own := gold_logprobs(result, column)) else None
            for column, name in enumerate(("without_reasoning", "after_reasoning"))
        },
    }  # fmt: skip
    jsonl.replace(store.folder / "summary.json", json.dumps(summary, indent=1, ensure_ascii=False))
    return result


def _graded(result: Measured, ks: Sequence[int]) -> dict[str, Any]:
    """The fields of summary.json that exist only for tasks with a grader."""
    return {
        "accuracy": asdict(result.accuracy()),
        "pass_at_k": {str(k): asdict(point) for k, point in zip(ks, result.pass_curve(ks), strict=True)},
        "by_level": {level: asdict(part.accuracy()) for level, part in result.by("levels").items()},
    }


def ask_judge(store: Store, problems: Sequence[Problem], config: EvalConfig, task: Task) -> str:
    """Write judge.json, a second opinion on the requested samples; returns it in a line or two."""
    rows = [dict(row) for row in store.chosen([problem.id for problem in problems], config.samples)]
    opinion = second_opinion(problems, rows, Judge(config.judge), task)
    jsonl.replace(store.folder / "judge.json", json.dumps(opinion, indent=1, ensure_ascii=False))
    return f"{store.settings['label']}: {opinion_line(opinion)}"


def usable(ks: Sequence[int], result: Measured) -> list[int]:
    """The requested k that the graded samples allow; by default 1, 2, 4, ..."""
    limit = int(result.drawn.min())
    return [k for k in ks if k <= limit] or result.ks()


def report(
    results: Sequence[Measured], problems: Sequence[Problem], config: EvalConfig, seed: int, ks: Sequence[int]
) -> str:
    """The results as text: a row per model, then each compared with the first on the same problems."""
    settings = config.sampling.model_dump(exclude=None if config.sampling.stop else {"stop"})
    how = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.items())
    lines = [
        f"{len(problems)} {config.split} problems, {config.samples} sample(s) each, seed {seed}; {how}",
        "95 % intervals: Wilson with one sample per problem, otherwise bootstrap over problems",
    ]
    for result in results:
        cut = "" if result.truncated is None else f", {result.truncated.mean():.1%} cut off"
        value = f"accuracy {_text(result.accuracy())}" if result.graded else "not graded (task.grading: none)"
        lines.append(f"{result.label}: {value}, {result.tokens.mean():.1f} tokens{cut}")
        if result.failures:
            lines.append(f"  left out: {result.failures} samples whose verifier failed")
        if not result.graded:
            continue
        chosen = usable(ks, result)
        if chosen != [1]:
            curve = zip(chosen, result.pass_curve(chosen), strict=True)
            lines.append("  " + "  ".join(f"pass@{k} {_text(point)}" for k, point in curve))
        parts = result.by("levels")
        if len(parts) > 1:
            lines.append("  " + "  ".join(f"{level}: {_text(part.accuracy())}" for level, part in parts.items()))
    for other in results[1:]:
        if result.graded and (comparison := compare(results[0], other)) is not None:
            lines.append(f"{other.label} - {results[0].label}: {_difference(comparison)}")
    return "\n".join(lines)


def _text(a: Interval) -> str:
    return f"{a.value:.3f} [{a.low:.3f}, {a.high:.3f}]"


def _difference(comparison: stats.Comparison) -> str:
    d = comparison.difference
    return (
        f"{d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}], p = {comparison.p_value:.2g} ({comparison.method}), paired on "
        f"{d.n} problems"
    )
