"""What it costs to train models with recurrent layers: each prompt once for its group, repeated, and a padded batch.

    .venv/bin/python benchmarks/mixers.py                  # about two minutes
    .venv/bin/python benchmarks/mixers.py --only lfm2 --prompts 2 --samples 8

One update (forward, backward) with random models of 3 M weights: 4 layers x 256, one of them attention (all of them in
Qwen2), vocabulary 512, float32, one thread. 4 prompts of 140 to 160 tokens, 16 answers each of about 100 tokens
(geometric, at most 384), at most 8192 tokens in a micro-batch. `shared` and `repeated` are hone with and without
shared prompts. `padded` is transformers alone: batches of 16 sequences, prompts padded on the left and answers on the
right, with its own forward pass and a mask, as trainers without packing compute it. Figures are seconds of CPU time.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hone.learn.forward import fast_layers, packed_logprobs
from hone.learn.pack import Packer
from hone.learn.samples import supervised_sample
from hone.model import attention, mixers
from hone.model.update_mode import update_mode
from hone.rollout.exactness import own_attention
from hone.types import Sample

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "pad_token_id": 1,
    "eos_token_id": 0,
    "bos_token_id": 2,
}
LINEAR = [*["linear_attention"] * 3, "full_attention"]
#: Name -> model type, and what its config has beside SHAPE.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"intermediate_size": 688}),
    "qwen3.5": (
        "qwen3_5_text",
        {
            "intermediate_size": 688,
            "head_dim": 64,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "layer_types": LINEAR,
        },
    ),
    "lfm2": (
        "lfm2",
        {
            "intermediate_size": 688,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
        },
    ),
    "granite4-h": (
        "granitemoehybrid",
        {
            "layer_types": LINEAR,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
            "mamba_chunk_size": 64,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "logits_scaling": 1.0,
            "shared_intermediate_size": 688,
            "intermediate_size": 688,
        },
    ),
}
PADDED_BATCH = 16


def build(name: str) -> PreTrainedModel:
    kind, more = MODELS[name]
    attention.register()
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**SHAPE, **more)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=attention.NAME
    )
    mixers.route(model)
    return model.eval()


def draw(prompts: int, samples: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    drawn = []
    for number in range(prompts):
        prompt = rng.integers(5, 500, int(rng.integers(140, 160)))
        for _ in range(samples):
            length = int(min(384, 1 + rng.geometric(1 / 100)))
            drawn.append(supervised_sample(str(number), prompt, rng.integers(5, 500, length)))
    return drawn


def packed(model: PreTrainedModel, samples: list[Sample], share: bool) -> float:
    """Seconds of an update as hone computes it."""
    batches = Packer(8192, share_prompts=share)(samples, [1.0] * len(samples))
    start = time.process_time()
    for batch in batches:
        with update_mode(model), fast_layers(model):
            (batch.weights * packed_logprobs(model, batch, 1.0).logprobs).sum().backward()
    return time.process_time() - start


def padded(model: PreTrainedModel, samples: list[Sample]) -> float:
    """Seconds of the same gradient by transformers alone."""
    start = time.process_time()
    with own_attention(model):
        model.config._attn_implementation = "sdpa"
        for first in range(0, len(samples), PADDED_BATCH):
            part = samples[first : first + PADDED_BATCH]
            prompt = max(s.prompt_len for s in part)
            answer = max(len(s.token_ids) - s.prompt_len for s in part)
            ids, mask = torch.ones(2, len(part), prompt + answer, dtype=torch.int64).unbind()
            mask = torch.zeros_like(mask)
            for row, s in enumerate(part):
                place = slice(prompt - s.prompt_len, prompt - s.prompt_len + len(s.token_ids))
                ids[row, place], mask[row, place] = torch.as_tensor(s.token_ids), 1
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=answer + 1).logits
            logprobs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, prompt:, None])[..., 0]
            (logprobs * mask[:, prompt:]).sum().backward()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, help="one model")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=16)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    samples = draw(arguments.prompts, arguments.samples)
    for name in [arguments.only] if arguments.only else MODELS:
        model = build(name)
        packed(model, samples, share=True)  # what libraries compile once
        seconds = {
            "shared": min(packed(model, samples, share=True) for _ in range(2)),
            "repeated": packed(model, samples, share=False),
            "padded": padded(model, samples),
        }
        ratios = {key: round(value / seconds["shared"], 2) for key, value in seconds.items()}
        print(json.dumps({"model": name, "seconds": {k: round(v, 2) for k, v in seconds.items()}, "ratios": ratios}))


if __name__ == "__main__":
    main()
