"""A policy of a few thousand weights, groups of random tokens, and the gradient of their update."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from hone.learn.batches import Batch, minibatches, per_sample, prepare, updates_of
from hone.learn.forward import frozen_logprobs
from hone.learn.pack import Packer
from hone.learn.policy import Policy, Trainable
from hone.learn.totals import split_by_sample
from hone.recipe.sections.algo import AlgoConfig, ValueConfig
from hone.recipe.sections.model import ModelConfig, TinyConfig
from hone.recipe.sections.optim import OptimConfig
from hone.recipe.sections.rollout import SamplingConfig
from hone.types import Group, MicroBatch, Problem, Reward, Rollout, Turn, Verdict

TINY = TinyConfig(vocab_size=300, hidden_size=32, layers=2, heads=2, kv_heads=1, mlp_size=48)
OPTIM = OptimConfig(lr=1e-2, grad_clip=1e9)
SAMPLING = SamplingConfig(max_tokens=16)


def load(folder: Path, optim: OptimConfig = OPTIM, value: ValueConfig | None = None, **model: object) -> Policy:
    return Policy.load(ModelConfig(path=str(folder), **model), optim, 10, Trainable(value=value))  # type: ignore[arg-type]


def packer(budget: int, share_prompts: bool = True) -> Packer:
    return Packer(budget, share_prompts)


def make_groups(rewards: list[list[float]], seed: int = 0, verdict: Verdict = "wrong") -> list[Group]:
    """Groups with random tokens; lengths from 1 to 9."""
    rng = np.random.default_rng(seed)
    groups = []
    for p, scores in enumerate(rewards):
        prompt = rng.integers(5, 290, 4 + p)
        rollouts = []
        for g in range(len(scores)):
            n = int(rng.integers(1, 10))
            turn = Turn(prompt, rng.integers(5, 290, n), -rng.random(n).astype(np.float32) * 6, "stop", 0)
            rollouts.append(Rollout(f"p{p}", g, (turn,), ""))
        problem = Problem(f"p{p}", "t", ({"role": "user", "content": "?"},), None)
        groups.append(Group(problem, tuple(rollouts), tuple(Reward(r, {}, verdict) for r in scores)))
    return groups


def gradient(
    policy: Policy, groups: list[Group], algo: AlgoConfig, budget: int, reference: bool = False, share: bool = True
) -> np.ndarray:
    """The gradient of one off-policy update, model and value head: the weights have moved since the rollout.

    Ratios are far enough from 1 for clipping, masks and sequence means to matter.
    """
    ref = load_other(policy) if reference else None
    random_head(policy)
    batch = prepare(groups, policy, ref, algo, SAMPLING, packer(budget, share))
    per_token = {"old_logprobs": per_sample(batch.samples, lambda b: policy.logprobs(b, 1.0), packer(budget, share))}
    if ref is not None:
        per_token["ref_logprobs"] = per_sample(
            batch.samples, lambda b: frozen_logprobs(ref, b, 1.0), packer(budget, share)
        )
    if algo.advantage == "gae":
        token = {name: by_sample(batch, name) for name in ("old_values", "value_targets")}
        per_token |= {name: [values[i] for i in range(len(batch.samples))] for name, values in token.items()}
    move(policy, 0.02, seed=2)
    updates = minibatches(
        updates_of(groups, algo), batch.samples, algo, SAMPLING.max_tokens, packer(budget, share), **per_token
    )
    return gradient_of(policy, updates, algo)


def gradient_of(policy: Policy, updates: Sequence[Sequence[MicroBatch]], algo: AlgoConfig) -> np.ndarray:
    """The gradients that the optimizer receives: of the model, then of the value head."""
    got: list[torch.Tensor] = []
    policy.optimizer.step = lambda *_: got.extend(p.grad.clone() for p in policy.optimizer.stepped())  # type: ignore[assignment,method-assign,func-returns-value]
    policy.update(updates, algo, SAMPLING.temperature)
    return torch.cat([g.flatten() for g in got]).numpy()


def by_sample(batch: Batch, name: str) -> dict[int, np.ndarray]:
    """A field of the micro-batches, by the number of the sample."""
    return {
        i: part
        for update in batch.minibatches
        for m in update
        for i, part in split_by_sample(m, getattr(m, name).numpy())
    }


@torch.no_grad()
def random_head(policy: Policy) -> None:
    """A fresh value head says 0 whatever it sees."""
    if policy.value_head is not None:
        policy.value_head.weight.normal_(generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def move(policy: Policy, by: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in policy.parameters:
        p.add_(by * torch.randn(p.shape, generator=generator).to(p.dtype))


def load_other(policy: Policy) -> torch.nn.Module:
    """A reference that differs from the policy."""
    other = copy.deepcopy(policy.model)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    return other.eval()


REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.5, 0.0, 2.0, 1.0]]
