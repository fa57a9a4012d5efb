"""One engine for all processes of a run: it divides the prompts, and every process gets every answer.

With the native engine each process samples its share of the prompts, with the random numbers that they have in the
whole batch. A server belongs to the first process, which sends it all prompts: it divides the work itself. The others
wait for that process without a bound, since its own waits are bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from hone.base.settings import UserError
from hone.base.world import World
from hone.recipe.sections.rollout import SamplingConfig
from hone.rollout.engine import Engine, Event
from hone.rollout.identity import Verified
from hone.types import IntArray, Turn

if TYPE_CHECKING:
    from hone.learn.policy import Policy

T = TypeVar("T")


@runtime_checkable
class Divides(Protocol):
    """An engine for several processes. `divided`: each has its own engine; else only the first has one."""

    divided: bool

    def on_each(self, call: Callable[[Engine], T], what: str) -> list[T]:
        """The results of `call` with the engine of each process, by rank; a UserError of one is raised on all."""
        ...


class DistributedEngine:
    """Implements `hone.rollout.engine.Engine`.

    `make`: makes this process's engine, given its `Event`. `event`: records events of the run, in the first process.
    """

    def __init__(self, make: Callable[[Event], Verified], world: World, divided: bool, event: Event) -> None:
        self._world, self.divided, self._event = world, divided, event
        self._unreported: list[tuple[str, str]] = []  # events not yet sent to the first process
        tell = event if world.main else lambda kind, message: self._unreported.append((kind, message))
        self._engine = make(tell) if divided or world.main else None

    def generate(
        self,
        prompts: Sequence[IntArray],
        sampling: SamplingConfig,
        *,
        samples: int,
        seed: int,
        progress: Callable[[int, int], None] | None = None,
        stream_ids: Sequence[int] | None = None,
    ) -> list[list[Turn]]:
        """See `hone.rollout.engine.Engine`. Every process calls it with the same arguments and gets the same turns."""

        numbers = range(len(prompts)) if stream_ids is None else stream_ids

        def sample(places: Sequence[int]) -> list[list[Turn]]:
            some, own = [prompts[i] for i in places], [numbers[i] for i in places]
            return self._own().generate(some, sampling, samples=samples, seed=seed, progress=progress, stream_ids=own)

        every = range(len(prompts))
        if not self.divided:
            return self._world.on_main(lambda: sample(every), "the answers of the server", patient=True)
        mine = self._world.share(every)
        parts = self._each(lambda: sample(mine) if mine else [], "the answers of the others")
        return [turns for part in parts for turns in part]

    def on_each(self, call: Callable[[Engine], T], what: str) -> list[T]:
        """See `Divides`."""
        return self._each(lambda: call(self._own()), what)

    def sync(self, policy: Policy, version: int) -> dict[str, float]:
        """Returns the first process's metrics of the comparison. Raises PolicyMismatch on every process."""
        if self.divided:
            own = policy.local_view()
            return self._each(lambda: self._own().sync(own, version), "the check of the weights")[0]
        whole = policy.main_view()

        def sync() -> dict[str, float]:
            assert whole is not None, "the first process has the whole model"
            return self._own().sync(whole, version)

        return self._world.on_main(sync, "new weights in the server", patient=True)

    @property
    def context(self) -> int | None:
        if self.divided:
            return self._own().context
        return self._world.on_main(lambda: self._own().context, "the context of the server")

    def close(self) -> None:
        """Close the engine of this process."""
        if self._engine is not None:
            self._engine.close()

    def _own(self) -> Verified:
        assert self._engine is not None, "this process has no engine"
        return self._engine

    def _each(self, call: Callable[[], T], what: str) -> list[T]:
        """The results of the calls on all processes, by rank; a UserError of one is raised on all."""
        results: list[T] = []
        failed: UserError | None = None
        try:
            results = [call()]
        except UserError as error:  # sent to all, so that no process waits for one that has ended
            failed = error
        events, self._unreported[:] = list(self._unreported), []
        parts = self._world.gather([(results, failed, events)], what)
        self._report([events for _, _, events in parts])
        for _, why, _ in parts:
            if why is not None:
                raise why
        return [result for results, _, _ in parts for result in results]

    def _report(self, by_rank: Sequence[Sequence[tuple[str, str]]]) -> None:
        """Report the processes' events, given by rank; equal ones are reported once, with their ranks."""
        ranks: dict[tuple[str, str], list[int]] = {}
        for rank, events in enumerate(by_rank):
            for event in events:
                ranks.setdefault(event, []).append(rank)
        for (kind, message), who in ranks.items():
            self._event(kind, f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {message}")
