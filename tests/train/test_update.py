"""The update: the same gradient under any split, skipped when not finite, exact when restored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.algo.config import AlgoConfig, CorrectionConfig, KLConfig
from hone.model.config import ModelConfig, TinyConfig
from hone.model.tiny import create
from hone.rollout.config import SamplingConfig
from hone.train import checkpoint
from hone.train.batches import minibatches, prepare
from hone.train.config import OptimConfig
from hone.train.policy import NonFiniteUpdate, Policy
from hone.types import Group, Problem, Reward, Rollout, Turn, Verdict

TINY = TinyConfig(vocab_size=300, hidden_size=32, layers=2, heads=2, kv_heads=1, mlp_size=48)
OPTIM = OptimConfig(lr=1e-2, grad_clip=1e9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    create(path, TINY, ["Zoey is a knight."] * 3, seed=0)
    return path


def load(folder: Path, optim: OptimConfig = OPTIM) -> Policy:
    return Policy.load(ModelConfig(path=str(folder)), optim, 10)


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


def gradient(policy: Policy, groups: list[Group], algo: AlgoConfig, budget: int, reference: bool = False) -> np.ndarray:
    """The gradient of one update, obtained through the weights' change under plain gradient ascent."""
    sampling = SamplingConfig(max_tokens=16)
    ref = load_other(policy) if reference else None
    batch = prepare(groups, policy, ref, algo, sampling, budget)
    got: list[torch.Tensor] = []
    policy.optimizer.step = lambda *_: got.extend(p.grad.clone() for p in policy.parameters)  # type: ignore[assignment,method-assign,func-returns-value]
    policy.update(batch.minibatches, algo, sampling.temperature)
    return torch.cat([g.flatten() for g in got]).numpy()


def load_other(policy: Policy) -> torch.nn.Module:
    """A reference that differs from the policy."""
    import copy

    other = copy.deepcopy(policy.model)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    return other.eval()


REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.5, 0.0, 2.0, 1.0]]


@pytest.mark.parametrize("loss", ["clipped", "gspo", "cispo"])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("penalty", ["none", "loss", "reward"])
def test_one_two_or_seven_micro_batches_give_one_gradient(
    folder: Path, loss: str, reduction: str, penalty: str
) -> None:
    algo = AlgoConfig(
        loss=loss,  # type: ignore[arg-type]
        reduction=reduction,  # type: ignore[arg-type]
        kl=KLConfig(coef=0.1, place="reward" if penalty == "reward" else "loss") if penalty != "none" else KLConfig(),
        correction=CorrectionConfig(kind="tis"),
        entropy_coef=0.01,
    )
    groups, counts, results = make_groups(REWARDS), set(), []
    for budget in (10_000, 60, 14):
        policy = load(folder)
        samples = prepare(groups, policy, None, AlgoConfig(), SamplingConfig(max_tokens=16), budget).minibatches[0]
        counts.add(len(samples))
        results.append(gradient(policy, groups, algo, budget, reference=penalty != "none"))
    assert len(counts) == 3
    assert min(counts) == 1
    assert max(counts) >= 7
    scale = np.abs(results[0]).max()
    assert scale > 1e-4
    for other in results[1:]:
        np.testing.assert_allclose(other / scale, results[0] / scale, atol=2e-6)


@settings(max_examples=8, deadline=None)
@given(st.permutations(range(4)), st.integers(12, 200))
def test_order_of_groups_and_packing_change_nothing(folder: Path, order: list[int], budget: int) -> None:
    groups = make_groups(REWARDS)
    reference = gradient(load(folder), groups, AlgoConfig(), 10_000)
    shuffled = gradient(load(folder), [groups[i] for i in order], AlgoConfig(), budget)
    np.testing.assert_allclose(shuffled, reference, atol=2e-6 * np.abs(reference).max())


def test_samples_without_advantage_change_nothing_but_the_denominator(folder: Path) -> None:
    """A group of equal rewards is left out of the computation, yet counts: 3 groups halve what 1.5 would give."""
    with_dead = make_groups([*REWARDS[:2], [1.0, 1.0, 1.0]])
    policy = load(folder)
    batch = prepare(with_dead, policy, None, AlgoConfig(), SamplingConfig(max_tokens=16), 10_000)
    used = sum(len(m.targets) for m in batch.minibatches[0])
    alive = sum(r.num_tokens for g in with_dead[:2] for r in g.rollouts)
    everyone = sum(r.num_tokens for g in with_dead for r in g.rollouts)
    assert used == alive < everyone
    assert batch.minibatches[0][0].weights[0].item() == pytest.approx(1 / everyone)


def test_the_update_raises_the_probability_of_the_better_answer(folder: Path) -> None:
    groups = make_groups([[1.0, 0.0]])
    policy = load(folder, OptimConfig(lr=1e-3))
    sampling = SamplingConfig(max_tokens=16)

    def margin() -> float:
        batch = prepare(groups, policy, None, AlgoConfig(), sampling, 10_000).minibatches[0]
        (values,) = policy.logprobs(batch, 1.0)
        own = batch[0].samples.numpy()
        good, bad = (batch[0].sample_ids.index(i) for i in (0, 1))
        return float(values[own == good].mean() - values[own == bad].mean())

    before = margin()
    policy.update(prepare(groups, policy, None, AlgoConfig(), sampling, 10_000).minibatches, AlgoConfig(), 1.0)
    assert margin() > before + 1e-3


