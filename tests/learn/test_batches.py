"""From groups to micro-batches, with log-probs that are set by hand: the token t has log-prob `table[t]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.testing import assert_allclose

from hone.learn import batches
from hone.learn.batches import Batch, minibatches, per_sample, ppo_advantages, prepare, updates_of
from hone.learn.pack import Packer
from hone.learn.policy import Policy
from hone.learn.samples import to_samples, with_advantages
from hone.recipe.sections.algo import AlgoConfig, KLConfig
from hone.recipe.sections.rollout import SamplingConfig
from hone.types import Finish, FloatArray, Group, MicroBatch, Problem, Reward, Rollout, Turn, Verdict

SAMPLING = SamplingConfig(max_tokens=5, temperature=0.7)
#: Log-probs of the policy and of the reference: the differences of tokens 11 to 16 are .1, .2, .3, .4, .5, .6.
NOW = {11: -1.0, 12: -1.5, 13: -2.0, 14: -2.5, 15: -3.0, 16: -3.5}
REF = {token: value - (token - 10) / 10 for token, value in NOW.items()}


def rollout(index: int, *completions: list[int], finish: Finish = "stop") -> Rollout:
    """Every turn begins anew: one sample each."""
    turns = [Turn(np.array([1, 2]), np.array(c), np.zeros(len(c), np.float32), finish, 0) for c in completions]
    return Rollout("p", index, tuple(turns), "")


def group(rollouts: Sequence[Rollout], rewards: Sequence[float], verdicts: dict[int, Verdict] | None = None) -> Group:
    given = [Reward(r, {}, (verdicts or {}).get(i, "wrong")) for i, r in enumerate(rewards)]
    return Group(Problem("p", "t", (), None), tuple(rollouts), tuple(given))


#: Two groups of two samples: tokens 11 12 | 13, rewards 1 0, and 14 | 15 16, rewards 0 2.
GROUPS = [
    group([rollout(0, [11, 12]), rollout(1, [13])], [1.0, 0.0]),
    group([rollout(0, [14]), rollout(1, [15, 16])], [0.0, 2.0]),
]
EQUAL = group([rollout(0, [11]), rollout(1, [12])], [1.0, 1.0])


def packer(tokens: int = 100) -> Packer:
    return Packer(tokens)


def tokens_of(batch: MicroBatch, table: dict[int, float]) -> np.ndarray:
    return np.array([table[t] for t in batch.targets.tolist()], np.float32)


def by_id(update: Sequence[MicroBatch], name: str) -> dict[int, list[float]]:
    """A field of the micro-batches of an update, for each sample."""
    found: dict[int, list[float]] = {}
    for batch in update:
        for place, value in zip(batch.samples.tolist(), getattr(batch, name).tolist(), strict=True):
            found.setdefault(batch.sample_ids[place], []).append(value)
    return found


class Models:
    """A policy and a reference that answer from tables and note what they were asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, values: dict[int, float] | None = None) -> None:
        self.tables: dict[str, dict[int, float]] = {"policy": NOW, "reference": REF}
        self.asked: list[tuple[str, list[int]]] = []
        self.off: list[str] = []
        self.policy = cast(Policy, SimpleNamespace(model="policy", world="world", values=self.values))
        self.reference: Any = "reference"
        self.value = values or {}
        monkeypatch.setattr(batches, "frozen_logprobs", self.logprobs)
        monkeypatch.setattr(batches, "adapter_off", self.without_adapter)

    def logprobs(self, model: str, given: list[MicroBatch], *, temperature: float, world: str) -> list[np.ndarray]:
        assert (temperature, world) == (0.7, "world")
        assert (model == "reference") == bool(self.off)  # the adapter is off for the reference only
        self.asked.append((model, sorted(i for batch in given for i in batch.sample_ids)))
        return [tokens_of(batch, self.tables[model]) for batch in given]

    def values(self, given: list[MicroBatch]) -> list[np.ndarray]:
        return [tokens_of(batch, self.value) for batch in given]

    @contextmanager
    def without_adapter(self, model: str) -> Iterator[None]:
        assert model == "reference"
        self.off.append(model)
        yield
        self.off.clear()

    def prepare(self, groups: Sequence[Group], algo: AlgoConfig, reference: bool = True, tokens: int = 100) -> Batch:
        return prepare(groups, self.policy, self.reference if reference else None, algo, SAMPLING, packer(tokens))


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Models:
    return Models(monkeypatch)


