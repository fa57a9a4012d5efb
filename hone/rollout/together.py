"""One engine for all processes of a run: who samples what, and everybody has every answer.

In this process (`native`) each samples its share of the prompts, from the random numbers that they have in the whole
batch. A server belongs to the first process, which asks it for everything: it divides work itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hone.dist.world import World
from hone.rollout.base import Engine
from hone.rollout.config import SamplingConfig
from hone.rollout.identity import Verified
from hone.types import IntArray, Turn

if TYPE_CHECKING:
    from hone.train.policy import Policy


class Together:
    """Implements `hone.rollout.base.Engine`. `engine`: None in a process that has none of its own."""

    def __init__(self, engine: Verified | None, world: World, divided: bool) -> None:
        self._engine, self._world, self._divided = engine, world, divided

    def generate(
        self,
        prompts: Sequence[IntArray],
        sampling: SamplingConfig,
        *,
        samples: int,
        seed: int,
        progress: Callable[[int, int], None] | None = None,
        first: int = 0,
    ) -> list[list[Turn]]:
        """See `hone.rollout.base.Engine`; every process asks the same and gets the same."""

        def sample(engine: Engine, some: Sequence[IntArray], at: int) -> list[list[Turn]]:
            return engine.generate(some, sampling, samples=samples, seed=seed, progress=progress, first=at)

        if not self._divided:
            return self._world.on_main(lambda: sample(self._own(), prompts, first), "the answers of the server")
        own = self._world.share(range(len(prompts)))
        turns = sample(self._own(), [prompts[i] for i in own], first + own[0]) if own else []
        return self._world.gather(turns, "the answers of the others")

    def sync(self, policy: Policy, version: int) -> dict[str, float]:
        """The first process's metrics of the comparison. Raises PolicyMismatch, on every process or on one."""
        alone = policy.alone()
        if self._divided:
            found = self._own().sync(alone, version)
            return self._world.on_main(lambda: found, "the check of the weights")
        return self._world.on_main(lambda: self._own().sync(alone, version), "new weights in the server")

    def close(self) -> None:
        """Ends what the engine started."""
        if self._engine is not None:
            self._engine.close()

    def _own(self) -> Verified:
        assert self._engine is not None, "the process that is asked has an engine"
        return self._engine
