"""Any Hugging Face causal LM, by folder or hub id, with our attention plugged in."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from hone.base import checksums, places
from hone.base.settings import UserError
from hone.model import attention, compiled, limits, lora, shards
from hone.model.logprobs import output_head
from hone.model.update_mode import recompute_activations
from hone.recipe.sections.model import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

hf_logging.disable_progress_bar()


def device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(config: ModelConfig, on: torch.device | None = None) -> PreTrainedModel:
    """The model in `config.dtype`, with our attention and in eval mode, in which it stays: sampler and trainer must be
    one network, without dropout or other noise (`hone.model.update_mode`). An adapter's folder is its base with the
    adapter merged in. `on`: where, by default the accelerator.

    Raises UserError when there is no model at `config.path`, one of a run that is damaged, or one that would train
    silently wrong.
    """
    attention.register()
    config = config.at(str(places.locate(config.path))) if places.is_known(config.path) else config
    checksums.require(Path(config.path).expanduser())
    if lora.is_adapter(config.path):
        model = load_model(config.at(base_of(config.path)), on)
        lora.merge_from(model, config.path)
        return model
    model = _found(config, lambda: (_of_checkpoint if shards.is_sharded(config.path) else _pretrained)(config))
    check_supported(model)
    if config.recompute_activations:
        try:
            recompute_activations(model)
        except ValueError as error:  # transformers' own, for a model that was not written for it
            raise UserError(f"model.recompute_activations: {error}; set it to false") from error
    if config.compile:
        compiled.request(model)
    model.to(on or device())
    return model.eval()


def _pretrained(config: ModelConfig) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        config.path,
        revision=config.revision,
        dtype=getattr(torch, config.dtype),
        attn_implementation=attention.NAME,
    )


def _of_checkpoint(config: ModelConfig) -> Any:
    """The weights in `model/` of a checkpoint, which several processes may have written."""
    settings = AutoConfig.from_pretrained(config.path)
    model = AutoModelForCausalLM.from_config(
        settings, dtype=getattr(torch, config.dtype), attn_implementation=attention.NAME
    )
    if (Path(config.path) / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(config.path)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    shards.read(Path(config.path), {name: w for name, w in model.state_dict().items() if name not in tied})
    return model.eval()


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The checkpoint's own tokenizer; one without an end-of-text token is an error."""
    config = config.at(str(places.locate(config.path))) if places.is_known(config.path) else config
    if lora.is_adapter(config.path) and not (Path(config.path) / "tokenizer_config.json").exists():
        config = config.at(base_of(config.path))
    tokenizer = _found(config, lambda: AutoTokenizer.from_pretrained(config.path, revision=config.revision))
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {config.path} has no end-of-text token: stopping could not be learned")
    return tokenizer


def base_of(adapter: str) -> str:
    """The model that an adapter belongs to: a folder, also one that has moved with its run, or a hub id.

    Raises UserError for a folder that has gone.
    """
    base = str(lora.read_config(adapter)["base_model_name_or_path"])
    if Path(base).is_absolute() and not Path(base).exists():
        place = places.moved(base, Path(adapter))
        if place is None:
            raise UserError(
                f"{adapter}: its base model {base} is not there (moved?); put it back, or write where it is as "
                f"base_model_name_or_path in {lora.CONFIG_FILE}"
            )
        return str(place)
    return base


def _found(config: ModelConfig, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except pickle.UnpicklingError as error:  # weights that are a program: torch does not run it
        raise UserError(
            f"model.path: {config.path}: its weights are a pickle that torch refuses to load (weights_only); give a "
            "checkpoint in safetensors"
        ) from error
    except KeyError as error:
        if error.args != (attention.NAME,):
            raise
        raise UserError(
            f"model.path: {config.path}: this architecture has its own attention classes and cannot be given another "
            "attention through transformers' AttentionInterface; choose another model"
        ) from error
    except (OSError, ValueError) as error:  # transformers' own, for a missing file, an unknown id, no network
        first = str(error).strip().splitlines()[0]
        raise UserError(f"model.path: {config.path}: {first}; give a folder with a checkpoint, or a hub id") from error


def check_supported(model: PreTrainedModel) -> None:
    """Refuse what is known to train wrong from the config alone: other than causal attention, scaled or capped logits
    (`output_head`). What a config does not tell is measured by `hone.rollout.exactness`."""
    limits.check_layer_types(model.config)
    try:
        output_head(model)
    except ValueError as error:
        raise UserError(str(error)) from error


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a completion: the tokenizer's, the model's and its generation config's."""
    generation = model.generation_config.eos_token_id if model.generation_config is not None else None
    found: list[int] = []
    for source in (tokenizer.eos_token_id, model.config.eos_token_id, generation):
        if source is not None:
            found += [source] if isinstance(source, int) else list(source)
    return tuple(dict.fromkeys(found))