def test_failed_verifiers_are_out_of_the_batch(folder: Path) -> None:
    (group,) = make_groups([[1.0, 0.0, 0.0]])
    failed = Group(group.problem, group.rollouts, (*group.rewards[:2], Reward(0.0, {}, "verifier_error")))
    batch = prepare([failed], load(folder), None, AlgoConfig(entropy_coef=0.1), SamplingConfig(max_tokens=16), 10_000)
    assert sorted(batch.minibatches[0][0].sample_ids) == [0, 1]
    counted = sum(r.num_tokens for r in group.rollouts[:2])
    assert batch.minibatches[0][0].weights[0].item() == pytest.approx(1 / counted)


def test_several_updates_share_the_groups_and_use_old_logprobs(folder: Path) -> None:
    algo = AlgoConfig(updates_per_rollout=2)
    policy = load(folder)
    batch = prepare(make_groups(REWARDS), policy, None, algo, SamplingConfig(max_tokens=16), 10_000)
    assert len(batch.minibatches) == 2
    first, second = ({i for m in u for i in m.sample_ids} for u in batch.minibatches)
    assert first == set(range(4)) | set(range(8, 12))
    assert second == set(range(4, 8)) | set(range(12, 16))
    assert batch.minibatches[0][0].old_logprobs is not None
    stats = policy.update(batch.minibatches, algo, 1.0)
    assert stats.metrics["ratio/mean"] != pytest.approx(1.0, abs=1e-6)  # the second update is off-policy
    on_policy = load(folder)
    stats = on_policy.update(minibatches_of(on_policy, AlgoConfig()), AlgoConfig(), 1.0)
    assert stats.metrics["ratio/mean"] == 1.0


def minibatches_of(policy: Policy, algo: AlgoConfig) -> list[list]:  # type: ignore[type-arg]
    groups = make_groups(REWARDS)
    batch = prepare(groups, policy, None, algo, SamplingConfig(max_tokens=16), 10_000)
    return minibatches(groups, batch.samples, algo, 10_000, 16)


def test_a_gradient_that_is_not_finite_is_skipped_then_stops(folder: Path) -> None:
    policy = load(folder)
    good = prepare(make_groups(REWARDS), policy, None, AlgoConfig(), SamplingConfig(max_tokens=16), 10_000)
    with torch.no_grad():
        policy.model.model.norm.weight[0] = float("nan")
    before = [p.clone() for p in policy.parameters]
    for _ in range(policy.MAX_SKIPPED - 1):
        stats = policy.update(good.minibatches, AlgoConfig(), 1.0)
        assert stats.metrics["skipped"] == 1.0
    for p, b in zip(policy.parameters, before, strict=True):
        torch.testing.assert_close(p, b, equal_nan=True, rtol=0, atol=0)
    with pytest.raises(NonFiniteUpdate, match=r"lower optim\.lr"):
        policy.update(good.minibatches, AlgoConfig(), 1.0)


def test_a_restored_policy_continues_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    def train(policy: Policy, steps: range) -> None:
        for seed in steps:
            groups = make_groups(REWARDS, seed)
            batch = prepare(groups, policy, None, AlgoConfig(), SamplingConfig(max_tokens=16), 40)
            policy.update(batch.minibatches, AlgoConfig(), 1.0)

    optim = OptimConfig(lr=1e-3, warmup_steps=2, decay="cosine")
    whole = load(folder, optim)
    train(whole, range(6))
    first = load(folder, optim)
    train(first, range(3))
    checkpoint.save(tmp_path, 3, first, keep=2)
    second = load(folder, optim)
    saved = checkpoint.newest_good(tmp_path, print)
    assert saved is not None
    second.restore(saved, checkpoint.read_state(saved)["policy"])
    train(second, range(3, 6))
    assert second.updates == whole.updates == 6
    for a, b in zip(second.parameters, whole.parameters, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "no_checksums"])
def test_a_damaged_checkpoint_is_passed_over_with_a_message(folder: Path, tmp_path: Path, damage: str) -> None:
    policy = load(folder)
    for step in (1, 2):
        checkpoint.save(tmp_path, step, policy, keep=3)
    victim = tmp_path / "step_000002" / "model" / "model.safetensors"
    data = bytearray(victim.read_bytes())
    if damage == "flip":
        data[-5] ^= 1
        victim.write_bytes(data)
    elif damage == "truncate":
        victim.write_bytes(data[: len(data) // 2])
    elif damage == "delete":
        victim.unlink()
    else:
        (tmp_path / "step_000002" / "checksums.json").unlink()
    said: list[str] = []
    good = checkpoint.newest_good(tmp_path, said.append)
    assert good is not None
    assert good.name == "step_000001"
    assert len(said) == 1
    assert "step_000002" in said[0]
    assert "one before" in said[0]


def test_old_checkpoints_are_pruned_and_leftovers_replaced(folder: Path, tmp_path: Path) -> None:
    policy = load(folder)
    (tmp_path / ".writing_000003").mkdir()
    (tmp_path / ".writing_000003" / "torn").write_text("x")
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, policy, keep=2)
    assert [p.name for p in checkpoint.found(tmp_path)] == ["step_000002", "step_000003"]
    assert not list(tmp_path.glob(".writing*"))
    assert not (tmp_path / "step_000003" / "torn").exists()
