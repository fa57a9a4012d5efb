"""One model over several processes: tensor parallel by the plan that transformers publishes, and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule

T = TypeVar("T")


def as_forward(model: nn.Module, call: Callable[[], T]) -> T:
    """`call()` as the model's forward pass: FSDP gathers the weights that belong to no layer around one."""
    if not isinstance(model, FSDPModule):
        return call()
    vars(model)["forward"] = call
    try:
        result: Any = model()
    finally:
        del vars(model)["forward"]
    return result  # type: ignore[no-any-return]
