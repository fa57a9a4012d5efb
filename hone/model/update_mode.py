"""What an update computes with: the sampler's network, without any randomness that the sampler does not have.

    with update_mode(model): ...      # around the forward and the backward pass of an update

Models stay in eval mode, in training too. Setting `nn.Dropout` to zero is not enough: many architectures drop out
through `torch.nn.functional.dropout(training=self.training)`, add noise to a router, or sample its choices, all of it
in train mode only. Two things do need train mode, and get it module by module: layers whose activations are computed
again in the backward pass, since transformers looks there, and the dropout of an adapter in supervised stages, which
the user asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hone.model import attention


def recompute_activations(model: PreTrainedModel) -> None:
    """Keep only the input of each layer, and compute the rest again in the backward pass of `update_mode`.

    Raises ValueError (transformers' own, or one like it) for a model that was not written for it.
    """
    # Newer transformers call it activation_checkpointing_enable, and warn of the old name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": True})  # our attention keeps its inner graph: only a pass without gradient builds none
    layers = _recomputed(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layers that can be computed again")
    for layer in layers:
        layer._gradient_checkpointing_func = functools.partial(_in_eval_mode, layer._gradient_checkpointing_func)


@contextmanager
def update_mode(model: nn.Module) -> Iterator[None]:
    """For the duration, activations are recomputed where that was requested, and an adapter's own dropout is on."""
    modules = [*_recomputed(model), *_adapter_dropout(model)]
    before = [module.training for module in modules]
    try:
        for module in modules:
            module.training = True  # of this module alone, not of what is inside it
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training


def _recomputed(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]


def _adapter_dropout(model: nn.Module) -> list[nn.Module]:
    """peft keeps it in a dictionary called `lora_dropout` in each adapted layer."""
    return [m for name, m in model.named_modules() if ".lora_dropout." in name and isinstance(m, nn.Dropout)]


def _in_eval_mode(checkpoint: Callable[..., Any], forward: functools.partial[Any], *inputs: Any) -> Any:
    """`checkpoint(forward, *inputs)`, where a layer that looks at `self.training` in its forward finds it off.

    The backward pass runs `forward` again, outside of the model's forward call: that belongs to the same pass.
    """
    layer, this = _layer_of(forward), attention.current_pass()

    def run(*again: Any) -> Any:
        before, layer.training = layer.training, False
        try:
            with attention.forward_pass(this):
                return forward(*again)
        finally:
            layer.training = before

    return checkpoint(run, *inputs)


def _layer_of(forward: functools.partial[Any]) -> nn.Module:
    """transformers passes `partial(Layer.forward, layer, ...)`, before 5.20 a partial of the layer's own `__call__`."""
    owner = forward.args[0] if forward.args else getattr(forward.func, "__self__", None)
    if not isinstance(owner, nn.Module):
        raise ValueError("this version of transformers hands layers to activation checkpointing in an unknown way")
    return owner
