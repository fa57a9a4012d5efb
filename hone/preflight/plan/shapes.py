"""The shape of a model without its weights: from its `config.json`, or for common models from a table.

config, where = config_of(ModelConfig(path="Qwen/Qwen2.5-7B-Instruct"))
model = meta_model(config, "bfloat16")        # on the meta device: no memory, every shape
"""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hone.base.settings import UserError
from hone.model import attention, lora, mixers
from hone.model.load import base_of, check_supported, located, require_source
from hone.model.tiny import architecture
from hone.model.update_mode import recompute_activations
from hone.recipe.sections.model import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def _shape(kind: str, hidden: int, mlp: int, layers: int, heads: int, kv: int, vocab: int, **more: Any) -> Any:
    shape = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "vocab_size": vocab}
    return kind, {**shape, "num_attention_heads": heads, "num_key_value_heads": kv, **more}


#: Shapes from the `config.json` of each model on the Hugging Face hub, under the organisations Qwen, meta-llama and
#: deepseek-ai. Names are matched in lower case and without suffixes of tuned variants (`-Instruct`, `-Base`, `-1M`).
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-0.5b": _shape("qwen2", 896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True),
    "qwen2.5-1.5b": _shape("qwen2", 1536, 8960, 28, 12, 2, 151936, tie_word_embeddings=True),
    "qwen2.5-3b": _shape("qwen2", 2048, 11008, 36, 16, 2, 151936, tie_word_embeddings=True),
    "qwen2.5-7b": _shape("qwen2", 3584, 18944, 28, 28, 4, 152064, tie_word_embeddings=False),
    "qwen2.5-14b": _shape("qwen2", 5120, 13824, 48, 40, 8, 152064, tie_word_embeddings=False),
    "qwen2.5-32b": _shape("qwen2", 5120, 27648, 64, 40, 8, 152064, tie_word_embeddings=False),
    "deepseek-r1-distill-qwen-1.5b": _shape("qwen2", 1536, 8960, 28, 12, 2, 151936, tie_word_embeddings=False),
    "deepseek-r1-distill-qwen-7b": _shape("qwen2", 3584, 18944, 28, 28, 4, 152064, tie_word_embeddings=False),
    "qwen3-0.6b": _shape("qwen3", 1024, 3072, 28, 16, 8, 151936, head_dim=128, tie_word_embeddings=True),
    "qwen3-1.7b": _shape("qwen3", 2048, 6144, 28, 16, 8, 151936, head_dim=128, tie_word_embeddings=True),
    "qwen3-4b": _shape("qwen3", 2560, 9728, 36, 32, 8, 151936, head_dim=128, tie_word_embeddings=True),
    "qwen3-8b": _shape("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128, tie_word_embeddings=False),
    "qwen3-14b": _shape("qwen3", 5120, 17408, 40, 40, 8, 151936, head_dim=128, tie_word_embeddings=False),
    "llama-3.2-1b": _shape("llama", 2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_word_embeddings=True),
    "llama-3.2-3b": _shape("llama", 3072, 8192, 28, 24, 8, 128256, head_dim=128, tie_word_embeddings=True),
    "llama-3.1-8b": _shape("llama", 4096, 14336, 32, 32, 8, 128256, tie_word_embeddings=False),
}
#: Other names of the same shapes.
ALIKE = {"qwen2-": "qwen2.5-", "qwen2.5-math-": "qwen2.5-", "qwen2.5-coder-": "qwen2.5-", "meta-llama-3": "llama-3"}


def published(path: str) -> PretrainedConfig | None:
    """The published shape of a hub id, if it is in the table."""
    name = re.sub(r"(-(instruct|base|1m|chat|hf|\d{4}))+$", "", path.rpartition("/")[2].lower())
    for other, ours in ALIKE.items():
        if name.startswith(other):
            name = ours + name.removeprefix(other)
            break
    name = "llama-3.1-8b" if name == "llama-3-8b" else name
    if name not in PUBLISHED:
        return None
    kind, shape = PUBLISHED[name]
    config: PretrainedConfig = AutoConfig.for_model(kind, **shape)
    return config


def config_of(model: ModelConfig) -> tuple[PretrainedConfig, str]:
    """The model's config, and where it comes from in words. Raises UserError if there is none."""
    if model.path == "tiny":
        return architecture(model.tiny), "model.tiny"
    model = located(model)
    if lora.is_adapter(model.path):
        return config_of(model.at(base_of(model.path)))
    try:
        return AutoConfig.from_pretrained(model.path, revision=model.revision, local_files_only=True), "its config.json"
    except (OSError, ValueError):  # not on this machine
        pass
    known = published(model.path)
    if known is not None:
        return known, "the published shape (hone.preflight.plan.shapes); its config.json is not on this machine"
    require_source(model)
    try:
        return AutoConfig.from_pretrained(model.path, revision=model.revision), "its config.json"
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.path: {model.path}: its config.json is not on this machine and cannot be fetched, and its "
            f"shape is not in hone's table ({', '.join(PUBLISHED)}); give a folder that holds its config.json"
        ) from error


def share_of(config: PretrainedConfig, tensor: int) -> PretrainedConfig:
    """The shape of the part that each of `tensor` processes computes: its heads, and its share of the MLP and the
    vocabulary.

    Hidden states are not divided, nor are sizes that are not divisible.
    """
    if tensor == 1:
        return config
    mine = copy.deepcopy(config)
    text = mine.get_text_config()
    text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        size = getattr(text, name, None)
        if size is not None and size % tensor == 0:
            setattr(text, name, size // tensor)
    return mine


def meta_model(config: PretrainedConfig, dtype: str, recompute: bool = False) -> PreTrainedModel:
    """The model as training runs it, on the meta device. Raises UserError for a model that hone does not support."""
    attention.register()
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=attention.NAME
        )
    check_supported(model)
    mixers.route(model)
    if recompute:
        recompute_activations(model)
    return model.eval()
