"""What each process of tests/test_shards.py runs: python -m tests.shard_worker CASE.json FOLDER

Trains in one layout and saves, then in each of `after` restores, trains one more step, and puts what came out in
FOLDER/<i>.pt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from hone.base.parallel import ParallelConfig
from hone.base.world import World
from hone.learn import checkpoint
from hone.learn.batches import prepare
from hone.learn.pack import Packer
from hone.learn.policy import Policy, Trainable
from hone.model.parallel import cut_as, whole_tensor
from hone.recipe.sections.algo import AlgoConfig
from hone.recipe.sections.model import LoraConfig, ModelConfig
from hone.recipe.sections.optim import OptimConfig
from tests.learn.policies import REWARDS, SAMPLING, make_groups


def load(case: dict[str, Any], parallel: dict[str, int]) -> Policy:
    world = World.from_env(ParallelConfig(**parallel))
    lora = LoraConfig(rank=4, targets=case["lora"]) if case.get("lora") else None
    model = ModelConfig(path=case["model"], dtype=case.get("dtype", "float32"))
    return Policy.load(model, OptimConfig(lr=1e-3, eps=1e-6), 100, Trainable(lora), world=world)


def step(policy: Policy, seed: int) -> None:
    packer = Packer(64, parts=policy.world.data)
    batch = prepare(make_groups(REWARDS, seed=seed), policy, None, AlgoConfig(), SAMPLING, packer)
    policy.update(batch.minibatches, AlgoConfig(), SAMPLING.temperature)


def everything(policy: Policy) -> dict[str, torch.Tensor]:
    """Weights, masters and moments in one piece, by name; the same on every process."""
    found = {name: whole_tensor(p).clone() for name, p in policy.model.named_parameters() if p.requires_grad}
    for name, master, p in zip(policy.optimizer.names, policy.optimizer.masters, policy.parameters, strict=True):
        for key, value in {"master": master, **policy.optimizer.state[master]}.items():
            found[f"{name}.{key}"] = whole_tensor(cut_as(p, value)).clone() if value.ndim else value.clone()
    return found


def main(case_file: str, out: str) -> None:
    torch.set_num_threads(1)
    case, folder = json.loads(Path(case_file).read_text()), Path(out)
    first = load(case, case["before"])
    for seed in range(2):
        step(first, seed)
    saved = checkpoint.save(folder / "checkpoints", 2, first, keep=1)
    results = [everything(first)]
    for parallel in case["after"]:
        again = load(case, parallel)
        again.restore(saved, checkpoint.read_state(saved)["policy"])
        results.append(everything(again))
    if first.world.main:
        for i, found in enumerate(results):
            torch.save(found, folder / f"{i}.pt")
    first.world.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
