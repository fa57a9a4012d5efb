"""The compiled decode attention equals PyTorch's, and its absence is said and harmless."""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from hone.model.scoring import Scoring, Window
from hone.recipe.sections.rollout import RolloutConfig, SamplingConfig
from hone.rollout.native import NativeEngine, kernel
from hone.rollout.native.attention import Grid, decode_attention
from hone.types import Turn


@pytest.fixture(scope="module")
def compiled() -> kernel.Kernel:
    try:
        return kernel.load()
    except kernel.CannotCompile as reason:
        pytest.skip(f"no kernel on this machine: {reason}")


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from(kernel.HEAD_SIZES),
    value_size=st.sampled_from((None, *kernel.HEAD_SIZES)),
    window=st.sampled_from((None, Window(1), Window(7), Window(30), Window(6, chunks=True))),
    softcap=st.sampled_from((None, 2.0)),
    sinks=st.booleans(),
    kv_heads=st.integers(1, 3),
    repeat=st.integers(1, 7),
    lengths=st.lists(st.integers(1, 37), min_size=1, max_size=3),
    rows=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20)), min_size=1, max_size=40),
    end=st.integers(1, 21),
    spare=st.integers(0, 5),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_equals_pytorch(
    compiled: kernel.Kernel,
    size: int,
    value_size: int | None,
    window: Window | None,
    softcap: float | None,
    sinks: bool,
    kv_heads: int,
    repeat: int,
    lengths: list[int],
    rows: list[tuple[int, int]],
    end: int,
    spare: int,
    threads: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    prompts = [prompt % len(lengths) for prompt, _ in rows]
    starts = [start % end for _, start in rows]
    batch, longest, capacity = len(rows), max(lengths), end + spare
    query = 3 * torch.randn(batch, kv_heads * repeat, 1, size)
    sizes = (size, value_size or size)
    prompt = [torch.randn(kv_heads, len(lengths), longest, d) for d in sizes]
    suffix = [torch.randn(kv_heads, batch, capacity, d) for d in sizes]
    scoring = Scoring(size**-0.5, window, softcap, torch.randn(kv_heads * repeat) if sinks else None)
    mask = torch.full((batch, longest + end), -math.inf)
    places = torch.tensor([prompts, [0] * batch, [lengths[p] for p in prompts], starts])
    for row, (p, start) in enumerate(zip(prompts, starts, strict=True)):
        position = lengths[p] + end - 1 - start
        first = 0 if window is None else int(window.first(torch.tensor(position)))
        places[1, row], places[3, row] = min(first, lengths[p]), start + max(0, first - lengths[p])
        mask[row, first : lengths[p]] = 0.0
        mask[row, longest + places[3, row] :] = 0.0
    grid = Grid.of(prompts, len(lengths), query.device)
    own = suffix[0][:, :, :end], suffix[1][:, :, :end]
    expected = decode_attention(query, (prompt[0], prompt[1]), own, grid, mask, scoring)

    # What a row must not see, and what no row wrote, may hold anything.
    for keys_or_values in suffix:
        for row in range(batch):
            keys_or_values[:, row, : places[3, row]] = math.nan
        keys_or_values[:, :, end:] = math.nan
    for keys_or_values in prompt:
        for p, length in enumerate(lengths):
            keys_or_values[:, p, length:] = math.nan
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = compiled(query, (prompt[0], prompt[1]), (suffix[0], suffix[1]), places, end, scoring)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-5)


def test_a_row_is_the_same_to_the_bit_whatever_is_beside_it(compiled: kernel.Kernel) -> None:
    torch.manual_seed(0)
    query, prompt, suffix = torch.randn(5, 4, 1, 32), torch.randn(2, 2, 2, 9, 32), torch.randn(2, 2, 5, 8, 32)
    rows = torch.tensor([[0, 1, 0, 1, 0], [0, 0, 4, 0, 0], [9, 6, 9, 6, 9], [0, 0, 3, 1, 2]])
    together = compiled(query, tuple(prompt), tuple(suffix), rows, 7, Scoring(0.2))
    for row in range(5):
        one = suffix[:, :, row : row + 1].contiguous()
        alone = compiled(
            query[row : row + 1], tuple(prompt), tuple(one), rows[:, row : row + 1].contiguous(), 7, Scoring(0.2)
        )
        assert torch.equal(alone[0], together[row])


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(1)
    sizes = {"vocab_size": 48, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 256}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, initializer_range=0.2, eos_token_id=None)).eval()


