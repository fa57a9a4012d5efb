"""RMS norms on a CPU, in fewer passes over memory: the same numbers but for rounding.

    with fast_norms(model): ...       # the modules and their weights do not change

PyTorch walks over the input seven times in such a norm, each time into new memory, and ten times in its backward pass,
for which it keeps three copies. Here one input and one number per row are kept (`RMSNorm`).

This concerns norms that scale by 1 + weight (Gemma, Qwen3.5 and Qwen3-Next) and those followed by a gate (gated delta
nets), of which such models have four in each layer, or one for each head. Norms that scale by the weight itself stay
the model's own: two in a layer cost little, and their models' results are the same to the bit in every version.
Modules are recognised by what they compute, not by their names. Only float32 on a CPU.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hone.model.meta import device_type

Kind = Literal["centred", "gated"]


class RMSNorm(torch.autograd.Function):
    """x [N, D], scale [D] -> x / sqrt(mean(x^2) + eps) * scale, row by row; Zhang and Sennrich, arXiv:1910.07467."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        inverse = _inverse(x, eps)
        ctx.save_for_backward(x, scale, inverse)
        return (x * inverse).mul_(scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """With r = 1 / sqrt(mean(x^2) + eps) and h = grad scale:

        of x: r h - x r^3 mean(h x); of scale: the sum of r x grad over the rows.
        """
        x, scale, inverse = ctx.saved_tensors
        products = grad * x
        of_scale = products.t() @ inverse[:, 0] if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, of_scale, None
        shared = (products @ scale)[:, None].mul_(inverse**3).div_(-x.shape[1])  # [N, 1]
        return (grad * scale).mul_(inverse).addcmul_(x, shared), of_scale, None


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x [..., D], scale [D] -> [..., D], differentiable once; strides are kept where two dimensions were swapped."""
    if x.ndim == 4 and not x.is_contiguous() and x.transpose(1, 2).is_contiguous():  # heads before tokens
        return rms_norm(x.transpose(1, 2), scale, eps).transpose(1, 2)
    rows = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled():
        out: Tensor = RMSNorm.apply(rows, scale, eps)
    else:
        out = (rows * _inverse(rows, eps)).mul_(scale)
    return out.view(x.shape)


def _inverse(x: Tensor, eps: float) -> Tensor:
    """[N, D] -> [N, 1]: one over the root of the mean square."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


@contextmanager
def fast_norms(model: nn.Module) -> Iterator[None]:
    """Context manager in which the model's RMS norms take fewer passes over memory, forward and backward."""
    chosen = [(module, kind) for module in model.modules() if (kind := _kind(module)) is not None]
    try:
        for module, kind in chosen:
            vars(module)["forward"] = functools.partial(_forward, module, kind)
        yield
    finally:
        for module, _ in chosen:
            vars(module).pop("forward", None)


def _centred(module: Any, eps: float, x: Tensor) -> Tensor:
    return rms_norm(x, 1.0 + module.weight, eps)


def _gated(module: Any, eps: float, x: Tensor, gate: Tensor) -> Tensor:
    return rms_norm(x, module.weight, eps) * F.silu(gate)


FAST: dict[Kind, Callable[..., Tensor]] = {"centred": _centred, "gated": _gated}
#: What each module computes, found once. A class may compute several things, by its settings.
_KINDS: WeakKeyDictionary[nn.Module, Kind | None] = WeakKeyDictionary()


def _forward(module: nn.Module, kind: Kind, *inputs: Tensor) -> Tensor:
    if inputs[0].dtype != torch.float32:
        own: Tensor = type(module).forward(module, *inputs)
        return own
    return FAST[kind](module, _eps(module), *inputs)


def _kind(module: nn.Module) -> Kind | None:
    """What a float32 norm on a CPU computes; None: neither of the two, or its forward is already replaced."""
    if "forward" in vars(module) or _eps(module) is None:
        return None
    parameters = dict(module.named_parameters())
    if list(parameters) != ["weight"]:
        return None
    weight = parameters["weight"]
    is_plain = weight.ndim == 1 and weight.dtype == torch.float32 and device_type(weight) == "cpu"
    if not is_plain or hasattr(weight, "placements"):
        return None
    if module not in _KINDS:
        _KINDS[module] = _probe_kind(module)
    return _KINDS[module]


def _eps(module: nn.Module) -> float | None:
    """The number that an RMS norm adds to the mean square."""
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    return eps if isinstance(eps, float) else None


@torch.no_grad()
def _probe_kind(module: Any) -> Kind | None:
    """By what a copy of the module, with weights of its own, makes of numbers of order 1 and of order sqrt(eps)."""
    count = len(inspect.signature(module.forward).parameters)
    if count not in (1, 2):
        return None
    kind: Kind = "gated" if count == 2 else "centred"
    copied, eps, size = copy.deepcopy(module).to_empty(device="cpu"), _eps(module) or 0.0, len(module.weight)
    copied.weight.copy_(torch.linspace(-0.5, 0.75, size))
    rows = [torch.linspace(*ends, 2 * size).view(2, -1) for ends in ((-2.0, 3.0), (2.0, -1.0))]
    for scale in (1.0, eps**0.5):
        inputs = [rows[0] * scale, *rows[1:]][:count]
        try:
            expected = copied(*inputs)
        except Exception:  # it takes inputs of another kind or shape, and so computes something else
            return None
        fast = FAST[kind](copied, eps, *inputs)
        if not (isinstance(expected, Tensor) and expected.shape == fast.shape):
            return None
        if not torch.allclose(fast, expected, rtol=1e-5, atol=1e-5):
            return None
    return kind