# --- which samples are in which update ------------------------------------------------------------------------------


def test_whole_groups_take_turns_and_failed_or_cut_samples_are_left_out() -> None:
    groups = [
        group([rollout(0, [11]), rollout(1, [12], [13])], [1, 0]),  # samples 0, 1 and 2
        group([rollout(0, [14], finish="length"), rollout(1, [15])], [1, 0]),  # 3, 4
        group([rollout(0, [16], [11]), rollout(1, [12])], [1, 0], {0: "verifier_timeout"}),  # 5 and 6, 7
    ]
    two = AlgoConfig(updates_per_rollout=2)
    assert updates_of(groups, two) == [[0, 1, 2, 7], [3, 4]]
    assert updates_of(groups, two, graded=False) == [[0, 1, 2, 5, 6, 7], [3, 4]]
    assert updates_of(groups, two.model_copy(update={"mask_truncated": True})) == [[0, 1, 2, 7], [4]]
    assert updates_of(groups, AlgoConfig()) == [[0, 1, 2, 3, 4, 7]]


# --- micro-batches --------------------------------------------------------------------------------------------------


def test_samples_without_a_gradient_count_in_the_denominators_only() -> None:
    groups = [GROUPS[0], EQUAL]  # 2, 1, 1 and 1 tokens; the last two without advantages
    samples = [s for g in groups for s in to_samples(g)]
    advantages = [np.full(n, a, np.float32) for n, a in ((2, 0.5), (1, -0.5), (1, 0.0), (1, 0.0))]
    samples = with_advantages(samples, advantages)
    old = [np.full(n, -float(i), np.float32) for i, n in enumerate((2, 1, 1, 1))]

    def packed(algo: AlgoConfig, members: list[list[int]] | None = None) -> list[list[MicroBatch]]:
        chosen = members or [[0, 1, 2, 3]]
        return minibatches(chosen, samples, algo, 5, packer(), old_logprobs=old, ref_logprobs=None)

    (update,) = packed(AlgoConfig())
    assert by_id(update, "weights") == {0: pytest.approx([0.2, 0.2]), 1: pytest.approx([0.2])}  # 1 / 5 tokens
    assert by_id(update, "old_logprobs") == {0: [0, 0], 1: [-1]}
    assert update[0].ref_logprobs is None
    (update,) = packed(AlgoConfig(reduction="constant"))
    assert by_id(update, "weights") == {0: pytest.approx([0.05, 0.05]), 1: pytest.approx([0.05])}  # 1 / (4 samples * 5)
    (update,) = packed(AlgoConfig(entropy_coef=0.1))
    assert set(by_id(update, "weights")) == {0, 1, 2, 3}
    assert by_id(update, "old_logprobs")[3] == [-3]
    first, second = packed(AlgoConfig(reduction="sequence_mean"), [[1], [2, 3], [0, 2]])  # the second teaches nothing
    assert by_id(first, "weights") == {1: [1.0]}
    assert by_id(second, "weights") == {0: [0.25, 0.25]}  # 1 / (2 samples * 2 tokens)


@pytest.mark.parametrize("tokens", [100, 4])  # one micro-batch, or one for each sample
def test_values_come_back_to_their_samples(tokens: int) -> None:
    samples = [s for g in GROUPS for s in to_samples(g)]
    weights: list[list[float]] = []

    def forward(given: Sequence[MicroBatch]) -> list[np.ndarray]:
        weights.extend(batch.weights.tolist() for batch in given)
        return [tokens_of(batch, NOW) for batch in given]

    every = per_sample(samples, forward, packer(tokens))
    assert [v.tolist() for v in every] == [[-1.0, -1.5], [-2.0], [-2.5], [-3.0, -3.5]]
    assert {w for of_batch in weights for w in of_batch} == {0.0}  # no loss is computed from these
    some = per_sample(samples, forward, packer(tokens), [3, 1])
    assert [v.tolist() for v in some] == [[0, 0], [-2.0], [0], [-3.0, -3.5]]
    assert {v.dtype for v in [*every, *some]} == {np.dtype(np.float32)}
    none = per_sample(samples, lambda given: [] if not given else [np.zeros(0)], packer(tokens), [])
    assert [v.tolist() for v in none] == [[0, 0], [0], [0], [0, 0]]


# --- everything before an update --------------------------------------------------------------------------------------


