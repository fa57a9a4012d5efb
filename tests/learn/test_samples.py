"""From turns to samples, and values per token from rollouts to samples and back."""

from __future__ import annotations

import numpy as np
import pytest

from hone.learn.samples import by_rollout, by_sample, chains, supervised_sample, to_samples, with_advantages
from hone.types import Group, Problem, Reward, Rollout, Sample, Turn


def turn(prompt: list[int], completion: list[int], logprobs: list[float] | None = None, version: int = 0) -> Turn:
    given = np.array(logprobs or [0.0] * len(completion), np.float32)
    return Turn(np.array(prompt), np.array(completion), given, "stop", version)


def group(*rollouts: tuple[Turn, ...], name: str = "p") -> Group:
    played = tuple(Rollout(name, i, turns, "") for i, turns in enumerate(rollouts))
    return Group(Problem(name, "t", (), None), played, tuple(Reward(0.0, {}, "wrong") for _ in played))


#: Two turns of one chain, as in the docstring of the module; the second was sampled after an update.
ONE_CHAIN = (turn([5, 6], [7, 2], [-0.5, -1.0], 4), turn([5, 6, 7, 2, 9, 6], [8, 2], [-0.25, -2.0], 3))
#: The second turn's prompt lacks the token 2: the history was rewritten.
TWO_CHAINS = (turn([5, 6], [7, 2], [-1.0, -2.0], 1), turn([5, 6, 7, 9], [8], [-3.0], 2))


def check_float32(sample: Sample) -> None:
    assert (sample.logprobs.dtype, sample.advantages.dtype) == (np.float32, np.float32)
    assert sample.trained.dtype == bool


def test_a_chain_is_one_sample() -> None:
    (sample,) = to_samples(group(ONE_CHAIN, name="q7"))
    assert sample.token_ids.tolist() == [5, 6, 7, 2, 9, 6, 8, 2]
    assert sample.trained.tolist() == [False, False, True, True, False, False, True, True]
    assert sample.logprobs.tolist() == [0, 0, -0.5, -1.0, 0, 0, -0.25, -2.0]
    assert sample.advantages.tolist() == [0] * 8
    assert (sample.prompt_len, sample.problem_id, sample.policy_version) == (2, "q7", 3)  # as stale as its oldest turn
    check_float32(sample)


def test_a_rewritten_history_begins_another_sample() -> None:
    first, second = to_samples(group(TWO_CHAINS))
    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([5, 6, 7, 2], [5, 6, 7, 9, 8])
    assert (first.prompt_len, second.prompt_len) == (2, 4)
    assert second.trained.tolist() == [False] * 4 + [True]
    assert (first.policy_version, second.policy_version) == (1, 2)


def test_a_prompt_that_adds_nothing_still_continues_its_chain() -> None:
    """As after a turn that its limit ended: the next one goes on with the very tokens."""
    turns = (turn([1], [2, 3]), turn([1, 2, 3], [4]))
    assert len(chains(Rollout("p", 0, turns, ""))) == 1
    (sample,) = to_samples(group(turns))
    assert sample.token_ids.tolist() == [1, 2, 3, 4]
    assert sample.trained.tolist() == [False, True, True, True]


@pytest.mark.parametrize("prompt", [[1, 2], [9, 2, 3, 7], [1, 2, 9, 7]])
def test_what_does_not_begin_with_the_turn_before_is_a_branch(prompt: list[int]) -> None:
    assert len(chains(Rollout("p", 0, (turn([1], [2, 3]), turn(prompt, [4])), ""))) == 2


def test_values_of_samples_become_values_of_rollouts_and_back() -> None:
    groups = [group(TWO_CHAINS, ONE_CHAIN), group((turn([1], [2]),))]
    values = [np.array(v, np.float32) for v in ([1, 2], [3], [4, 5, 6, 7], [8])]
    by_group = by_rollout(groups, values)
    assert [[v.tolist() for v in rollouts] for rollouts in by_group] == [[[1, 2, 3], [4, 5, 6, 7]], [[8]]]
    assert [v.tolist() for v in by_sample(groups, by_group)] == [[1, 2], [3], [4, 5, 6, 7], [8]]


def test_values_that_are_too_few_or_too_many_are_no_values() -> None:
    groups, value = [group(ONE_CHAIN, ONE_CHAIN)], np.zeros(4, np.float32)
    for wrong in ([], [[value, value], [value]], [[value]], [[value] * 3]):
        with pytest.raises(ValueError, match="zip"):
            by_sample(groups, wrong)
    samples = to_samples(groups[0])
    for count in (1, 3):
        with pytest.raises(ValueError, match="zip"):
            with_advantages(samples, [value] * count)


def test_advantages_stand_where_tokens_were_sampled() -> None:
    samples = to_samples(group(ONE_CHAIN, TWO_CHAINS))
    values = [np.array([1.0, 2.0, -3.0, -4.0]), np.array([5.0, 6.0]), np.array([7.0])]
    result = with_advantages(samples, values)
    assert [s.advantages.tolist() for s in result] == [
        [0, 0, 1, 2, 0, 0, -3, -4],
        [0, 0, 5, 6],
        [0, 0, 0, 0, 7],
    ]
    assert [s.token_ids.tolist() for s in result] == [s.token_ids.tolist() for s in samples]
    for sample in result:
        check_float32(sample)


def test_a_sample_to_imitate() -> None:
    sample = supervised_sample("q3", np.array([5, 6, 7]), np.array([8, 2]))
    assert sample.token_ids.tolist() == [5, 6, 7, 8, 2]
    assert sample.trained.tolist() == [False, False, False, True, True]
    assert sample.advantages.tolist() == [0, 0, 0, 1, 1]
    assert sample.logprobs.tolist() == [0] * 5
    assert (sample.prompt_len, sample.problem_id, sample.policy_version) == (3, "q3", 0)
    check_float32(sample)
