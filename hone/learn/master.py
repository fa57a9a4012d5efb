"""Float32 master weights: gradients accumulate and optimizer steps are taken in single precision.

A step of lr 1e-6 on a weight of 1 is lost in bfloat16, whose numbers near 1 are 1/128 apart (Micikevicius et al., Mixed
Precision Training, arXiv:1710.03740).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hone.base.world import World
from hone.model.parallel import cut_dims, own_part


def master_weights(parameters: Sequence[Tensor]) -> list[Tensor]:
    """One float32 tensor per parameter for the optimizer to step: the parameter itself, or for lower precision a copy
    that accumulates its gradient. Of a sharded parameter it is this process's part."""
    masters = []
    for p in parameters:
        if p.dtype == torch.float32:
            masters.append(own_part(p).detach().requires_grad_() if isinstance(p, DTensor) else p)
            continue
        master = own_part(p).detach().float().requires_grad_()
        p.register_post_accumulate_grad_hook(partial(_accumulate, master))
        masters.append(master)
    return masters


def collect_gradients(masters: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    """Move the gradients of sharded parameters to their masters."""
    for master, p in zip(masters, parameters, strict=True):
        if master is not p and p.grad is not None:
            master.grad, p.grad = _own_gradient(p), None


@torch.no_grad()
def publish(masters: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    """Round the master weights into the model."""
    for master, p in zip(masters, parameters, strict=True):
        if master.dtype != p.dtype:
            own_part(p).copy_(master)


def clip_gradients(masters: Sequence[Tensor], parameters: Sequence[Tensor], limit: float, world: World) -> float:
    """Clip the gradient to norm `limit`; returns the norm before clipping, over all parameters and processes.

    Each part of a weight counts once, even if several processes hold it.
    """
    if not world.is_sharded:
        return float(torch.nn.utils.clip_grad_norm_(masters, limit))
    kinds: tuple[frozenset[str], ...] = (
        frozenset(),
        frozenset({"shard"}),
        frozenset({"tensor"}),
        frozenset({"shard", "tensor"}),
    )
    device = masters[0].device
    squares = {kind: torch.zeros((), dtype=torch.float64, device=device) for kind in kinds}
    for master, p in zip(masters, parameters, strict=True):
        if master.grad is not None:
            squares[cut_dims(p)] += torch.linalg.vector_norm(master.grad).double().square()
    for dim in ("shard", "tensor"):
        world.sum([value for kind, value in squares.items() if dim in kind], dim)
    norm = float(sum(squares.values()).sqrt())  # type: ignore[union-attr]
    factor = min(1.0, limit / (norm + 1e-6))  # as in clip_grad_norm_; the same everywhere
    for master in masters:
        if master.grad is not None:
            master.grad.mul_(factor)
    return norm


def _accumulate(master: Tensor, p: Tensor) -> None:
    grad = _own_gradient(p)  # the hook runs right after the backward pass has added to it
    if master.grad is None:
        master.grad = grad.float()
    else:
        master.grad += grad
    p.grad = None


def _own_gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    if not isinstance(p, DTensor):
        return p.grad
    grad = p.grad
    assert isinstance(grad, DTensor)
    if grad.placements != p.placements:  # the bias of a row-parallel layer: its gradient is a partial sum
        grad = grad.redistribute(placements=p.placements)
        return own_part(grad).clone()
    return own_part(grad)
