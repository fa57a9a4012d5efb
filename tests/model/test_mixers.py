"""Recurrent mixers over packed rows, against the mixer's own forward over each sequence alone."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hone.base.settings import UserError
from hone.model import attention, linear, lora, mixers
from hone.model.load import load_model
from hone.model.mixers import States
from hone.recipe.sections.model import LoraConfig, ModelConfig
from hone.types import Block
from tests.tiny_families import make

#: One of each kind: gated delta net, short convolution, Mamba-2 with limits of the time step, Kimi, Mamba-1.
KINDS = ("qwen3.5", "lfm2", "nemotron-h", "kimi-linear", "jamba")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixers")


@cache
def mixer_of(name: str, folder: Path) -> nn.Module:
    make(name, folder / name)
    return mixers.recurrent(load_model(ModelConfig(path=str(folder / name))))[0]


def own(mixer: nn.Module, hidden: Tensor) -> Tensor:
    """[L, D] -> [L, D] by transformers alone."""
    out: Tensor = type(mixer).forward(mixer, hidden[None])
    return out[0]


def sequences(layout: tuple[Block, ...]) -> list[tuple[list[int], int]]:
    """Packed positions of each sequence, and how many of them are the first sequence's too."""
    found, at = [], 0
    for block in layout:
        prompt = list(range(at, at + block.prompt_len))
        at += block.prompt_len
        for i, length in enumerate(block.completion_lens):
            found.append(([*prompt, *range(at, at + length)], len(prompt) if i else 0))
            at += length
    return found


LAYOUTS = st.lists(
    st.builds(Block, st.integers(0, 70), st.lists(st.integers(1, 70), min_size=1, max_size=4).map(tuple)),
    min_size=1,
    max_size=3,
).map(tuple)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=8, deadline=None)
@given(layout=LAYOUTS, seed=st.integers(0, 1 << 20))
def test_a_packed_row_is_each_sequence_by_itself_forward_and_backward(
    name: str, folder: Path, layout: tuple[Block, ...], seed: int
) -> None:
    mixer = mixer_of(name, folder)
    generator = torch.Generator().manual_seed(seed)
    total = sum(block.num_tokens for block in layout)
    hidden = torch.randn(total, 64, generator=generator, requires_grad=True)
    weight = torch.randn(total, 64, generator=generator)
    packed = mixers.packed(mixer, hidden[None], layout)[0]
    inputs = [hidden, *mixer.parameters()]
    ours = torch.autograd.grad((packed * weight).sum(), inputs)
    expected, loss = torch.zeros(total, 64), torch.zeros(())
    for positions, shared in sequences(layout):
        out = own(mixer, hidden[positions])
        expected[positions[shared:]] = out[shared:].detach()
        loss = loss + (out[shared:] * weight[positions[shared:]]).sum()
    theirs = torch.autograd.grad(loss, inputs)
    torch.testing.assert_close(packed.detach(), expected, rtol=1e-4, atol=1e-4)
    top = max(float(g.abs().max()) for g in theirs)
    assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) < 1e-4 * top


@pytest.mark.parametrize("name", KINDS)
def test_documents_see_nothing_of_each_other(name: str, folder: Path) -> None:
    layout = (Block(9, (5, 12)), Block(9, (7,)), Block(0, (6,)))
    hidden = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    mixer = mixer_of(name, folder)
    before = mixers.packed(mixer, hidden[None], layout)[0]
    hidden[26:42] = torch.nan  # the second prompt and its completion
    after = mixers.packed(mixer, hidden[None], layout)[0]
    assert after[26:42].isnan().any()
    others = [*range(26), *range(42, 48)]
    torch.testing.assert_close(after[others], before[others], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["qwen3.5", "lfm2", "nemotron-h", "kimi-linear"])
