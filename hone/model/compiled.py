"""Training passes through `torch.compile`, layer by layer: what lies between the products becomes one kernel.

Each layer is compiled on its own ("regional compilation", torchtitan, arXiv:2410.06511): all layers of a model share
the code, and it is made for any number of tokens. Attention stays outside, since its layout is Python's own: a layer
is compiled in two parts, before and behind it. Generation is left as it is.

On a GPU that is where norms, rotary embeddings and activations cost most. On a CPU it is slower
(`benchmarks/throughput.py --compile`), and PyTorch's own products take the place of `hone.model.linear`'s.
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
    """From now on `compiled` has an effect on this model. Raises UserError if its layers cannot be found."""
    if not decoder_layers(model):
        raise UserError(f"model.compile: {type(model).__name__} does not say what its layers are; set it to false")
    attention.keep_out_of_graphs()
    mixers.keep_out_of_graphs(model)
    setattr(model, _MARK, True)


def is_compiled(model: nn.Module) -> bool:
    return bool(getattr(model, _MARK, False))


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """What the architecture says must stay in one piece: its layers. FSDP2 makes a class of its own of theirs."""
    names = set(model._no_split_modules or ())
    return [m for m in model.modules() if names & {kind.__name__ for kind in type(m).__mro__}]


@contextmanager
def compiled(model: PreTrainedModel) -> Iterator[None]:
    """For the duration, layers run compiled."""
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
    """One for all layers of a kind, of all models; `dynamic`: for any number of tokens."""
    forward: Callable[..., Any] = torch.compile(layer.forward, dynamic=True)
    return forward
