"""Packed attention in an unmodified model equals one sequence at a time, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hone.learn.pack import Packer
from hone.learn.samples import supervised_sample
from hone.model import attention
from hone.types import Sample

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MODELS = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
}


def samples() -> list[Sample]:
    """Groups of 4, 3 and 1 with prompts of different lengths, completions of 1 to 12 tokens."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 97, n) for n in (9, 4, 6)]
    return [
        supervised_sample(str(p), prompts[p], rng.integers(0, 97, n))
        for p, n in [(0, 5), (0, 12), (0, 1), (0, 5), (1, 7), (1, 7), (1, 7), (2, 3)]
    ]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("share", "budget"), [(True, 1000), (True, 30), (False, 1000), (False, 25)])
def test_equals_one_sequence_at_a_time(name: str, share: bool, budget: int) -> None:
    torch.manual_seed(0)
    attention.register()
    model = MODELS[name]()
    data, weights = samples(), [1.0, -0.5, 2.0, 0.25, 1.0, 0.5, -1.0, 3.0]

    model.set_attn_implementation("eager")
    expected = {}
    for i, (s, w) in enumerate(zip(data, weights, strict=True)):
        ids = torch.as_tensor(s.token_ids)[None]
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        expected[i] = logprobs[s.prompt_len - 1 :]
        (w * expected[i].sum()).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    model.set_attn_implementation(attention.NAME)
    for batch in Packer(budget, share)(data, weights):
        hidden = model.model(
            input_ids=batch.inputs[None], position_ids=batch.positions[None], use_cache=False, layout=batch.layout
        ).last_hidden_state[0]
        logits = model.lm_head(hidden[batch.sources])
        logprobs = torch.log_softmax(logits, -1).gather(1, batch.targets[:, None])[:, 0]
        for place, i in enumerate(batch.sample_ids):
            torch.testing.assert_close(logprobs[batch.samples == place], expected[i], atol=1e-5, rtol=0)
        (batch.weights * logprobs).sum().backward()
    for p, reference in zip(model.parameters(), gradients, strict=True):
        scale = reference.abs().max().clamp(min=1.0)
        torch.testing.assert_close(p.grad / scale, reference / scale, atol=1e-6, rtol=0)


def test_a_call_without_layout_is_an_error() -> None:
    attention.register()
    model = MODELS["qwen2"]()
    model.set_attn_implementation(attention.NAME)
    with pytest.raises(ValueError, match="layout"):
        model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
