"""Matrix products of the model through oneDNN, where PyTorch would use MKL.

On AMD processors MKL runs single-precision products at about half of what the vector units can do
(measured on Zen 5, one thread, 128 x 256 x 688: 101 GFLOP/s, oneDNN 208); PyTorch uses oneDNN for
bfloat16 and in compiled code, but has no switch for it in eager single precision. The results differ in
rounding only. Only plain float32 `nn.Linear` layers on the CPU are affected.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# oneDNN builds a primitive per shape and keeps the last 1024; it reads this at its first product. The machine code of a
# shape is never freed, whatever the capacity (`hone.preflight.plan.kernels.KERNEL`), so callers use few shapes.
CAPACITY = 256
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(CAPACITY))

PACKED_BYTES = 2 << 30
PACKED_ROWS = 128  # the packed layout is chosen for this number of rows; it is as fast for others


def available() -> bool:
    """Whether oneDNN is used. Depends only on the machine and the build, so that two runs on one machine agree bit for
    bit."""
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def keeps_shapes(model: nn.Module) -> bool:
    """Whether `onednn` sends products of this model through oneDNN, which keeps memory for every shape."""
    return available() and any(_is_plain(m, "cpu") for m in model.modules())


def _rounded(x: Tensor) -> Tensor:
    """x [..., K] as a matrix, with rows of zeros appended until their number is 1, a multiple of 8 up to 128, or a
    multiple of 128 above: the few sizes of packed passes and decode steps. Rectangles of sequences have other sizes
    (`hone.model.mixers`). A row of a product is the same to the bit, however many other rows there are."""
    spare = _spare(x.numel(), x.shape[-1])
    return F.pad(x.reshape(-1, x.shape[-1]), (0, 0, 0, spare)) if spare else x


@functools.lru_cache(maxsize=4096)
def _spare(numbers: int, width: int) -> int:
    """The rows that `_rounded` appends to so many numbers in rows of `width`; cached for the layers of a step."""
    rows = numbers // width
    return 0 if rows == 1 else -rows % (8 if rows <= 128 else 128)


def _unrounded(out: Tensor, like: Tensor) -> Tensor:
    """The first rows of `out` [M, N], in the shape of `like` [..., K]."""
    rows = like.numel() // like.shape[-1]
    return (out if out.numel() == rows * out.shape[-1] else out[:rows]).view(*like.shape[:-1], out.shape[-1])


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K], weight [N, K] -> x @ weight.T + bias [M, N]."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def _without_gradient(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] -> [..., N], whatever the number of rows."""
    if not _spare(x.numel(), x.shape[-1]):
        return _product(x, weight, bias)
    return _unrounded(_product(_rounded(x), weight, bias), x)


class OneDNNLinear(torch.autograd.Function):
    """`F.linear` with its three products through oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        g, x2 = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_x = _product(g, weight.t(), None).view_as(x) if ctx.needs_input_grad[0] else None
        grad_w = _product(g.t(), x2.t(), None) if ctx.needs_input_grad[1] else None
        grad_b = g.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return grad_x, grad_w, grad_b


def onednn_linear(module: nn.Linear, x: Tensor) -> Tensor:
    """x [..., K] -> [..., N], differentiable once."""
    if not torch.is_grad_enabled():
        return _without_gradient(x, module.weight, module.bias)
    # As a matrix: the result is then no view, and models may change it in place (OLMo clips its queries so).
    rounded = _rounded(x)
    out: Tensor = OneDNNLinear.apply(rounded.reshape(-1, x.shape[-1]), module.weight, module.bias)
    return _unrounded(out, x)


def _packed_linear(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Used for a single row too: `F.linear` has less overhead, but reads uncached weights at half the speed."""
    weight = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), PACKED_ROWS)
    return functools.partial(_without_gradient, weight=weight, bias=module.bias)


@contextmanager
def onednn(model: nn.Module, frozen: bool = False) -> Iterator[None]:
    """Context manager in which linear layers call oneDNN; the modules and their weights do not change.

    `frozen`: no weights change meanwhile. Each layer's weight is then reordered once into oneDNN's layout instead of in
    every product, where it takes a twentieth of the time with 128 rows and half with 8. The copies are as large as
    the weights, so models above PACKED_BYTES are excluded.
    """
    chosen = plain_layers(model, "cpu") if available() else []
    packed = frozen and sum(layer.weight.nbytes for layer in chosen) <= PACKED_BYTES
    try:
        for layer in chosen:
            vars(layer)["forward"] = _packed_linear(layer) if packed else functools.partial(onednn_linear, layer)
        yield
    finally:
        for layer in chosen:
            vars(layer).pop("forward", None)


def plain_layers(model: nn.Module, device: str | None = None) -> list[nn.Linear]:
    """Linear layers whose forward is not replaced, on `device` or on any."""
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and "forward" not in vars(m)]
    return [m for m in linear if _is_plain(m, device)]


def _is_plain(module: nn.Module, device: str | None) -> bool:
    """Whether a layer is float32 and not quantised, wrapped by another library, or sharded."""
    if type(module) is not nn.Linear or hasattr(module.weight, "placements"):
        return False
    return module.weight.dtype == torch.float32 and module.weight.device.type == (device or module.weight.device.type)
