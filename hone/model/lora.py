"""Low-rank adapters: a layer computes W x + (alpha / rank) B A x, and only A and B are trained.

Hu et al., LoRA, arXiv:2106.09685. The adapters are `peft`'s, injected into the model in place: it stays the same
Hugging Face model, and attention, output head and packing are unaware of them. Where peft's layers are in the way,
plain ones replace them temporarily:

    with adapter_off(model): ...    # W alone: the reference, without a second copy of the model
    with merged(model): ...         # W + (alpha / rank) B A in one matrix: to sample, to export, to send to a server

peft takes seconds to import, so it is imported only when an adapter is attached.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn

from hone.base.extras import needed
from hone.base.settings import UserError
from hone.model import mixers, saving, shards
from hone.model.random_state import own_random_numbers
from hone.recipe.sections.model import LoraConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Mixers whose last projection peft does not adapt, since fused kernels read its weight.
WITHOUT_OUT_PROJ = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
#: Names of expert layers, which peft maps to the fused tensor in models that have one.
EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
ADAPTER = "default"  # peft's name of a single adapter
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of the names in peft's files


def attach(model: PreTrainedModel, lora: LoraConfig, seed: int) -> None:
    """Put a new adapter into the model and freeze everything else. B is 0, so the outputs do not change.

    `seed` determines A. Raises UserError for targets that the model does not have, and if peft is not installed.
    """
    peft = _peft()
    names = target_names(model, lora.targets)
    alpha = int(lora.scale_alpha) if lora.scale_alpha.is_integer() else lora.scale_alpha  # as peft writes it
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=alpha, lora_dropout=lora.dropout, target_modules=names, task_type="CAUSAL_LM"
    )
    _inject(model, config, seed)


def target_names(model: PreTrainedModel, targets: str | tuple[str, ...]) -> list[str]:
    """Ends of the names of the targeted linear layers, as peft matches them: `q_proj`, or `mlp.c_proj` where another
    part has a `c_proj` too.

    `attention`: layers inside attention modules; `mlp`: all others except those of recurrent mixers and routers.
    Raises UserError for a name that does not exist.
    """
    linear = _linear(model)
    kinds = sorted({type(m).__name__ for m in model.modules() if type(m).__name__ == "Conv1D"})
    if not linear:
        kind = f" (its layers are {', '.join(kinds)})" if kinds else ""
        raise UserError(f"lora: {type(model).__name__} has no linear layers to adapt{kind}; train without lora")
    leaves = sorted({name.rpartition(".")[2] for name in linear})
    if targets == "all":
        return _endings(model, list(linear))
    if targets in ("attention", "mlp"):
        chosen = [name for name in linear if _part(name) == targets]
        if not chosen:
            fused = (
                f" (its experts, {', '.join(experts)}, are not adapted)" if (experts := fused_experts(model)) else ""
            )
            raise UserError(
                f"lora.targets: this model has no linear layers in its {targets} that can be adapted{fused}; name "
                f"others: {', '.join(leaves)}"
            )
        return _endings(model, chosen)
    for name in targets:
        if name not in leaves and name in EXPERTS and fused_experts(model):
            raise UserError(
                f"lora.targets: {name} belongs to experts that are fused in one tensor, which hone does not adapt; "
                f"name others: {', '.join(leaves)}"
            )
        if name in unadaptable(model):
            raise UserError(
                f"lora.targets: the weight of {name} is read directly, bypassing the layer, so an adapter would have "
                f"no effect; name others: {', '.join(leaves)}"
            )
        if not any(f".{full_name}".endswith(f".{name}") for full_name in linear):
            raise UserError(f"lora.targets: {name} is not a linear layer of this model; it has {', '.join(leaves)}")
    return sorted(targets)


#: Parts of the names of modules: attention, recurrent mixers, and what sends tokens to experts.
ATTENTION = ("attn", "attention")
MIXERS = ("linear_attn", "mamba", "mixer", "conv", "rglru", "ssm")
ROUTERS = ("router", "gate", "shared_expert_gate")


def _part(name: str) -> str:
    """The part of a layer that a linear layer belongs to: `attention`, `mixer` or `mlp`."""
    parents = name.split(".")[:-1]
    if any(part in MIXERS for part in parents):
        return "mixer"
    return "attention" if any(kind in part for part in parents for kind in ATTENTION) else "mlp"


def _endings(model: PreTrainedModel, chosen: list[str]) -> list[str]:
    """The shortest ends of these names that no other module's name has."""
    others = [f".{name}" for name, _ in model.named_modules() if name not in set(chosen)]
    endings = set()
    for name in chosen:
        parts = name.split(".")
        candidates = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        endings.add(next(end for end in candidates if not any(other.endswith(f".{end}") for other in others)))
    return sorted(endings)


