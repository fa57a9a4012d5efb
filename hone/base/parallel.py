"""How a run is spread over processes."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from hone.base.settings import Section


class ParallelConfig(Section):
    """Processes, `replicate` x `shard` x `tensor` of them; each has a device of its own where there are devices.

    `replicate`: whole copies of the model, each on its own share of the batch. `shard`: weights, gradients and moments
    of a copy cut into so many parts, gathered layer by layer (FSDP2, `fully_shard`); each part works on its own share
    of the batch too. `tensor`: every matrix product cut into so many parts, which work on the same samples.
    """

    replicate: PositiveInt = 1
    shard: PositiveInt = 1
    tensor: PositiveInt = 1
    timeout: PositiveFloat = 1800.0  # seconds that a process waits for the others, at most

    @property
    def processes(self) -> int:
        return self.replicate * self.shard * self.tensor
