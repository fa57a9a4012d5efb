"""Load any Hugging Face causal LM, by folder or hub id, with our attention plugged in."""

from __future__ import annotations

import difflib
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from hone.base import checksums, hub, places
from hone.base.settings import UserError
from hone.model import attention, compiled, limits, lora, mixers, shards
from hone.model.logprobs import output_head
from hone.model.update_mode import recompute_activations
from hone.recipe.sections.model import WITHOUT_OWNER, ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

hf_logging.disable_progress_bar()

#: A folder with none of these has no tokenizer of any kind.
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "merges.txt", "tekken*")


def device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(config: ModelConfig, on: torch.device | None = None) -> PreTrainedModel:
    """Load the model in `config.dtype` with our attention, always in eval mode: sampler and trainer must be the same
    network, without dropout or other noise (`hone.model.update_mode`). A folder of an adapter gives its base with the
    adapter merged in. `on`: the device, by default the accelerator.

    Raises UserError if there is no model at `config.path`, it is damaged, or it would silently train incorrectly.
    """
    attention.register()
    config = located(config)
    checksums.require(Path(config.path).expanduser())
    if lora.is_adapter(config.path):
        model = load_model(config.at(base_of(config.path)), on)
        lora.merge_from(model, config.path)
        return model
    model = _loaded(config, lambda: (_of_checkpoint if shards.is_sharded(config.path) else _pretrained)(config))
    check_supported(model)
    limits.ignore_places_in_the_row(model)
    mixers.route(model)
    if config.recompute_activations:
        try:
            recompute_activations(model)
        except ValueError as error:  # from transformers, for a model without support for it
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
    """Load the `model/` of a checkpoint, which several processes may have written."""
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
    """Load the checkpoint's tokenizer. Raises UserError if there is none, or it has no end-of-text token."""
    config = located(config)
    if lora.is_adapter(config.path) and not (Path(config.path) / "tokenizer_config.json").exists():
        config = config.at(base_of(config.path))
    folder = Path(config.path).expanduser()
    if folder.is_dir() and not any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        raise UserError(
            f"model.path: {config.path} has no tokenizer ({', '.join(TOKENIZER_FILES)}); put that of the model it was "
            f"trained from there: AutoTokenizer.from_pretrained(BASE).save_pretrained({config.path!r})"
        )
    tokenizer = _loaded(config, lambda: AutoTokenizer.from_pretrained(config.path, revision=config.revision))
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {config.path} has no end-of-text token: stopping could not be learned")
    return tokenizer


def require_weights(path: str) -> None:
    """Raises UserError if `path` is a folder without weights; their contents are read by `load_model`."""
    folder = places.locate(path).expanduser()
    if folder.is_dir() and not any(path for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern)):
        raise UserError(
            f"model.path: {path} has no weights (*.safetensors); give a folder with a checkpoint, or a hub id"
        )


def base_of(adapter: str) -> str:
    """The base model of an adapter: a folder, even if it has moved with its run, or a hub id.

    Raises UserError if the folder is missing.
    """
    base = str(lora.read_config(adapter)["base_model_name_or_path"])
    if Path(base).is_absolute() and not Path(base).exists():
        place = places.moved(base, Path(adapter))
        if place is None:
            raise UserError(
                f"{adapter}: its base model {base} is not there (moved?); put it back, or write its path as "
                f"base_model_name_or_path in {lora.CONFIG_FILE}"
            )
        return str(place)
    return base


def located(config: ModelConfig) -> ModelConfig:
    """The config with the current place of a folder that the run in use records. Raises UserError if it is missing."""
    return config.at(str(places.locate(config.path))) if places.is_known(config.path) else config


def require_source(config: ModelConfig) -> None:
    """Raises UserError, at once, if the model is neither a folder nor cached and cannot come from the hub."""
    path = config.path
    if Path(path).expanduser().exists() or _is_cached(config):
        return
    if "/" not in path and path not in WITHOUT_OWNER:
        near = difflib.get_close_matches(path, sorted(p.name for p in Path.cwd().iterdir() if p.is_dir()), n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise UserError(
            f"model.path: {path}: no folder of this name in {Path.cwd()}; {meant}Give the folder of a checkpoint, or a "
            "hub id with its owner, such as Qwen/Qwen3-0.6B"
        )
    hub.require(f"model.path: {path}", "give a folder with a checkpoint")


def _loaded(config: ModelConfig, load: Callable[[], Any]) -> Any:
    require_source(config)
    try:
        return load()
    except pickle.UnpicklingError as error:  # torch does not run code in weights
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
    except (OSError, ValueError) as error:  # from transformers: missing file, unknown id, no network
        first = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(f"model.path: {config.path}: {first}; give a folder with a checkpoint, or a hub id") from error


def _is_cached(config: ModelConfig) -> bool:
    """Whether some file of the model is in the hub's cache; its client reports missing ones."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(config.path, "config.json", revision=config.revision), str)
    except HFValidationError:  # not a hub id: the loader reports it
        return True


def check_supported(model: PreTrainedModel) -> None:
    """Raises UserError for models whose config shows that they would train incorrectly: unknown kinds of layers, a
    wrapped output head. `hone.rollout.exactness` detects what a config does not show."""
    limits.check_layer_types(model.config, mixers.check(model))
    try:
        output_head(model)
    except ValueError as error:
        raise UserError(str(error)) from error


def left_out(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """(kind, message) of events on parts that are not trained although the settings, or the model's config, suggest
    it."""
    if (covered := lora.coverage(model)) is not None:
        yield "lora", covered
    text = model.config.get_text_config()
    for name in ("router_aux_loss_coef", "aux_loss_alpha"):
        if getattr(text, name, None) and lora.fused_experts(model):
            yield "experts", f"the routers' auxiliary loss ({name} of the model's config) is not part of the objective"


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a completion: the tokenizer's, the model's and its generation config's."""
    generation = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids: list[int] = []
    for source in (tokenizer.eos_token_id, model.config.eos_token_id, generation):
        if source is not None:
            ids += [source] if isinstance(source, int) else list(source)
    return tuple(dict.fromkeys(ids))