def _linear(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Name -> layer that can be adapted: plain linear layers except the output head and routers.

    In a model with fused experts peft maps the names of expert layers to the fused tensors (as in adapters of older
    checkpoints), wherever they occur. So layers with these names are excluded, also dense ones and shared experts.
    """
    head = model.get_output_embeddings()
    excluded = {*unadaptable(model), *(EXPERTS if fused_experts(model) else ())}
    named = {name: m for name, m in model.named_modules() if type(m) is nn.Linear and m is not head}
    if any("expert" in name for name, _ in model.named_modules()):
        named = {name: m for name, m in named.items() if not any(part in ROUTERS for part in name.split("."))}
    return {name: m for name, m in named.items() if name.rpartition(".")[2] not in excluded}


def unadaptable(model: nn.Module) -> list[str]:
    """Last parts of the names of a recurrent mixer's layers whose weight its code, or a fused kernel, reads itself."""
    recurrent = mixers.recurrent(model)
    names = {"dt_proj"} if any(not mixers.continues(mixer) for mixer in recurrent) else set()
    kind = str(getattr(getattr(model, "config", None), "model_type", ""))
    return sorted(names | ({"out_proj"} if recurrent and kind in WITHOUT_OUT_PROJ else set()))


def fused_experts(model: nn.Module) -> list[str]:
    """Last parts of the names of weights [experts, out, in] that hold all experts of a layer."""
    return sorted({name.rpartition(".")[2] for name, p in model.named_parameters() if "expert" in name and p.ndim == 3})


def coverage(model: PreTrainedModel) -> str | None:
    """What an attached adapter covers, if that is less than `lora.targets` suggests; else None."""
    experts, mixing = fused_experts(model), unadaptable(model)
    if not has_adapter(model) or not (experts or mixing):
        return None
    names = ", ".join(sorted({name for _, name, _ in _adapted(model)}))
    rest = [f"{', '.join(mixing)} of the recurrent mixers"] if mixing else []
    if experts:
        rest.append(
            f"the experts of this model ({', '.join(experts)}), its router and layers that are named as experts'"
        )
    return f"lora: adapters are on {names}; {' and '.join(rest)} are not adapted"


def has_adapter(model: nn.Module) -> bool:
    """Whether an adapter is attached (and not merged for good)."""
    return bool(getattr(model, "peft_config", None))


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Context manager in which the model runs without its adapter, if it has one."""
    with _exchanged(model, lambda layer: layer.get_base_layer()):
        yield


@contextmanager
def merged(model: nn.Module) -> Iterator[None]:
    """Context manager in which each adapted layer is an ordinary `nn.Linear`, and parameters have the names of the base
    model.

    The frozen weights are not modified: adding and subtracting would leave a rounding error.
    """
    with _exchanged(model, _merged_layer):
        yield


def for_sampling(model: PreTrainedModel) -> AbstractContextManager[None]:
    """The model as an in-process engine runs it: merged in float32, which differs by rounding only and saves two thin
    products per layer and token; unmerged in bfloat16, where rounding would make it another policy."""
    return merged(model) if model.dtype == torch.float32 else nullcontext()


def merge(model: PreTrainedModel) -> None:
    """Add the adapter to the weights permanently and remove it."""
    for parent, child, layer in _adapted(model):
        base = layer.get_base_layer()
        base.weight.data = _merged_weight(layer)
        setattr(parent, child, base)
    _forget(model)


def remove(model: PreTrainedModel) -> None:
    """Remove the adapter without changing the weights."""
    for parent, child, layer in _adapted(model):
        setattr(parent, child, layer.get_base_layer())
    _forget(model)


# --- files, in peft's format ----------------------------------------------------------------------------------------


def save_adapter(model: PreTrainedModel, folder: Path, base: str) -> None:
    """`adapter_config.json` and `adapter_model.safetensors`, as `peft.PeftModel.from_pretrained` reads them.

    `base`: the folder or hub id of the adapter's base model. Its `config.json` is written beside them.
    """
    save_settings(model, folder, base)
    tensors = {name: value.contiguous() for name, value in named_weights(model).items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def save_settings(model: PreTrainedModel, folder: Path, base: str) -> None:
    """Write the files of `save_adapter` except for the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.copy(_peft_config(model))
    config.base_model_name_or_path = str(Path(base).resolve()) if Path(base).exists() else base
    config.inference_mode = True
    config.save_pretrained(folder)
    saving.save_settings(model.config, folder)


def named_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The adapter's tensors by their names in peft's files; they share memory with the model."""
    return {_PREFIX + name: value for name, value in adapter_weights(model).items()}


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Fill the attached adapter from files in peft's format, or a checkpoint's. Raises UserError if they do not fit."""
    saved = shards.shapes(folder)
    own = named_weights(model)
    ours, theirs = _peft_config(model), read_config(folder)
    fits = saved == {name: tuple(value.shape) for name, value in own.items()}
    if not fits or ours.lora_alpha != theirs["lora_alpha"]:
        targets = theirs["target_modules"]
        raise UserError(
            f"lora: the adapter in {folder} has rank {theirs['r']}, alpha {theirs['lora_alpha']} and targets "
            f"{targets if isinstance(targets, str) else ', '.join(sorted(targets))}; set lora.rank, lora.alpha and "
            "lora.targets to these"
        )
    shards.read(folder, own)


def adapter_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The adapter's tensors by their names in peft's files without the prefix; they share memory with the model."""
    tensors: dict[str, torch.Tensor] = _peft().get_peft_model_state_dict(
        model, adapter_name=ADAPTER, save_embedding_layers=False
    )
    return tensors


def factor(model: PreTrainedModel) -> float:
    """The scaling factor of B A x, alpha / rank."""
    config = _peft_config(model)
    return float(config.lora_alpha / config.r)


def is_adapter(path: str | Path) -> bool:
    """Whether `path` is a folder in peft's format."""
    return (Path(path) / CONFIG_FILE).is_file()


def read_config(folder: str | Path) -> dict[str, Any]:
    """adapter_config.json. Raises UserError unless it is plain LoRA: merging would change the model's outputs."""
    values: dict[str, Any] = json.loads((Path(folder) / CONFIG_FILE).read_text())
    if values.get("peft_type") != "LORA":
        raise UserError(f"{folder}: an adapter of type {values.get('peft_type')}; only LORA is supported")
    if used := [key for key in ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern") if values.get(key)]:
        raise UserError(f"{folder}: its {CONFIG_FILE} has {', '.join(used)}, which are not supported")
    return values


def merge_from(model: PreTrainedModel, folder: str | Path) -> None:
    """Merge the adapter in `folder` into its base model."""
    read_config(folder)
    config = _peft().LoraConfig.from_pretrained(str(folder))
    config.inference_mode = False
    _inject(model, config, seed=0)
    load_adapter(model, Path(folder))
    merge(model)
    model.requires_grad_(True)  # peft has frozen it


# --- the exchange ---------------------------------------------------------------------------------------------------


@contextmanager
def _exchanged(model: nn.Module, other: Callable[[Any], nn.Module]) -> Iterator[None]:
    """Context manager in which `other(layer)` replaces each adapted layer."""
    places = _adapted(model)
    try:
        with torch.no_grad():
            for parent, child, layer in places:
                setattr(parent, child, other(layer))
        yield
    finally:
        for parent, child, layer in places:
            setattr(parent, child, layer)


def _adapted(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """(parent, attribute name, layer) of every adapted layer."""
    if not has_adapter(model):
        return []
    from peft.tuners.lora import LoraLayer

    return [(p, name, c) for p in model.modules() for name, c in p.named_children() if isinstance(c, LoraLayer)]


@torch.no_grad()
def _merged_weight(layer: Any) -> torch.Tensor:
    """W + (alpha / rank) B A [out, in], computed in float32 and rounded once."""
    weight = layer.get_base_layer().weight
    a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    total = torch.addmm(weight.float(), b.float(), a.float(), alpha=layer.scaling[ADAPTER])
    return total.to(weight.dtype)


def _merged_layer(layer: Any) -> nn.Linear:
    base = layer.get_base_layer()
    plain = nn.Linear(base.in_features, base.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(_merged_weight(layer), requires_grad=False)
    plain.bias = base.bias
    return plain


def _inject(model: PreTrainedModel, config: Any, seed: int) -> None:
    """Wrap the targets in peft's layers. Raises UserError if one is not a plain linear layer."""
    with own_random_numbers(model.device):
        torch.manual_seed(seed)
        _peft().inject_adapter_in_model(config, model, ADAPTER)
    for _, name, layer in _adapted(model):
        if type(layer.get_base_layer()) is not nn.Linear:
            raise UserError(f"lora.targets: {name} is a {type(layer.get_base_layer()).__name__}; give linear layers")


def _forget(model: PreTrainedModel) -> None:
    """Remove peft's record, because of which it would treat the next adapter as a second one."""
    if has_adapter(model):
        del model.peft_config


def _peft_config(model: PreTrainedModel) -> Any:
    return model.peft_config[ADAPTER]


def require() -> None:
    """Raises UserError if peft is not installed."""
    _peft()


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UserError(f"lora: peft is not installed; {needed('lora')}") from error
    return peft