def test_a_prompt_is_computed_once_for_its_completions(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    real = mixers.apply

    def counted(mixer: nn.Module, hidden: Tensor, states: States | None) -> Tensor:
        seen.append(tuple(hidden.shape[:2]))
        return real(mixer, hidden, states)

    monkeypatch.setattr(mixers, "apply", counted)
    mixer = mixer_of(name, folder)
    mixers.packed(mixer, torch.randn(1, 2 * 50 + 8 * 16, 64), (Block(50, (16,) * 4), Block(50, (16,) * 4)))
    assert seen == [(2, 50), (8, 16)]


@pytest.mark.parametrize("name", KINDS)
def test_one_token_after_another_is_the_same_as_all_at_once(name: str, folder: Path) -> None:
    mixer = mixer_of(name, folder)
    hidden = torch.randn(21, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = own(mixer, hidden)
        out, states = mixers.read_prompts(mixer, hidden[None, :18], (13, 5))
        rows = states.rows(torch.tensor([0, 1, 0]))
        steps = [mixers.step(mixer, hidden[t].expand(3, 1, 64), rows)[:, 0] for t in range(13, 21)]
    torch.testing.assert_close(out[0, :13], expected[:13], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.stack(steps)[:, 0], expected[13:], rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(torch.stack(steps)[:, 2], expected[13:], rtol=1e-4, atol=2e-5)
    assert float((torch.stack(steps)[0, 1] - expected[13]).abs().max()) > 1e-3, "another prompt, another state"


def test_outside_of_a_pass_a_mixer_is_as_it_was(folder: Path) -> None:
    mixer = mixer_of("lfm2", folder)
    hidden = torch.randn(2, 7, 64)
    expected = type(mixer).forward(mixer, hidden)
    torch.testing.assert_close(mixer(hidden), expected, rtol=0, atol=0)
    with attention.forward_pass(attention.ForwardPass((Block(0, (7, 7)),))):
        packed = mixer(hidden.reshape(1, 14, 64))
    torch.testing.assert_close(packed.reshape(2, 7, 64), expected, rtol=1e-5, atol=1e-5)


def test_the_rectangles_of_a_packed_row() -> None:
    plan = mixers._plan((Block(2, (3, 1)), Block(0, (2,)), Block(2, ())), True, torch.device("cpu"))
    assert [rows.take.tolist() for rows in plan.prompts] == [[[0, 1], [8, 9]]]
    (ended,) = plan.completions
    pad = 10
    assert ended.take.tolist() == [
        [2, 3, 4, *[pad] * 5],
        [6, 7, *[pad] * 6],
        [5, *[pad] * 7],
    ]
    assert ended.starts.tolist() == [0, 2, 0], "2: from zero"
    assert plan.places.tolist() == [0, 1, 4, 5, 6, 20, 12, 13, 2, 3]
    repeated = mixers._plan((Block(2, (3, 1)),), False, torch.device("cpu"))
    assert not repeated.prompts
    assert repeated.completions[0].take[:, :5].tolist() == [[0, 1, 2, 3, 4], [0, 1, 5, 6, 6]]
    assert repeated.places.tolist() == [0, 1, 2, 3, 4, 10]


def test_lengths_are_rounded_to_eight_per_octave() -> None:
    assert [mixers.rounded(n) for n in (1, 8, 9, 63, 64, 127, 128, 129, 200, 1000)] == [
        *(8, 8, 16, 64, 64, 128, 128, 144, 208, 1024)
    ]
    assert mixers.similar([30, 100, 90, 31, 8]) == [[1, 2], [3, 0], [4]]


def test_layers_of_weights_that_are_read_past_the_layer_get_no_adapter(folder: Path) -> None:
    mixer_of("jamba", folder)
    model = load_model(ModelConfig(path=str(folder / "jamba")))
    assert "dt_proj" not in lora.target_names(model, "all")
    with pytest.raises(UserError, match="dt_proj is read directly"):
        lora.attach(model, LoraConfig(rank=2, targets=("dt_proj",)), seed=0)
    lora.attach(model, LoraConfig(rank=2, targets=("in_proj",)), seed=0)
    assert "dt_proj of the recurrent mixers" in str(lora.coverage(model))


def test_a_mixer_that_needs_more_than_hidden_states_is_refused() -> None:
    class Odd(nn.Module):
        def forward(self, hidden_states: Tensor, gates: Tensor, past_key_values: Any = None) -> Tensor:
            past_key_values.update_conv_state(hidden_states, 0)
            return hidden_states * gates

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = Odd()
            text = type("Text", (), {"model_type": "odd", "layer_types": ["conv"]})()
            self.config = type("Config", (), {"get_text_config": lambda self: text})()

    with pytest.raises(UserError, match=r"Odd keeps a recurrent state and needs gates"):
        mixers.check(Model())


@pytest.mark.skipif(not linear.available(), reason="needs a CPU with AVX-512")
@pytest.mark.parametrize("shape", [(3, 50, 24), (1, 128, 24), (2, 3, 24), (1, 24)])
def test_products_of_odd_numbers_of_rows_are_those_of_pytorch(shape: tuple[int, ...]) -> None:
    """oneDNN keeps memory for every shape, so that rows of zeros are added behind those of a rectangle."""
    layer, x = nn.Linear(24, 40), torch.randn(shape, requires_grad=True)
    grad = torch.randn(*shape[:-1], 40)
    expected, found = layer(x), linear.onednn_linear(layer, x)
    inputs = [x, layer.weight, layer.bias]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
