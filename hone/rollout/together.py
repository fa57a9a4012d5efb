"""One engine for all processes of a run: who samples what, and everybody has every answer.

In this process (`native`) each samples its share of the prompts, from the random numbers that they have in the whole
batch. A server belongs to the first process, which asks it for everything: it divides work itself. The others wait for
as long as that one is at work, whose waits have bounds of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from hone.base.settings import UserError
from hone.base.world import World
from hone.recipe.sections.rollout import SamplingConfig
from hone.rollout.engine import Event
from hone.rollout.identity import Verified
from hone.types import IntArray, Turn

if TYPE_CHECKING:
    from hone.learn.policy import Policy

T = TypeVar("T")


class DistributedEngine:
    """Implements `hone.rollout.engine.Engine`.

    `make`: this process's engine, from whom it tells its events. `event`: tells the run, in the first process.
    """

    def __init__(self, make: Callable[[Event], Verified], world: World, divided: bool, event: Event) -> None:
        self._world, self._divided, self._event = world, divided, event
        self._said: list[tuple[str, str]] = []  # events of this process that the first one has not heard of
        tell = event if world.main else lambda kind, message: self._said.append((kind, message))
        self._engine = make(tell) if divided or world.main else None

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
        """See `hone.rollout.engine.Engine`; every process asks the same and gets the same."""

        def sample(some: Sequence[IntArray], at: int) -> list[list[Turn]]:
            own = self._own()
            return own.generate(some, sampling, samples=samples, seed=seed, progress=progress, first=at)

        if not self._divided:
            return self._world.on_main(lambda: sample(prompts, first), "the answers of the server", patient=True)
        own = self._world.share(range(len(prompts)))
        mine = [prompts[i] for i in own]
        parts = self._each(lambda: sample(mine, first + own[0]) if own else [], "the answers of the others")
        return [turns for part in parts for turns in part]

    def sync(self, policy: Policy, version: int) -> dict[str, float]:
        """The first process's metrics of the comparison. Raises PolicyMismatch, on every process."""
        alone = policy.local_view()
        if self._divided:
            return self._each(lambda: self._own().sync(alone, version), "the check of the weights")[0]
        return self._world.on_main(lambda: self._own().sync(alone, version), "new weights in the server", patient=True)

    def close(self) -> None:
        """Ends what the engine started."""
        if self._engine is not None:
            self._engine.close()

    def _own(self) -> Verified:
        assert self._engine is not None, "the process that is asked has an engine"
        return self._engine

    def _each(self, call: Callable[[], T], what: str) -> list[T]:
        """What the calls of all processes return, by rank; a UserError of one is raised on all."""
        results: list[T] = []
        failed: UserError | None = None
        try:
            results = [call()]
        except UserError as error:  # known to all, so that nobody waits for a process that has ended
            failed = error
        said, self._said[:] = list(self._said), []
        parts = self._world.gather([(results, failed, said)], what)
        self._hear([said for _, _, said in parts])
        for _, why, _ in parts:
            if why is not None:
                raise why
        return [result for results, _, _ in parts for result in results]

    def _hear(self, said: Sequence[Sequence[tuple[str, str]]]) -> None:
        """Events of other processes, by rank; the same of several is one."""
        ranks: dict[tuple[str, str], list[int]] = {}
        for rank, events in enumerate(said):
            for event in events:
                ranks.setdefault(event, []).append(rank)
        for (kind, message), who in ranks.items():
            self._event(kind, f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {message}")