def test_no_groups_are_no_batch(models: Models) -> None:
    assert models.prepare([], AlgoConfig(kl=KLConfig(coef=0.1))) == Batch((), ())
    assert models.asked == []


def test_without_a_penalty_and_with_one_update_nothing_is_computed(models: Models) -> None:
    batch = models.prepare(GROUPS, AlgoConfig(advantage="dr_grpo"))
    assert models.asked == []
    (update,) = batch.minibatches
    assert by_id(update, "advantages") == {0: [0.5, 0.5], 1: [-0.5], 2: [-1.0], 3: [1.0, 1.0]}
    assert (update[0].old_logprobs, update[0].ref_logprobs, update[0].old_values) == (None, None, None)
    assert [s.advantages.tolist() for s in batch.samples] == [[0, 0, 0.5, 0.5], [0, 0, -0.5], [0, 0, -1], [0, 0, 1, 1]]


def test_a_penalty_in_the_loss_needs_the_reference_of_every_sample(models: Models) -> None:
    batch = models.prepare([*GROUPS, EQUAL], AlgoConfig(advantage="dr_grpo", kl=KLConfig(coef=0.1)))
    assert models.asked == [("reference", [0, 1, 2, 3, 4, 5])]
    (update,) = batch.minibatches
    assert by_id(update, "ref_logprobs")[3] == pytest.approx([-3.5, -4.1])
    assert by_id(update, "ref_logprobs")[5] == pytest.approx([-1.7])
    models.asked.clear()
    models.prepare(GROUPS, AlgoConfig(kl=KLConfig(coef=0.1)), reference=False)  # as where there is none
    assert models.asked == []


def test_a_penalty_in_the_reward_by_hand(models: Models) -> None:
    """Sums of now - ref: .1 + .2, .3 | .4, .5 + .6. Rewards less half of it: .85, -.15 | -.2, 1.45."""
    algo = AlgoConfig(advantage="dr_grpo", kl=KLConfig(coef=0.5, estimator="k1", place="reward"))
    batch = models.prepare(GROUPS, algo)
    assert models.asked == [("reference", [0, 1, 2, 3]), ("policy", [0, 1, 2, 3])]
    got = by_id(batch.minibatches[0], "advantages")
    for i, expected in enumerate(([0.5, 0.5], [-0.5], [-0.825], [0.825, 0.825])):
        assert got[i] == pytest.approx(expected, abs=1e-6)
    assert batch.minibatches[0][0].old_logprobs is None


def test_with_several_updates_the_old_log_probs_also_make_the_penalty(models: Models) -> None:
    algo = AlgoConfig(advantage="dr_grpo", updates_per_rollout=2, kl=KLConfig(coef=0.5, estimator="k1", place="reward"))
    batch = models.prepare(GROUPS, algo)
    assert models.asked == [("reference", [0, 1, 2, 3]), ("policy", [0, 1, 2, 3])]  # the policy once
    first, second = batch.minibatches
    assert by_id(first, "old_logprobs") == {0: [-1.0, -1.5], 1: [-2.0]}
    assert by_id(second, "advantages")[3] == pytest.approx([0.825, 0.825])


def test_old_log_probs_are_asked_of_samples_with_a_gradient(models: Models) -> None:
    two = AlgoConfig(advantage="dr_grpo", updates_per_rollout=2)
    batch = models.prepare([GROUPS[0], EQUAL, GROUPS[1]], two)
    assert models.asked == [("policy", [0, 1, 4, 5])]
    (update,) = batch.minibatches  # that of EQUAL teaches nothing
    assert by_id(update, "old_logprobs")[5] == [-3.0, -3.5]
    models.asked.clear()
    models.prepare([GROUPS[0], EQUAL, GROUPS[1]], two.model_copy(update={"entropy_coef": 0.1}))
    assert models.asked == [("policy", [0, 1, 2, 3, 4, 5])]


def test_a_log_prob_that_is_not_finite_spoils_its_own_sample(models: Models) -> None:
    """The penalty of the others is what it was; the broken one gets NaN: its update is skipped, and it is named.

    Sample 2 has no finite penalty: its group's rewards less penalties are 0 and 1.45.
    """
    models.tables["reference"] = {**REF, 14: -np.inf}
    algo = AlgoConfig(advantage="dr_grpo", kl=KLConfig(coef=0.5, estimator="k1", place="reward"))
    got = by_id(models.prepare(GROUPS, algo).minibatches[0], "advantages")
    assert_allclose(got[0], [0.5, 0.5], atol=1e-6)
    assert np.isnan(got[2]).all()
    assert_allclose(got[3], [0.725, 0.725], atol=1e-6)


