"""What a checkpoint holds of a policy, and how it is restored: see `hone.learn.checkpoint` for the files.

model/      the weights; with LoRA the adapter alone, named as in peft's files
optimizer/  NAME.exp_avg, NAME.exp_avg_sq, NAME.step of every weight NAME that was stepped; NAME.weight of those
            that model/ lacks: float32 masters of lower-precision weights, the value head
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
    """A copy of a policy at one moment; `tensors` are this process's parts, in host memory."""

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
    """Read moments and masters; the weights have been read already."""
    saved = shards.shapes(folder / "optimizer")
    into: dict[str, torch.Tensor] = {}
    policy.optimizer.state.clear()
    for name, stepped, p in _stepped(policy):
        if p is not None and p.dtype != stepped.dtype:
            stepped.copy_(own_part(p))  # overwritten below if the checkpoint has a float32 master
        if f"{name}.weight" in saved:
            into[f"{name}.weight"] = cut_as(p, stepped.detach())
        if f"{name}.step" in saved:
            moments = {"step": torch.zeros((), device=stepped.device)}
            moments |= {key: torch.zeros_like(stepped, requires_grad=False) for key in MOMENTS}
            into |= {f"{name}.{key}": cut_as(p, moments[key]) for key in MOMENTS}
            into[f"{name}.step"] = moments["step"].view(1)
            policy.optimizer.state[stepped] = moments
    shards.read(folder / "optimizer", into)


def read_weights(model: PreTrainedModel, folder: Path) -> None:
    """Read a checkpoint's `model` or an ordinary Hugging Face folder. Raises ValueError if they do not fit."""
    shards.read(folder, weights(model))


def files(policy: Policy) -> dict[str, bytes]:
    """The files that make the weights a Hugging Face model: config and tokenizer."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
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
    """(name, stepped tensor, parameter) of every tensor that the optimizer steps; the value head has no parameter."""
    optimizer = policy.optimizer
    for name, master, p in zip(optimizer.names, optimizer.masters, optimizer.parameters, strict=True):
        yield name, master, p
    if policy.value_head is not None:
        for name, p in policy.value_head.named_parameters():
            yield f"value_head.{name}", p, None
