"""Settings of how a run is distributed over processes."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from hone.base.settings import Section


class ParallelConfig(Section):
    """There are `replicate` x `shard` x `tensor` processes; with accelerators each has its own.

    `replicate`: number of whole copies of the model, each with its own share of the batch. `shard`: number of parts of
    weights, gradients and moments of a copy, gathered layer by layer (FSDP2, `fully_shard`), each with its own share of
    the batch too. `tensor`: number of parts of every matrix product, which work on the same samples.
    """

    replicate: PositiveInt = 1
    shard: PositiveInt = 1
    tensor: PositiveInt = 1
    timeout: PositiveFloat = 1800.0  # seconds that a process waits for the others at most

    @property
    def processes(self) -> int:
        return self.replicate * self.shard * self.tensor
