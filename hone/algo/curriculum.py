"""Which problems come when."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

import numpy as np

from hone.types import Problem


class Course:
    """Every problem once per epoch, each epoch in an order of its own.

    The draw depends on (seed, step) alone, so a resumed run continues without a cursor to lose.
    """

    def __init__(self, problems: Sequence[Problem], seed: int) -> None:
        if not problems:
            raise ValueError("there are no training problems")
        self.problems = problems
        self.seed = seed

    def draw(self, step: int, count: int) -> list[Problem]:
        """The `count` problems of step `step` (counted from 0)."""
        size = len(self.problems)
        places = range(step * count, (step + 1) * count)
        orders = {epoch: self._order(epoch) for epoch in {place // size for place in places}}
        return [self.problems[orders[place // size][place % size]] for place in places]

    def draw_others(self, step: int, round: int, count: int, without: Collection[str]) -> list[Problem]:
        """Up to `count` problems at random whose ids are not among `without`, to replace some of the step's."""
        order = np.random.default_rng((self.seed, step, round)).permutation(len(self.problems))
        others = (self.problems[i] for i in order if self.problems[i].id not in without)
        return list(islice(others, count))

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.problems))
