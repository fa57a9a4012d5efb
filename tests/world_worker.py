"""What each process of tests/test_world.py runs: python -m tests.world_worker CASES.json OUT"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from hone.base.parallel import ParallelConfig
from hone.base.world import World
from hone.learn.batches import prepare
from hone.learn.pack import Packer
from hone.learn.policy import Policy, Trainable
from hone.model.compiled import decoder_layers
from hone.recipe.sections.algo import AlgoConfig
from hone.recipe.sections.model import LoraConfig, ModelConfig
from hone.recipe.sections.optim import LayersConfig, OptimConfig
from tests.learn.policies import SAMPLING, make_groups

STEPS = 5


def five_steps(case: dict[str, Any]) -> dict[str, Any]:
    """Losses, gradient norms and weights after `STEPS` updates on fixed groups; the same on every process."""
    world = World.from_env(ParallelConfig(**case.get("parallel", {})))
    if case.get("mean"):
        averaging(world)
    algo = AlgoConfig(**{"kl": {"coef": 0.05}, "entropy_coef": 0.01, **case.get("algo", {})})
    lora = LoraConfig(rank=4, targets=case["lora"]) if case.get("lora") else None
    policy = Policy.load(
        ModelConfig(path=case["model"], **case.get("settings", {})),
        OptimConfig(lr=1e-3, grad_clip=0.5, eps=1e-6),
        100,
        Trainable(lora, value=algo.value if algo.advantage == "gae" else None),
        reference=True,
        world=world,
    )
    if case.get("settings", {}).get("compile"):
        assert decoder_layers(policy.model), "nothing would be compiled"
    if case.get("skips") and world.data_rank == 1:
        skipping(policy)
    packer = Packer(case.get("budget", 64), parts=world.data)
    found: dict[str, Any] = {"loss": [], "grad_norm": [], "entropy": [], "kl": [], "logprobs": [], "grad_norms": []}
    for step in range(STEPS):
        if step == case.get("reset"):
            narrower = lora and lora.model_copy(update={"rank": 3})
            policy.merge_and_reset(step, policy.optimizer.optim, LayersConfig(), narrower, {})
        groups = make_groups(case["rewards"], seed=step)
        batch = prepare(groups, policy, policy.reference, algo, SAMPLING, packer)
        stats = policy.update(batch.minibatches, algo, SAMPLING.temperature)
        for name in ("loss", "grad_norm"):
            found[name].append(getattr(stats, name))
        for name in ("entropy", "kl"):
            found[name].append(stats.metrics.get(name, 0.0))
        for name in ("logprobs", "grad_norms"):
            values = getattr(stats, name)
            found[name].append([torch.as_tensor(values[i]) for i in sorted(values)])
    weights = {n: p.detach().clone() for n, p in policy.gathered_model().named_parameters()}
    whole = policy.main_view()  # without a copy in the other processes
    assert (whole is not None) == world.main
    if whole is not None:
        assert all(torch.equal(p, weights[n]) for n, p in whole.model.named_parameters())
    found["weights"] = weights
    return found


def averaging(world: World) -> None:
    """The fault that frameworks have by default: gradients averaged over processes."""
    fsdp = FSDPModule.set_gradient_divide_factor
    FSDPModule.set_gradient_divide_factor = lambda self, _: fsdp(self, world.shard)  # type: ignore[method-assign]


def skipping(policy: Policy) -> None:
    """A part of the model that this process does not use, as an expert whom no token of its samples asks."""
    for layer in policy.model.model.layers[1:]:
        layer.mlp.forward = lambda x: x


def main(cases: str, out: str) -> None:
    torch.set_num_threads(1)
    for i, case in enumerate(json.loads(Path(cases).read_text())):
        world = World.from_env(ParallelConfig(**case.get("parallel", {})))
        found = five_steps(case)
        same = world.gather([found["loss"] + found["grad_norm"]])
        assert all(x == same[0] for x in same), "processes disagree"
        if world.main:
            torch.save(found, Path(out) / f"{i}.pt")
    world.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
