"""Linear layers in lower precision than the policy's, to sample faster, on copies of the current weights.

    with reduced(model, "bfloat16"): ...    # the modules and their weights do not change

bfloat16: weights and inputs are rounded, sums are in float32. int8: each row of the weight is round(w / s) with its own
s = max |w| / 127, inputs are rounded to bfloat16 ("weight-only, per channel"). Embeddings, norms, attention and, as is
usual, the output head keep the policy's precision. Samples come from a distribution close but not equal to the
policy's; the log-probs of the tokens are those of this distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hone.base.settings import UserError
from hone.model.linear import PACKED_ROWS, plain_layers

Weights = Literal["policy", "bfloat16", "int8"]
Product = Callable[[Tensor], Tensor]

#: PyTorch's int8 product is used up to this many rows: it reads less but computes slowly, and pads more rows to 8.
INT8_ROWS = 1
#: It reads this many numbers at a time, beyond the end of a shorter row.
INT8_MULTIPLE = 16


def check(model: PreTrainedModel, weights: Weights) -> None:
    """Raises UserError if this model cannot be sampled with these weights on this device."""
    if weights == "policy" or (weights == "bfloat16" and model.dtype == torch.bfloat16):
        return
    if model.dtype != torch.float32:
        raise UserError(f"rollout.weights: {weights} is made from float32 weights, but model.dtype is {_name(model)}")
    if weights == "int8" and model.device.type != "cpu":
        raise UserError(
            f"rollout.weights: int8 is for CPUs, and the model is on {model.device}; give bfloat16, or an engine that "
            "has quantised kernels (rollout.engine: vllm)"
        )


@contextmanager
def reduced(model: PreTrainedModel, weights: Weights) -> Iterator[None]:
    """Context manager in which linear layers use copies of their weights in this precision, made on entry. Weights must
    not change meanwhile."""
    check(model, weights)
    layers = [] if weights == "policy" or model.dtype != torch.float32 else plain_layers(model)
    head = model.get_output_embeddings()
    layers = [layer for layer in layers if layer is not head]
    try:
        for layer in layers:
            vars(layer)["forward"] = _bfloat16(layer) if weights == "bfloat16" else _int8(layer)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> int8 [N, K] and scales [N] bfloat16, whose product differs from it by at most half a scale."""
    scale = (weight.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny).to(torch.bfloat16)
    # Rounded down, a scale would put the largest weight beyond 127.
    return (weight / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def _bfloat16(layer: nn.Linear) -> Product:
    product, bias = _product(layer.weight.detach().to(torch.bfloat16)), layer.bias

    def forward(x: Tensor) -> Tensor:
        out = product(x.to(torch.bfloat16)).float()
        return out if bias is None else out.add_(bias)

    return forward


def _int8(layer: nn.Linear) -> Product:
    numbers, scale = quantised(layer.weight.detach())
    product, scales, bias = _product(numbers.to(torch.bfloat16)), scale.float(), layer.bias
    few = INT8_ROWS * layer.in_features if layer.in_features % INT8_MULTIPLE == 0 else 0

    def forward(x: Tensor) -> Tensor:
        rounded = x.to(torch.bfloat16)
        if x.numel() <= few:
            rows = rounded.view(-1, x.shape[-1])
            out = torch._weight_int8pack_mm(rows, numbers, scale).float().view(*x.shape[:-1], -1)
        else:
            out = product(rounded).float().mul_(scales)  # int8 numbers are exact in bfloat16
        return out if bias is None else out.add_(bias)

    return forward


def _product(weight: Tensor) -> Product:
    """x [..., K] -> x @ weight.T [..., N], both bfloat16; in oneDNN's layout where oneDNN computes it."""
    if weight.device.type != "cpu" or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return lambda x: F.linear(x, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _name(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")
