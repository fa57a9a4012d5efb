"""The update: the same gradient under any split, exact when restored."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.learn import batches, checkpoint
from hone.learn.batches import minibatches, per_sample, prepare, updates_of
from hone.learn.forward import Outputs
from hone.learn.master import master_weights
from hone.learn.objective import METRICS, Objective
from hone.learn.policy import Policy
from hone.learn.totals import Totals, split_by_sample
from hone.recipe.sections.algo import AlgoConfig, CorrectionConfig, KLConfig
from hone.recipe.sections.optim import OptimConfig
from hone.types import Block, Group, MicroBatch, Reward
from tests.learn.policies import REWARDS, SAMPLING, gradient, load, make_groups, packer

KINDS, PLACES = ("k1", "k2", "k3"), ("loss", "reward")


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
        samples = prepare(groups, policy, None, AlgoConfig(), SAMPLING, packer(budget)).minibatches[0]
        counts.add(len(samples))
        results.append(gradient(policy, groups, algo, budget, reference=penalty != "none"))
    assert len(counts) == 3
    assert min(counts) == 1
    assert max(counts) >= 7
    scale = np.abs(results[0]).max()
    assert scale > 1e-4
    for other in results[1:]:
        np.testing.assert_allclose(other / scale, results[0] / scale, atol=2e-6)


@settings(max_examples=40, deadline=None)
@given(
    loss=st.sampled_from(["clipped", "gspo", "cispo"]),
    reduction=st.sampled_from(["token_mean", "sequence_mean", "constant"]),
    advantage=st.sampled_from(["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae"]),
    kl=st.sampled_from([KLConfig(), *(KLConfig(coef=0.1, estimator=e, place=p) for e in KINDS for p in PLACES)]),
    entropy_coef=st.sampled_from([0.0, 0.01]),
    correction=st.sampled_from(["none", "tis", "mis"]),
    order=st.permutations(range(4)),
    turn=st.permutations(range(4)),
    budget=st.integers(12, 200),
    share=st.booleans(),
)
def test_order_packing_and_shared_prompts_change_nothing(
    folder: Path, order: list[int], turn: list[int], budget: int, share: bool, correction: str, **algo: Any
) -> None:
    """Any order of groups and of the samples within, any split, prompts computed once or for each sample."""
    config = AlgoConfig(**algo, correction=CorrectionConfig(kind=correction))  # type: ignore[arg-type]
    value = config.value if config.advantage == "gae" else None
    groups, reference = make_groups(REWARDS), config.kl.coef > 0
    expected = gradient(load(folder, value=value), groups, config, 10_000, reference)
    shuffled = [
        Group(g.problem, tuple(g.rollouts[i] for i in turn), tuple(g.rewards[i] for i in turn))
        for g in (groups[i] for i in order)
    ]
    got = gradient(load(folder, value=value), shuffled, config, budget, reference, share)
    scale = np.abs(expected).max()
    assert scale > 1e-5
    np.testing.assert_allclose(got / scale, expected / scale, atol=2e-6)


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
def test_a_group_shifted_by_a_constant_reward_has_the_same_gradient(folder: Path, advantage: str) -> None:
    config = AlgoConfig(advantage=advantage)  # type: ignore[arg-type]
    shifted = [[r + 3.0 * p for r in group] for p, group in enumerate(REWARDS)]
    expected = gradient(load(folder), make_groups(REWARDS), config, 10_000)
    got = gradient(load(folder), make_groups(shifted), config, 10_000)
    np.testing.assert_allclose(got, expected, atol=2e-6 * np.abs(expected).max())


def test_recomputed_activations_give_the_same_bits_and_keep_less(folder: Path) -> None:
    results, most = [], []
    for recompute in (False, True):
        live = [0, 0]  # elements kept for the way back: now, and at most

        class Kept:
            def __init__(self, x: torch.Tensor, live: list[int] = live) -> None:
                self.x, self.live = x, live
                live[0] += x.numel()
                live[1] = max(live)

            def __del__(self) -> None:
                self.live[0] -= self.x.numel()

        policy = load(folder, recompute_activations=recompute)
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.x):
            results.append(gradient(policy, make_groups(REWARDS), AlgoConfig(), 10_000))
        most.append(live[1])
    np.testing.assert_array_equal(results[0], results[1])
    assert most[1] < 0.7 * most[0]


def test_bfloat16_steps_are_taken_in_float32(folder: Path, tmp_path: Path) -> None:
    """Steps of 1e-5 on weights near 1 vanish in bfloat16, whose neighbours there are 0.0078 apart; 8 of them add up."""
    optim = OptimConfig(lr=1e-5, grad_clip=1e9)
    policy = load(folder, optim, dtype="bfloat16")
    weight = policy.model.model.norm.weight  # all ones at the start
    norm = next(i for i, p in enumerate(policy.parameters) if p is weight)
    for seed in range(8):
        batch = prepare(make_groups(REWARDS, seed), policy, None, AlgoConfig(), SAMPLING, packer(40))
        policy.update(batch.minibatches, AlgoConfig(), 1.0)
    assert policy.parameters[norm].dtype == torch.bfloat16
    assert policy.optimizer.masters[norm].dtype == torch.float32
    moved = (policy.optimizer.masters[norm] - 1).abs()
    assert 1e-6 < moved.max() < 1e-4
    torch.testing.assert_close(policy.parameters[norm], policy.optimizer.masters[norm].bfloat16(), rtol=0, atol=0)
    checkpoint.save(tmp_path, 8, policy, keep=1)
    again = load(folder, optim, dtype="bfloat16")
    saved = checkpoint.newest_good(tmp_path, print)
    assert saved is not None
    again.restore(saved, checkpoint.read_state(saved)["policy"])
    for a, b in zip(again.optimizer.masters, policy.optimizer.masters, strict=True):
        assert torch.equal(a, b)


def test_gradients_are_added_up_in_float32() -> None:
    """1 + 2^-9 is 1 in bfloat16, however often 2^-9 is added."""
    p = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    (master,) = master_weights([p])
    for part in (1.0, *(2.0**-9 for _ in range(8))):
        (p * part).sum().backward()
    assert p.grad is None
    assert master.grad is not None
    assert master.grad.tolist() == [1.0 + 8 * 2.0**-9] * 3


def test_a_checkpoint_of_another_precision_is_what_is_trained_on(folder: Path, tmp_path: Path) -> None:
    first = load(folder)
    for p in first.parameters:
        p.data.mul_(1.5)
    checkpoint.save(tmp_path, 1, first, keep=1)
    saved = checkpoint.newest_good(tmp_path, print)
    assert saved is not None
    second = load(folder, OptimConfig(lr=1e-9), dtype="bfloat16")
    second.restore(saved, checkpoint.read_state(saved)["policy"])
    batch = prepare(make_groups(REWARDS), second, None, AlgoConfig(), SAMPLING, packer(10_000))
    second.update(batch.minibatches, AlgoConfig(), 1.0)
    for a, b in zip(first.parameters, second.parameters, strict=True):
        torch.testing.assert_close(b.float(), a, rtol=2**-7, atol=1e-6)


def test_samples_without_advantage_change_nothing_but_the_denominator(folder: Path) -> None:
    """A group of equal rewards is left out of the computation, yet counts: 3 groups halve what 1.5 would give."""
    with_dead = make_groups([*REWARDS[:2], [1.0, 1.0, 1.0]])
    policy = load(folder)
    batch = prepare(with_dead, policy, None, AlgoConfig(), SAMPLING, packer(10_000))
    used = sum(len(m.targets) for m in batch.minibatches[0])
    alive = sum(r.num_tokens for g in with_dead[:2] for r in g.rollouts)
    everyone = sum(r.num_tokens for g in with_dead for r in g.rollouts)
    assert used == alive < everyone
    assert batch.minibatches[0][0].weights[0].item() == pytest.approx(1 / everyone)


def test_the_update_raises_the_probability_of_the_better_answer(folder: Path) -> None:
    groups = make_groups([[1.0, 0.0]])
    policy = load(folder, OptimConfig(lr=1e-3))

    def margin() -> float:
        batch = prepare(groups, policy, None, AlgoConfig(), SAMPLING, packer(10_000)).minibatches[0]
        (values,) = policy.logprobs(batch, 1.0)
        own = batch[0].samples.numpy()
        good, bad = (batch[0].sample_ids.index(i) for i in (0, 1))
        return float(values[own == good].mean() - values[own == bad].mean())

    before = margin()
    policy.update(prepare(groups, policy, None, AlgoConfig(), SAMPLING, packer(10_000)).minibatches, AlgoConfig(), 1.0)
    assert margin() > before + 1e-3


def test_failed_verifiers_are_out_of_the_batch(folder: Path) -> None:
    (group,) = make_groups([[1.0, 0.0, 0.0]])
    failed = Group(group.problem, group.rollouts, (*group.rewards[:2], Reward(0.0, {}, "verifier_error")))
    batch = prepare([failed], load(folder), None, AlgoConfig(entropy_coef=0.1), SAMPLING, packer(10_000))
    assert sorted(batch.minibatches[0][0].sample_ids) == [0, 1]
    counted = sum(r.num_tokens for r in group.rollouts[:2])
    assert batch.minibatches[0][0].weights[0].item() == pytest.approx(1 / counted)


def test_several_updates_share_the_groups_and_use_old_logprobs(folder: Path) -> None:
    algo = AlgoConfig(updates_per_rollout=2)
    policy = load(folder)
    batch = prepare(make_groups(REWARDS), policy, None, algo, SAMPLING, packer(10_000))
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


def test_old_log_probs_are_asked_only_of_samples_that_teach(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[int] = set()
    real = batches.frozen_logprobs

    def frozen(model: object, given: list[MicroBatch], **rest: object) -> list[np.ndarray]:
        asked.update(i for batch in given for i in batch.sample_ids)
        return real(model, given, **rest)

    monkeypatch.setattr(batches, "frozen_logprobs", frozen)
    policy = load(folder)
    groups = make_groups([[1.0, 0.0, 0.0, 1.0], [1.0] * 4, [0.0, 1.0, 1.0, 1.0], [0.0] * 4])
    batch = prepare(groups, policy, None, AlgoConfig(updates_per_rollout=2), SAMPLING, packer(64))
    taught = {i for update in batch.minibatches for m in update for i in m.sample_ids}
    assert asked == taught == {0, 1, 2, 3, 8, 9, 10, 11}
    old = {i: v for u in batch.minibatches for m in u for i, v in split_by_sample(m, m.old_logprobs.numpy())}
    now = per_sample(batch.samples, lambda b: policy.logprobs(b, 1.0), packer(64))
    for i in taught:
        np.testing.assert_allclose(old[i], now[i], atol=1e-6)
    asked.clear()
    prepare(groups, policy, None, AlgoConfig(updates_per_rollout=2, entropy_coef=0.1), SAMPLING, packer(64))
    assert asked == set(range(16))  # the bonus is a gradient of every sample


def test_totals_are_those_of_each_micro_batch_read_at_once() -> None:
    totals = Totals()
    for start in (0, 2):
        ids, samples = (start + 1, start), torch.tensor([0, 0, 1])
        zeros = torch.zeros(3)
        batch = MicroBatch(
            zeros.long(), zeros.long(), (Block(0, (3,)),), zeros.long(), zeros.long(), samples,
            sampled_logprobs=torch.tensor([-1.0, -2.0, -3.0]), advantages=zeros, weights=zeros, sample_ids=ids,
        )  # fmt: skip
        hidden = torch.zeros(3, 2, requires_grad=True)
        hidden.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0], [5.0, 12.0]])
        logprobs = torch.tensor([-1.0, -2.5, -3.0]) - start
        sums = torch.arange(len(METRICS), dtype=torch.float64)
        outputs = Outputs(hidden, logprobs, torch.ones(3) * start)
        totals.add(batch, outputs, Objective(torch.tensor(0.5), sums), torch.tensor(0.25))
    assert totals.tokens == 0  # nothing was waited for
    totals.read()
    assert (totals.loss, totals.value_loss, totals.tokens, totals.mismatch) == (1.0, 0.5, 6, 2.5)
    assert totals.sums.tolist() == [2.0 * i for i in range(len(METRICS))]
    assert {i: v.tolist() for i, v in totals.logprobs.items()} == {1: [-1, -2.5], 0: [-3], 3: [-3, -4.5], 2: [-5]}
    assert {i: v.tolist() for i, v in totals.entropies.items()} == {1: [0, 0], 0: [0], 3: [2, 2], 2: [2]}
    assert totals.grad_norms == {1: 5.0, 0: 13.0, 3: 5.0, 2: 13.0}
    assert totals.read().loss == 1.0  # again is harmless


def minibatches_of(policy: Policy, algo: AlgoConfig) -> list[list]:  # type: ignore[type-arg]
    groups = make_groups(REWARDS)
    batch = prepare(groups, policy, None, algo, SAMPLING, packer(10_000))
    return minibatches(updates_of(groups, algo), batch.samples, algo, 16, packer(10_000))


def test_a_restored_policy_continues_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    def train(policy: Policy, steps: range) -> None:
        for seed in steps:
            groups = make_groups(REWARDS, seed)
            batch = prepare(groups, policy, None, AlgoConfig(), SAMPLING, packer(40))
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
    victim = tmp_path / "step_000002" / "model" / "shard-00001-model-00001-of-00001.safetensors"
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
    assert [p.name for p in checkpoint.saved_steps(tmp_path)] == ["step_000002", "step_000003"]
    assert not list(tmp_path.glob(".writing*"))
    assert not (tmp_path / "step_000003" / "torn").exists()


def test_mismatch_of_sampler_and_trainer_by_hand(folder: Path) -> None:
    """The sampler's log-probs are the trainer's plus a known difference; several updates report that of the first."""
    differences = {1: 0.5, 3: -1.0, 6: 0.25}
    for updates in (1, 2):
        policy = load(folder)
        groups = make_groups(REWARDS)
        first = prepare(groups, policy, None, AlgoConfig(), SAMPLING, packer(10_000))
        true = [v for m in first.minibatches[0] for v in policy.logprobs([m], 1.0)]
        by_sample = dict(pair for m, v in zip(first.minibatches[0], true) for pair in split_by_sample(m, v))
        moved = []
        for p, group in enumerate(groups):
            rollouts = []
            for g, rollout in enumerate(group.rollouts):
                i = 4 * p + g
                logprobs = by_sample[i] + np.float32(differences.get(i, 0.0))
                rollouts.append(replace(rollout, turns=(replace(rollout.turns[0], logprobs=logprobs),)))
            moved.append(replace(group, rollouts=tuple(rollouts)))
        algo = AlgoConfig(updates_per_rollout=updates)
        batch = prepare(moved, policy, None, algo, SAMPLING, packer(10_000))
        metrics = policy.update(batch.minibatches, algo, 1.0).metrics
        inside = [i for i in range(16) if (i // 4) % updates == 0]  # groups are dealt out in turn
        lengths = {i: int(batch.samples[i].trained.sum()) for i in inside}
        d = np.concatenate([np.full(n, differences.get(i, 0.0)) for i, n in lengths.items()])
        assert metrics["mismatch/mean_abs"] == pytest.approx(np.abs(d).mean(), abs=1e-5)
        assert metrics["mismatch/k3"] == pytest.approx((np.exp(-d) - 1 + d).mean(), abs=1e-5)
        assert metrics["mismatch/max"] == pytest.approx(np.abs(d).max(), abs=1e-5)


def test_the_checksums_are_of_every_file_and_a_second_save_of_a_step_changes_nothing(
    folder: Path, tmp_path: Path
) -> None:
    step = checkpoint.save(tmp_path, 1, load(folder), keep=2)
    sums = json.loads((step / "checksums.json").read_text())
    files = [p for p in step.rglob("*") if p.is_file() and p.name != "checksums.json"]
    assert sums == {str(p.relative_to(step)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    assert list(sums) == sorted(sums)
    assert {"state.json", "model/config.json"} <= sums.keys()
    written = (step / "state.json").stat().st_ino
    assert checkpoint.save(tmp_path, 1, load(folder), keep=2) == step
    assert (step / "state.json").stat().st_ino == written
    assert not list(tmp_path.glob(".writing*"))