def test_values_of_a_value_head_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """gamma = lam = 1: a token's advantage is the reward less its value, whitened; its target is the reward."""
    values = {11: 0.5, 12: 0.75, 13: 0.25, 14: 0.0, 15: 1.0, 16: 1.5}
    models = Models(monkeypatch, values)
    batch = models.prepare(GROUPS, AlgoConfig(advantage="gae"))
    (update,) = batch.minibatches
    assert by_id(update, "old_values") == {0: [0.5, 0.75], 1: [0.25], 2: [0.0], 3: [1.0, 1.5]}
    assert by_id(update, "value_targets") == {0: [1.0, 1.0], 1: [0.0], 2: [0.0], 3: [2.0, 2.0]}
    raw = np.array([0.5, 0.25, -0.25, 0.0, 1.0, 0.5])  # reward - value
    white = (raw - raw.mean()) / raw.std()
    got = by_id(update, "advantages")
    assert_allclose([*got[0], *got[1], *got[2], *got[3]], white, atol=1e-5)
    models.value = {**values, 13: np.nan}
    got = by_id(models.prepare(GROUPS, AlgoConfig(advantage="gae")).minibatches[0], "advantages")
    assert np.isnan(got[1]).all()
    assert np.isfinite([*got[0], *got[2], *got[3]]).all()


def test_the_penalty_of_a_value_head_is_paid_token_by_token() -> None:
    """coef .5, gamma = lam = 1, values 0: to go are 1 - .1 - .2 and 1 - .2; then 0 - .15. Targets are these."""
    groups = [group([rollout(0, [11, 12]), rollout(1, [13])], [1.0, 0.0])]
    kl: list[list[FloatArray]] = [[np.array([0.2, 0.4], np.float32), np.array([0.3], np.float32)]]
    values: list[list[FloatArray]] = [[np.zeros(2, np.float32), np.zeros(1, np.float32)]]
    algo = AlgoConfig(advantage="gae", kl=KLConfig(coef=0.5, place="reward"))
    by_token, targets = ppo_advantages(groups, values, algo, kl)
    assert_allclose(np.concatenate(targets[0]), [0.7, 0.8, -0.15], atol=1e-6)
    assert by_token[0][0][1] > by_token[0][0][0] > 0 > by_token[0][1][0]
    discounted = algo.model_copy(update={"value": algo.value.model_copy(update={"gamma": 0.5, "lam": 0.0})})
    _, targets = ppo_advantages(groups, values, discounted, None)
    assert_allclose(np.concatenate(targets[0]), [0.0, 1.0, 0.0])  # lam 0: reward + gamma * next value


def test_a_value_head_with_a_penalty_in_the_reward_or_in_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values 0. In the reward, half of .1, .2 | .3 | .4 | .5, .6 is paid token by token; in the loss none is."""
    models = Models(monkeypatch, dict.fromkeys(NOW, 0.0))
    paid = AlgoConfig(advantage="gae", kl=KLConfig(coef=0.5, estimator="k1", place="reward"))
    targets = by_id(models.prepare(GROUPS, paid).minibatches[0], "value_targets")
    for i, expected in enumerate(([0.85, 0.9], [-0.15], [-0.2], [1.45, 1.7])):
        assert targets[i] == pytest.approx(expected, abs=1e-6)
    update = models.prepare(GROUPS, AlgoConfig(advantage="gae", kl=KLConfig(coef=0.5))).minibatches[0]
    assert by_id(update, "value_targets")[0] == [1.0, 1.0]
    assert by_id(update, "ref_logprobs")[1] == pytest.approx([-2.3])


def test_the_limit_of_the_sampling_is_that_of_the_reduction(models: Models) -> None:
    (update,) = models.prepare(GROUPS, AlgoConfig(reduction="constant")).minibatches
    assert by_id(update, "weights")[0] == pytest.approx([0.05, 0.05])  # 1 / (4 samples * 5 tokens)


def test_a_forward_pass_that_leaves_micro_batches_out_is_an_error() -> None:
    samples = [s for g in GROUPS for s in to_samples(g)]
    with pytest.raises(ValueError, match="zip"):
        per_sample(samples, lambda given: [], packer())
