"""Which problems come when."""

from __future__ import annotations

from collections.abc import Sequence

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

    def draw(self, step: int, count: int, round: int = 0) -> list[Problem]:
        """The `count` problems of step `step` (counted from 0).

        `round` above 0 asks for others, to replace some of the step's: drawn at random, at most as many as there are.
        """
        size = len(self.problems)
        if round:
            rng = np.random.default_rng((self.seed, step, round))
            return [self.problems[i] for i in rng.choice(size, size=min(count, size), replace=False)]
        places = range(step * count, (step + 1) * count)
        orders = {epoch: self._order(epoch) for epoch in {place // size for place in places}}
        return [self.problems[orders[place // size][place % size]] for place in places]

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.problems))
