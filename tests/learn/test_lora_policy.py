"""The policy with an adapter, hard resets with and without one, and which layers are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hone.base.settings import UserError
from hone.learn import checkpoint
from hone.learn.batches import per_sample, prepare
from hone.learn.forward import frozen_logprobs
from hone.learn.optimizer import depths, num_layers, rate_factor
from hone.learn.policy import Policy, Trainable
from hone.model import lora
from hone.recipe.sections.algo import AlgoConfig, ValueConfig
from hone.recipe.sections.model import LoraConfig, ModelConfig
from hone.recipe.sections.optim import LayersConfig, OptimConfig
from tests.learn.policies import OPTIM, REWARDS, SAMPLING, make_groups, packer

LORA = LoraConfig(rank=3, targets="all")
KL = AlgoConfig.model_validate({"kl": {"coef": 0.1}})


def load(folder: Path, adapter: LoraConfig | None = LORA, **more: Any) -> Policy:
    model = ModelConfig(path=str(folder), **more.pop("model", {}))
    trainable = Trainable(adapter, more.pop("layers", LayersConfig()), more.pop("value", None), more.pop("seed", 0))
    return Policy.load(model, more.pop("optim", OPTIM), 10, trainable, **more)


def step(policy: Policy, seed: int = 0, algo: AlgoConfig = KL) -> Any:
    groups = make_groups(REWARDS, seed)
    batch = prepare(groups, policy, policy.reference, algo, SAMPLING, packer(64))
    policy.update(batch.minibatches, algo, 1.0)
    return batch


def logprobs(model: Any, batch: Any) -> np.ndarray:
    return np.concatenate(per_sample(batch.samples, lambda b: frozen_logprobs(model, b, 1.0), packer(64)))


def bits(policy: Policy) -> dict[str, torch.Tensor]:
    """Weights, master weights and moments."""
    weights = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    for i, p in enumerate(policy.optimizer.stepped()):
        weights[f"{i}.master"] = p.detach().clone()
        weights |= {f"{i}.{key}": value.clone() for key, value in policy.optimizer.state.get(p, {}).items()}
    return weights


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


# --- adapter --------------------------------------------------------------------------------------------------------


def test_an_update_moves_the_adapter_and_nothing_else(folder: Path) -> None:
    policy = load(folder)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    step(policy)
    step(policy, 1)
    moved = {name for name, p in policy.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    assert len(policy.optimizer.stepped()) == len(moved)
    assert len(policy.optimizer.state) == len(moved)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_gradient_is_that_of_the_matrix(folder: Path, recompute: bool) -> None:
    """dL/dB = s G A^T and dL/dA = s B^T G, G the gradient of the merged matrix in full fine-tuning, s = alpha / rank.

    With recomputed activations too, whose first layer must be asked for a gradient though the embeddings are frozen.
    """
    policy = load(folder, model={"recompute_activations": recompute})
    with torch.no_grad():
        for name, value in lora.adapter_weights(policy.model).items():
            if "lora_B" in name:
                value.normal_(std=0.2, generator=torch.Generator().manual_seed(5))
    groups = make_groups(REWARDS)
    batch = prepare(groups, policy, None, AlgoConfig(), SAMPLING, packer(64))
    grads: dict[str, torch.Tensor] = {}

    def gradients(policy: Policy) -> dict[str, torch.Tensor]:
        def take(*_: Any) -> None:
            grads.update({name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None})

        policy.optimizer.step = take  # type: ignore[method-assign,assignment]
        policy.update(batch.minibatches, AlgoConfig(), 1.0)
        actual = dict(grads)
        grads.clear()
        return actual

    own = gradients(policy)
    full = load(folder, None)
    with lora.merged(policy.model):
        full.model.load_state_dict(policy.model.state_dict())
    of_matrix = gradients(full)
    assert len(own) == 28
    for name, grad in own.items():
        stem, _, which = name.partition(".lora_")
        matrix = of_matrix[f"{stem}.weight"]
        layer = policy.model.get_submodule(stem)
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        expected = 2.0 * (matrix @ a.T if which.startswith("B") else b.T @ matrix)
        torch.testing.assert_close(grad, expected, atol=1e-5, rtol=1e-3)


def test_the_reference_is_the_policy_with_its_adapter_off(folder: Path) -> None:
    policy = load(folder, reference=True)
    assert policy.reference is policy.model
    start = load(folder, None)
    for seed in range(3):
        step(policy, seed)
    batch = prepare(make_groups(REWARDS), policy, policy.reference, KL, SAMPLING, packer(64))
    actual = np.concatenate([m.ref_logprobs.numpy() for u in batch.minibatches for m in u])
    expected = np.concatenate([frozen_logprobs(start.model, [m], 1.0)[0] for u in batch.minibatches for m in u])
    np.testing.assert_array_equal(actual, expected)
    assert np.abs(logprobs(policy.model, batch) - logprobs(start.model, batch)).max() > 0.1


def test_low_precision_has_float32_masters_of_the_adapter(folder: Path) -> None:
    """A thousandth of a step of bfloat16 is kept in the master weight, and rounded into the model when it has grown."""
    policy = load(folder, model={"dtype": "bfloat16"}, optim=OptimConfig(lr=1e-5))
    assert {p.dtype for p in policy.parameters} == {torch.bfloat16}
    assert {m.dtype for m in policy.optimizer.masters} == {torch.float32}
    first = [m.clone() for m in policy.optimizer.masters]
    step(policy, algo=AlgoConfig())
    changed = [not torch.equal(a, b) for a, b in zip(first, policy.optimizer.masters, strict=True)]
    assert sum(changed) >= 14  # B of every layer at least: at first A has no gradient, since B is 0
    for master, p in zip(policy.optimizer.masters, policy.parameters, strict=True):
        assert torch.equal(master.bfloat16(), p)


def test_dropout_is_keyed_by_the_update(folder: Path, tmp_path: Path) -> None:
    """Supervised: the same numbers after a resume, others in the next update, and none that anybody else draws."""
    adapter = LORA.model_copy(update={"dropout": 0.5})

    def imitate(policy: Policy) -> float:
        batch = prepare(make_groups(REWARDS), policy, None, AlgoConfig(), SAMPLING, packer(10_000))
        return policy.imitate(batch.minibatches[0]).loss

    first = load(folder, adapter)
    with torch.no_grad():
        for p in first.parameters:
            p.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    imitate(first)
    checkpoint.save(tmp_path / "checkpoints", 1, first, keep=1)
    torch.manual_seed(7)
    second = load(folder, adapter)
    saved = tmp_path / "checkpoints" / "step_000001"
    second.restore(saved, checkpoint.read_state(saved)["policy"])
    assert imitate(first) == imitate(second)
    assert_same(bits(first), bits(second))
    still = load(folder, adapter, optim=OptimConfig(lr=1e-12))
    still.restore(saved, checkpoint.read_state(saved)["policy"])
    still.configure(OptimConfig(lr=1e-12), LayersConfig())
    assert imitate(still) != imitate(still)


# --- hard resets ----------------------------------------------------------------------------------------------------

NEXT = LoraConfig(rank=5, targets="attention")


@pytest.mark.parametrize(
    ("adapter", "after"), [(LORA, NEXT), (LORA, LORA), (None, None)], ids=["rank 5", "same rank", "without adapter"]
)
def test_a_reset_changes_no_output_and_begins_anew(
    folder: Path, adapter: LoraConfig | None, after: LoraConfig | None
) -> None:
    policy = load(folder, adapter, reference=True)
    for seed in range(3):
        batch = step(policy, seed)
    start = logprobs(load(folder, None).model, batch)
    before = logprobs(policy.model, batch)
    assert np.abs(before - start).max() > 0.1
    policy.merge_and_reset(3, OPTIM, LayersConfig(), after, {"why": "step"})
    now = logprobs(policy.model, batch)
    np.testing.assert_allclose(now, before, atol=1e-4)
    assert not policy.optimizer.state  # no moments, no count of steps
    assert policy.reference is not None
    with lora.adapter_off(policy.reference):
        np.testing.assert_allclose(logprobs(policy.reference, batch), now, atol=0)  # a KL of exactly 0
    if after is not None:
        ranks = {min(w.shape) for w in lora.adapter_weights(policy.model).values()}
        assert ranks == {after.rank}
        assert all((w == 0).all() for name, w in lora.adapter_weights(policy.model).items() if "lora_B" in name)
    step(policy, 9)  # and it goes on: the first step of Adam is lr in every weight that has a gradient
    assert all(float(state["step"]) == 1 for state in policy.optimizer.state.values())
    moved = np.abs(logprobs(policy.model, batch) - now).max()
    assert moved > 0.01
    with lora.adapter_off(policy.reference):
        np.testing.assert_array_equal(logprobs(policy.reference, batch), now)  # it stays what it became


def test_master_weights_survive_a_reset_without_an_adapter(folder: Path) -> None:
    """They are the policy: rounded to bfloat16 and back, small steps would be lost."""
    policy = load(folder, None, model={"dtype": "bfloat16"}, optim=OptimConfig(lr=1e-5))
    step(policy, algo=AlgoConfig())
    masters = [m.clone() for m in policy.optimizer.masters]
    policy.merge_and_reset(1, OptimConfig(lr=1e-5), LayersConfig(), None, {"why": "step"})
    assert all(torch.equal(a, b) for a, b in zip(masters, policy.optimizer.masters, strict=True))
    step(policy, 1, AlgoConfig())
    change = max(float((a - b).detach().abs().max()) for a, b in zip(masters, policy.optimizer.masters, strict=True))
    assert change == pytest.approx(1e-5, rel=0.1), "the gradient was counted twice, or not at all"


def test_the_value_head_stays_and_its_moments_go(folder: Path) -> None:
    algo = AlgoConfig(advantage="gae")
    policy = load(folder, value=ValueConfig(lr=0.1))
    step(policy, algo=algo)
    assert policy.value_head is not None
    weight = policy.value_head.weight.detach().clone()
    assert weight.any()
    policy.merge_and_reset(1, OPTIM, LayersConfig(), NEXT, {"why": "step"})
    assert torch.equal(policy.value_head.weight, weight)
    assert not policy.optimizer.state
    step(policy, 1, algo)
    assert not torch.equal(policy.value_head.weight, weight)


def test_warm_up_begins_again_and_decay_goes_on(folder: Path) -> None:
    optim = OptimConfig(lr=0.1, warmup_steps=3, decay="linear")
    policy = load(folder, optim=optim)

    def rate() -> float:
        batch = prepare(make_groups(REWARDS), policy, None, AlgoConfig(), SAMPLING, packer(64))
        return policy.update(batch.minibatches, AlgoConfig(), 1.0).metrics["lr"]

    assert [rate() for _ in range(4)] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    policy.merge_and_reset(4, optim, LayersConfig(), LORA, {"why": "step"})
    # Update 4 of 10: 1/4 of the warm-up; 1 - 1/7 of the rate is left after 1 of the 7 updates that decay.
    assert [rate() for _ in range(2)] == pytest.approx([0.1 / 4 * 6 / 7, 0.1 / 2 * 5 / 7])


@pytest.mark.parametrize("adapter", [LORA, None], ids=["adapter", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_after_a_reset_is_the_same_bits(
    folder: Path, tmp_path: Path, adapter: LoraConfig | None, dtype: str
) -> None:
    """Base, adapter of another rank, moments, reference: three steps later nothing differs."""
    after = None if adapter is None else NEXT
    first = load(folder, adapter, reference=True, model={"dtype": dtype})
    step(first)
    first.merge_and_reset(1, OPTIM, LayersConfig(), after, {"why": "step"})
    first.export_base(tmp_path / "resets" / "reset_001")
    first.base = str(tmp_path / "resets" / "reset_001")
    step(first, 1)
    saved = checkpoint.save(tmp_path / "checkpoints", 2, first, keep=1)
    second = load(folder, adapter, reference=True, model={"dtype": dtype})
    second.restore(saved, checkpoint.read_state(saved)["policy"], tmp_path / "resets" / "reset_001")
    assert second.resets == [{"step": 1, "why": "step"}]
    assert_same(bits(first), bits(second))
    for seed in (2, 3):
        a, b = step(first, seed), step(second, seed)
        assert all(
            torch.equal(x.ref_logprobs, y.ref_logprobs)
            for u, v in zip(a.minibatches, b.minibatches, strict=True)
            for x, y in zip(u, v, strict=True)
        )
    assert_same(bits(first), bits(second))


def test_a_checkpoint_with_an_adapter_is_an_adapter(folder: Path, tmp_path: Path) -> None:
    """Small, and a model for whoever reads it: `hone eval`, peft."""
    policy = load(folder)
    batch = step(policy)
    saved = checkpoint.save(tmp_path, 1, policy, keep=1)
    assert not (saved / "model" / "model.safetensors").exists()
    read = load(saved / "model", None)
    np.testing.assert_allclose(logprobs(read.model, batch), logprobs(policy.model, batch), atol=1e-5)
    assert len(read.parameters) == len(load(folder, None).parameters)  # and all of it can be trained
    with pytest.raises(UserError, match="has an adapter and the recipe wants none; resume with lora as it was"):
        load(folder, None).restore(saved, checkpoint.read_state(saved)["policy"])


def test_an_existing_adapter_goes_on(folder: Path, tmp_path: Path) -> None:
    first = load(folder)
    batch = step(first)
    first.export_adapter(tmp_path / "adapter")
    second = load(folder, LORA.model_copy(update={"path": str(tmp_path / "adapter")}))
    np.testing.assert_array_equal(logprobs(second.model, batch), logprobs(first.model, batch))


# --- layers ---------------------------------------------------------------------------------------------------------


def test_rates_by_layer() -> None:
    layers = LayersConfig(lr_decay=0.5)
    assert [rate_factor(depth, layers, 3) for depth in range(5)] == [1 / 8, 1 / 4, 1 / 2, 1, 1]


def test_depths_of_a_model(folder: Path) -> None:
    model = load(folder, None).model
    actual = depths(model)
    assert num_layers(model) == 2
    assert actual["model.embed_tokens.weight"] == 0
    assert actual["model.layers.1.mlp.up_proj.weight"] == 2
    assert actual["model.norm.weight"] == 3


@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "adapter"])
@pytest.mark.parametrize(
    ("layers", "moved"),
    [
        (LayersConfig(train="first", count=1), {0, 1}),
        (LayersConfig(train="last", count=1), {2, 3}),
        (LayersConfig(), {0, 1, 2, 3}),
    ],
)
def test_only_the_chosen_layers_move(
    folder: Path, adapter: LoraConfig | None, layers: LayersConfig, moved: set[int]
) -> None:
    policy = load(folder, adapter, layers=layers)
    depth = depths(policy.model)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    step(policy, algo=AlgoConfig())
    changed = {depth[name] for name, p in policy.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == (moved if adapter is None else moved & {1, 2})


def test_frozen_layers_cost_no_backward(folder: Path) -> None:
    """Below the lowest layer that is trained nothing is on the way back."""
    policy = load(folder, None, layers=LayersConfig(train="last", count=1))
    seen: list[str] = []
    for i, layer in enumerate(policy.model.model.layers):
        layer.mlp.down_proj.register_full_backward_hook(lambda *_, i=i: seen.append(f"layer {i}"))
    step(policy, algo=AlgoConfig())
    assert set(seen) == {"layer 1"}


def test_growing_layers_keep_their_moments(folder: Path) -> None:
    policy = load(folder, None, layers=LayersConfig(train="last", count=1))
    step(policy, algo=AlgoConfig())
    norm = policy.model.model.norm.weight
    below = policy.model.model.layers[0].mlp.up_proj.weight
    assert below not in policy.optimizer.state
    policy.configure(OPTIM, LayersConfig())
    step(policy, 1, AlgoConfig())
    assert float(policy.optimizer.state[norm]["step"]) == 2
    assert float(policy.optimizer.state[below]["step"]) == 1
    policy.configure(OptimConfig(lr=0.5), LayersConfig(lr_decay=0.1))
    rates = {group["depth"]: group["full_lr"] for group in policy.optimizer.param_groups}
    assert rates == pytest.approx({0: 0.005, 1: 0.05, 2: 0.5, 3: 0.5})


def test_more_layers_than_there_are(folder: Path) -> None:
    with pytest.raises(UserError, match=r"layers.count: 3 exceeds the 2 layers of the model; give at most 2"):
        load(folder, layers=LayersConfig(train="last", count=3))
    with pytest.raises(ValueError, match="count: "):
        LayersConfig.model_validate({"train": "last"})
