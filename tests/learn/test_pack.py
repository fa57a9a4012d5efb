"""Packing: the one shift, shared prompts, budgets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.learn.pack import Packer
from hone.learn.samples import supervised_sample, to_samples, with_advantages
from hone.types import Block, Group, Problem, Reward, Rollout, Sample, Turn


def sample(prompt: list[int], completion: list[int], name: str = "p") -> Sample:
    return supervised_sample(name, np.asarray(prompt), np.asarray(completion))


def test_worked_example_of_the_record() -> None:
    """The example in the docstring of MicroBatch, by hand."""
    (batch,) = Packer(100)([sample([5, 6], [7, 2]), sample([5, 6], [8, 9, 2])], [0.5, 0.25])
    assert batch.inputs.tolist() == [5, 6, 7, 2, 8, 9, 2]
    assert batch.positions.tolist() == [0, 1, 2, 3, 2, 3, 4]
    assert batch.layout == (Block(2, (2, 3)),)
    assert batch.sources.tolist() == [1, 2, 1, 4, 5]
    assert batch.targets.tolist() == [7, 2, 8, 9, 2]
    assert batch.samples.tolist() == [0, 0, 1, 1, 1]
    assert batch.weights.tolist() == [0.5, 0.5, 0.25, 0.25, 0.25]


def test_without_sharing_the_prompt_is_repeated() -> None:
    (batch,) = Packer(100, share_prompts=False)([sample([5, 6], [7, 2]), sample([5, 6], [8, 9, 2])], [1, 1])
    assert batch.inputs.tolist() == [5, 6, 7, 2, 5, 6, 8, 9, 2]
    assert batch.layout == (Block(0, (4, 5)),)
    assert batch.sources.tolist() == [1, 2, 5, 6, 7]
    assert batch.targets.tolist() == [7, 2, 8, 9, 2]


def test_untrained_tokens_inside_a_completion_are_context_only() -> None:
    mask = np.asarray([False, True, False, True])
    s = Sample(np.asarray([5, 6, 7, 8]), mask, np.zeros(4, np.float32), np.zeros(4, np.float32), 1, "p", 0)
    (batch,) = Packer(100)([s], [1.0])
    assert batch.inputs.tolist() == [5, 6, 7, 8]
    assert (batch.sources.tolist(), batch.targets.tolist()) == ([0, 2], [6, 8])


def test_per_token_values_follow_their_sample() -> None:
    samples = [sample([1], [2, 3, 4]), sample([9, 9], [5])]
    old = [np.asarray([-1, -2, -3], np.float32), np.asarray([-4], np.float32)]
    for batch in Packer(4)(samples, [1, 1], ids=[10, 20], old_logprobs=old):
        expected = {10: [-1, -2, -3], 20: [-4]}
        for place, name in enumerate(batch.sample_ids):
            assert batch.old_logprobs is not None
            assert batch.old_logprobs[batch.samples == place].tolist() == expected[name]


lengths = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=14)


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(4, 40), st.booleans())
def test_every_trained_token_appears_once_with_its_own_context(
    spec: list[tuple[int, int]], budget: int, share: bool
) -> None:
    prompts = [[1, 2], [3, 4, 5], [6], [7, 8, 9, 10]]
    samples = [sample(prompts[p], list(range(20, 20 + n)), f"{p}") for p, n in spec]
    batches = Packer(budget, share)(samples, [float(i + 1) for i in range(len(samples))])
    seen: dict[int, list[int]] = {}
    for batch in batches:
        for place, i in enumerate(batch.sample_ids):
            assert i not in seen
            mine = batch.samples == place
            seen[i] = batch.targets[mine].tolist()
            assert set(batch.weights[mine].tolist()) == {float(i + 1)}
            # What predicts token t is token t-1 of the same sequence, at its position.
            before = batch.inputs[batch.sources[mine]].tolist()
            whole = samples[i].token_ids.tolist()
            assert before == whole[samples[i].prompt_len - 1 : -1]
            assert batch.positions[batch.sources[mine]].tolist() == list(
                range(samples[i].prompt_len - 1, len(whole) - 1)
            )
    assert {i: s.token_ids[s.trained].tolist() for i, s in enumerate(samples)} == seen


def test_micro_batches_keep_to_the_budget_and_are_balanced() -> None:
    rng = np.random.default_rng(0)
    samples = [sample([1, 2, 3, i], [5] * int(n)) for i, n in enumerate(rng.integers(5, 40, 64))]
    sizes = [len(b.inputs) for b in Packer(400)(samples, [1.0] * 64)]
    assert max(sizes) <= 400
    groups = [sample([p], [5] * int(n)) for p in range(8) for n in rng.integers(5, 40, 16)]
    sizes = [len(b.inputs) for b in Packer(700)(groups, [1.0] * 128)]
    assert max(sizes) <= 700
    assert max(sizes) - min(sizes) <= 450


def test_nothing_to_pack_is_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        Packer(100)([], [])


def test_stop_token_is_trained_and_advantages_align() -> None:
    turn = Turn(np.asarray([5, 6]), np.asarray([7, 2]), np.asarray([-0.1, -0.7], np.float32), "stop", 3)
    problem = Problem("p", "t", ({"role": "user", "content": "?"},), 1)
    group = Group(problem, (Rollout("p", 0, (turn,), "x"),), (Reward(1.0, {}, "correct"),))
    (s,) = with_advantages(to_samples(group), [np.asarray([1.5, 2.5], np.float32)])
    assert s.trained.tolist() == [False, False, True, True]
    assert s.advantages.tolist() == [0, 0, 1.5, 2.5]
    assert s.logprobs.tolist() == pytest.approx([0, 0, -0.1, -0.7])
    (batch,) = Packer(10)([s], [1.0])
    assert batch.targets.tolist() == [7, 2]  # 2 is the end-of-text token
    assert torch.equal(batch.advantages, torch.tensor([1.5, 2.5]))
