"""Two-model evaluation: one model writes a reasoning context, and a frozen model answers after reading it.

    hone eval RECIPE --answerer FOLDER

Measures the answerer's accuracy and its perplexity of the gold answer: after the contexts of the model under test,
without a context (the floor), and after one that gives the answer away (the ceiling).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hone.base import stats, streams
from hone.base.settings import UserError
from hone.environments.play import Episodes
from hone.measure.evaluate import eval_problems, load_evaluated
from hone.recipe.recipe import RLStage
from hone.recipe.sections.rollout import SamplingConfig
from hone.rewards.base import judge
from hone.rewards.config import PerplexityReward
from hone.rewards.gold import gold_text
from hone.rewards.perplexity import context_of, leaks, perplexity, score
from hone.rollout.answerer import LocalAnswerer
from hone.rollout.engine import Engine
from hone.rollout.local import LocalModel, load_local
from hone.rollout.text import decoder
from hone.tasks import make_task
from hone.tasks.base import Task
from hone.types import Grade, Interval, Problem, Rollout

#: Extra tokens for the answerer, beyond the answer: a tag, "So it is".
ROOM = 12

Contexts = Sequence[Sequence[str]]  # [P][S]; "": no context


def two_model(
    problems: Sequence[Problem],
    contexts: Contexts,
    task: Task,
    answerer: LocalAnswerer,
    engine: Engine,
    config: PerplexityReward,
) -> dict[str, Any]:
    """One row per condition (`context`, `none`, `leaked`): accuracy and gold perplexity, each with its 95 % interval.

    `engine` serves the answerer, which answers greedily, with no room to reason. `reward` is the mean of the perplexity
    reward over the contexts, with its interval; `leak_rate` is the share of contexts with the gold answer; `by_problem`
    has the mean reward and negative log-prob of each problem, for paired comparisons.
    """
    conditions = {
        "context": contexts,
        "none": [[""] for _ in problems],
        "leaked": [[f"The answer is {gold_text(p)}"] for p in problems],
    }
    nlls = {name: gold_nlls(problems, texts, answerer, config.cue) for name, texts in conditions.items()}
    rows: dict[str, Any] = {}
    for name, texts in conditions.items():
        right = answers(problems, texts, task, answerer, engine, config.cue)
        rows[name] = {
            "accuracy": asdict(stats.accuracy(right)),
            "gold_perplexity": asdict(mean_perplexity([float(np.mean(n)) for n in nlls[name]])),
        }
    leaked = [[leaks(c, gold_text(p)) for c in texts] for p, texts in zip(problems, contexts, strict=True)]
    values = [
        [score(math.exp(a), math.exp(none), leak, config).value or 0.0 for a, leak in zip(texts, held, strict=True)]
        for texts, (none,), held in zip(nlls["context"], nlls["none"], leaked, strict=True)
    ]
    return {
        **rows,
        "reward": asdict(stats.bootstrap_mean([float(np.mean(v)) for v in values])),
        "leak_rate": float(np.mean([x for held in leaked for x in held])),
        "by_problem": {
            "reward": [float(np.mean(v)) for v in values],
            "gold_nll": [float(np.mean(n)) for n in nlls["context"]],
        },
    }


def gold_nlls(problems: Sequence[Problem], contexts: Contexts, answerer: LocalAnswerer, cue: str) -> list[list[float]]:
    """[P][S] mean negative log-probs of the gold answer's tokens, which are the logarithms of its perplexities."""
    return [
        [math.log(perplexity(x)) for x in answerer.logprobs(problem, texts, cue, gold_text(problem))]
        for problem, texts in zip(problems, contexts, strict=True)
    ]


def mean_perplexity(nlls: Sequence[float]) -> Interval:
    """exp of the mean over problems, so that no single problem dominates; the interval is a bootstrap over problems."""
    mean = stats.bootstrap_mean(nlls)
    return Interval(math.exp(mean.value), math.exp(mean.low), math.exp(mean.high), mean.n)


