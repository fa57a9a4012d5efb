"""What each process of tests/test_peers.py runs: python -m tests.peers_worker OUT"""

from __future__ import annotations

import datetime
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from hone.base.http import ServerRefused
from hone.base.parallel import ParallelConfig
from hone.base.settings import UserError
from hone.base.world import World
from hone.recipe.sections.rollout import SamplingConfig
from hone.rollout.together import DistributedEngine

#: Seconds that a process waits for another, and that the first process is at work.
TIMEOUT, WORK = 3.0, 8.0


def impatient(world: World) -> World:
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=TIMEOUT))
    world.barrier("both are here")
    return replace(world, control=group, timeout=TIMEOUT)


def works() -> str:
    time.sleep(WORK)
    return "the answer"


def refuses() -> None:
    raise ServerRefused(503, "no memory", "a prompt")


class Told:
    """An engine that has something to say, and fails at version 2 in the second process."""

    def __init__(self, event: Any, rank: int) -> None:
        self.event, self.rank = event, rank
        event("born", "the same of all")

    def generate(self, prompts: Any, *_: Any, stream_ids: Any, **__: Any) -> list[list[Any]]:
        self.event("sampled", f"from {stream_ids[0]} on")
        return [[f"{self.rank}:{int(prompt[0])}"] for prompt in prompts]

    def sync(self, policy: Any, version: int) -> dict[str, float]:
        if version == 2 and self.rank == 1:
            self.event("policy_mismatch", "stale")
            raise UserError("stale weights in process 1")
        return {"rank": float(self.rank)}


class Policy:
    def local_view(self) -> Policy:
        return self

    def main_view(self) -> Policy:
        return self


def main(out: str) -> None:
    world = World.from_env(ParallelConfig(replicate=2))
    near = impatient(world)
    assert near.on_main(works, "a long answer", patient=True) == "the answer"

    with pytest.raises(ServerRefused, match="a prompt: the server answered 503: no memory") as refused:
        world.on_main(refuses, patient=True)
    assert refused.value.status == 503

    said: list[tuple[str, str]] = []
    engine = DistributedEngine(
        lambda event: Told(event, world.rank),
        world,
        True,
        lambda *event: said.append(event),  # type: ignore[arg-type]
    )
    prompts = [np.array([i]) for i in range(5)]
    found = engine.generate(prompts, SamplingConfig(), samples=1, seed=0)
    assert found == [["0:0"], ["0:1"], ["1:2"], ["1:3"], ["1:4"]]
    assert engine.sync(Policy(), 1) == {"rank": 0.0}  # type: ignore[arg-type]
    with pytest.raises(UserError, match="stale weights in process 1"):
        engine.sync(Policy(), 2)  # type: ignore[arg-type]
    if world.main:
        Path(out, "events").write_text("\n".join(f"{kind}|{message}" for kind, message in said))
    world.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
