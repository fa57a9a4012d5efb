"""The running batch: requests that come and go, each with settings of its own; stop strings; the memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from hone.base.settings import UserError
from hone.model import linear
from hone.recipe.sections.rollout import RolloutConfig, SamplingConfig
from hone.rollout.native import NativeEngine
from hone.rollout.native import core as core_module
from hone.rollout.native.core import Core
from hone.rollout.native.memory import Budget, columns
from hone.rollout.native.requests import Request
from hone.types import Turn

STOPS = (5, 9)
#: Token i reads as two letters, so that a stop string of three lies across tokens.
PIECES = [chr(97 + i // 8) + chr(97 + i % 8) for i in range(48)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    return _model()


def _model(**more: Any) -> Qwen2ForCausalLM:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 256, **more}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, initializer_range=0.2, eos_token_id=None)).eval()


def _text(ids: Sequence[int]) -> str:
    return "".join(PIECES[i] for i in ids)


def _engine(model: Qwen2ForCausalLM, stops: Sequence[int] = STOPS, **config: Any) -> NativeEngine:
    return NativeEngine(model, stops, RolloutConfig(**config), decode=_text)


def _request(n: int, seed: int = 0, samples: int = 1, **sampling: Any) -> Request:
    prompt = np.random.default_rng(n).integers(1, 48, n)
    return Request(prompt, SamplingConfig(**{"max_tokens": 30, **sampling}), seed=seed, samples=samples)


def _finish(core: Core) -> dict[tuple[int, int], Turn]:
    done: dict[tuple[int, int], Turn] = {}
    while core.busy:
        for out in core.step():
            if out.turn is not None:
                assert (out.request, out.sample) not in done
                done[out.request, out.sample] = out.turn
    return done


def _alone(model: Qwen2ForCausalLM, request: Request, stops: Sequence[int] = STOPS) -> list[Turn]:
    with _engine(model, stops).open() as core:
        core.submit([request])
        done = _finish(core)
    return [done[0, sample] for sample in range(request.samples)]


REQUESTS = (
    _request(7, seed=3, samples=3, temperature=1.3),
    _request(12, temperature=0.0, samples=2),
    _request(3, seed=8, top_p=0.8, max_tokens=45),
    _request(12, seed=9, samples=4, top_k=5, temperature=0.7),
    _request(20, seed=3, min_p=0.1, max_tokens=5),
    _request(1, seed=2, samples=2, stop=("ab", "cad"), max_tokens=60),
)


@pytest.mark.parametrize("max_sequences", [512, 4])
def test_requests_of_all_kinds_in_one_batch_get_what_they_get_alone(
    model: Qwen2ForCausalLM, max_sequences: int
) -> None:
    # Random numbers never depend on the batch; here the arithmetic, up to rounding, does not change a token either.
    expected = [_alone(model, request) for request in REQUESTS]
    with _engine(model, max_sequences=max_sequences).open() as core:
        numbers = core.submit(REQUESTS[:2])
        done: dict[tuple[int, int], Turn] = {}
        for request in REQUESTS[2:]:  # the others come while the first are running
            for _ in range(3):
                done |= {(o.request, o.sample): o.turn for o in core.step() if o.turn is not None}
            numbers += core.submit([request])
        done |= _finish(core)
    assert len({len(turn.completion_ids) for turn in done.values()}) > 4
    for number, turns in zip(numbers, expected):
        for sample, turn in enumerate(turns):
            assert done[number, sample].completion_ids.tolist() == turn.completion_ids.tolist()
            assert done[number, sample].finish == turn.finish
            np.testing.assert_allclose(done[number, sample].logprobs, turn.logprobs, rtol=0, atol=1e-5)


def test_a_seed_decides_and_streams_of_one_seed_differ(model: Qwen2ForCausalLM) -> None:
    prompt, sampling = REQUESTS[0].prompt_ids, SamplingConfig(max_tokens=30, temperature=1.3)
    keys = [(1, 0), (2, 0), (1, 1), (1, 0)]
    with _engine(model).open() as core:
        core.submit([Request(prompt, sampling, seed, stream) for seed, stream in keys])
        a, b, c, again = [turn.completion_ids.tolist() for _, turn in sorted(_finish(core).items())]
    assert a == again
    assert len({tuple(a), tuple(b), tuple(c)}) == 3


def test_a_stop_string_ends_with_the_token_that_completes_it(model: Qwen2ForCausalLM) -> None:
    free = _alone(model, _request(6, seed=1, samples=6, max_tokens=40), stops=())
    for length in (2, 3, 5):
        stop = _text(free[0].completion_ids)[31 : 31 + length]  # from the middle of a token on
        cut = _alone(model, _request(6, seed=1, samples=6, max_tokens=40, stop=(stop,)), stops=())
        for whole, turn in zip(free, cut):
            text = _text(whole.completion_ids)
            ends = [i for i in range(1, 41) if stop in text[: 2 * i]]
            assert len(turn.completion_ids) == (ends[0] if ends else 40)
            assert turn.completion_ids.tolist() == whole.completion_ids.tolist()[: len(turn.completion_ids)]
            assert turn.finish == ("stop" if ends else "length")
            assert not ends or stop in _text(turn.completion_ids)
        assert cut[0].finish == "stop"


def test_a_stop_string_that_the_last_token_allowed_completes(model: Qwen2ForCausalLM) -> None:
    (free,) = _alone(model, _request(6, seed=1), stops=())
    stop = (_text(free.completion_ids[:10])[-3:],)
    first = next(i for i in range(1, 31) if stop[0] in _text(free.completion_ids[:i]))
    (turn,) = _alone(model, _request(6, seed=1, max_tokens=first, stop=stop), stops=())
    assert (turn.finish, len(turn.completion_ids)) == ("stop", first)
    (turn,) = _alone(model, _request(6, seed=1, max_tokens=first - 1, stop=stop), stops=())
    assert turn.finish == "length"


def test_generate_takes_stop_strings_too(model: Qwen2ForCausalLM) -> None:
    sampling = SamplingConfig(max_tokens=60, stop=("ab", "c"))
    groups = _engine(model).generate([_request(9).prompt_ids], sampling, samples=8, seed=0)
    ends = {turn.finish for turn in groups[0]}
    assert "stop" in ends
    for turn in groups[0]:
        body, last = turn.completion_ids[:-1], int(turn.completion_ids[-1])
        assert not any(stop in _text(body) for stop in sampling.stop)
        assert (turn.finish == "stop") == (last in STOPS or any(s in _text(turn.completion_ids) for s in sampling.stop))


def test_stop_strings_need_a_decoder(model: Qwen2ForCausalLM) -> None:
    engine = NativeEngine(model, STOPS, RolloutConfig())
    with pytest.raises(ValueError, match="decode"):
        engine.generate([np.array([1])], SamplingConfig(stop=("a",)), samples=1, seed=0)


def test_streamed_tokens_joined_are_the_turn(model: Qwen2ForCausalLM) -> None:
    streamed = Request(REQUESTS[0].prompt_ids, REQUESTS[0].sampling, seed=3, samples=3, streamed=True)
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    pieces = 0
    with _engine(model).open() as core:
        core.submit([streamed, REQUESTS[1]])
        while core.busy:
            for out in core.step():
                if out.request == 0:
                    seen[out.sample] += out.tokens.tolist()
                    pieces += 1
                    assert out.turn is None or out.turn.completion_ids.tolist() == seen[out.sample]
                else:
                    assert out.turn is not None
                    assert out.tokens.tolist() == out.turn.completion_ids.tolist()
    expected = [turn.completion_ids.tolist() for turn in _alone(model, REQUESTS[0])]
    assert list(seen.values()) == expected
    assert pieces > 20


def test_a_cancelled_request_ends_and_leaves_the_others_alone(model: Qwen2ForCausalLM) -> None:
    with _engine(model, (), max_sequences=5).open() as core:
        first, waiting, other = core.submit([_request(7, samples=3), _request(6, samples=9), _request(5, samples=2)])
        for _ in range(6):
            core.step()
        core.cancel(first)
        core.cancel(waiting)
        core.cancel(99)
        done = _finish(core)
        assert not core.busy
    assert len(done) == 14
    for (number, _), turn in done.items():
        assert turn.finish == ("length" if number == other else "abort")
        assert len(turn.completion_ids) == 30 if number == other else len(turn.completion_ids) < 10
    assert [done[other, 0].completion_ids.tolist(), done[other, 1].completion_ids.tolist()] == [
        turn.completion_ids.tolist() for turn in _alone(model, _request(5, samples=2), stops=())
    ]


def test_a_finished_row_is_reported_before_its_place_is_given_away(model: Qwen2ForCausalLM) -> None:
    with _engine(model, ()).open() as core:
        short, *_ = core.submit([_request(4, max_tokens=3), *[_request(4 + i, max_tokens=40) for i in range(15)]])
        steps = 0
        while not any(out.request == short for out in core.step()):
            steps += 1
        assert steps == 2  # one in sixteen: too few to move the others
        _finish(core)


# --- memory ----------------------------------------------------------------------------------


def test_the_model_sees_few_shapes_and_what_is_said_is_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: set[tuple[int, ...]] = set()
    model = _model(intermediate_size=64)  # whole vectors: else the last of them is rounded as scalars are

    def note(_: Any, inputs: Any, __: Any) -> None:
        shapes.add(tuple(inputs[0].shape))

    def run() -> dict[tuple[int, int], Turn]:
        shapes.clear()
        with _engine(model).open() as core:
            core._pads = True  # also where oneDNN is not used
            core.submit(REQUESTS)
            return _finish(core)

    model.get_input_embeddings().register_forward_hook(note)
    padded = run()
    assert {rows for rows, tokens in shapes if tokens == 1} <= {1, 8, 16}
    assert {tokens for rows, tokens in shapes if tokens > 1} == {128}
    if linear.available():  # other libraries round a row otherwise when there are more of them
        monkeypatch.setattr(core_module, "padded_rows", lambda rows: rows)
        monkeypatch.setattr(core_module, "padded_prompt", lambda tokens: tokens)
        plain = run()
        assert len(shapes) > 4
        for work, turn in plain.items():
            assert np.array_equal(turn.completion_ids, padded[work].completion_ids)
            assert np.array_equal(turn.logprobs, padded[work].logprobs)


def test_bytes_per_token_are_those_of_the_model(model: Qwen2ForCausalLM) -> None:
    budget = Budget.of(model, 0.5)
    assert budget.bytes_per_token == 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head size, float32
    assert budget.tokens == (1 << 29) // 256
    assert Budget.of(model, None).tokens > 1 << 20  # a quarter of any machine
    assert [columns(1), columns(64), columns(200)] == [2, 96, 232]


def test_waiting_requests_queue_for_memory_and_the_cache_stays_within_it(model: Qwen2ForCausalLM) -> None:
    requests = [_request(10 + 3 * i, seed=i, samples=3, max_tokens=20 + 25 * (i % 3)) for i in range(6)]
    expected = [[turn.completion_ids.tolist() for turn in _alone(model, request)] for request in requests]
    tokens = 700
    most_rows = 0
    with _engine(model, kv_cache_gib=tokens * 256 / (1 << 30)).open() as core:
        core.submit(requests)
        done: dict[tuple[int, int], Turn] = {}
        while core.busy:
            done |= {(o.request, o.sample): o.turn for o in core.step() if o.turn is not None}
            cache = core._cache
            held = len(cache.lengths) * max(cache.lengths.values(), default=0)
            assert held + len(cache.row_prompts) * cache.capacity <= tokens
            most_rows = max(most_rows, len(cache.row_prompts))
    assert 2 <= most_rows < 12
    assert [[done[i, g].completion_ids.tolist() for g in range(3)] for i in range(6)] == expected


def test_a_request_that_could_never_fit_is_refused_with_the_numbers(model: Qwen2ForCausalLM) -> None:
    engine = _engine(model, kv_cache_gib=100 * 256 / (1 << 30))
    small, large = _request(20, max_tokens=30), _request(20, max_tokens=60)
    with engine.open() as core:
        with pytest.raises(UserError, match=r"prompt 0 needs .* GiB .* 20 prompt tokens and up to 60 .*kv_cache_gib"):
            core.submit([small, large])
        assert not core.busy  # neither was taken
        core.submit([small])
        assert len(_finish(core)) == 1


def test_a_long_answer_waits_and_is_not_overtaken(model: Qwen2ForCausalLM) -> None:
    order = []
    with _engine(model, (), kv_cache_gib=300 * 256 / (1 << 30)).open() as core:
        first, large, small = [
            core.submit([_request(10, max_tokens=n, samples=g)])[0] for n, g in ((40, 2), (110, 1), (10, 1))
        ]
        while core.busy:
            order += [out.request for out in core.step() if out.turn is not None]
    assert order[:2] == [first, first]
    assert set(order) == {first, large, small}


# --- log-probs for scoring -------------------------------------------------------------------


def _reference(model: Qwen2ForCausalLM, ids: np.ndarray) -> torch.Tensor:
    """Log-probs [L, V] of what follows each token, from one ordinary forward pass."""
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        return model(torch.from_numpy(ids)[None], use_cache=False).logits[0].log_softmax(-1)


def test_prompt_scores_and_likeliest_tokens_equal_a_full_forward_pass(model: Qwen2ForCausalLM) -> None:
    sampling = [
        SamplingConfig(temperature=0.0, max_tokens=6),
        SamplingConfig(temperature=0.5, top_k=2, max_tokens=9),
        SamplingConfig(temperature=1.5, max_tokens=4),
    ]
    prompts = [np.random.default_rng(n).integers(1, 48, n) for n in (9, 1, 14)]
    requests = [
        Request(prompt, s, top_logprobs=k, echo=echo)
        for prompt, s, k, echo in zip(prompts, sampling, (3, 4, 0), (True, True, False))
    ]
    with _engine(model, ()).open() as core:
        core.submit(requests)
        outputs = [out for _ in iter(lambda: core.busy, False) for out in core.step()]
    scores = {out.request: out.prompt for out in outputs if out.prompt is not None}
    turns = {out.request: out.turn for out in outputs if out.turn is not None}
    assert set(scores) == {0, 1}
    for i, k in ((0, 3), (1, 4)):
        turn, prompt = turns[i], scores[i]
        assert turn is not None
        assert prompt is not None
        n = len(prompts[i])
        logprobs = _reference(model, np.concatenate([turn.prompt_ids, turn.completion_ids]))
        own = logprobs[: n - 1].gather(1, torch.from_numpy(prompts[i][1:])[:, None])[:, 0]
        np.testing.assert_allclose(prompt.logprobs[1:], own, rtol=0, atol=1e-5)
        assert np.isnan(prompt.logprobs[0])
        values, ids = logprobs[: n - 1].topk(max(3, k))
        np.testing.assert_allclose(prompt.top_logprobs[1:, :k], values[:, :k], rtol=0, atol=1e-5)
        assert prompt.top_ids[1:, :k].tolist() == ids[:, :k].tolist()
        tops = [out.top for out in outputs if out.request == i and len(out.tokens)]
        top_ids = np.concatenate([top.ids for top in tops if top is not None])
        top_values = np.concatenate([top.logprobs for top in tops if top is not None])
        said = logprobs[n - 1 : -1]
        if sampling[i].temperature:
            said = (said / 0.5).topk(2)[0].log_softmax(-1)
            assert (top_values[:, 2:] == -np.inf).all()
            np.testing.assert_allclose(top_values[:, :2], said, rtol=0, atol=1e-5)
        else:
            np.testing.assert_allclose(top_values, said.topk(3)[0], rtol=0, atol=1e-5)
            assert top_ids[:, 0].tolist() == turn.completion_ids.tolist()
            np.testing.assert_allclose(top_values[:, 0], turn.logprobs, rtol=0, atol=1e-6)
        assert all(token in row for token, row in zip(turn.completion_ids, top_ids)) or i == 1
    assert all(out.top is None for out in outputs if out.request == 2)