def _generate(model: Qwen2ForCausalLM, **config: object) -> list[list[Turn]]:
    engine = NativeEngine(model, (5, 9), RolloutConfig(**config))
    prompts = [np.arange(n) % 48 for n in (7, 30, 12)]
    return engine.generate(prompts, SamplingConfig(max_tokens=90), samples=6, seed=3)


@pytest.mark.parametrize("max_sequences", [5, 100])
def test_the_engine_says_the_same_with_it(compiled: kernel.Kernel, model: Qwen2ForCausalLM, max_sequences: int) -> None:
    """Rows come and go at different lengths; both ways give the tokens, and their log-probs to rounding."""
    calls = 0

    class Counted(kernel.Kernel):
        def __call__(self, *args: object) -> torch.Tensor:  # type: ignore[override]
            nonlocal calls
            calls += 1
            return compiled(*args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "load", lambda: Counted.__new__(Counted))
        with_it = _generate(model, max_sequences=max_sequences)
    assert calls > 0
    without = _generate(model, max_sequences=max_sequences, compiled=False)
    for group, other in zip(with_it, without, strict=True):
        for turn, expected in zip(group, other, strict=True):
            assert turn.completion_ids.tolist() == expected.completion_ids.tolist()
            np.testing.assert_allclose(turn.logprobs, expected.logprobs, atol=2e-5)


@pytest.fixture
def _anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel.load.cache_clear()
    yield
    kernel.load.cache_clear()


@pytest.mark.usefixtures("_anew")
@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("no-such-compiler", "there is no C++ compiler (no-such-compiler)"), ("false", "failed with exit code 1")],
)
def test_without_a_compiler_it_is_said_once_and_generation_goes_on(
    model: Qwen2ForCausalLM,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    compiler: str,
    reason: str,
) -> None:
    monkeypatch.setenv("CXX", compiler)
    engine = NativeEngine(model, (5, 9), RolloutConfig())
    for _ in range(2):
        engine.generate([np.arange(4)], SamplingConfig(max_tokens=3), samples=2, seed=0)
    said = capsys.readouterr().err
    assert said.count("without its compiled kernel") == 1
    assert reason in said


@pytest.mark.usefixtures("_anew", "compiled")
def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernel.load()
    (library,) = (tmp_path / "hone").iterdir()
    written = library.stat().st_mtime_ns
    kernel.load.cache_clear()
    kernel.load()
    assert library.stat().st_mtime_ns == written


@pytest.mark.usefixtures("_anew", "compiled")
def test_compiling_it_on_first_use_disturbs_no_output(
    model: Qwen2ForCausalLM,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    fast = [flag for flag in kernel._flags(platform.machine()) if flag != "-O3"]  # to compile, not to run
    monkeypatch.setattr(kernel, "_flags", lambda machine: fast)
    with caplog.at_level("INFO", logger="hone"):
        NativeEngine(model, (5, 9), RolloutConfig()).generate(
            [np.arange(4)], SamplingConfig(max_tokens=3), samples=2, seed=0
        )
    assert capfd.readouterr() == ("", "")
    assert [r.getMessage() for r in caplog.records if "compiling the decode kernel" in r.getMessage()]
    events: list[tuple[str, str]] = []
    engine = NativeEngine(model, (5, 9), RolloutConfig(), event=lambda *event: events.append(event))
    for _ in range(2):
        engine.generate([np.arange(4)], SamplingConfig(max_tokens=3), samples=2, seed=0)
    ((kind, message),) = events  # what a run records, once, although another engine has compiled it
    assert kind == "decode_kernel_compiled"
    assert re.fullmatch(r"the decode kernel was compiled in \d+\.\d s, once for this machine", message)
    kernel.load.cache_clear()  # another process, which finds it
    NativeEngine(model, (5, 9), RolloutConfig(), event=lambda *event: events.append(event)).generate(
        [np.arange(4)], SamplingConfig(max_tokens=3), samples=2, seed=0
    )
    assert len(events) == 1


def test_what_it_was_not_compiled_for_is_left_to_pytorch() -> None:
    query = torch.empty(1, 2, 1, 64)
    assert kernel.Kernel.fits(query, query)
    assert kernel.Kernel.fits(query, query[..., :32]), "values of another size"
    assert not kernel.Kernel.fits(query, query[..., :24])
    assert not kernel.Kernel.fits(query[..., :8], query[..., :8])
    assert not kernel.Kernel.fits(query.bfloat16(), query.bfloat16())
