"""Training passes through `torch.compile`, layer by layer: the operations between matrix products become one kernel.

Each layer is compiled on its own ("regional compilation", torchtitan, arXiv:2410.06511): all layers of a model share
the code, which handles any number of tokens. Attention stays outside, because its layout is a Python object: a layer is
compiled in two parts, before and after it. Generation is not compiled.

This concerns norms, rotary embeddings and activations, which cost most on a GPU. On a CPU it is slower
(`benchmarks/throughput.py --compile`), and PyTorch's own products replace those of `hone.model.linear`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hone.base.settings import UserError
from hone.model import attention, mixers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MARK = "hone_compiled"


def request(model: PreTrainedModel) -> None:
    """Let `compiled` take effect on this model. Raises UserError if its layers cannot be found."""
    if not decoder_layers(model):
        raise UserError(f"model.compile: {type(model).__name__} does not declare its layers; set it to false")
    attention.keep_out_of_graphs()
    mixers.keep_out_of_graphs(model)
    setattr(model, _MARK, True)


def is_compiled(model: nn.Module) -> bool:
    return bool(getattr(model, _MARK, False))


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers, which the architecture declares as modules that must not be split. FSDP2 replaces their class."""
    names = set(model._no_split_modules or ())
    return [m for m in model.modules() if names & {kind.__name__ for kind in type(m).__mro__}]


@contextmanager
def compiled(model: PreTrainedModel) -> Iterator[None]:
    """Context manager in which layers run compiled."""
    layers = decoder_layers(model)
    try:
        for layer in layers:
            vars(layer)["forward"] = functools.partial(_compiled(type(layer)), layer)  # type: ignore[arg-type]
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


@functools.cache
def _compiled(layer: type[nn.Module]) -> Callable[..., Any]:
    """The compiled forward of all layers of a class, in all models; `dynamic`: for any number of tokens."""
    forward: Callable[..., Any] = torch.compile(layer.forward, dynamic=True)
    return forward
