"""Oracles: integer arithmetic for the hash, transformers' logits processors for the filters."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hone.recipe.sections.rollout import SamplingConfig
from hone.rollout.native.sampler import likeliest, mix, sample, sample_mix, uniforms

LARGEST = 1.0 - 2.0**-24  # the largest number that `uniforms` gives


def _splitmix(x: int) -> int:
    x &= 2**64 - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def test_uniforms_are_the_documented_hash_in_integer_arithmetic() -> None:
    golden = 0x9E3779B97F4A7C15
    for seed, prompt, sample_, position in ((0, 0, 0, 0), (7, 3, 11, 5), (2**63 + 5, 10**6, 15, 127)):
        key = _splitmix(seed + golden)
        key = _splitmix(key ^ _splitmix((prompt + 1) * golden))
        key = _splitmix(key ^ _splitmix((sample_ + 1) * golden))
        expected = (_splitmix(key + (position + 1) * golden) >> 40) / 2**24
        assert uniforms(seed, [prompt], [sample_], 200)[0, position] == expected


def test_uniforms_depend_on_every_part_of_the_key_and_on_nothing_else() -> None:
    base = uniforms(1, [4], [2], 64)[0]
    assert np.array_equal(uniforms(1, [9, 4, 4], [0, 2, 3], 100)[1, :64], base)
    for other in (uniforms(2, [4], [2], 64), uniforms(1, [5], [2], 64), uniforms(1, [4], [3], 64)):
        assert (other[0] == base).sum() == 0
    assert (uniforms(1, [2], [4], 64)[0] == base).sum() == 0  # prompt and sample are not interchangeable


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    draws = uniforms(3, np.repeat(np.arange(40), 25), np.tile(np.arange(25), 40), 200)  # [1000, 200]
    assert draws.min() >= 0.0
    assert draws.max() <= LARGEST
    counts = np.bincount((draws.ravel() * 100).astype(int), minlength=100)
    assert (((counts - 2000) ** 2) / 2000).sum() < 150  # chi-square, 99 degrees: 0.1 % is at 148
    for a, b in ((draws[:, :-1], draws[:, 1:]), (draws[:-1], draws[1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.01  # 4.5 standard deviations


@pytest.mark.parametrize("vocab", [1, 5, 64, 500, 512])
def test_each_token_gets_its_share_of_the_unit_interval(vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(1, vocab) * 3
    n = 40_000
    draws = (torch.arange(n) + 0.5) / n
    tokens, logprobs = sample(logits.expand(n, -1), draws, SamplingConfig(temperature=0.8))
    probs = (logits[0].double() / 0.8).softmax(0)
    share = torch.bincount(tokens, minlength=vocab) / n
    assert (share - probs).abs().max() < 1.5 / n + 1e-6
    assert torch.equal(tokens, tokens.sort().values)  # the inverse of a distribution function is monotone
    torch.testing.assert_close(logprobs, probs.log().float()[tokens], rtol=0, atol=2e-6)


def test_a_token_of_probability_zero_is_never_drawn_and_the_last_one_can_be() -> None:
    logits = torch.full((4, 600), -math.inf)
    logits[:, 3] = 0.0
    logits[:, 597] = -10.0  # probability 4.5e-5
    draws = torch.tensor([0.0, 0.5, 1.0 - 1e-5, LARGEST])
    tokens, logprobs = sample(logits, draws, SamplingConfig())
    assert tokens.tolist() == [3, 3, 597, 597]
    assert logprobs[2].item() == pytest.approx(-10.0 - math.log1p(math.exp(-10.0)), abs=1e-5)


def test_mass_in_a_long_tail_is_not_lost_to_rounding() -> None:
    logits = torch.full((10, 100_001), math.log(1e-8 / (1 - 1e-3)))
    logits[:, 0] = 0.0  # 99.9 %, then 100 000 tokens that a float32 running sum would not notice
    tail = (sample(logits, 0.999 + torch.arange(10) * 1e-4, SamplingConfig())[0]).float()
    assert abs(tail[5].item() - 50_000) < 100
    assert (tail.diff() > 0).all()


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.9},
        {"top_p": 0.9, "min_p": 0.05},
        {"top_k": 12, "top_p": 0.8, "min_p": 0.2, "temperature": 1.5},
        {"top_p": 0.01},
        {"top_k": 1000},
    ],
)
def test_filters_keep_what_transformers_keeps_and_renormalise(settings: dict[str, float]) -> None:
    sampling = SamplingConfig.model_validate(settings)
    torch.manual_seed(0)
    logits = torch.randn(6, 80) * 2
    expected = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k:
        expected = TopKLogitsWarper(sampling.top_k)(None, expected)
    if sampling.top_p < 1:
        expected = TopPLogitsWarper(sampling.top_p)(None, expected)
    if sampling.min_p:
        expected = MinPLogitsWarper(sampling.min_p)(None, expected)
    expected = expected.log_softmax(-1)  # [6, 80]
    draws = torch.linspace(0, LARGEST, 20_000)
    for row in range(6):
        tokens, logprobs = sample(logits[row].expand(20_000, -1), draws, sampling)
        assert torch.isfinite(expected[row][tokens]).all()
        likely = (expected[row] > math.log(1e-4)).nonzero().flatten()  # of more than two of the draws
        assert set(likely.tolist()) <= set(tokens.tolist())
        torch.testing.assert_close(logprobs, expected[row][tokens], rtol=0, atol=5e-6)
        share = torch.bincount(tokens, minlength=80) / 20_000
        torch.testing.assert_close(share, expected[row].exp(), rtol=0, atol=2e-4)


def test_greedy_takes_the_first_of_the_largest_and_reports_the_models_own_logprob() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    tokens, logprobs = sample(logits, None, SamplingConfig(temperature=0.0, top_k=1))
    assert tokens.tolist() == [1]
    total = 1 + 2 * math.exp(2) + math.e
    assert logprobs.item() == pytest.approx(2 - math.log(total), abs=1e-6)


def test_half_precision_logits_are_sampled_in_single() -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, 300).to(torch.bfloat16)
    draws = torch.linspace(0, LARGEST, 8)
    tokens, logprobs = sample(logits, draws, SamplingConfig())
    torch.testing.assert_close(
        logprobs, logits.float().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1), rtol=0, atol=2e-6
    )


# --- by hand: probabilities 0.5, 0.25, 0.125, 0.125, exact in binary -----------------------------

HALVES = torch.tensor([[0.125, 0.5, 0.25, 0.125]]).log()


def _kept(**settings: float) -> list[int]:
    """The tokens that any of 64 evenly spaced numbers draws."""
    draws = (torch.arange(64) + 0.5) / 64
    tokens, _ = sample(HALVES.expand(64, -1), draws, SamplingConfig.model_validate(settings))
    return sorted(set(tokens.tolist()))


def test_filters_at_their_bounds() -> None:
    assert _kept(top_k=1) == [1]
    assert _kept(top_k=3) in ([0, 1, 2], [1, 2, 3])
    assert _kept(top_k=4) == _kept() == [0, 1, 2, 3]
    # the mass before a token must be below top_p: 0, 0.5, 0.75, 0.875
    assert _kept(top_p=0.5) == [1]
    assert _kept(top_p=0.6) == [1, 2]
    assert _kept(top_p=0.8) == [0, 1, 2]  # of equal ones the first comes first
    assert _kept(min_p=0.3) == [1, 2]
    assert _kept(min_p=0.2) == [0, 1, 2, 3]


def test_the_floor_of_min_p_is_each_rows_own() -> None:
    logits = torch.tensor([[10.0, 8.0, 0.0], [1.0, 0.9, -9.0]])
    draws = torch.tensor([LARGEST, LARGEST])
    assert sample(logits, draws, SamplingConfig(min_p=0.05))[0].tolist() == [1, 1]


def test_likeliest_by_hand() -> None:
    logs = [math.log(p) for p in (0.5, 0.25, 0.125)]
    kinds = mix([SamplingConfig()], HALVES.device)
    tokens, logprobs = likeliest(HALVES, kinds, 2)
    assert tokens.tolist() == [[1, 2]]
    assert logprobs[0].tolist() == pytest.approx(logs[:2])
    assert likeliest(HALVES, kinds, 9)[0].shape == (1, 4)
    # the same numbers as `sample` reports, with a temperature and a filter; -inf where no token is left
    kinds = mix([SamplingConfig(temperature=0.5, top_k=2)], HALVES.device)
    tokens, logprobs = likeliest(HALVES, kinds, 3)
    assert tokens[0, :2].tolist() == [1, 2]
    assert logprobs[0].tolist() == pytest.approx([math.log(0.8), math.log(0.2), -math.inf])
    # at temperature 0 the model's own
    tokens, logprobs = likeliest(3.0 + HALVES, mix([SamplingConfig(temperature=0.0)], HALVES.device), 2)
    assert tokens.tolist() == [[1, 2]]
    assert logprobs[0].tolist() == pytest.approx(logs[:2])


def test_rows_of_different_settings_by_hand() -> None:
    greedy, plain, two = SamplingConfig(temperature=0.0), SamplingConfig(), SamplingConfig(top_k=2)
    kinds = mix([plain, greedy, plain, two], HALVES.device)
    assert [(s, None if rows is None else rows.tolist()) for s, rows in kinds] == [
        (plain, [0, 2]),
        (greedy, [1]),
        (two, [3]),
    ]
    assert mix([plain, plain], HALVES.device) == [(plain, None)]
    # in the order of ids 0.125, 0.625, 0.875, 1: 0.7 is token 2 and 0.99 token 3; of the two likeliest 2/3 and 1/3
    draws = torch.tensor([0.7, 0.1, 0.99, 0.9])
    tokens, logprobs = sample_mix(HALVES.expand(4, -1), draws, kinds)
    assert tokens.tolist() == [2, 1, 3, 2]
    expected = [math.log(p) for p in (0.25, 0.5, 0.125, 1 / 3)]
    assert logprobs.tolist() == pytest.approx(expected)
    assert sample_mix(HALVES, None, mix([greedy], HALVES.device))[0].tolist() == [1]
    best, values = likeliest(HALVES.expand(4, -1), kinds, 3)
    assert best[:, 0].tolist() == [1] * 4
    assert values[3].tolist() == pytest.approx([math.log(2 / 3), math.log(1 / 3), -math.inf])


def test_each_row_may_have_a_seed_of_its_own() -> None:
    both = uniforms([1, 2], [4, 5], [2, 3], 8)
    assert np.array_equal(both[0], uniforms(1, [4], [2], 8)[0])
    assert np.array_equal(both[1], uniforms(2, [5], [3], 8)[0])
    assert both.dtype == np.float32


def test_two_kinds_of_rows_and_one() -> None:
    greedy, plain, warm = SamplingConfig(temperature=0.0), SamplingConfig(), SamplingConfig(temperature=2.0)
    two = HALVES.expand(2, -1)
    draws = torch.tensor([0.7, 0.99])
    assert sample_mix(two, draws, mix([greedy, plain], HALVES.device))[0].tolist() == [1, 3]
    assert sample_mix(two, draws, mix([plain, plain], HALVES.device))[0].tolist() == [2, 3]
    _, logprobs = likeliest(torch.stack([HALVES[0], HALVES[0] * 0]), mix([greedy, greedy], HALVES.device), 1)
    assert logprobs[:, 0].tolist() == pytest.approx([math.log(0.5), math.log(0.25)])
    _, logprobs = likeliest(HALVES, mix([warm], HALVES.device), 1)  # roots of 0.5, 0.25, 0.125, 0.125
    roots = [math.sqrt(p) for p in (0.5, 0.25, 0.125, 0.125)]
    assert logprobs.item() == pytest.approx(math.log(roots[0] / sum(roots)))
