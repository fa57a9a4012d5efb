"""Recorded decode steps. For what a GPU records stands a list of PyTorch's operations, which is run again as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hone.model.scoring import Scoring
from hone.recipe.sections.rollout import RolloutConfig, SamplingConfig
from hone.rollout.native import NativeEngine, cache
from hone.rollout.native.cache import DecodeCache, Prompt
from hone.rollout.native.graph import WORTH_STEPS, CannotRecord, GraphStep
from hone.types import Turn

#: What brings a number to Python, or has a size that depends on numbers; and what makes a tensor of Python's numbers,
#: which on a GPU is a copy from the CPU.
FORBIDDEN = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique", "lift_fresh", "repeat_interleave")


class Tape(TorchDispatchMode):
    """Keeps the operations that run, with the very tensors that they took and gave."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in FORBIDDEN:
            raise CannotRecord(f"{func} in a recorded step")
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # neither in place nor a view
                    old.copy_(new)


class TapeRecorder:
    """As a CUDA graph: the same operations on the same memory, whatever Python's variables say by then."""

    def __init__(self) -> None:
        self.rehearsed = self.recorded = self.replayed = 0

    def rehearse(self, step: Callable[[], Tensor]) -> None:
        self.rehearsed += 1
        step()

    def record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.recorded += 1
        with Tape() as tape:
            logits = step()
        logits.fill_(float("nan"))  # recording computes nothing

        def replay() -> None:
            self.replayed += 1
            tape.replay()

        return replay, logits


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _model(kind: str = "qwen2", **more: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 512} | more
    sizes |= {"initializer_range": 0.2, "eos_token_id": None}
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(head_dim=16, **sizes)).eval()
    return Qwen2ForCausalLM(Qwen2Config(**sizes)).eval()


WINDOW = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
MODELS = {"qwen2": _model(), "qwen3": _model("qwen3"), "windowed": _model(**WINDOW)}


def _engine(model: PreTrainedModel, recorder: object | None, said: list[str] | None = None, **config: Any) -> Any:
    settings = RolloutConfig(compiled=False, **config)
    events: list[str] = [] if said is None else said
    engine = NativeEngine(
        model, (5, 9), settings, decode=_text, event=lambda kind, text: events.append(f"{kind}: {text}")
    )
    engine._recorder = lambda: recorder  # type: ignore[assignment, method-assign, return-value]
    return engine


def _text(ids: Sequence[int]) -> str:
    return "".join(chr(97 + i % 26) for i in ids)


def _same(found: list[list[Turn]], expected: list[list[Turn]]) -> None:
    for group, others in zip(found, expected, strict=True):
        for turn, other in zip(group, others, strict=True):
            assert turn.completion_ids.tolist() == other.completion_ids.tolist()
            assert turn.finish == other.finish
            np.testing.assert_allclose(turn.logprobs, other.logprobs, rtol=0, atol=2e-5)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(sorted(MODELS)),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    samples=st.integers(1, 5),
    max_tokens=st.integers(1, 90),
    max_sequences=st.integers(1, 12),
    piece=st.sampled_from([WORTH_STEPS - 1, WORTH_STEPS, 40, 256]),
    sampling=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.7, 1.0]),
            "top_k": st.sampled_from([0, 5]),
            "stop": st.sampled_from([(), ("ab", "q"), ("xyz",)]),
        }
    ),
)
def test_recorded_steps_say_the_same(
    kind: str,
    lengths: list[int],
    samples: int,
    max_tokens: int,
    max_sequences: int,
    piece: int,
    sampling: dict[str, Any],
) -> None:
    """Prompts, groups, stop strings, rows that leave and enter, and a cache that outgrows its capacity."""
    prompts = [np.random.default_rng(n).integers(1, 48, n) for n in lengths]
    settings = SamplingConfig(max_tokens=max_tokens, **sampling)
    model, recorder = MODELS[kind], TapeRecorder()
    expected = _engine(model, None, max_sequences=max_sequences).generate(prompts, settings, samples=samples, seed=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "STATIC_CHUNK", piece)
        found = _engine(model, recorder, max_sequences=max_sequences).generate(
            prompts, settings, samples=samples, seed=3
        )
    _same(found, expected)
    longest = max(len(turn.completion_ids) for group in expected for turn in group)
    if longest > WORTH_STEPS and piece >= WORTH_STEPS:
        assert recorder.replayed >= longest - 2 * WORTH_STEPS
        assert 0 < recorder.recorded == recorder.rehearsed


def test_it_is_recorded_once_between_rebuilds() -> None:
    recorder = TapeRecorder()
    engine = _engine(_model(), recorder)
    engine._stops = ()
    (group,) = engine.generate([np.arange(7)], SamplingConfig(max_tokens=300), samples=2, seed=0)
    assert {len(turn.completion_ids) for turn in group} == {300}
    assert recorder.recorded == 2  # 256 columns, and those up to 300
    assert recorder.replayed == 299  # the prompt gives the first token


