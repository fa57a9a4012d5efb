"""Peak memory of a forward and backward pass: runs the update's code on the meta device and adds up sizes.

    model = meta_model(config, "bfloat16")                        # shapes without numbers, of any architecture
    most = trace(model, batch, again=True)                        # bytes beyond the weights and gradients

Tensors on the meta device have a size but no memory, so a model of 7 billion weights takes a few seconds.
Workspace inside kernels, and memory that an allocator keeps beside the tensors, are not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hone.learn.forward import packed_logprobs
from hone.model.meta import stands_for
from hone.model.norms import fast_norms
from hone.model.update_mode import update_mode
from hone.types import MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


#: The product of tokens with the weights of their experts.
GROUPED = torch.ops.aten._grouped_mm.default


class Alive(TorchDispatchMode):
    """While active, adds the sizes of new storages and subtracts those of freed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 0  # transformers checks whether positions restart, for a mask that our attention does not use
        grouped = func is GROUPED and args[0].is_meta
        out = _grouped(func, args, kwargs or {}) if grouped else func(*args, **(kwargs or {}))
        inputs = {x.untyped_storage()._cdata for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in tree_iter(out):
            # A view of a weight, or a gradient that was added to, is not new.
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in inputs:
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return

        def gone(_: Any) -> None:
            self.now -= size
            self._seen.pop(key, None)

        self._seen[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def _grouped(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Without numbers this product knows bfloat16 only; its result has the shape and strides of any precision."""
    dtype = args[0].dtype
    halves = [x.to(torch.bfloat16) for x in args[:2]]
    out: torch.Tensor = func(*halves, *args[2:], **kwargs)
    return out.to(dtype)


def forward_backward(model: PreTrainedModel, batch: MicroBatch, entropy: bool) -> None:
    """The forward and backward pass of an update; gradients remain. `entropy`: include its gradient.

    The temperature is 1: another one takes as much memory, since logits are divided in place.
    """
    with update_mode(model):
        hidden, logprobs, entropies = packed_logprobs(model, batch, 1.0, want_entropy=True)
        hidden.retain_grad()
        assert entropies is not None
        loss = -(batch.weights * logprobs).sum()
        if entropy:
            loss = loss - entropies.sum()
        loss.backward()


def trace(
    model: PreTrainedModel,
    batch: MicroBatch,
    *,
    device: str = "cpu",
    entropy: bool = False,
    again: bool = True,
) -> int:
    """Peak bytes in `forward_backward`, beyond the weights and the gradients that existed before.

    `device`: cpu or cuda, which the meta device stands in for. `again`: gradients exist already, from an earlier
    micro-batch.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.grad = torch.empty_like(p) if again else None
    try:
        with Alive() as alive, stands_for(device), fast_norms(model):
            forward_backward(model, batch, entropy)
        return alive.peak
    finally:
        for p in trained:
            p.grad = None
