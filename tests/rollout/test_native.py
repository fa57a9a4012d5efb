"""The native engine against transformers: `generate` for the tokens, a full forward pass for the log-probs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hone.base.settings import UserError
from hone.model.linear import available, onednn
from hone.model.scoring import Scoring
from hone.recipe.sections.rollout import RolloutConfig, SamplingConfig
from hone.rollout.native import NativeEngine
from hone.rollout.native.attention import Grid, decode_attention
from hone.rollout.native.memory import Budget
from hone.rollout.native.requests import Request
from hone.rollout.native.scheduler import Queue
from hone.types import IntArray, Turn

VOCAB = 48
STOPS = (5, 9, 17)
EQUAL = (9, 9, 9, 9)
MIXED = (7, 12, 3, 12, 1)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These models are too small for two: threads waiting for each other would take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _model(architecture: str = "qwen2", vocab: int = VOCAB) -> PreTrainedModel:
    sizes: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,  # large weights: outputs that depend on the whole context
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(1)
    model: PreTrainedModel
    if architecture == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    elif architecture == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(head_dim=16, **sizes))
    else:
        model = LlamaForCausalLM(LlamaConfig(**{**sizes, "num_key_value_heads": 1}))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero by default, and then a forgotten one would not show
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def _prompts(lengths: Sequence[int], vocab: int = VOCAB) -> list[IntArray]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, vocab, n) for n in lengths]


def _generate(model: PreTrainedModel, prompts: list[IntArray], stops: Sequence[int], n: int) -> list[list[int]]:
    """transformers' greedy completions, cut after the first stop token."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p.tolist() for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    model.set_attn_implementation("sdpa")
    out = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=n, eos_token_id=list(stops) or None, pad_token_id=0
    )
    rows = []
    for row in out[:, longest:].tolist():
        ends = [i for i, token in enumerate(row) if token in stops]
        rows.append(row[: ends[0] + 1] if ends else row)
    return rows


def _full_logprobs(model: PreTrainedModel, turn: Turn, temperature: float = 1.0) -> torch.Tensor:
    """The log-probabilities [Lc] of a completion, from one ordinary forward pass."""
    ids = torch.from_numpy(np.concatenate([turn.prompt_ids, turn.completion_ids]))[None]
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, len(turn.prompt_ids) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.from_numpy(turn.completion_ids)[:, None])[:, 0]


def _tokens(turns: list[list[Turn]]) -> list[list[list[int]]]:
    return [[turn.completion_ids.tolist() for turn in group] for group in turns]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("lengths", [EQUAL, MIXED])
@pytest.mark.parametrize("stopping", [False, True])
def test_greedy_equals_generate(architecture: str, lengths: tuple[int, ...], stopping: bool) -> None:
    model, prompts = _model(architecture), _prompts(lengths)
    stops: tuple[int, ...] = ()
    expected = _generate(model, prompts, stops, 30)
    if stopping:
        stops = (expected[0][8], expected[1][20])
        expected = _generate(model, prompts, stops, 30)
        assert len({len(row) for row in expected}) > 1
    for samples in (1, 16):
        for max_sequences in (512, 7):  # 7: groups are split, finished rows replaced
            engine = NativeEngine(model, stops, RolloutConfig(max_sequences=max_sequences))
            turns = engine.generate(prompts, SamplingConfig(temperature=0.0, max_tokens=30), samples=samples, seed=0)
            assert _tokens(turns) == [[row] * samples for row in expected]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("max_sequences", [512, 6])
def test_logprobs_equal_a_full_forward_pass(architecture: str, max_sequences: int) -> None:
    model, prompts = _model(architecture), _prompts(MIXED)
    engine = NativeEngine(model, STOPS, RolloutConfig(max_sequences=max_sequences), version=3)
    turns = engine.generate(prompts, SamplingConfig(temperature=1.3, max_tokens=40), samples=5, seed=1)
    for prompt, group in zip(prompts, turns):
        assert len({tuple(turn.completion_ids) for turn in group}) == 5
        for turn in group:
            assert np.array_equal(turn.prompt_ids, prompt)
            assert turn.policy_version == 3
            expected = _full_logprobs(model, turn, 1.3)
            torch.testing.assert_close(torch.from_numpy(turn.logprobs), expected, rtol=0, atol=1e-5)


