"""Generation with models that have recurrent states, against the model's own eager forward."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from hone.model.load import load_model
from hone.recipe.sections.model import ModelConfig
from hone.recipe.sections.rollout import RolloutConfig, SamplingConfig
from hone.rollout import exactness
from hone.rollout.native.engine import NativeEngine
from hone.rollout.native.memory import Budget, columns
from hone.rollout.native.states import row_bytes
from hone.types import Turn
from tests.rollout.test_graph import TapeRecorder
from tests.tiny_families import make

PROMPTS = [np.random.default_rng(n).integers(5, 500, n) for n in (1, 4, 11, 19, 30, 47)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@cache
def model_of(name: str, folder: Path) -> PreTrainedModel:
    make(name, folder / name)
    return load_model(ModelConfig(path=str(folder / name)))


@torch.no_grad()
def own_logits(model: PreTrainedModel, turn: Turn) -> torch.Tensor:
    """[n, V] from which the model alone would draw each token of the completion."""
    ids = torch.as_tensor(np.concatenate([turn.prompt_ids, turn.completion_ids]))
    with exactness.own_attention(model):
        logits: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0, len(turn.prompt_ids) - 1 : -1]
    return logits


@pytest.mark.parametrize("name", ["qwen3.5", "lfm2", "nemotron-h", "mamba2"])
def test_rows_that_come_and_go_draw_from_the_models_own_distribution(name: str, folder: Path) -> None:
    """Five rows at once for 12 samples, with stop tokens: rows leave early, and rows of other prompts enter."""
    model = model_of(name, folder)
    engine = NativeEngine(model, tuple(range(40)), RolloutConfig(max_sequences=5))
    groups = engine.generate(PROMPTS, SamplingConfig(max_tokens=24), samples=2, seed=1)
    assert "stop" in {turn.finish for group in groups for turn in group}
    for turn in (turn for group in groups for turn in group):
        own = own_logits(model, turn).log_softmax(-1).gather(1, torch.as_tensor(turn.completion_ids)[:, None])[:, 0]
        np.testing.assert_allclose(turn.logprobs, own.numpy(), rtol=0, atol=5e-5)


@pytest.mark.parametrize("name", ["qwen3.5", "lfm2"])
def test_greedy_tokens_are_the_models_own(name: str, folder: Path) -> None:
    model = model_of(name, folder)
    engine = NativeEngine(model, (), RolloutConfig(max_sequences=4))
    for (turn,) in engine.generate(PROMPTS, SamplingConfig(max_tokens=16, temperature=0.0), samples=1, seed=0):
        assert turn.completion_ids.tolist() == own_logits(model, turn).argmax(-1).tolist()


@pytest.mark.parametrize("name", ["qwen3.5", "lfm2", "nemotron-h"])
def test_recorded_steps_leave_the_states_where_they_are(name: str, folder: Path) -> None:
    """A step is run twice before its recording is replayed; states must advance once for each token."""
    model = model_of(name, folder)
    found = []
    for recorder in (None, TapeRecorder()):
        engine = NativeEngine(model, (), RolloutConfig(compiled=False, max_sequences=4))
        engine._recorder = lambda recorder=recorder: recorder  # type: ignore[method-assign, assignment, misc]
        groups = engine.generate(PROMPTS[1:4], SamplingConfig(max_tokens=40), samples=2, seed=3)
        found.append([turn.completion_ids.tolist() for group in groups for turn in group])
    assert recorder is not None
    assert recorder.replayed > 30
    assert found[0] == found[1]


def test_the_memory_of_states_is_counted_for_every_prompt_and_row(folder: Path) -> None:
    model = model_of("lfm2", folder)
    kernel = model.config.conv_L_cache
    assert row_bytes(model) == 2 * 64 * kernel * 4  # two of four layers: 64 channels, float32
    budget = Budget.of(model, gib=1 / 1024)
    assert budget.bytes_per_token == 2 * 2 * 2 * 16 * 4  # two layers: keys and values of two heads of 16
    positions = 3 * 100 + 6 * columns(20) + -(-(3 + 6) * row_bytes(model) // budget.bytes_per_token)
    assert budget.positions(prompts=3, longest=100, rows=6, max_tokens=20) == positions
    delta = model_of("qwen3.5", folder)
    linear = delta.config.layer_types.count("linear_attention")
    channels = 2 * 2 * 16 + 4 * 16  # queries and keys of two heads, values of four
    assert row_bytes(delta) == linear * 4 * (channels * delta.config.linear_conv_kernel_dim + 4 * 16 * 16)
