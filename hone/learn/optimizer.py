"""The optimizer: which weights are trained, at which learning rate, and their gradients over all processes.

The depth of a parameter is 0 for the embeddings, l for layer l = 1..L, and L + 1 after the layers.
Frozen layers stay in the optimizer and keep their moments: without a gradient they are not stepped.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hone.base.settings import UserError
from hone.base.world import World
from hone.learn.master import clip_gradients, collect_gradients, master_weights, publish
from hone.learn.value import ValueHead
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


class MasterAdamW(torch.optim.AdamW):
    """AdamW over the float32 masters of a model's trainable parameters (`hone.learn.master`), and over a value head.

    There is one group per layer, and one for the head. `names`, `parameters` and `masters` go together. `full_lr` of a
    group is its learning rate before warm-up and decay.
    """

    def __init__(
        self, model: PreTrainedModel, head: ValueHead | None, optim: OptimConfig, layers: LayersConfig
    ) -> None:
        depth = depths(model)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.model, self.head = model, head
        self.names, self.parameters = list(named), list(named.values())
        self.masters = master_weights(self.parameters)
        self._depths = {p: depth[name] for name, p in named.items()}
        by_depth: dict[int, list[torch.Tensor]] = {}
        for place, master in zip(self._depths.values(), self.masters, strict=True):
            by_depth.setdefault(place, []).append(master)
        groups: list[dict[str, Any]] = [{"params": by_depth[place], "depth": place} for place in sorted(by_depth)]
        if head is not None:
            groups.append({"params": list(head.parameters()), "depth": None})
        super().__init__(
            groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=True
        )
        self.configure(optim, layers)

    def configure(self, optim: OptimConfig, layers: LayersConfig) -> None:
        """Set rates, decay and the trained layers, which may change without resetting the moments."""
        self.optim, self.layers = optim, layers
        last = num_layers(self.model)
        for group in self.param_groups:
            depth = group["depth"]
            if depth is not None:
                group["full_lr"] = optim.lr * rate_factor(depth, layers, last)
            elif self.head is not None:
                group["full_lr"] = self.head.config.lr
            group |= {"betas": optim.betas, "eps": optim.eps, "weight_decay": optim.weight_decay}
        freeze(self.model, self._depths, layers)

    def renew(self, optim: OptimConfig, layers: LayersConfig) -> None:
        """Begin again without moments; the masters stay."""
        self.state.clear()
        self.configure(optim, layers)

    def stepped(self) -> list[torch.Tensor]:
        """All tensors that are stepped, in a fixed order: masters by depth, then the value head."""
        return [p for group in self.param_groups for p in group["params"]]

    def sum_gradients(self, world: World, partial: Collection[str]) -> None:
        """Sum over all processes, never average: the weights of the loss are those of the whole batch.

        `partial`: names of parameters whose gradients are partial sums on the tensor-parallel processes.
        """
        collect_gradients(self.masters, self.parameters)
        self._fill_gradients(world)
        grads = {name: m.grad for name, m in zip(self.names, self.masters, strict=True) if m.grad is not None}
        world.sum(list(grads.values()), "replicate")
        if world.is_sharded:
            world.sum([grad for name, grad in grads.items() if name in partial], "tensor")
        if self.head is not None:
            head_grads = [p.grad for p in self.head.parameters() if p.grad is not None]
            world.sum(head_grads, "replicate", "shard")

    def _fill_gradients(self, world: World) -> None:
        """Fill in zero gradients, so that all processes sum the same list of tensors.

        Experts or skipped parts of a model may have been used only by the samples of one process.
        """
        tensors = [*self.masters, *(self.head.parameters() if self.head is not None else ())]
        gathered = world.gather([[t.grad is not None for t in tensors]], "which weights have a gradient")
        for t, used in zip(tensors, map(any, zip(*gathered, strict=True)), strict=True):
            if used and t.grad is None:
                t.grad = torch.zeros_like(t)

    def clip(self, world: World) -> tuple[float, float]:
        """Clip to `optim.grad_clip`; returns the norms before, of model and value head.

        The head is clipped separately, so that it does not limit the policy's step.
        """
        norm = clip_gradients(self.masters, self.parameters, self.optim.grad_clip, world)
        if self.head is None:
            return norm, 0.0
        return norm, float(torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.optim.grad_clip))

    def apply(self, factor: float) -> None:
        """Step with the learning rates times `factor`, and round the masters into the model."""
        for group in self.param_groups:
            group["lr"] = group["full_lr"] * factor
        self.step()
        publish(self.masters, self.parameters)


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