def test_a_model_that_looks_at_numbers_runs_without_and_it_is_said_once() -> None:
    """Rotary embeddings that rescale themselves ask for the largest position."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = _model(rope_parameters=rope)
    prompts, sampling, said = [np.arange(5), np.arange(9)], SamplingConfig(max_tokens=40), []
    expected = _engine(model, None).generate(prompts, sampling, samples=3, seed=1)
    engine = _engine(model, TapeRecorder(), said)
    _same(engine.generate(prompts, sampling, samples=3, seed=1), expected)
    assert len(said) == 1
    assert said[0].startswith(
        "decode_graph: generation runs without CUDA graphs and is slower: aten._local_scalar_dense"
    )
    assert not engine._config.compiled  # nor tried again by the next batch


def test_what_was_recorded_before_a_rebuild_is_not_replayed() -> None:
    calls: list[str] = []

    class Named(TapeRecorder):
        def record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
            self.recorded += 1
            name = str(self.recorded)
            return lambda: calls.append(name), torch.full((1, 2), float(self.recorded))

    step = GraphStep(lambda tokens, positions: torch.zeros(1, 2), Named(), pytest.fail)
    token = torch.tensor([1])
    step.forget(WORTH_STEPS)
    assert [float(step(token, token)[0, 0]) for _ in range(2)] == [1.0, 1.0]
    step.forget(WORTH_STEPS)
    assert float(step(token, token)[0, 0]) == 2.0
    step.forget(WORTH_STEPS - 1)  # not worth it
    assert float(step(token, token)[0, 0]) == 0.0
    assert calls == ["1", "1", "2"]


def test_columns_to_come_are_hidden_and_zero_by_hand() -> None:
    keys = {0: (torch.ones(1, 2, 4), torch.ones(1, 2, 4))}
    rows = DecodeCache(static=True)
    rows.rebuild([], [0], {0: Prompt(2, keys)}, steps=3, max_tokens=3, live=[])
    assert rows.capacity == 3
    x = torch.full((1, 1, 1, 4), 2.0)
    rows.attend(0, x, x, x, Scoring(0.5))
    assert rows._mask is not None
    assert rows._mask.tolist() == [[0, 0, 0, -np.inf, -np.inf]]  # the prompt, the column being written, two to come
    assert rows._layers[0].suffix[0][0, 0].sum(1).tolist() == [8.0, 0.0, 0.0]
    rows.advance()
    assert rows._mask.tolist() == [[0, 0, 0, 0, -np.inf]]
    out = rows.attend(0, x, x, x, Scoring(0.5))
    # Scores 0.5 * 2 * 1 * 4 = 4 for the prompt's two keys, 8 for both of its own.
    own = 2 * np.exp(8.0) / (2 * np.exp(8.0) + 2 * np.exp(4.0))
    np.testing.assert_allclose(out.flatten().tolist(), [2 * own + (1 - own)] * 4, rtol=1e-6)


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_says_the_same_with_graphs(dtype: torch.dtype) -> None:
    model = _model(hidden_size=256, num_attention_heads=8).to("cuda", dtype)
    prompts, sampling = [np.arange(n) for n in (5, 17, 30)], SamplingConfig(max_tokens=200, temperature=0.7)
    said: list[str] = []

    def run(compiled: bool) -> list[list[Turn]]:
        config = RolloutConfig(compiled=compiled, max_sequences=8)
        engine = NativeEngine(model, (5, 9), config, event=lambda kind, text: said.append(f"{kind}: {text}"))
        return engine.generate(prompts, sampling, samples=6, seed=3)

    with_graphs, without = run(True), run(False)
    assert not said
    for group, others in zip(with_graphs, without, strict=True):
        for turn, other in zip(group, others, strict=True):
            n = min(len(turn.completion_ids), len(other.completion_ids), 20 if dtype == torch.bfloat16 else 200)
            if dtype == torch.float32:
                assert turn.completion_ids.tolist() == other.completion_ids.tolist()
            same = (turn.completion_ids[:n] == other.completion_ids[:n]).cumprod().sum()
            np.testing.assert_allclose(
                turn.logprobs[:same], other.logprobs[:same], atol=1e-4 if dtype == torch.float32 else 0.1
            )


@pytest.mark.gpu
def test_a_gpu_is_faster_with_graphs() -> None:
    import time

    model = _model(hidden_size=512, num_hidden_layers=12, num_attention_heads=8).to("cuda", torch.bfloat16)

    def seconds(compiled: bool) -> float:
        engine = NativeEngine(model, (), RolloutConfig(compiled=compiled))
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            engine.generate([np.arange(30)], SamplingConfig(max_tokens=256), samples=4, seed=0)
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(True) < 0.7 * seconds(False)


@pytest.mark.gpu
def test_a_gpu_goes_on_where_a_step_cannot_be_recorded() -> None:
    """And leaves nothing behind that training would trip over."""
    model = _model(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}).to("cuda")
    said: list[str] = []
    engine = NativeEngine(model, (), RolloutConfig(), event=lambda kind, text: said.append(kind))
    (group,) = engine.generate([np.arange(9)], SamplingConfig(max_tokens=40), samples=2, seed=0)
    assert said == ["decode_graph"]
    assert len(group[0].completion_ids) == 40
    torch.cuda.empty_cache()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.rand(3, device="cuda").isfinite().all()