def test_greedy_logprobs_are_the_models_own() -> None:
    model = _model()
    turns = NativeEngine(model, (), RolloutConfig()).generate(
        _prompts(MIXED), SamplingConfig(temperature=0.0, max_tokens=8), samples=1, seed=0
    )
    for (turn,) in turns:
        expected = _full_logprobs(model, turn)
        assert expected.max() < -1e-3
        torch.testing.assert_close(torch.from_numpy(turn.logprobs), expected, rtol=0, atol=1e-5)


def test_finish_says_how_each_completion_ended() -> None:
    turns = NativeEngine(_model(), STOPS, RolloutConfig(max_sequences=5)).generate(
        _prompts(MIXED), SamplingConfig(max_tokens=12, temperature=1.5), samples=8, seed=2
    )
    finishes = [turn.finish for group in turns for turn in group]
    assert {"stop", "length"} == set(finishes)
    for group in turns:
        for turn in group:
            *body, last = turn.completion_ids.tolist()
            assert not set(body) & set(STOPS)
            assert (turn.finish == "stop") == (last in STOPS)
            assert turn.finish == "stop" or len(turn.completion_ids) == 12


def test_frequencies_match_the_distribution() -> None:
    model, n = _model(vocab=6), 3000
    (prompt,) = _prompts([5], vocab=6)
    (group,) = NativeEngine(model, (), RolloutConfig()).generate(
        [prompt], SamplingConfig(max_tokens=2, temperature=4.0), samples=n, seed=5
    )
    pairs = torch.tensor([[a, b] for a in range(6) for b in range(6)])
    ids = torch.cat([torch.from_numpy(prompt).expand(36, -1), pairs], dim=1)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        logprobs = (model(ids, use_cache=False).logits[:, 4:6] / 4.0).log_softmax(-1)  # [36, 2, 6]
    probs = logprobs.gather(2, pairs[:, :, None]).sum((1, 2)).exp().double()
    counts = np.bincount([6 * t.completion_ids[0] + t.completion_ids[1] for t in group], minlength=36)
    assert probs.min() * n > 1
    assert chisquare(counts, (probs / probs.sum() * n).numpy()).pvalue > 1e-3
    assert chisquare(counts, np.roll((probs / probs.sum() * n).numpy(), 1)).pvalue < 1e-9


def test_a_sample_does_not_depend_on_what_else_is_in_the_batch() -> None:
    # The random numbers never do; that the tokens do not either needs equal arithmetic up to rounding, as here.
    model, prompts = _model(), _prompts(MIXED)
    sampling = SamplingConfig(max_tokens=25)

    def run(max_sequences: int, samples: int, count: int, seed: int = 0) -> list[list[list[int]]]:
        engine = NativeEngine(model, STOPS, RolloutConfig(max_sequences=max_sequences))
        return _tokens(engine.generate(prompts[:count], sampling, samples=samples, seed=seed))

    reference = run(512, 6, len(prompts))
    assert run(3, 6, len(prompts)) == reference
    assert run(1, 6, len(prompts)) == reference
    assert run(512, 6, 2) == reference[:2]
    assert run(512, 2, len(prompts)) == [group[:2] for group in reference]
    assert run(512, 6, len(prompts), seed=1) != reference


def test_two_runs_are_bit_identical() -> None:
    model, prompts = _model(), _prompts(MIXED)
    runs = [
        NativeEngine(model, STOPS, RolloutConfig(max_sequences=8)).generate(
            prompts, SamplingConfig(max_tokens=25), samples=6, seed=0
        )
        for _ in range(2)
    ]
    for a, b in zip(*runs):
        for x, y in zip(a, b):
            assert np.array_equal(x.completion_ids, y.completion_ids)
            assert np.array_equal(x.logprobs, y.logprobs)


