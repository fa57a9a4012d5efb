"""Which weights are trained, and at which learning rate: one optimizer group per layer.

The depth of a parameter is 0 for the embeddings, l for layer l = 1..L, and L + 1 after the layers.
Frozen layers stay in the optimizer and keep their moments: without a gradient they are not stepped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hone.base.settings import UserError
from hone.recipe.sections.optim import LayersConfig, OptimConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def depths(model: PreTrainedModel) -> dict[str, int]:
    """Parameter name -> depth; a weight tied to the embedding has its depth, 0."""
    last = num_layers(model)
    embedding = model.get_input_embeddings().weight
    result = {}
    for name, p in model.named_parameters():
        number = re.search(r"\.(\d+)\.", name)
        result[name] = 0 if p is embedding else int(number[1]) + 1 if number else last + 1
    return result


def num_layers(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().num_hidden_layers)


def is_trained(depth: int, layers: LayersConfig, last: int) -> bool:
    """Whether a parameter of this depth is trained in a model of `last` layers."""
    if layers.count is None:
        return True
    return depth <= layers.count if layers.train == "first" else depth > last - layers.count


def rate_factor(depth: int, layers: LayersConfig, last: int) -> float:
    """The learning rate at this depth as a share of the full one: `lr_decay` applies once per layer, from the top down.

    Worked example: 3 layers, lr_decay 0.5: embeddings 1/8, layers 1/4, 1/2, 1, after the layers 1.
    """
    return layers.lr_decay ** max(0, last - depth)


def new_optimizer(
    trained: Iterable[tuple[int, torch.Tensor]], head: torch.nn.Linear | None, optim: OptimConfig
) -> torch.optim.AdamW:
    """AdamW without any moments. `trained`: (depth, master weight); `head`: PPO's value head, in its own group."""
    by_depth: dict[int, list[torch.Tensor]] = {}
    for depth, master in trained:
        by_depth.setdefault(depth, []).append(master)
    groups: list[dict[str, Any]] = [{"params": by_depth[depth], "depth": depth} for depth in sorted(by_depth)]
    if head is not None:
        groups.append({"params": list(head.parameters()), "depth": None})
    return torch.optim.AdamW(
        groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=True
    )


def configure(
    optimizer: torch.optim.Optimizer, optim: OptimConfig, layers: LayersConfig, last: int, head_lr: float
) -> None:
    """Settings that may change while the moments stay; `full_lr` is the learning rate before warm-up and decay."""
    for group in optimizer.param_groups:
        depth = group["depth"]
        group["full_lr"] = head_lr if depth is None else optim.lr * rate_factor(depth, layers, last)
        group |= {"betas": optim.betas, "eps": optim.eps, "weight_decay": optim.weight_decay}


def check_layers(model: PreTrainedModel, layers: LayersConfig) -> None:
    """Raises UserError if the model has fewer layers than `layers.count`."""
    last = num_layers(model)
    if layers.count is not None and layers.count > last:
        raise UserError(f"layers.count: {layers.count} exceeds the {last} layers of the model; give at most {last}")


def freeze(model: PreTrainedModel, trained: Mapping[torch.nn.Parameter, int], layers: LayersConfig) -> None:
    """Require gradients in the chosen layers only. `trained`: parameter -> depth."""
    check_layers(model, layers)
    last = num_layers(model)
    for p, depth in trained.items():
        p.requires_grad_(is_trained(depth, layers, last))
    # Gradient checkpointing needs an input that requires a gradient; the output of frozen embeddings does not.
    recomputes = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    if recomputes and not model.get_input_embeddings().weight.requires_grad:
        model.enable_input_require_grads()


def new_value_head(model: PreTrainedModel) -> torch.nn.Linear:
    """Hidden states [N, D] -> values [N, 1]; initialised to 0."""
    head = torch.nn.Linear(model.config.get_text_config().hidden_size, 1, device=model.device)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    return head
