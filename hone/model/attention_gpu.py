"""Packed attention on a GPU: one call for all sequences of a row, whatever their lengths.

`flash`: `torch.nn.attention.varlen.varlen_attn` (FlashAttention-2, Dao, arXiv:2307.08691). Each sequence has at least
as many keys as queries, and its last query sees its last key ("bottom-right"): a completion's keys are its own and
those of its prompt, which are gathered.

`flex`: `torch.nn.attention.flex_attention`, where that is not available (head sizes, older PyTorch). A mask determines
which keys a query sees, and its empty blocks are skipped; nothing is gathered. It also computes chunks, soft caps, and
sinks: a sink adds exp(sink) to the sum of the softmax, so the output is multiplied by sigmoid(logsumexp - sink).

Both compute the same as `hone.model.attention.packed_attention` does by blocks, which float32 continues to use.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from hone.model.scoring import Scoring, Window
from hone.types import Block

#: The oldest GPU that PyTorch's FlashAttention supports, its largest head size, and the number that head sizes must be
#: a multiple of.
CAPABILITY, LARGEST_HEAD, HEAD_MULTIPLE = (8, 0), 256, 8
#: Positions in one block of flex attention's mask: the trainer pads rows to multiples of it.
MASK_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Varlen:
    """N sequences for `varlen_attn`. Queries stand in packed order; keys and values are fetched.

    Worked example: a prompt of 2 shared by completions of 2 and 3, layout (Block(2, (2, 3)),)::

        queries = [0, 2, 4, 7]          # the prompt, then each completion
        keys    = [0, 2, 6, 11]         # 2, then 2 + 2, then 2 + 3
        fetched = [0, 1,  0, 1, 2, 3,  0, 1, 4, 5, 6]
    """

    queries: Tensor  # [N + 1] int32, cumulative
    keys: Tensor  # [N + 1] int32, cumulative
    fetched: Tensor | None  # [Tk] int64, packed positions; None: all of them, in order
    longest_query: int
    longest_key: int


@lru_cache(maxsize=16)  # called by every layer, and again when layers are recomputed
def varlen(layout: tuple[Block, ...], device: torch.device) -> Varlen:
    queries, keys, fetched = [0], [0], []
    start = 0
    for block in layout:
        prompt = torch.arange(start, start + block.prompt_len)
        if block.prompt_len:
            queries.append(queries[-1] + block.prompt_len)
            keys.append(keys[-1] + block.prompt_len)
            fetched.append(prompt)
        at = start + block.prompt_len
        for length in block.completion_lens:
            queries.append(queries[-1] + length)
            keys.append(keys[-1] + block.prompt_len + length)
            fetched += [prompt, torch.arange(at, at + length)]
            at += length
        start = at
    shared = any(block.prompt_len and block.completion_lens for block in layout)
    cumulative = torch.tensor([queries, keys], dtype=torch.int32)
    longest = cumulative.diff(dim=1).max(dim=1).values.tolist()
    # non_blocking: a plain copy would wait for all earlier work of the device.
    ends = cumulative.to(device, non_blocking=True)
    places = torch.cat(fetched).to(device, non_blocking=True) if shared else None
    return Varlen(ends[0], ends[1], places, longest[0], longest[1])


@lru_cache(maxsize=16)
def owners(layout: tuple[Block, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each packed token, three arrays [T]: its block; its sequence in the block, 0 for the prompt, 1, 2, ... for
    the completions; and its position, counted from the start of the prompt."""
    blocks, sequences, positions = [], [], []
    for i, block in enumerate(layout):
        lengths = torch.tensor([block.prompt_len, *block.completion_lens])
        sequences.append(torch.arange(len(lengths)).repeat_interleave(lengths))
        blocks.append(torch.full((block.num_tokens,), i))
        positions.append(torch.arange(block.prompt_len))
        positions += [torch.arange(block.prompt_len, block.prompt_len + n) for n in block.completion_lens]
    of = [torch.cat(parts).to(device, non_blocking=True) for parts in (blocks, sequences, positions)]
    return of[0], of[1], of[2]