def test_suffixes_outgrow_their_first_capacity() -> None:
    model = _model()
    (group,) = NativeEngine(model, (), RolloutConfig()).generate(
        _prompts([8]), SamplingConfig(max_tokens=120), samples=3, seed=0
    )
    for turn in group:
        assert len(turn.completion_ids) == 120
        torch.testing.assert_close(torch.from_numpy(turn.logprobs), _full_logprobs(model, turn), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("length", "max_tokens", "message"),
    [
        (100, 40, r"prompt 1 has 100 tokens and may be followed by 40: 140 .* 128 .*max_tokens to 28 or less"),
        (128, 1, r"prompt 1 has 128 tokens and leaves no room .* 128 .* shorten or drop"),
        (0, 1, r"prompt 1 is empty"),
    ],
)
def test_prompts_without_room_are_refused(length: int, max_tokens: int, message: str) -> None:
    engine = NativeEngine(_model(), (), RolloutConfig())
    prompts = [_prompts([3])[0], np.ones(length, dtype=np.int64)]
    with pytest.raises(UserError, match=message):
        engine.generate(prompts, SamplingConfig(max_tokens=max_tokens), samples=1, seed=0)


def test_a_prompt_and_completion_may_fill_the_context() -> None:
    ((turn,),) = NativeEngine(_model(), (), RolloutConfig()).generate(
        _prompts([100]), SamplingConfig(max_tokens=28), samples=1, seed=0
    )
    assert len(turn.completion_ids) == 28


def test_progress_counts_up_to_the_total() -> None:
    seen: list[tuple[int, int]] = []
    NativeEngine(_model(), STOPS, RolloutConfig(max_sequences=4)).generate(
        _prompts(MIXED),
        SamplingConfig(max_tokens=10),
        samples=3,
        seed=0,
        progress=lambda done, total: seen.append((done, total)),
    )
    done = [d for d, _ in seen]
    assert {total for _, total in seen} == {15}
    assert done == sorted(set(done))
    assert done[-1] == 15
    assert len(done) > 3


def test_the_model_is_left_as_it_was_even_after_an_error() -> None:
    model = _model()
    model.set_attn_implementation("sdpa")
    model.train()
    engine = NativeEngine(model, STOPS, RolloutConfig())
    engine.generate(_prompts([4]), SamplingConfig(max_tokens=3), samples=2, seed=0)
    assert (model.config._attn_implementation, model.training) == ("sdpa", True)
    with pytest.raises(IndexError):
        engine.generate([np.array([VOCAB + 7])], SamplingConfig(max_tokens=3), samples=1, seed=0)
    assert (model.config._attn_implementation, model.training) == ("sdpa", True)
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.skipif(not available(), reason="this machine keeps PyTorch's own matrix products")
@pytest.mark.parametrize("frozen", [False, True])
def test_onednn_differs_in_rounding_only_and_is_gone_afterwards(frozen: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 32, bias=False))
    others = torch.nn.Linear(32, 8)
    vars(others)["forward"] = own = lambda x: x[..., :8]  # as accelerate and others do
    model.append(others)
    x = torch.randn(5, 3, 64)
    plain, exact = model(x), x.double()
    for layer in list(model)[:2]:
        exact = torch.nn.functional.linear(
            exact, layer.weight.double(), None if layer.bias is None else layer.bias.double()
        )
    with onednn(model, frozen), torch.no_grad():
        assert "forward" in vars(model[0])
        fast = model(x)
    torch.testing.assert_close(fast.double(), exact[..., :8], rtol=0, atol=1e-5)
    torch.testing.assert_close(fast, plain, rtol=0, atol=1e-5)
    assert "forward" not in vars(model[0])
    assert vars(others)["forward"] is own
    model(x).sum().backward()
    assert model[0].weight.grad is not None


