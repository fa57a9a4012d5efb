"""Perplexity of the gold answers under a model: without reasoning, and after its own.

    hone eval RUN --gold-perplexity

The model reads the question, its own reasoning (or none), a cue, and then the gold answer: PPL = exp(-mean log p). It
needs no grading, and changes before accuracy does.

    gold.jsonl   beside samples.jsonl: {"problem_id": "gsm8k-0003", "index": 5, "cue": "<answer>", "logprobs": [-0.1]}
                 one row per problem (index null: without reasoning) and per sample; log-probs in nats, one per token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hone.base import jsonl
from hone.base.progress import Track
from hone.base.settings import UserError
from hone.grade.parse import parse
from hone.measure.models import AnswerSource, Model
from hone.measure.stats.measured import Measured
from hone.measure.stats.perplexity import gold_changes, gold_logprobs, gold_perplexity
from hone.measure.store import GOLD, Store
from hone.rewards.base import Judged
from hone.rewards.config import RewardConfig
from hone.rewards.gold import gold_text
from hone.rewards.perplexity import context_of
from hone.rollout.answerer import LocalAnswerer
from hone.rollout.local import LocalModel
from hone.types import Grade, Problem, Rollout

#: Opens the answer in the format that most tasks ask for.
ANSWER_TAG = "<answer>"
Key = tuple[str, int | None]  # problem id, index of the sample; None: without reasoning


@dataclass(frozen=True)
class GoldPrompt:
    """The cue and the context that precede a gold answer."""

    cue: str
    context: str  # which part of the model's text, see `hone.rewards.perplexity.context_of`

    @classmethod
    def of(cls, reward: RewardConfig, texts: Sequence[str]) -> GoldPrompt:
        """The cue and context of the recipe's perplexity reward, if it has one; else everything before the answer, with
        the answer tag as the cue if the model uses it."""
        config = reward.perplexity
        if "perplexity" in reward.parts:
            return cls(config.cue, config.context)
        return cls(ANSWER_TAG if any(ANSWER_TAG in text for text in texts) else config.cue, "before_answer")


def check(models: Sequence[Model], problems: Sequence[Problem]) -> None:
    """Raises UserError, before anything is sampled, for models and problems without a gold perplexity."""
    for model in models:
        if model.hosted:
            raise UserError(
                f"--gold-perplexity: {model.where} gives no log-probs of given text; leave it out, or "
                "evaluate the model's own folder"
            )
    for problem in problems:
        gold_text(problem)


def measure(
    store: Store, source: AnswerSource, problems: Sequence[Problem], reward: RewardConfig, samples: int
) -> None:
    """Append the missing rows of the requested samples to gold.jsonl."""
    drawn = {problem.id: store.chosen([problem.id], samples) for problem in problems}
    prompt = GoldPrompt.of(reward, [row["text"] for rows in drawn.values() for row in rows])
    path = store.folder / GOLD
    jsonl.keep(path, lambda row: row["cue"] == prompt.cue and row["context"] == prompt.context)
    present: set[Key] = {(row["problem_id"], row["index"]) for row in jsonl.read(path)}
    local: LocalModel = source.local  # type: ignore[attr-defined]  # a hosted model has none: see `check`
    answerer = LocalAnswerer(local.model, local.renderer)
    with Track(f"gold answers, {store.settings['label']}", len(problems)) as progress:
        for problem in problems:
            contexts: dict[Key, str] = {(problem.id, None): ""}
            for row in drawn[problem.id]:
                contexts[problem.id, row["index"]] = before_answer(problem, row["text"], prompt.context)
            missing = {key: text for key, text in contexts.items() if key not in present}
            if missing:
                all_logprobs = answerer.logprobs(problem, list(missing.values()), prompt.cue, gold_text(problem))
                for (problem_id, index), logprobs in zip(missing, all_logprobs, strict=True):
                    values = np.maximum(logprobs, -1e4).astype(float).round(6).tolist()  # JSON knows no infinity
                    row = {"problem_id": problem_id, "index": index, "cue": prompt.cue, "context": prompt.context}
                    jsonl.append(path, {**row, "logprobs": values})
            progress.advance("")


def before_answer(problem: Problem, text: str, which: str) -> str:
    """The part of the model's own text that precedes the gold answer."""
    judged = Judged(Rollout(problem.id, 0, (), text), parse(text), Grade("malformed"))
    return context_of(judged, which).strip()


def report_lines(models: Sequence[Measured]) -> list[str]:
    lines = []
    for model, changed in gold_changes(models):
        without, after = (gold_perplexity(gold_logprobs(model, column)) for column in (0, 1))
        lines.append(
            f"{model.label}: gold perplexity {after.value:.3f} [{after.low:.3f}, {after.high:.3f}] after its own "
            f"reasoning, {without.value:.3f} [{without.low:.3f}, {without.high:.3f}] without"
        )
        if changed is not None:
            r = changed.ratio
            lines.append(
                f"  x {r.value:.3f} [{r.low:.3f}, {r.high:.3f}] of the first model's, p = {changed.p_value:.2g}"
            )
    return lines