def sees(layout: tuple[Block, ...], device: torch.device, window: Window | None = None) -> Callable[..., Tensor]:
    """(batch, head, query, key) -> whether the query sees the key; flex attention's `mask_mod`."""
    block, sequence, position = owners(layout, device)

    def mask(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        prompt_or_own = (sequence[key] == 0) | (sequence[key] == sequence[query])
        seen = (query >= key) & (block[query] == block[key]) & prompt_or_own
        return seen if window is None else seen & (position[key] >= window.first(position[query]))

    return mask


def kind(query: Tensor, value: Tensor, scoring: Scoring) -> Literal["flash", "flex"] | None:
    """The implementation for queries [..., D] and values [..., Dv]; None: block by block, as on a CPU."""
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return None
    size = query.shape[-1]
    capable = torch.cuda.get_device_capability(query.device) >= CAPABILITY
    same = value.shape[-1] == size  # FlashAttention needs keys and values of one size
    known = scoring.fused and not (scoring.window is not None and scoring.window.chunks)
    if capable and same and known and size <= LARGEST_HEAD and size % HEAD_MULTIPLE == 0 and _varlen_attn() is not None:
        return "flash"
    return "flex" if capable else None


def attention(
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,  # [1, Hkv, T, D]
    layout: tuple[Block, ...],
    scoring: Scoring,
    how: Literal["flash", "flex"],
) -> Tensor:  # [1, T, H, D]
    """Causal attention inside each block: completions see their prompt and themselves. Differentiable."""
    if how == "flash":
        call = _varlen_attn()
        assert call is not None
        return flash(query, key, value, varlen(layout, query.device), scoring, call)
    return flex(query, key, value, layout, scoring, _compiled_flex())


def flash(
    query: Tensor, key: Tensor, value: Tensor, layout: Varlen, scoring: Scoring, call: Callable[..., Tensor]
) -> Tensor:
    """Shapes as in `attention`; `call` is `varlen_attn` or an equivalent."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    if layout.fetched is not None:
        k, v = k.index_select(0, layout.fetched), v.index_select(0, layout.fetched)
    grouped: dict[str, bool] = {}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in _parameters(call):
            grouped = {"enable_gqa": True}
        else:  # PyTorch 2.11: each query head needs its own key head
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out = call(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        layout.queries,
        layout.keys,
        layout.longest_query,
        layout.longest_key,
        scale=scoring.scaling,
        window_size=(-1 if scoring.window is None else scoring.window.size - 1, 0),  # keys before and after the query
        **grouped,
    )
    return out[None]


def flex(
    query: Tensor, key: Tensor, value: Tensor, layout: tuple[Block, ...], scoring: Scoring, call: Callable[..., Any]
) -> Tensor:
    """Shapes as in `attention`; `call` is `flex_attention`, compiled or not."""
    options: dict[str, Any] = {
        "block_mask": _block_mask(layout, query.device, scoring.window),
        "scale": scoring.scaling,
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    if scoring.softcap is not None:
        options["score_mod"] = _cap(scoring.softcap)
    if scoring.sinks is None:
        out: Tensor = call(query, key, value, **options)
        return out.transpose(1, 2)
    from torch.nn.attention.flex_attention import AuxRequest

    out, aux = call(query, key, value, **options, return_aux=AuxRequest(lse=True))  # lse [1, H, T]
    share = torch.sigmoid(aux.lse - scoring.sinks.float()[:, None])
    return (out * share[..., None].to(out.dtype)).transpose(1, 2)


@cache  # one function for each cap: a new function would be compiled again
def _cap(softcap: float) -> Callable[..., Tensor]:
    """flex attention's `score_mod`."""

    def capped(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


@lru_cache(maxsize=8)
def _block_mask(layout: tuple[Block, ...], device: torch.device, window: Window | None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    tokens, mask = sum(block.num_tokens for block in layout), sees(layout, device, window)
    return create_block_mask(mask, None, None, tokens, tokens, device=device, BLOCK_SIZE=MASK_BLOCK)


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@cache
def _varlen_attn() -> Callable[..., Tensor] | None:
    """`varlen_attn`; None if this PyTorch lacks it, or if it does not support causal windows yet."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"scale", "window_size"} <= _parameters(varlen_attn) else None  # type: ignore[return-value]


@cache
def _parameters(call: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(call).parameters)