def test_sync_serves_the_policy_and_its_version() -> None:
    old, new, prompts = _model(), _model("llama"), _prompts(EQUAL)
    engine = NativeEngine(old, (), RolloutConfig())
    policy: Any = SimpleNamespace(model=new)
    engine.sync(policy, version=8)
    turns = engine.generate(prompts, SamplingConfig(temperature=0.0, max_tokens=12), samples=1, seed=0)
    assert [turn.policy_version for (turn,) in turns] == [8] * 4
    assert [turn.completion_ids.tolist() for (turn,) in turns] == _generate(new, prompts, (), 12)


def test_weights_that_changed_in_place_are_served() -> None:
    """Layers laid out anew for generation must not outlive it: that would serve stale weights."""
    model, prompts, sampling = _model(), _prompts(EQUAL), SamplingConfig(temperature=0.0, max_tokens=12)
    engine = NativeEngine(model, (), RolloutConfig())
    before = engine.generate(prompts, sampling, samples=1, seed=0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(-1.0)
    after = engine.generate(prompts, sampling, samples=1, seed=0)
    said = [turn.completion_ids.tolist() for (turn,) in after]
    assert said != [turn.completion_ids.tolist() for (turn,) in before]
    assert said == _generate(model, prompts, (), 12)


def test_nothing_to_do() -> None:
    engine = NativeEngine(_model(), (), RolloutConfig())
    assert engine.generate([], SamplingConfig(), samples=2, seed=0) == []
    with pytest.raises(ValueError, match="samples is 0"):
        engine.generate(_prompts([3]), SamplingConfig(max_tokens=2), samples=0, seed=0)


def test_a_group_is_never_split_more_than_it_must_be() -> None:
    requests = {i: Request(np.ones(n, np.int64), SamplingConfig(), samples=2) for i, n in enumerate([3, 9, 9])}
    queue = Queue(Budget(10_000, 1), max_sequences=3)
    queue.add(requests)
    assert queue.take([], requests) == [(1, 0), (1, 1), (2, 0)]  # longest first, whole groups
    assert queue.waits(2)
    assert not queue.waits(1)
    queue.add({3: requests[1]})  # a longer prompt that comes later waits its turn
    assert queue.take([], requests) == [(2, 1), (0, 0), (0, 1)]
    assert not queue.waits(0)


@pytest.mark.parametrize("prompts", [[0, 0, 1, 1], [1, 0, 1, 1, 2, 0], [0]])
def test_decode_attention_equals_attention_row_by_row(prompts: list[int]) -> None:
    torch.manual_seed(0)
    count, rows, lengths = max(prompts) + 1, len(prompts), [5, 3, 4]
    query = torch.randn(rows, 4, 1, 8)
    keys, values = torch.randn(2, count, 5, 8), torch.randn(2, count, 5, 8)
    own_keys, own_values = torch.randn(2, rows, 6, 8), torch.randn(2, rows, 6, 8)
    starts = [row % 4 for row in range(rows)]
    mask = torch.zeros(rows, 11)
    for row, prompt in enumerate(prompts):
        mask[row, lengths[prompt] : 5] = -torch.inf
        mask[row, 5 : 5 + starts[row]] = -torch.inf
    grid = Grid.of(prompts, count, torch.device("cpu"))
    assert grid.regular == (prompts != [1, 0, 1, 1, 2, 0])
    out = decode_attention(query, (keys, values), (own_keys, own_values), grid, mask, Scoring(0.3))
    for row, prompt in enumerate(prompts):
        for head in range(4):
            k = torch.cat([keys[head // 2, prompt, : lengths[prompt]], own_keys[head // 2, row, starts[row] :]])
            v = torch.cat([values[head // 2, prompt, : lengths[prompt]], own_values[head // 2, row, starts[row] :]])
            expected = (k @ query[row, head, 0] * 0.3).softmax(0) @ v
            torch.testing.assert_close(out[row, 0, head], expected, rtol=0, atol=1e-6)
