"""The mode of the model in an update: the sampler's network, without any randomness that the sampler lacks.

    with update_mode(model): ...      # around the forward and the backward pass of an update

Models stay in eval mode, even in training. Setting `nn.Dropout` to zero is not enough: many architectures use
`torch.nn.functional.dropout(training=self.training)`, add noise to a router, or sample its choices, all in train mode
only. Two kinds of modules do need train mode and get it one by one: layers that recompute activations in the backward
pass, since transformers checks it there, and the dropout of an adapter in supervised stages, if the user set it.
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
    """Keep only the input of each layer and recompute the rest in the backward pass of `update_mode`.

    Raises ValueError for a model that does not support it.
    """
    # Newer transformers name it activation_checkpointing_enable and warn about the old name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": True})  # only a pass without gradients keeps our attention from storing its inner graph
    layers = _recomputed(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layers that can be recomputed")
    for layer in layers:
        layer._gradient_checkpointing_func = functools.partial(_in_eval_mode, layer._gradient_checkpointing_func)


@contextmanager
def update_mode(model: nn.Module) -> Iterator[None]:
    """Context manager in which activations are recomputed if requested, and an adapter's dropout is on."""
    modules = [*_recomputed(model), *_adapter_dropout(model)]
    before = [module.training for module in modules]
    try:
        for module in modules:
            module.training = True  # of this module only, not of its children
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training


def _recomputed(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]


def _adapter_dropout(model: nn.Module) -> list[nn.Module]:
    """The dropout modules of an adapter: peft keeps them in a dictionary `lora_dropout` in each adapted layer."""
    return [m for name, m in model.named_modules() if ".lora_dropout." in name and isinstance(m, nn.Dropout)]


def _in_eval_mode(checkpoint: Callable[..., Any], forward: functools.partial[Any], *inputs: Any) -> Any:
    """`checkpoint(forward, *inputs)`, with `self.training` off inside the layer's forward.

    The backward pass runs `forward` again, outside of the model's forward call, as part of the same `ForwardPass`.
    """
    layer, current = _layer_of(forward), attention.current_pass()

    def run(*again: Any) -> Any:
        before, layer.training = layer.training, False
        try:
            with attention.forward_pass(current):
                return forward(*again)
        finally:
            layer.training = before

    return checkpoint(run, *inputs)


def _layer_of(forward: functools.partial[Any]) -> nn.Module:
    """The layer in `partial(Layer.forward, layer, ...)`, before transformers 5.20 a partial of its `__call__`."""
    owner = forward.args[0] if forward.args else getattr(forward.func, "__self__", None)
    if not isinstance(owner, nn.Module):
        raise ValueError("this version of transformers passes layers to activation checkpointing in an unknown way")
    return owner
