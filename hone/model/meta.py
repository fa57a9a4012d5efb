"""Which device the meta device stands for.

    with stands_for("cpu"): model(...)      # of meta tensors: the code of a CPU runs, with sizes and without numbers
    if device_type(x) == "cpu": ...

Where code differs between devices, so does the memory that it takes, and `hone plan` adds that up on meta tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_stood_for: ContextVar[str] = ContextVar("device", default="meta")


@contextmanager
def stands_for(device: str) -> Iterator[None]:
    """Context manager in which `device_type` of meta tensors is `device` (cpu or cuda)."""
    token = _stood_for.set(device)
    try:
        yield
    finally:
        _stood_for.reset(token)


def device_type(x: Tensor) -> str:
    """cpu, cuda or another type of device."""
    return _stood_for.get() if x.is_meta else x.device.type
