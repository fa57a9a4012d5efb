"""Copies of linear layers in a lower precision: the products, what is left alone, and that sampling says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from hone.base.settings import UserError
from hone.model.reduced import INT8_ROWS, check, quantised, reduced
from hone.recipe.notes import notices
from hone.recipe.recipe import Recipe
from hone.recipe.sections.rollout import RolloutConfig, SamplingConfig
from hone.rollout.native import NativeEngine

TASK = {"name": "knights"}


@pytest.fixture
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 40, "tie_word_embeddings": True}
    made = Qwen2ForCausalLM(Qwen2Config(**sizes, initializer_range=0.2, eos_token_id=None)).eval()
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):  # zero by default, and then a forgotten one would not show
            nn.init.normal_(parameter, std=0.2)
    return made


def test_int8_by_hand() -> None:
    weight = torch.tensor([[127.0, -63.4, 0.6], [0.0, 0.5, -2.0], [0.0, 0.0, 0.0]])
    numbers, scale = quantised(weight)
    assert scale.dtype == torch.bfloat16
    assert scale.tolist()[0] == 1.0
    assert numbers.dtype == torch.int8
    assert numbers.tolist() == [[127, -63, 1], [0, 32, -127], [0, 0, 0]]  # 2 / 127 is 0.01575 in bfloat16
    assert (weight - numbers * scale.float()[:, None]).abs().max() <= 0.5 * scale.max() * 1.01


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
@pytest.mark.parametrize("rows", [INT8_ROWS, INT8_ROWS + 1, 40])
def test_products_are_those_of_rounded_weights_and_inputs(model: Qwen2ForCausalLM, weights: Any, rows: int) -> None:
    x = torch.randn(rows, 1, 32, generator=torch.Generator().manual_seed(rows))
    layer = model.model.layers[0].self_attn.q_proj
    w = layer.weight.detach().bfloat16().float()
    if weights == "int8":
        numbers, scale = quantised(layer.weight.detach())
        w = numbers * scale.float()[:, None]
    expected = (x.bfloat16().double() @ w.double().T + layer.bias.double()).float()
    with torch.no_grad(), reduced(model, weights):
        out = layer(x)
    assert out.dtype == torch.float32
    assert out.shape == (rows, 1, 32)
    torch.testing.assert_close(out, expected, atol=0.02, rtol=2**-8)  # sums leave rounded to bfloat16
    with torch.no_grad():
        assert (layer(x) - out).abs().max() > 1e-4  # and the policy's own are others


def test_int8_of_a_layer_whose_rows_its_product_would_read_beyond() -> None:
    """40 inputs are no multiple of 16: PyTorch's product gives rubbish there, or ends the process."""
    model = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=48, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40)
    )
    layer = model.model.layers[0].mlp.down_proj
    x = torch.randn(1, 40)
    with torch.no_grad(), reduced(model, "int8"):
        torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight), atol=0.005, rtol=0.05)


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_the_policy_is_untouched_and_copies_are_of_its_weights_as_they_are_now(
    model: Qwen2ForCausalLM, weights: Any
) -> None:
    before = {name: p.clone() for name, p in model.named_parameters()}
    layer, x = model.model.layers[1].mlp.up_proj, torch.randn(3, 32)
    with torch.no_grad():
        with reduced(model, weights):
            first = layer(x)
            assert "forward" not in vars(model.lm_head)
        assert "forward" not in vars(layer)
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        layer.weight.mul_(2.0)
        with reduced(model, weights):
            assert torch.equal(layer(x), 2 * first)


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_log_probs_are_those_of_what_is_sampled_from(model: Qwen2ForCausalLM, weights: Any) -> None:
    """Not the policy's: by teacher forcing with the same weights they come out again, with the policy's they do not."""
    engine = NativeEngine(model, (), RolloutConfig(weights=weights))
    sampling = SamplingConfig(max_tokens=20, temperature=0.7)
    (group,) = engine.generate([np.arange(9)], sampling, samples=8, seed=3)

    def gap() -> float:
        gaps = []
        for turn in group:
            ids = torch.tensor(np.concatenate([turn.prompt_ids, turn.completion_ids]))[None]
            logits = model(input_ids=ids, use_cache=False).logits[0, 8:-1] / 0.7
            own = logits.log_softmax(-1).gather(1, ids[0, 9:, None])[:, 0]
            gaps.append(np.abs(own.numpy() - turn.logprobs).mean())
        return float(np.mean(gaps))

    with torch.no_grad():
        with engine.as_served(model):
            served = gap()
        policy = gap()
    assert served < 0.01 < 2 * policy
    assert policy > 3 * served


def test_where_it_cannot_be_is_an_error(model: Qwen2ForCausalLM) -> None:
    meta = Qwen2ForCausalLM(model.config).to("meta")
    with pytest.raises(UserError, match="int8 is for CPUs, and the model is on meta"):
        check(meta, "int8")
    with pytest.raises(UserError, match=r"made from float32 weights, but model.dtype is bfloat16"):
        NativeEngine(model.to(torch.bfloat16), (), RolloutConfig(weights="int8"))
    with pytest.raises(
        ValidationError, match=r"int8 is made from float32 weights, but model.dtype is bfloat16; remove one"
    ):
        Recipe(name="x", task=TASK, model={"dtype": "bfloat16"}, rollout={"weights": "int8"})


def test_what_does_not_follow_is_said() -> None:
    def said(**settings: Any) -> list[str]:
        return [n for n in notices(Recipe(name="x", task=TASK, **settings)) if n.startswith("rollout.weights")]

    assert "without a correction" in said(rollout={"weights": "int8"})[0]
    assert not said(rollout={"weights": "int8"}, algo={"correction": {"kind": "tis"}})
    assert "no effect" in said(rollout={"weights": "bfloat16"}, model={"dtype": "bfloat16"})[0]
    assert "no effect while rollout.engine is vllm" in said(rollout={"weights": "bfloat16", "engine": "vllm"})[0]
