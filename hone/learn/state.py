"""What of a policy is in a checkpoint, and how it comes back: see `hone.learn.checkpoint` for the files.

model/      the weights; of LoRA the adapter alone, by the names of peft's files
optimizer/  NAME.exp_avg, NAME.exp_avg_sq, NAME.step of every weight NAME that was stepped; NAME.weight of those
            that are not in model/: float32 masters of lower precision, the value head
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hone.model import lora as adapters
from hone.model import shards
from hone.model.parallel import cut_as, own_part
from hone.model.saving import save_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hone.learn.policy import Policy

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class State:
    """A copy of a policy at one moment; `tensors` are this process's parts, in the memory of the host."""

    tensors: Mapping[str, Mapping[str, torch.Tensor]]  # folder -> name -> part
    files: Mapping[str, bytes]  # beside the weights in model/: config, tokenizer
    scalars: Mapping[str, Any]


def weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Every weight once, by its name; they share memory with the model."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    return {name: value for name, value in model.state_dict().items() if name not in tied}


def tensors(policy: Policy) -> dict[str, dict[str, torch.Tensor]]:
    """What a checkpoint holds, by folder and name; they share memory with the policy."""
    trained = weights(policy.model) if policy.lora is None else adapters.named_weights(policy.model)
    rest: dict[str, torch.Tensor] = {}
    for name, stepped, p in _stepped(policy):
        moments = policy.optimizer.state.get(stepped, {})
        if moments:
            rest |= {f"{name}.{key}": cut_as(p, moments[key]) for key in MOMENTS}
            rest[f"{name}.step"] = moments["step"].reshape(1)
        if p is None or p.dtype != stepped.dtype:
            rest[f"{name}.weight"] = cut_as(p, stepped.detach())
    return {"model": trained, "optimizer": rest}


@torch.no_grad()
def restore(policy: Policy, folder: Path) -> None:
    """Moments and masters; the weights are those of the checkpoint already."""
    there = shards.shapes(folder / "optimizer")
    into: dict[str, torch.Tensor] = {}
    policy.optimizer.state.clear()
    for name, stepped, p in _stepped(policy):
        if p is not None and p.dtype != stepped.dtype:
            stepped.copy_(own_part(p))  # unless the checkpoint has something more precise
        if f"{name}.weight" in there:
            into[f"{name}.weight"] = cut_as(p, stepped.detach())
        if f"{name}.step" in there:
            moments = {"step": torch.zeros((), device=stepped.device)}
            moments |= {key: torch.zeros_like(stepped, requires_grad=False) for key in MOMENTS}
            into |= {f"{name}.{key}": cut_as(p, moments[key]) for key in MOMENTS}
            into[f"{name}.step"] = moments["step"].view(1)
            policy.optimizer.state[stepped] = moments
    shards.read(folder / "optimizer", into)


def read_weights(model: PreTrainedModel, folder: Path) -> None:
    """Of a checkpoint's `model`, or of an ordinary Hugging Face folder. Raises ValueError if they do not fit."""
    shards.read(folder, weights(model))


def files(policy: Policy) -> dict[str, bytes]:
    """What stands beside the weights, so that the folder is a model: its settings and its tokenizer."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if policy.lora is not None:
            adapters.save_settings(policy.model, folder, policy.base)
        else:
            config = copy.deepcopy(policy.model.config)
            config.dtype = policy.model.dtype
            save_settings(config, folder)
            if policy.model.generation_config is not None:
                policy.model.generation_config.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _stepped(policy: Policy) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """Everything that the optimizer steps, by name: masters, each with its parameter, and the value head."""
    for name, master, p in zip(policy.names, policy.masters, policy.parameters, strict=True):
        yield name, master, p
    if policy.value_head is not None:
        for name, p in policy.value_head.named_parameters():
            yield f"value_head.{name}", p, None
