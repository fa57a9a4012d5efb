"""Any Hugging Face causal LM, by folder or hub id, with our attention plugged in."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as hf_logging

from hone.model import attention
from hone.model.config import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

hf_logging.disable_progress_bar()


def device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(config: ModelConfig) -> PreTrainedModel:
    """Weights in the dtype of training: float32 on a CPU; on a GPU as `config.dtype` says.

    Raises OSError (from transformers) when nothing is found at `config.path`.
    """
    attention.register()
    dtype = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
    model = AutoModelForCausalLM.from_pretrained(
        config.path, revision=config.revision, dtype=dtype, attn_implementation=attention.NAME
    )
    check_supported(model)
    model.to(device())  # type: ignore[arg-type]  # transformers' wrapper hides the signature
    return model


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The checkpoint's own tokenizer; one without an end-of-text token is an error."""
    tokenizer = AutoTokenizer.from_pretrained(config.path, revision=config.revision)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {config.path} has no end-of-text token: stopping could not be learned")
    return tokenizer


def check_supported(model: PreTrainedModel) -> None:
    """Refuse what would train silently wrong: capped logits, dropout, logits multiplied by a constant."""
    c = model.config
    if getattr(c, "final_logit_softcapping", None):
        raise ValueError(
            f"{c.model_type} caps its logits (final_logit_softcapping): not supported, choose another model"
        )
    if getattr(c, "logit_scale", None) or getattr(c, "logits_scaling", None):
        raise ValueError(f"{c.model_type} scales its logits: not supported, choose another model")
    for key in ("attention_dropout", "resid_pdrop", "embd_pdrop"):
        if getattr(c, key, 0):
            # Sampler and trainer would see different networks.
            logging.getLogger(__name__).warning("%s = %s is set to 0 for training", key, getattr(c, key))
            setattr(c, key, 0.0)


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a completion: the tokenizer's, the model's and its generation config's."""
    generation = model.generation_config.eos_token_id if model.generation_config is not None else None
    found: list[int] = []
    for source in (tokenizer.eos_token_id, model.config.eos_token_id, generation):
        if source is not None:
            found += [source] if isinstance(source, int) else list(source)
    return tuple(dict.fromkeys(found))
