"""Conversations that wait for their next prompt: their keys, values and states, so that they are not computed again.

    kept.add(work, cache.sequence(row, tokens))        # the turn has ended
    past = kept.take(work)                             # its next prompt is read behind it; None: it was evicted

Memory is bounded by the engine's budget: the conversation that has waited longest is evicted first. What is evicted is
read again, with the same result.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hone.rollout.native.cache import Prompt
from hone.rollout.native.memory import Budget
from hone.rollout.native.requests import Work


@dataclass(slots=True)
class Kept:
    budget: Budget
    evicted: int = 0  # so far
    _waiting: dict[Work, Prompt] = field(default_factory=dict)  # the one that has waited longest is first

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def positions(self) -> int:
        """The key-value positions that all of them need."""
        return sum(map(self.positions_of, self._waiting))

    def positions_of(self, work: Work | None) -> int:
        """The key-value positions that this one needs; 0 if it is not kept."""
        past = None if work is None else self._waiting.get(work)
        return 0 if past is None else self.budget.positions(1, past.length, 0, 0)

    def add(self, work: Work, past: Prompt) -> None:
        self._waiting[work] = past

    def take(self, work: Work | None) -> Prompt | None:
        """Remove and return it; None if it is not kept."""
        return None if work is None else self._waiting.pop(work, None)

    def length(self, work: Work | None) -> int:
        """Tokens of it that were read; 0 if it is not kept."""
        past = None if work is None else self._waiting.get(work)
        return 0 if past is None else past.length

    def evict(self) -> None:
        """Drop the one that has waited longest."""
        del self._waiting[next(iter(self._waiting))]
        self.evicted += 1

    def clear(self) -> None:
        self._waiting.clear()
