"""World: which of the processes of a run this is, and what they share. One process is the trivial case.

    world = World.from_env(recipe.parallel)     # reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    mine = world.share(problems)                # this process's part; `gather` puts the parts together again

Every process runs the same loop on the same seed. Work is divided where it is slow (sampling, rewards, forward and
backward passes) and put together at once, so that everything in between, and everything that is written down, is that
of one process. Only the first process writes files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """`rank` of `size` processes. Ranks of one tensor-parallel group follow each other."""

    rank: int = 0
    size: int = 1
    tensor: int = 1  # processes that work on the same samples in the update

    @property
    def main(self) -> bool:
        """Whether this process writes the run folder and speaks to the user."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """This process's part of `items`: a run of neighbours, parts differ by one at most."""
        cuts = [len(items) * r // self.size for r in (self.rank, self.rank + 1)]
        return list(items[cuts[0] : cuts[1]])
