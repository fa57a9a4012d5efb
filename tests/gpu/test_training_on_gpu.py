"""Training, sampling and checkpoints on a GPU, against the same in float32 on a CPU. `make gpu` runs these.

Tests that take `accelerator` rehearse on a CPU with HONE_GPU_TESTS_ON_CPU=1: it then stands on both sides.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hone.base.settings import UserError
from hone.learn import checkpoint
from hone.learn.batches import prepare
from hone.learn.network import LoadedModel
from hone.learn.policy import Policy, Trainable
from hone.model import attention_gpu, compiled
from hone.model.load import load_model, load_tokenizer
from hone.model.tiny import create
from hone.preflight.plan.rehearse import explained
from hone.recipe.recipe import Recipe
from hone.recipe.sections.algo import AlgoConfig
from hone.recipe.sections.model import LoraConfig, ModelConfig, TinyConfig
from hone.recipe.sections.optim import OptimConfig
from hone.recipe.sections.rollout import IdentityConfig, RolloutConfig, SamplingConfig
from hone.rollout.identity import PolicyMismatch, Verified, mean_difference, policy_logprobs
from hone.rollout.native import NativeEngine
from hone.tasks.knights.task import KnightsConfig
from tests.learn.policies import REWARDS, SAMPLING, make_groups, packer

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
OPTIM = OptimConfig(lr=1e-4, grad_clip=1e9)
SHAPE = TinyConfig(vocab_size=300, hidden_size=64, layers=2, heads=4, kv_heads=2, mlp_size=96)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    create(path, SHAPE, ["Zoey is a knight."] * 3, seed=0)
    return path


@pytest.fixture
def accelerator() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def policy_on(device: torch.device, folder: Path, lora: LoraConfig | None = None, **model: Any) -> Policy:
    config = ModelConfig(path=str(folder), **model)
    loaded = LoadedModel(load_model(config, device), load_tokenizer(config), str(folder))
    return Policy(loaded, OPTIM, 10, Trainable(lora))


def updates(policy: Policy, seed: int = 0, budget: int = 60) -> Any:
    batch = prepare(make_groups(REWARDS, seed), policy, None, AlgoConfig(), SAMPLING, packer(budget))
    return policy.update(batch.minibatches, AlgoConfig(entropy_coef=0.01), 1.0)


def gradient(policy: Policy) -> torch.Tensor:
    """What the optimizer is given, in float32 on the CPU; no step is taken."""
    got: list[torch.Tensor] = []
    policy.optimizer.step = lambda *_: got.extend(p.grad.clone() for p in policy.optimizer.stepped())  # type: ignore
    updates(policy)
    return torch.cat([g.flatten().float().cpu() for g in got])


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_the_gradient_in_float32_is_that_of_a_cpu(folder: Path, accelerator: torch.device) -> None:
    expected = gradient(policy_on(CPU, folder))
    assert apart(gradient(policy_on(accelerator, folder)), expected) < 1e-4


def test_the_gradient_in_bfloat16_is_near_that_of_float32(folder: Path, accelerator: torch.device) -> None:
    """And is gathered in float32: one micro-batch or many give nearly the same."""
    expected = gradient(policy_on(CPU, folder))
    assert apart(gradient(policy_on(accelerator, folder, dtype="bfloat16")), expected) < 0.1


def test_bfloat16_weights_are_the_rounded_masters(folder: Path, accelerator: torch.device) -> None:
    policy = policy_on(accelerator, folder, dtype="bfloat16")
    before = [master.detach().clone() for master in policy.optimizer.masters]
    for seed in range(3):
        assert updates(policy, seed).metrics["skipped"] == 0
    moved = max(float((a.detach() - b).abs().max()) for a, b in zip(policy.optimizer.masters, before))
    assert 1e-4 < moved < 4e-4  # three steps of at most the rate each
    for p, master in zip(policy.parameters, policy.optimizer.masters, strict=True):
        assert (p.dtype, master.dtype, p.device.type) == (torch.bfloat16, torch.float32, accelerator.type)
        assert torch.equal(p, master.bfloat16())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_layers_have_the_same_gradient(folder: Path, dtype: str) -> None:
    compiled._compiled.cache_clear()
    torch._dynamo.reset()
    cuda = torch.device("cuda")
    expected = gradient(policy_on(CPU, folder))
    got = gradient(policy_on(cuda, folder, dtype=dtype, compile=True))
    assert apart(got, expected) < (1e-4 if dtype == "float32" else 0.1)


@pytest.mark.parametrize("how", ["flash", "flex"])
def test_attention_of_the_gpu_gives_the_log_probs_of_a_cpu(
    folder: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, policy = policy_on(CPU, folder), policy_on(torch.device("cuda"), folder, dtype="bfloat16")
    assert attention_gpu.kind(torch.zeros(1, 4, 3, 16, dtype=torch.bfloat16, device="cuda")) == "flash"
    monkeypatch.setattr(attention_gpu, "kind", lambda query: how)
    batch = prepare(make_groups(REWARDS), policy, None, AlgoConfig(), SAMPLING, packer(200)).minibatches[0]
    got = np.concatenate(policy.logprobs(batch, 1.0))
    monkeypatch.undo()
    np.testing.assert_allclose(got, np.concatenate(exact.logprobs(batch, 1.0)), atol=0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_sampled_has_the_log_probs_that_are_trained(
    folder: Path, accelerator: torch.device, dtype: str
) -> None:
    """Recorded decode steps and packed training: two ways through one model."""
    policy = policy_on(accelerator, folder, dtype=dtype)
    said: list[str] = []
    engine = NativeEngine(policy.model, (), RolloutConfig(), event=lambda kind, text: said.append(f"{kind}: {text}"))
    prompts = [np.arange(5, 5 + n) for n in (4, 30, 61)]
    groups = engine.generate(prompts, SamplingConfig(max_tokens=80), samples=4, seed=0)
    assert not [text for text in said if "decode_graph" in text]
    turns = [turn for group in groups for turn in group]
    served = np.concatenate([turn.logprobs for turn in turns])
    assert mean_difference(served, policy_logprobs(policy, turns)) < (1e-5 if dtype == "float32" else 0.02)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_the_identity_check_in_bfloat16(folder: Path, accelerator: torch.device, lora: LoraConfig | None) -> None:
    """It passes after updates, far below its tolerance, and stops where the engine has other weights."""
    if lora is not None:
        pytest.importorskip("peft")
    policy = policy_on(accelerator, folder, lora, dtype="bfloat16")
    engine = NativeEngine(policy.model, policy.stop_ids, RolloutConfig())
    checked = Verified(engine, policy.tokenizer, IdentityConfig(), "bfloat16", lambda kind, text: None)
    for version in (0, 5):
        gap = checked.sync(policy, version)["identity/gap"]
        assert gap < 0.04
        updates(policy, version)
    other = policy_on(accelerator, folder, dtype="bfloat16")
    with torch.no_grad():
        for p in other.parameters:
            p.add_(0.5 * torch.randn_like(p))
    engine.sync = lambda policy, version: setattr(engine, "_model", other.model)  # type: ignore
    with pytest.raises(PolicyMismatch):
        checked.sync(policy, 10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_comes_back_to_the_bit_and_training_goes_on(
    folder: Path, accelerator: torch.device, dtype: str, tmp_path: Path
) -> None:
    policy = policy_on(accelerator, folder, dtype=dtype)
    updates(policy)
    path = checkpoint.save(tmp_path, 1, policy, keep=1)
    again = policy_on(accelerator, folder, dtype=dtype)
    again.restore(path, checkpoint.read_state(path)["policy"])
    for a, b in zip(again.optimizer.stepped(), policy.optimizer.stepped(), strict=True):
        assert a.device.type == accelerator.type
        assert torch.equal(a, b)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(again.optimizer.state[a][key], policy.optimizer.state[b][key])
            assert again.optimizer.state[a][key].device == policy.optimizer.state[b][key].device
    one, two = updates(policy, seed=1), updates(again, seed=1)
    assert two.loss == pytest.approx(one.loss, rel=1e-3, abs=1e-5)
    for a, b in zip(again.optimizer.stepped(), policy.optimizer.stepped(), strict=True):  # sums may be in another order
        torch.testing.assert_close(a, b, atol=2e-5, rtol=0)


def test_what_a_checkpoint_holds_is_of_the_moment_it_was_taken(
    folder: Path, accelerator: torch.device, tmp_path: Path
) -> None:
    """Copies to the host are done when `take` returns: the update that follows does not show in them."""
    policy = policy_on(accelerator, folder, dtype="bfloat16")
    updates(policy)
    then = [p.detach().clone() for p in policy.optimizer.stepped()]
    snapshot = checkpoint.take(1, policy, keep=1)
    assert all(t.device == CPU for tensors in snapshot.state.tensors.values() for t in tensors.values())
    writer = checkpoint.Writer()
    updates(policy, seed=1)
    writer.begin(lambda: checkpoint.write(tmp_path, snapshot))
    updates(policy, seed=2)
    writer.wait()
    (path,) = checkpoint.saved_steps(tmp_path)
    policy.restore(path, checkpoint.read_state(path)["policy"])
    assert all(torch.equal(a, b) for a, b in zip(policy.optimizer.stepped(), then, strict=True))


def test_running_out_of_memory_is_explained(accelerator: torch.device, tmp_path: Path) -> None:
    stage = Recipe(name="x", task=KnightsConfig(name="knights"), stage="sft", tokens_per_microbatch=65536)
    with pytest.raises(UserError, match=r"(?s)out of memory in stage x.*lower "), explained(stage, tmp_path):
        torch.empty(1 << 46, device=accelerator)
    assert torch.zeros(3, device=accelerator).sum() == 0  # the device goes on


# --- what waits for the device ----------------------------------------------------------------------------------------


def waits(call: Callable[[], object]) -> int:
    """How often `call` waits for the GPU, as far as PyTorch tells."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return sum("synchronizing" in str(one.message) for one in said)


def test_decoding_does_not_wait_for_every_token(folder: Path) -> None:
    model = policy_on(torch.device("cuda"), folder, dtype="bfloat16").model
    engine = NativeEngine(model, (), RolloutConfig())

    def tokens(n: int) -> int:
        return waits(lambda: engine.generate([np.arange(9)], SamplingConfig(max_tokens=n), samples=4, seed=0))

    tokens(64)
    assert tokens(192) - tokens(64) <= 3 * 128 // 8  # a few for each look, one in 8 tokens


def test_an_update_does_not_wait_for_every_micro_batch(folder: Path) -> None:
    policy = policy_on(torch.device("cuda"), folder, dtype="bfloat16")
    algo, counts, waited = AlgoConfig(), [], []
    for budget in (10_000, 30):
        for seed in range(2):  # the first one sets up; the second has other lengths
            batch = prepare(make_groups(REWARDS, seed), policy, None, algo, SAMPLING, packer(budget))
            waited.append(waits(lambda b=batch: policy.update(b.minibatches, algo, 1.0)))  # type: ignore[misc]
        counts.append(len(batch.minibatches[0]))
    assert counts[1] > counts[0] + 2
    assert waited[3] <= waited[1] + 1