def answers(
    problems: Sequence[Problem],
    contexts: Contexts,
    task: Task,
    answerer: LocalAnswerer,
    engine: Engine,
    cue: str,
) -> list[list[float]]:
    """[P][S] 1 if the answerer's text after the cue is right, else 0; greedy, about as long as the gold answers."""
    places = [(p, c) for p, texts in zip(problems, contexts, strict=True) for c in texts]
    prompts = [answerer.prompt_ids(problem, context, cue) for problem, context in places]
    longest = max(len(answerer.renderer.tokenizer.encode(gold_text(p), add_special_tokens=False)) for p in problems)
    greedy = SamplingConfig(temperature=0.0, max_tokens=longest + ROOM)
    turns = engine.generate(prompts, greedy, samples=1, seed=0)
    completions = [decoder(answerer.renderer.tokenizer)(t.completion_ids.tolist()) for (t,) in turns]
    right = iter(
        [
            float(grade(task, p, cue, text).verdict == "correct")
            for (p, _), text in zip(places, completions, strict=True)
        ]
    )
    return [[next(right) for _ in texts] for texts in contexts]


def grade(task: Task, problem: Problem, cue: str, text: str) -> Grade:
    """Grade the text after the cue; without an answer block, its first line is the answer."""
    whole = task.grade(problem, cue + text)
    if whole.verdict != "malformed":
        return whole
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return task.grade(problem, f"<answer>{first}</answer>")


# --- on the command line ---------------------------------------------------------------------


def cli_two_model(stage: RLStage, path: Path, answerer: str, out: Path | None = None) -> None:
    """`hone eval --answerer`: the model at `path` writes contexts for the evaluation problems, `answerer` answers."""
    config = stage.reward.perplexity
    if config.is_server:
        raise UserError(f"--answerer {answerer}: the two-model evaluation needs a model in this process, not a server")
    task = make_task(stage.task, stage.seed)
    writer = load_evaluated(stage, path, task)
    reader = load_local(stage.model.at(answerer), stage.rollout, stage.prompt, task.system)
    problems = eval_problems(task, stage.eval)
    row = evaluate_contexts(stage, problems, task, writer, reader)
    print(f"{path} writes contexts for {len(problems)} {stage.eval.split} problems, {answerer} answers")
    print("  context   accuracy  95%               gold perplexity  95%")
    for name in ("context", "none", "leaked"):
        a, p = row[name]["accuracy"], row[name]["gold_perplexity"]
        print(
            f"  {name:8}  {a['value']:8.3f}  [{a['low']:.3f}, {a['high']:.3f}]  "
            f"{p['value']:15.4f}  [{p['low']:.4f}, {p['high']:.4f}]"
        )
    r = row["reward"]
    print(f"  reward ({config.kind}) {r['value']:.4f}  95% [{r['low']:.4f}, {r['high']:.4f}]", end="")
    print(f", {row['leak_rate']:.1%} of the contexts contain the gold answer")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"model": str(path), "answerer": answerer, **row}, indent=1))


def evaluate_contexts(
    stage: RLStage, problems: Sequence[Problem], task: Task, writer: LocalModel, reader: LocalModel
) -> dict[str, Any]:
    """Sample contexts from `writer` according to the eval section, then evaluate them with `two_model`."""
    config, seed = stage.reward.perplexity, streams.answers("evaluation", stage.seed)
    sampling, samples = stage.eval.sampling, stage.eval.samples
    groups = Episodes(writer.renderer).sample(problems, writer.engine, sampling, samples=samples, seed=seed)
    contexts, answerer = contexts_of(task, problems, groups, config), LocalAnswerer(reader.model, reader.renderer)
    return two_model(problems, contexts, task, answerer, reader.engine, config)


def contexts_of(
    task: Task, problems: Sequence[Problem], groups: Sequence[Sequence[Rollout]], config: PerplexityReward
) -> list[list[str]]:
    """[P][S] the part of each rollout that the answerer reads."""
    return [
        [context_of(judge(task, problem, rollout), config.context).strip() for rollout in group]
        for problem, group in zip(problems, groups, strict=True)
    ]
