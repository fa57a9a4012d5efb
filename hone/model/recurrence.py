"""Faster forms, on a CPU, of functions that mixers of transformers call: the same numbers but for rounding.

    forward = fast_forward(type(mixer))        # the class's own code, which calls these where it fits
    forward(mixer, hidden, cache_params=states)

- One step of the gated delta rule walks over the state of all rows ten times in transformers, each time into new
  memory. Here it is updated in place, a few rows at a time, which stay in the processor's cache.
- Its form for many tokens solves one system of equations instead of two, and writes nothing in place, which autograd
  would copy.
- A short convolution is a sum of shifted products. oneDNN, which PyTorch uses for it, builds code for every shape, and
  sequences come in many.

Elsewhere (other devices, precisions and calls) the functions of transformers run, or the kernels that it uses.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hone.model.meta import device_type
from hone.model.norms import rms_norm

#: Bytes of states that are updated together.
TILE = 1 << 19
CHUNK = 32  # tokens whose changes of the state are solved for at once: half of transformers'
EPSILON = 1e-6  # of l2 norms, as in transformers


@functools.cache
def fast_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    """The forward of modules of this class; its own code, but for those functions in FASTER that it calls."""
    plain: Any = inspect.unwrap(kind.forward)
    called = [name for name in FASTER if name in plain.__code__.co_names and name in plain.__globals__]
    if not called:
        return kind.forward
    names = plain.__globals__ | {name: FASTER[name](plain.__globals__[name]) for name in called}
    forward = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    forward.__kwdefaults__ = plain.__kwdefaults__
    return forward


# --- the gated delta rule --------------------------------------------------------------------------------------------


def _delta_rule(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch_recurrent_gated_delta_rule` and `torch_chunk_gated_delta_rule` of transformers; Yang et al., Gated Delta
    Networks, arXiv:2412.06464."""

    def rule(
        query: Tensor,  # [R, L, Hk, Dk]
        key: Tensor,  # [R, L, Hk, Dk]
        value: Tensor,  # [R, L, H, Dv]
        g: Tensor,  # [R, L, H] log decay
        beta: Tensor,  # [R, L, H]
        initial_state: Tensor | None = None,  # [R, H, Dk, Dv]
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if device_type(query) != "cpu" or not use_qk_l2norm_in_kernel or any(x is not None for x in more.values()):
            return original(
                query,
                key,
                value,
                g=g,
                beta=beta,
                initial_state=initial_state,
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                **more,
            )
        if query.shape[1] == 1 and initial_state is not None and not torch.is_grad_enabled():
            step, state = delta_step(query[:, 0], key[:, 0], value[:, 0], g[:, 0], beta[:, 0], initial_state)
            out = step[:, None]
        else:
            out, state = delta_chunks(query, key, value, g, beta, initial_state)
        return out.to(query.dtype), state if output_final_state else None

    return rule


def delta_step(
    query: Tensor,  # [R, Hk, Dk]
    key: Tensor,  # [R, Hk, Dk]
    value: Tensor,  # [R, H, Dv]
    log_decay: Tensor,  # [R, H]
    beta: Tensor,  # [R, H]
    state: Tensor,  # [R, H, Dk, Dv]
) -> tuple[Tensor, Tensor]:
    """One token of each row: S <- decay S + k (beta (v - k decay S)); returns q S [R, H, Dv] and S, in float32.

    A float32 `state` is changed in place. q and k are scaled to length 1, and q is divided by sqrt(Dk).
    """
    state = state.float()
    rows, heads, size, _ = state.shape
    repeat = heads // key.shape[1]
    query, key = (
        _normed(x.float(), length).repeat_interleave(repeat, dim=1)[:, :, None]  # [R, H, 1, Dk]
        for x, length in ((query, size**-0.5), (key, 1.0))
    )
    value, beta, decay = (x.float()[:, :, None] for x in (value, beta[..., None], log_decay.float().exp()[..., None]))
    out = torch.empty_like(value)  # [R, H, 1, Dv]
    step = max(1, TILE // (state[0].numel() * state.itemsize))
    for first in range(0, rows, step):
        part = slice(first, first + step)
        change = (value[part] - key[part] @ state[part].mul_(decay[part])) * beta[part]
        state[part].addcmul_(key[part].mT, change)
        out[part] = query[part] @ state[part]
    return out[:, :, 0], state


def delta_chunks(
    query: Tensor,  # [R, L, Hk, Dk]
    key: Tensor,  # [R, L, Hk, Dk]
    value: Tensor,  # [R, L, H, Dv]
    log_decay: Tensor,  # [R, L, H]
    beta: Tensor,  # [R, L, H]
    state: Tensor | None,  # [R, H, Dk, Dv]
) -> tuple[Tensor, Tensor]:
    """The same for L tokens of each row: [R, L, H, Dv], and the state behind them, in float32.

    Section 3 of the paper, in chunks of CHUNK tokens. Within a chunk, what the tokens add to S solves a triangular
    system of equations; one solution serves values and keys. Products of queries and keys are computed once for the
    heads of values that share them.
    """
    rows, length, key_heads, size = key.shape
    heads, value_size = value.shape[2:]
    shared = (key_heads, heads // key_heads)

    def chunks(x: Tensor) -> Tensor:  # [R, L, h, ...] -> [R, h, chunks, CHUNK, ...]
        padded = F.pad(x.float(), (0, 0) * (x.ndim - 2) + (0, -length % CHUNK))
        return padded.unflatten(1, (-1, CHUNK)).movedim(3, 1).contiguous()

    def by_key(x: Tensor) -> Tensor:  # [R, H, ...] -> [R, Hk, H / Hk, ...]
        return x.unflatten(1, shared)

    query, key = _normed(chunks(query), size**-0.5), _normed(chunks(key))
    weight = chunks(beta)[..., None]
    total = chunks(log_decay).cumsum(-1)  # [R, H, chunks, CHUNK]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=key.device).triu(1)
    decay = by_key((total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp())
    products = (torch.cat((key, query), dim=-2) @ key.mT)[:, :, None]
    system = (products[..., :CHUNK, :] * (decay * by_key(weight))).flatten(1, 2)
    attended = (products[..., CHUNK:, :] * decay).flatten(0, 2)
    since, until = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
    recalled = (key[:, :, None] * by_key(weight * since)).flatten(1, 2)
    right = torch.cat((chunks(value) * weight, recalled), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).flatten(0, 1)
    parts = (
        *solved.split((value_size, size), dim=-1),
        (query[:, :, None] * by_key(since)).flatten(0, 2),
        attended,
        (key[:, :, None] * by_key(until)).flatten(0, 2),
        since[..., -1:, :].flatten(0, 1),
    )
    now = value.new_zeros(rows * heads, size, value_size).float() if state is None else state.float().flatten(0, 1)
    outs = []
    for new, old, queries, within, kept, left in zip(*(part.unbind(1) for part in parts), strict=True):
        change = torch.baddbmm(new, old, now, alpha=-1)  # [R * H, CHUNK, Dv]
        outs.append(torch.baddbmm(queries @ now, within, change))
        now = torch.baddbmm(now * left, kept.mT, change)
    out = torch.stack(outs, dim=1).flatten(1, 2)[:, :length].unflatten(0, (rows, heads))
    return out.transpose(1, 2), now.unflatten(0, (rows, heads))


def _normed(x: Tensor, length: float = 1.0) -> Tensor:
    """Vectors [..., D] scaled to this length: an RMS norm, with which they would have the length sqrt(D)."""
    size = x.shape[-1]
    return rms_norm(x, x.new_full((size,), length * size**-0.5), EPSILON / size)


# --- short convolutions ----------------------------------------------------------------------------------------------


def _conv(original: Callable[..., Any]) -> Callable[..., Any]:
    """`causal_conv1d_fn` of transformers."""

    def conv(
        hidden: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **more: Any
    ) -> Tensor:
        if not _fits(hidden, weight, activation):
            return original(hidden, weight, bias, activation=activation, **more)
        return _activated(ShortConvolution.apply(hidden, weight, bias), activation)

    return conv


def _conv_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """`causal_conv1d_update` of transformers: hidden [R, C, 1]; conv_state [R, C, k] is changed in place."""

    def update(
        hidden: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
    ) -> Tensor:
        if not _fits(hidden, weight, activation) or conv_state.shape[-1] != weight.shape[-1]:
            return original(hidden, conv_state, weight, bias, activation)
        before = conv_state[..., 1:].clone()
        conv_state[..., :-1] = before
        conv_state[..., -1:] = hidden
        out = hidden[..., 0] * weight[:, -1]
        for i in range(before.shape[-1]):
            out.addcmul_(before[..., i], weight[:, i])
        return _activated((out if bias is None else out.add_(bias))[..., None], activation)

    return update


def _fits(hidden: Tensor, weight: Tensor, activation: str | None) -> bool:
    return (
        device_type(hidden) == "cpu"
        and hidden.dtype == weight.dtype == torch.float32
        and activation in (None, "silu", "swish")
    )


def _activated(x: Tensor, activation: str | None) -> Tensor:
    return x if activation is None else F.silu(x)


class ShortConvolution(torch.autograd.Function):
    """out[r, c, t] = bias[c] + sum over i of weight[c, k - 1 - i] hidden[r, c, t - i]; zeros stand before the first."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """hidden [R, C, L], weight [C, k], bias [C] -> [R, C, L]."""
        ctx.save_for_backward(hidden, weight)
        ctx.biased = bias is not None
        out = hidden * weight[:, -1:]
        for i in range(1, min(weight.shape[1], hidden.shape[2])):
            out[..., i:].addcmul_(hidden[..., :-i], weight[:, -1 - i, None])
        return out if bias is None else out.add_(bias[:, None])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        of_hidden, of_weight = grad * weight[:, -1:], torch.zeros_like(weight)
        of_weight[:, -1] = (grad * hidden).sum((0, 2))
        for i in range(1, min(weight.shape[1], hidden.shape[2])):
            of_hidden[..., :-i].addcmul_(grad[..., i:], weight[:, -1 - i, None])
            of_weight[:, -1 - i] = (grad[..., i:] * hidden[..., :-i]).sum((0, 2))
        return of_hidden, of_weight, grad.sum((0, 2)) if ctx.biased else None


#: Name of a function that mixers call -> what makes a faster one of it.
FASTER: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "causal_conv1d_fn": _conv,
    "causal_conv1d_update": _conv_step,
}
