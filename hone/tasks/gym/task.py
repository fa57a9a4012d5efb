"""`reasoning_gym:<name>`: the tasks of the reasoning-gym package (github.com/open-thought/reasoning-gym).

    task: {name: "reasoning_gym:chain_sum", levels: [0, 1, 2], config: {allow_negation: true}}

Problems and scores are the package's own. Its code never runs in the trainer's process: problems are made in one with a
fixed hash seed, answers are graded in workers with a deadline (`hone.tasks.gym.package`).
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

from pydantic import JsonValue, NonNegativeInt, PositiveFloat, model_validator

from hone.base.settings import Section, UserError
from hone.grade.parse import parse
from hone.grade.workers import Failure, Workers
from hone.tasks.gym.package import FULL_MARKS, canonical_form
from hone.tasks.splits import alternating, even_shares
from hone.types import Grade, Problem, Split

SYSTEM = (
    "You are a helpful assistant. First think about the problem inside <think> </think>, then give the final "
    "answer, and nothing else, inside <answer> </answer>, in the form that the problem asks for."
)

#: Longer answers are not graded.
MAX_ANSWER = 20_000

#: Time limits to start and per problem: several tasks take 0.3 s, and one form in ten is a validation problem.
START_SECONDS, SECONDS_PER_PROBLEM = 120.0, 10.0

WORKERS = 2


class GymConfig(Section):
    """Sizes are totals, divided evenly between the levels, which alternate in the order of problems."""

    name_prefix: ClassVar[str] = "reasoning_gym"

    name: str  # reasoning_gym:NAME
    levels: tuple[NonNegativeInt, ...] = ()  # of the package's curriculum, from 0; empty: the package's defaults
    config: dict[str, JsonValue] = {}  # settings of the package's task
    train: NonNegativeInt = 1000
    validation: NonNegativeInt = 100
    test: NonNegativeInt = 100
    seed: NonNegativeInt = 0  # training problems also depend on the recipe's seed, other splits do not
    deadline: PositiveFloat = 5.0  # seconds to grade one answer

    @model_validator(mode="after")
    def _possible(self) -> GymConfig:
        if not re.fullmatch(r"reasoning_gym:\w+", self.name):
            raise ValueError(f"name: {self.name!r} names no task of the package; write reasoning_gym:NAME")
        if len(set(self.levels)) < len(self.levels):
            raise ValueError(f"levels: {self.levels}: a level is named twice; remove one")
        return self


class GymTask:
    """A `BatchTask`; see `hone.tasks.base`."""

    system = SYSTEM

    def __init__(self, config: GymConfig, seed: int = 0) -> None:
        self.config, self.seed = config, seed
        self.name = config.name
        self._own = config.name.partition(":")[2]
        self._problems: dict[Split, list[Problem]] = {}

    def problems(self, split: Split) -> Sequence[Problem]:
        """Made once. Raises UserError without the package, and for unknown names, levels and settings."""
        if split not in self._problems:
            levels = self.config.levels or (None,)
            shares = even_shares(getattr(self.config, split), len(levels))
            made = self._made(split, shares)
            rows = [[self._problem(e, level) for e in entries] for level, entries in zip(levels, made, strict=True)]
            self._problems[split] = alternating(rows)
        return self._problems[split]

    def grade(self, problem: Problem, text: str) -> Grade:
        return self.grade_all([(problem, text)])[0]

    def grade_all(self, items: Sequence[tuple[Problem, str]]) -> list[Grade]:
        """`correct` for full marks from the package's scorer, `malformed` if it cannot read the answer."""
        answers = [parse(text).answer for _, text in items]
        gradable = [i for i, answer in enumerate(answers) if answer and len(answer) <= MAX_ANSWER]
        rows = [items[i][0].extra for i in gradable]
        calls = [(self._own, row["settings"], row["entry"], answers[i]) for i, row in zip(gradable, rows, strict=True)]
        scores = dict(zip(gradable, self._workers.map(calls), strict=True)) if calls else {}
        return [_grade(answer, scores.get(i)) for i, answer in enumerate(answers)]

    @cached_property
    def _workers(self) -> Workers:
        return Workers("hone.tasks.gym.worker:score", count=WORKERS, deadline=self.config.deadline)

    def _made(self, split: Split, counts: Sequence[int]) -> list[list[dict[str, Any]]]:
        """The package's entries of each level, from a process with a fixed hash seed."""
        source = f"{self.config.seed}/{self.seed}" if split == "train" else f"{self.config.seed}"
        request = {
            "name": self._own,
            "config": self.config.config,
            "levels": self.config.levels,
            "split": split,
            "counts": counts,
            "seed": f"{source}/{split}",
        }
        seconds = START_SECONDS + SECONDS_PER_PROBLEM * sum(counts)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "hone.tasks.gym.package"],
                input=json.dumps(request).encode(),
                env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                capture_output=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired as error:
            message = f"{sum(counts)} problems of the {split} split took longer than {seconds:.0f} s; ask for fewer"
            raise UserError(f"task: {self.name}: {message}, or of lower levels") from error
        if done.returncode:
            raise UserError(f"task: {self.name}: the package failed:\n{done.stderr.decode(errors='replace')[-2000:]}")
        reply = pickle.loads(done.stdout)
        if isinstance(reply, str):
            raise UserError(f"task: {self.name}: {reply}")
        result: list[list[dict[str, Any]]] = reply
        return result

    def _problem(self, made: dict[str, Any], level: int | None) -> Problem:
        digest = hashlib.sha256(canonical_form(made["question"]).encode()).hexdigest()[:12]
        entry = {key: made[key] for key in ("question", "answer", "metadata")}
        return Problem(
            id=f"{self._own}-{digest}",
            task=self.name,
            messages=({"role": "user", "content": made["question"]},),
            answer=made["gold"],
            level="" if level is None else str(level),
            extra={"settings": made["settings"], "entry": entry},
        )


def _grade(answer: str | None, score: float | Failure | None) -> Grade:
    """The grade from the worker's result; None: no answer, too long, or not readable by the scorer."""
    shown = answer[:200] if answer else None
    if isinstance(score, Failure):
        return Grade(score.kind, shown, note=score.message)
    if score is None:
        return Grade("malformed", shown)
    return Grade("correct" if score >= FULL_MARKS else "wrong", shown, score=score)
