"""Curricula: which problems each step trains on.

    uniform      every problem once per epoch, each epoch in an order of its own
    sequential   one level after the other, easiest first
    mixture      levels by fixed weights
    adaptive     levels by how much there is to learn: p (1 - p) of the observed pass rate p, the variance of a right
                 or wrong answer (Foster & Foerster, arXiv:2502.12272)

Within a level, too, every problem is drawn once per epoch. What is drawn depends on the seed, the step and the state:
the position in each level, and its pass rate. The state is in every checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from hone.base import streams
from hone.base.settings import Section, UserError
from hone.tasks.rows.problems import levels_of
from hone.types import NOT_GRADED, Group, Problem

EVERYTHING = ""  # the pool of uniform draws; the others are levels


class CurriculumConfig(Section):
    """Which levels of the task the problems of a step come from: see `hone.tasks.curriculum`."""

    kind: Literal["uniform", "sequential", "mixture", "adaptive"] = "uniform"
    steps_per_level: PositiveInt | None = None  # sequential; null: until every problem of the level has been drawn once
    weights: dict[str, NonNegativeFloat] = {}  # mixture: level -> share; levels that are not named are not drawn
    floor: float = Field(default=0.1, gt=0.0, le=1.0)  # adaptive: this share is dealt evenly to all levels
    memory: float = Field(default=0.9, ge=0.0, lt=1.0)  # adaptive: weight of the earlier steps in a level's pass rate

    @model_validator(mode="after")
    def _weighted(self) -> CurriculumConfig:
        if self.kind == "mixture" and not any(self.weights.values()):
            raise ValueError("weights: a mixture needs some, as in {3: 1, 5: 2}: twice as many problems of level 5")
        return self


class Curriculum:
    """The problems of a run, in the order of its curriculum. Raises UserError for levels that the task does not
    have."""

    def __init__(self, problems: Sequence[Problem], seed: int, config: CurriculumConfig | None = None) -> None:
        if not problems:
            raise ValueError("there are no training problems")
        self.problems = problems
        self.seed = seed
        names, self._level_of = levels_of(problems)  # [problems]: index of each problem's level among the names
        places = {level: np.flatnonzero(self._level_of == n) for n, level in enumerate(names)}
        self._level_names = names
        self._levels = {level: places[level] for level in sorted(names, key=natural) if len(places[level])}
        self._drawn: dict[str, int] = {}  # problems taken from a pool so far
        self._steps: dict[str, int] = {}  # steps of a sequential curriculum on a level so far
        self._pass_rates: dict[str, float] = {}  # moving averages
        # step -> the two above, from before its draw
        self._before: dict[int, tuple[dict[str, int], dict[str, int]]] = {}
        self._rounds: dict[int, list[list[str]]] = {}  # step -> ids of the problems drawn for it, round by round
        self.shares: dict[str, float] = {}  # level -> share in the last step drawn; empty for uniform
        self.configure(config or CurriculumConfig())

    def configure(self, config: CurriculumConfig) -> None:
        """Switch to another curriculum; positions and pass rates are kept."""
        self.check(config)
        self.config = config

    def check(self, config: CurriculumConfig) -> None:
        """Raises UserError for a curriculum that does not suit these problems."""
        if config.kind != "uniform" and len(self._levels) == 1:
            raise UserError(f"curriculum.kind {config.kind}: the training problems have only one level; use uniform")
        unknown = sorted(set(config.weights) - self._levels.keys())
        if config.kind == "mixture" and unknown:
            raise UserError(
                f"curriculum.weights: no training problem has level {', '.join(unknown)}; levels: "
                f"{', '.join(self._levels)}"
            )

    # --- drawing ------------------------------------------------------------------------------

    def draw(self, step: int, count: int) -> list[Problem]:
        """The `count` problems of step `step`. Call it once per step."""
        self._before = {s: kept for s, kept in self._before.items() if s >= step - 1}
        self._before[step] = dict(self._drawn), dict(self._steps)
        problems = self._draw(step, count)
        self._rounds[step] = [[problem.id for problem in problems]]
        return problems

    def _draw(self, step: int, count: int) -> list[Problem]:
        if self.config.kind == "uniform":
            self.shares = {}
            return [self.problems[i] for i in self._next(EVERYTHING, len(self.problems), count)]
        self.shares = self._shares()
        if self.config.kind == "sequential":
            (level,) = self.shares
            self._steps[level] = self._steps.get(level, 0) + 1
        counts = deal(count, self.shares, streams.generator("shares", seed=self.seed, step=step).random())
        return [
            self.problems[int(self._levels[level][i])]
            for level, n in counts.items()
            for i in self._next(level, len(self._levels[level]), n)
        ]

    def draw_others(self, step: int, round: int, count: int, without: Collection[str]) -> list[Problem]:
        """Up to `count` random problems whose ids are not in `without`, to replace some of the step's.

        They come from the levels of the step, in the same shares.
        """
        rng = streams.generator("refill", seed=self.seed, step=step, refill=round)
        order = rng.permutation(len(self.problems))
        if self.shares:
            shares = [
                self.shares.get(name, 0.0) / max(1, len(self._levels.get(name, ()))) for name in self._level_names
            ]
            weights = np.array(shares)[self._level_of]
            # Efraimidis & Spirakis, Weighted random sampling with a reservoir, 2006: sort by -log(u) / weight.
            keys = rng.exponential(size=len(weights)) / np.maximum(weights, 1e-300)
            order = np.argsort(keys)
            order = order[weights[order] > 0]
        candidates = (self.problems[int(i)] for i in order)
        others = list(islice((problem for problem in candidates if problem.id not in without), count))
        self._rounds.setdefault(step, []).append([problem.id for problem in others])
        return others

    def taken(self, step: int) -> list[list[str]]:
        """Ids of the problems drawn for a step, round by round. Call it once per step: they are then forgotten."""
        return self._rounds.pop(step)

    def _shares(self) -> dict[str, float]:
        """Level -> share of the problems of the next step, for levels with a share above 0."""
        levels = list(self._levels)
        if self.config.kind == "sequential":
            return {next((level for level in levels[:-1] if not self._finished(level)), levels[-1]): 1.0}
        if self.config.kind == "mixture":
            weights, floor = {level: self.config.weights.get(level, 0.0) for level in levels}, 0.0
        else:
            weights = {level: learnable(self._pass_rates.get(level, 0.5)) for level in levels}
            floor = self.config.floor
        total = sum(weights.values())
        if not total:  # every level is solved, or hopeless
            return {level: 1.0 / len(levels) for level in levels}
        shares = {level: floor / len(levels) + (1.0 - floor) * w / total for level, w in weights.items()}
        return {level: share for level, share in shares.items() if share}

    def _finished(self, level: str) -> bool:
        """Whether a sequential curriculum has finished a level."""
        if self.config.steps_per_level is not None:
            return self._steps.get(level, 0) >= self.config.steps_per_level
        return self._drawn.get(level, 0) >= len(self._levels[level])

    def _next(self, pool: str, size: int, count: int) -> list[int]:
        """Indices of the next `count` problems in a pool of `size`."""
        start = self._drawn.get(pool, 0)
        places = range(start, start + count)
        orders = {epoch: self._order(pool, epoch, size) for epoch in {place // size for place in places}}
        self._drawn[pool] = start + count
        return [int(orders[place // size][place % size]) for place in places]

    def _order(self, pool: str, epoch: int, size: int) -> np.ndarray:
        if pool == EVERYTHING:
            return streams.generator("problems", seed=self.seed, epoch=epoch).permutation(size)
        word = streams.level_word(pool)
        return streams.generator("level", seed=self.seed, epoch=epoch, level=word).permutation(size)

    # --- observing ----------------------------------------------------------------------------

    def observe(self, groups: Sequence[Group]) -> None:
        """Update the pass rates of a step's levels; samples whose verifier failed do not count."""
        seen = []
        for group in groups:
            graded = [r.verdict == "correct" for r in group.rewards if r.verdict not in NOT_GRADED]
            seen.append((group.problem.level, sum(graded), len(graded)))
        self.count(seen)

    def count(self, seen: Iterable[tuple[str, int, int]]) -> None:
        """The same from (level, right answers, answers) of each group."""
        totals: dict[str, tuple[int, int]] = {}
        for level, right, answers in seen:
            before = totals.get(level, (0, 0))
            totals[level] = before[0] + right, before[1] + answers
        for level, (right, answers) in totals.items():
            if answers:
                rate, memory = right / answers, self.config.memory
                self._pass_rates[level] = memory * self._pass_rates.get(level, rate) + (1.0 - memory) * rate

    def metrics(self) -> dict[str, float]:
        """Shares of the levels in the last step drawn; empty for a uniform curriculum."""
        return {f"curriculum/{level}": share for level, share in self.shares.items()}

    # --- state --------------------------------------------------------------------------------

    def state(self, step: int | None = None) -> dict[str, Any]:
        """For the checkpoint: plain numbers, exact in JSON. Problems already drawn for `step` do not count: a run that
        begins at `step` draws them again."""
        drawn, steps = (
            self._before.get(step, (self._drawn, self._steps)) if step is not None else (self._drawn, self._steps)
        )
        return {"drawn": dict(drawn), "steps": dict(steps), "pass_rates": dict(self._pass_rates)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._drawn, self._steps = dict(state["drawn"]), dict(state["steps"])
        self._pass_rates = dict(state["pass_rates"])
        self._before, self._rounds = {}, {}


def learnable(pass_rate: float) -> float:
    """p (1 - p): at most 1/4, where right and wrong are even; 0 for a level that is solved or hopeless."""
    return pass_rate * (1.0 - pass_rate)


def deal(count: int, shares: Mapping[str, float], u: float) -> dict[str, int]:
    """Divide `count` places over levels: each level gets its share rounded up or down, and on average exactly its
    share. `u` is uniform in [0, 1).

    Systematic sampling: level k gets the whole numbers in its interval of a line of length `count`, shifted by u.
    """
    ends = np.cumsum([0.0, *shares.values()])
    marks = np.floor(ends / ends[-1] * count + u).astype(int)
    marks[-1] = marks[0] + count  # the line is exactly that long, however its parts round
    return dict(zip(shares, np.diff(marks).tolist()))


def natural(level: str) -> tuple[tuple[int, str], ...]:
    """Sort key: `2` before `10`, text by its letters."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", level) if part)
