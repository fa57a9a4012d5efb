"""Float32 master weights: gradients of micro-batches are added up, and steps taken, in single precision.

A step of lr 1e-6 on a weight of 1 is lost in bfloat16, whose numbers near 1 are 1/128 apart (Micikevicius et al., Mixed
Precision Training, arXiv:1710.03740).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor


def master_weights(parameters: Sequence[Tensor]) -> list[Tensor]:
    """One float32 tensor for each parameter: itself where it is one already, else a copy that gathers its gradient."""
    masters = []
    for p in parameters:
        if p.dtype == torch.float32:
            masters.append(p)
            continue
        master = p.detach().float().requires_grad_()
        p.register_post_accumulate_grad_hook(partial(_hand_over, master))
        masters.append(master)
    return masters


@torch.no_grad()
def publish(masters: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    """Round the master weights into the model."""
    for master, p in zip(masters, parameters, strict=True):
        if master is not p:
            p.copy_(master)


def _hand_over(master: Tensor, p: Tensor) -> None:
    assert p.grad is not None  # the hook runs when it has just been added to
    if master.grad is None:
        master.grad = p.grad.float()
    else:
        master.grad += p.grad
    p.grad = None
