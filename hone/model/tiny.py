"""`tiny`: a from-scratch model for learning on a CPU, as an ordinary Hugging Face checkpoint.

A small model (`tiny.architecture`) with random weights and a byte-level BPE tokenizer trained on the task's own text.
Plain `transformers` loads what `create` writes:

    AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hone.base import checksums
from hone.model.saving import save_model
from hone.recipe.sections.model import TinyConfig

EOS, PAD = "<|endoftext|>", "<|pad|>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
#: Architecture -> model type of its text model, types of layers (repeated over the layers; where empty, all have full
#: attention), and sizes. Sizes are values, or names of sizes of the whole model and of its heads.
ARCHITECTURES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "qwen2": ("qwen2", (), {}),
    "gemma3": (
        "gemma3_text",
        ("sliding_attention", "full_attention"),
        {"sliding_window": 64, "query_pre_attn_scalar": "head_dim", "head_dim": "head_dim"},
    ),
    "qwen3_5": (
        "qwen3_5_text",
        ("linear_attention", "linear_attention", "linear_attention", "full_attention"),
        {
            "head_dim": "head_dim",
            "linear_num_value_heads": "num_attention_heads",
            "linear_num_key_heads": "num_key_value_heads",
            "linear_key_head_dim": "head_dim",
            "linear_value_head_dim": "head_dim",
        },
    ),
    "lfm2": ("lfm2", ("conv", "conv", "full_attention"), {"block_auto_adjust_ff_dim": False}),
}
#: Ends of the names of the layers that write to the residual stream, in all of these.
WRITERS = ("o_proj", "out_proj", "down_proj", "w2")
PUNCTUATION = r"[^\w\s]|\n"


def train_tokenizer(texts: Iterable[str], vocab_size: int, phrases: int = 0) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every string round-trips (in Unicode's form NFC). Tags and phrases are single plain tokens.

    Text is split into words as in Qwen2, because AutoTokenizer does so for any tokenizer beside a Qwen2 model: the
    loaded tokenizer equals the trained one.
    """
    texts = list(texts)
    whole = [*TAGS, *common_phrases(texts, phrases)]
    tokenizer = Tokenizer(models.BPE())
    qwen2 = Qwen2Tokenizer().backend_tokenizer
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        setattr(tokenizer, part, getattr(qwen2, part))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(whole),
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in whole])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)


def common_phrases(texts: Sequence[str], count: int) -> list[str]:
    """At most `count` phrases of several words, such as ` is a knight`, without punctuation.

    They are the first byte-pair merges across blanks: superwords, Liu et al., SuperBPE, arXiv:2503.13423.
    """
    if not count:
        return []
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PUNCTUATION), "isolated")
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=16 * count + 512, show_progress=False))
    learned = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    words = {word for text in texts for word in re.sub(PUNCTUATION, " ", text).split()}
    phrases = [text for text, _ in learned if text.startswith(" ") and " " in text.strip()]
    return [text for text in phrases if words.issuperset(text.split())][:count]  # a merge may end within a word


def create(folder: Path, config: TinyConfig, texts: Iterable[str] | PreTrainedTokenizerFast, seed: int) -> None:
    """Write the checkpoint of a freshly initialised model to `folder`, with the tokenizer `texts` or
    one trained on `texts`; `checksums.json` is written last."""
    if isinstance(texts, PreTrainedTokenizerFast):
        tokenizer = texts
    else:
        tokenizer = train_tokenizer(texts, config.vocab_size, config.phrases)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(architecture(config, tokenizer.eos_token_id, tokenizer.pad_token_id))
    _scale_residual_branches(model)
    model.generation_config.do_sample = False
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    save_model(model, folder)
    tokenizer.save_pretrained(folder)
    checksums.write(folder)


def architecture(config: TinyConfig, eos: int | None = None, pad: int | None = None) -> PretrainedConfig:
    """The Hugging Face config of the model; `eos` and `pad` are token ids."""
    sizes: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": True,
        "initializer_range": config.init_std,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }
    kind, layers, more = ARCHITECTURES[config.architecture]
    known = {**sizes, "head_dim": config.hidden_size // config.heads}
    sizes |= {key: known.get(value, value) for key, value in more.items()}
    if layers:
        sizes["layer_types"] = [layers[i % len(layers)] for i in range(config.layers)]
    return CONFIG_MAPPING[kind](**sizes)


@torch.no_grad()
def _scale_residual_branches(model: Any) -> None:
    """Scale the initial outputs of attention, mixers and MLPs by 1/sqrt(2 layers), as in GPT-2."""
    factor = (2 * model.config.num_hidden_layers) ** -0.5
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in WRITERS:
            module.weight.mul_(factor)
