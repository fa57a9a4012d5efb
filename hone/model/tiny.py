"""`tiny`: a from-scratch model for learning on a CPU, as an ordinary Hugging Face checkpoint.

A small Qwen2 with random weights and a byte-level BPE tokenizer trained on the task's own text.
Plain `transformers` loads what `create` writes:

    AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from hone.model.config import TinyConfig

EOS, PAD = "<|endoftext|>", "<|pad|>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every string round-trips. The tags are ordinary (decoded) one-token words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS),
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)


def create(folder: Path, config: TinyConfig, texts: Iterable[str], seed: int) -> None:
    """Write the checkpoint of a freshly initialised model to `folder`."""
    tokenizer = train_tokenizer(texts, config.vocab_size)
    hf_config = Qwen2Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.mlp_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=True,
        initializer_range=config.init_std,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(hf_config)
    _scale_residual_branches(model)
    model.generation_config.do_sample = False
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def _scale_residual_branches(model: Qwen2ForCausalLM) -> None:
    """What each layer adds to the residual stream starts smaller by 1/sqrt(2 layers), as in GPT-2."""
    factor = (2 * model.config.num_hidden_layers) ** -0.5
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(factor)
        layer.mlp.down_proj.weight.mul_(factor)
