"""What is not finite is skipped, kept and named; what pulls too hard is named."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from hone.base import jsonl
from hone.base.world import World
from hone.learn.batches import Batch, prepare
from hone.learn.policy import Policy
from hone.learn.samples import chains
from hone.recipe.sections.algo import AlgoConfig, KLConfig, WatchConfig
from hone.recipe.sections.optim import OptimConfig
from hone.runs.writer import RunWriter
from hone.stages.guard import (
    TENSORS,
    NonFiniteUpdate,
    guard,
    guard_grades,
    no_signal,
    skipped_in_a_row,
    usual_grad_norm,
)
from hone.types import Block, Group, MicroBatch, Reward, StepStats, Verdict
from tests.learn.policies import REWARDS, SAMPLING, load, make_groups, packer

WATCH = WatchConfig(max_skipped=3, window=3)


def batch_of(policy: Policy, scale: float = 1.0, sample: int = 5) -> Batch:
    """Where the tokens of one sample have `scale` times their advantage."""
    batch = prepare(make_groups(REWARDS), policy, None, AlgoConfig(), SAMPLING, packer(60))

    def scaled(m):  # type: ignore[no-untyped-def]
        of_sample = m.samples == (m.sample_ids.index(sample) if sample in m.sample_ids else -1)
        return replace(m, advantages=torch.where(of_sample, m.advantages * scale, m.advantages))

    return Batch(batch.samples, tuple(tuple(scaled(m) for m in update) for update in batch.minibatches))


def take_step(writer: RunWriter, step: int, policy: Policy, batch: Batch) -> StepStats:
    stats = policy.update(batch.minibatches, AlgoConfig(), 1.0)
    writer.log(step, {"grad_norm": stats.grad_norm, **stats.metrics}, {})
    guard(writer, step, stats, batch.minibatches, batch.samples, WATCH)
    return stats


def test_a_batch_that_is_not_finite_is_skipped_kept_and_in_the_end_stops(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = RunWriter.open(tmp_path, {}, 0)
    policy = load(folder)
    batch = batch_of(policy)
    with torch.no_grad():
        policy.model.model.norm.weight[0] = float("nan")
    before = [p.clone() for p in policy.parameters]
    take_step(writer, 0, policy, batch)
    for p, b in zip(policy.parameters, before, strict=True):
        torch.testing.assert_close(p, b, equal_nan=True, rtol=0, atol=0)
    (event,) = jsonl.read(tmp_path / "events.jsonl")
    assert event["kind"] == "update_skipped"
    assert "Not finite in 16 of 16 samples: p0 (sample 1), " in event["message"]
    assert event["message"] in capsys.readouterr().err
    kept = read_batches(tmp_path / event["file"])
    for ours, theirs in zip(batch.minibatches[0], kept[0], strict=True):
        assert ours.layout == theirs.layout
        assert ours.sample_ids == theirs.sample_ids
        for name in ("inputs", "sources", "targets", "advantages", "weights"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))
    take_step(writer, 1, policy, batch)
    with pytest.raises(NonFiniteUpdate, match=r"3 steps in a row .*lower optim\.lr"):
        take_step(writer, 2, policy, batch)


def test_one_bad_sample_is_the_one_that_is_named(folder: Path, tmp_path: Path) -> None:
    writer = RunWriter.open(tmp_path, {}, 0)
    policy = load(folder, OptimConfig(lr=1e-9))
    good, bad = batch_of(policy), batch_of(policy, 3e22)  # the gradient's square is more than a float32 can hold
    take_step(writer, 0, policy, bad)
    (event,) = jsonl.read(tmp_path / "events.jsonl")
    assert "Not finite in 1 of 16 samples: p1 (sample 6)" in event["message"]
    assert not policy.optimizer.state, "a skipped update must not reach the moments"
    take_step(writer, 1, policy, good)  # training goes on, and the count begins anew
    assert skipped_in_a_row(writer.history) == 0


@pytest.mark.parametrize(
    "algo",
    [
        AlgoConfig(updates_per_rollout=2),
        AlgoConfig(advantage="gae"),
        AlgoConfig(kl=KLConfig(coef=0.1, place="reward")),
        AlgoConfig(advantage="gae", updates_per_rollout=2, kl=KLConfig(coef=0.1, place="reward")),
    ],
)
def test_what_the_model_says_before_the_update_may_be_nan_too(folder: Path, algo: AlgoConfig) -> None:
    """Old log-probs, values and KL come from the same forward pass: the update is skipped, nothing is raised."""
    policy = load(folder, value=algo.value if algo.advantage == "gae" else None)
    reference = load(folder).model if algo.kl.coef else None
    with torch.no_grad():
        policy.model.model.norm.weight[0] = float("nan")
    batch = prepare(make_groups(REWARDS), policy, reference, algo, SAMPLING, packer(60))
    before = [p.clone() for p in policy.optimizer.masters]
    stats = policy.update(batch.minibatches, algo, 1.0)
    assert stats.metrics["skipped"] == algo.updates_per_rollout
    for p, b in zip(policy.optimizer.masters, before, strict=True):
        torch.testing.assert_close(p, b, equal_nan=True, rtol=0, atol=0)


def test_only_the_first_process_writes_what_was_skipped(folder: Path, tmp_path: Path) -> None:
    policy = load(folder)
    batch = batch_of(policy)
    with torch.no_grad():
        policy.model.model.norm.weight[0] = float("nan")
    writer = RunWriter.open(tmp_path / "run", {}, 0, World(1, 2))
    take_step(writer, 0, policy, batch)
    assert not (tmp_path / "run").exists()


def test_of_several_updates_only_those_that_were_taken_are_in_the_means(folder: Path, tmp_path: Path) -> None:
    policy = load(folder, OptimConfig(lr=1e-9))
    algo = AlgoConfig(updates_per_rollout=2)
    batch = prepare(make_groups(REWARDS), policy, None, algo, SAMPLING, packer(10_000))
    good, bad = batch.minibatches
    bad = tuple(replace(m, advantages=m.advantages * 3e38) for m in bad)
    stats = policy.update([good, bad], algo, 1.0)
    alone = load(folder, OptimConfig(lr=1e-9)).update([good], algo, 1.0)
    assert stats.metrics["skipped"] == 1
    assert stats.metrics["entropy"] == pytest.approx(alone.metrics["entropy"])
    assert stats.loss == pytest.approx(alone.loss)
    assert not math.isfinite(stats.grad_norm)
    writer = RunWriter.open(tmp_path, {}, 0)
    writer.log(0, {"grad_norm": stats.grad_norm, **stats.metrics}, {})
    guard(writer, 0, stats, [good, bad], batch.samples, WATCH)
    (event,) = jsonl.read(tmp_path / "events.jsonl")
    assert "1 of 2 updates had a loss or gradient that is not finite" in event["message"]


def test_a_step_without_an_update_does_not_break_a_row_of_skipped_ones() -> None:
    skipped, dull = {"skipped": 1.0, "trained_tokens": 5}, {"skipped": 0.0, "trained_tokens": 0}
    taken = {"skipped": 0.0, "trained_tokens": 5}
    assert skipped_in_a_row([taken, skipped, dull, skipped]) == 2
    assert skipped_in_a_row([skipped, taken, dull]) == 0


def test_a_spike_names_the_largest_share(folder: Path, tmp_path: Path) -> None:
    writer = RunWriter.open(tmp_path, {}, 0)
    policy = load(folder, OptimConfig(lr=1e-9))
    good = batch_of(policy)
    for step in range(3):
        take_step(writer, step, policy, good)
    assert not (tmp_path / "events.jsonl").exists()
    stats = take_step(writer, 3, policy, batch_of(policy, 300.0))
    (event,) = jsonl.read(tmp_path / "events.jsonl")
    assert event["kind"] == "grad_spike"
    assert event["message"].split("Largest shares: ")[1].startswith(("p1 (sample 6) 100%", "p1 (sample 6) 99%"))
    assert max(stats.grad_norms, key=stats.grad_norms.__getitem__) == 5


def test_shares_are_those_of_the_gradient_at_the_last_hidden_states(folder: Path) -> None:
    """Twice the advantage, twice the gradient of that sample, and of no other."""
    once, twice = (load(folder, OptimConfig(lr=1e-9)) for _ in range(2))
    a = once.update(batch_of(once).minibatches, AlgoConfig(), 1.0).grad_norms
    b = twice.update(batch_of(twice, 2.0).minibatches, AlgoConfig(), 1.0).grad_norms
    for i in range(16):
        assert b[i] == pytest.approx(a[i] * (2 if i == 5 else 1), rel=1e-5)


def test_the_usual_norm_leaves_out_what_says_nothing() -> None:
    history = [{"grad_norm": x} for x in (1.0, None, 0.0, 3.0, 2.0)]
    assert usual_grad_norm(history, WATCH) == 2.0
    assert usual_grad_norm(history[:-1], WATCH) is None


def test_a_step_that_taught_nothing_says_why() -> None:
    groups, masking = make_groups(REWARDS), AlgoConfig(mask_truncated=True)
    count = sum(len(group.rewards) for group in groups)
    cut = [
        replace(
            group, rollouts=tuple(replace(r, turns=(replace(r.turns[-1], finish="length"),)) for r in group.rollouts)
        )
        for group in groups
    ]
    assert no_signal(groups, masking).startswith("no group had a reward difference")
    assert no_signal(cut, AlgoConfig()).startswith("no group had a reward difference")
    assert no_signal(cut, masking) == (
        f"of {count} samples {count} were cut off at sampling.max_tokens, and algo.mask_truncated leaves those out; no "
        "sample is left to learn from: nothing was learned in this step; raise sampling.max_tokens, or set "
        "algo.mask_truncated: false"
    )
    branched = [replace(g, rollouts=tuple(replace(r, turns=r.turns * 2) for r in g.rollouts)) for g in cut]
    assert all(len(chains(r)) == 2 for g in branched for r in g.rollouts)
    assert no_signal(branched, masking) == no_signal(cut, masking)  # rollouts are counted, however they branch
    unscored = [replace(g, rewards=tuple(replace(r, verdict="verifier_error") for r in g.rewards)) for g in groups]
    assert f"of {count} samples {count} have no reward; no sample is left" in no_signal(unscored, masking)


def read_batches(path: Path) -> list[list[MicroBatch]]:
    """The micro-batches in a file of `skipped/`, update by update."""
    updates: list[list[MicroBatch]] = []
    with safe_open(path, "pt") as file:
        names = set(file.keys())
        for shape in json.loads(file.metadata()["batches"]):
            u = shape["update"]
            while len(updates) <= u:
                updates.append([])
            prefix = f"{u}.{len(updates[u])}."
            tensors: dict[str, torch.Tensor] = {
                name: file.get_tensor(prefix + name) for name in TENSORS if prefix + name in names
            }
            layout = tuple(Block(prompt, tuple(lens)) for prompt, lens in shape["layout"])
            updates[u].append(MicroBatch(layout=layout, sample_ids=tuple(shape["sample_ids"]), **tensors))
    return updates


def test_a_reward_of_0_or_1_that_differs_from_the_grader_is_said_once(tmp_path: Path) -> None:
    def groups(pairs: list[tuple[float, Verdict]]) -> list[Group]:
        (group,) = make_groups([[value for value, _ in pairs]])
        rewards = tuple(Reward(value, {"mine": value}, verdict) for value, verdict in pairs)
        return [replace(group, rewards=rewards)]

    same = [(1.0, "correct"), (0.0, "wrong"), (0.0, "malformed"), (0.0, "verifier_error")] * 10
    writer = RunWriter.open(tmp_path, {}, 0)
    guard_grades(writer, 0, groups([*same, (0.0, "correct")]), "mine", True)  # 1 of 31
    guard_grades(writer, 1, groups([(0.3, "correct"), (0.7, "wrong")]), "mine", True)  # not 0 or 1
    guard_grades(writer, 2, groups([(0.0, "correct")]), None, True)
    assert jsonl.read(tmp_path / "events.jsonl") == []
    for step in (3, 4):
        guard_grades(writer, step, groups([*same, *[(0.0, "correct")] * 2, (1.0, "wrong")]), "mine", True)
    (event,) = jsonl.read(tmp_path / "events.jsonl")
    assert (event["kind"], event["step"]) == ("grades_differ", 3)
    assert "differ on 3 of 33 samples: 2 are graded correct and have no reward, 1 have one" in event["message"]
    assert "task.grading=none" in event["message"]
    other = RunWriter.open(tmp_path / "other", {}, 0)  # of a task without this setting
    guard_grades(other, 0, groups([(0.0, "correct"), (1.0, "wrong")]), "mine", False)
    (event,) = jsonl.read(tmp_path / "other" / "events.jsonl")
    assert "task.grading" not in event["message"]
    assert "hone runs show" in event["message"]
