"""Our attention, plugged into unmodified Hugging Face models.

Models are loaded with `attn_implementation="hone"`; a keyword that is passed through the model's
forward call decides what the attention computes:

- `layout=(Block, ...)`: packed training, one row of T tokens (`packed_attention`);
- `decode_cache=cache`: generation over our own key/value cache (`hone.rollout.native.cache`).

A forward call with neither is an error: there is no mask, so plain attention here would silently let
documents see each other. Both are also kept in a context variable (`forward_pass`), for models that do not pass
keywords on to their attention; it counts calls, so that a model that never calls this attention is detected.
Windows, soft caps and sinks are computed (`hone.model.scoring`); what a layer requests beyond that (masks of its own,
dropout) is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from hone.base.settings import UserError
from hone.model import attention_gpu
from hone.model.scoring import Scoring, Window, scoring_of
from hone.types import Block

NAME = "hone"
#: Scores that exist at once where no fused kernel computes the attention: 64 MB in float32.
SCORES = 2**24


@dataclass(slots=True)
class ForwardPass:
    """One forward call of a model; either `layout` or `decode_cache` is set."""

    layout: tuple[Block, ...] | None = None
    decode_cache: Any = None
    calls: int = 0  # so far, of our attention


_CURRENT: ContextVar[ForwardPass | None] = ContextVar("hone_forward_pass", default=None)


@contextmanager
def forward_pass(current: ForwardPass | None) -> Iterator[None]:
    """Context manager in which attention calls without a keyword belong to this pass."""
    token = _CURRENT.set(current)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_pass() -> ForwardPass | None:
    """The pass in progress, or None."""
    return _CURRENT.get()


def check_called(model: torch.nn.Module, done: ForwardPass) -> None:
    """Raises UserError if no layer called our attention: packed sequences would have seen each other."""
    if not done.calls:
        raise UserError(
            f"{type(model).__name__} computes attention (or a substitute) by itself and never calls the configured "
            f"attention function, so packed sequences would see each other; choose another model"
        )


def packed_attention(
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,  # [1, Hkv, T, Dv]
    layout: tuple[Block, ...],
    scoring: Scoring,
) -> Tensor:  # [1, T, H, Dv]
    """Causal attention inside each block: completions attend to their prompt and themselves only."""
    if how := attention_gpu.kind(query, value, scoring):
        return attention_gpu.attention(query, key, value, layout, scoring, how)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    out: Tensor = _PackedAttention.apply(q, k, v, scoring.sinks, layout, scoring)
    return out[None]


class _PackedAttention(torch.autograd.Function):
    """Scaled-dot-product attention per block, as one node of the graph.

    With autograd, the backward pass of every slice of the packed row would fill a zero tensor as
    long as the whole row; here the gradients of a block are written to their place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        layout: tuple[Block, ...],
        scoring: Scoring,
    ) -> Tensor:
        trained = any(ctx.needs_input_grad)
        ctx.layout, ctx.window, ctx.pieces = layout, scoring.window, []
        ctx.sinks = None if sinks is None else sinks.detach().requires_grad_(trained)
        inner = replace(scoring, sinks=ctx.sinks)
        result = q.new_empty(*q.shape[:-1], v.shape[-1])  # values may be shorter than keys (MLA)
        start = 0
        for block in layout:
            stop = start + block.num_tokens
            leaves = _block_inputs(q[start:stop], k[start:stop], v[start:stop], block, scoring.window)
            with torch.set_grad_enabled(trained):
                leaves = [[x.detach().requires_grad_(trained) for x in part] for part in leaves]
                outputs = [causal_attention(part[0], part[1], part[2], inner) for part in leaves]  # [n, H, longest, D]
            _unpad(result[start:stop], [out.detach().transpose(1, 2) for out in outputs], block)
            ctx.pieces.append((leaves, outputs))
            start = stop
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # [T, H, D]
        parts: list[list[Tensor]] = [[], [], []]  # gradients of q, k, v, block after block
        of_sinks = None if ctx.sinks is None else torch.zeros_like(ctx.sinks)
        start = 0
        for block, (leaves, outputs) in zip(ctx.layout, ctx.pieces, strict=True):
            stop = start + block.num_tokens
            grads = [x.transpose(1, 2) for x in _pad(grad[start:stop], block)]
            inputs = [x for part in leaves for x in part]
            flat = torch.autograd.grad(outputs, inputs if of_sinks is None else [*inputs, ctx.sinks], grads)
            if of_sinks is not None:
                of_sinks += flat[-1]
            for which in range(3):
                parts[which] += _block_gradient(list(flat[which : len(inputs) : 3]), block, ctx.window)
            start = stop
        ctx.pieces = []
        return torch.cat(parts[0]), torch.cat(parts[1]), torch.cat(parts[2]), of_sinks, None, None


def _block_inputs(
    q: Tensor, k: Tensor, v: Tensor, block: Block, window: Window | None
) -> list[list[Tensor]]:  # one [q, k, v] per part, each [n, heads, length, D]
    """The prompt, if any, and the runs of completions, whose keys follow those of the prompt that they see."""
    parts = [[x.transpose(1, 2) for x in part] for part in zip(*(_pad(x, block) for x in (q, k, v)), strict=True)]
    if not block.prompt_len:
        return parts
    prompt, runs, first = parts[0], parts[1:], _first_seen(block, window)
    seen = [x[:, :, first:] for x in prompt[1:]]
    return [prompt] + [
        [rq, *(torch.cat([p.expand(len(x), -1, -1, -1), x], dim=2) for p, x in zip(seen, (rk, rv), strict=True))]
        for rq, rk, rv in runs
    ]


def _first_seen(block: Block, window: Window | None) -> int:
    """The first position of the prompt that a completion sees. Chunks are counted from the start: all are kept."""
    if window is None or window.chunks:
        return 0
    return max(0, block.prompt_len - (window.size - 1))


@lru_cache(maxsize=256)
def _runs(lens: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Group neighbours whose lengths differ by at most a quarter, so that there is little padding."""
    runs: list[list[int]] = []
    for length in lens:
        if runs and max(*runs[-1], length) <= 1.25 * min(*runs[-1], length) + 8:
            runs[-1].append(length)
        else:
            runs.append([length])
    return tuple(tuple(run) for run in runs)


def _pad(x: Tensor, block: Block) -> list[Tensor]:
    """[Tb, heads, D] -> the prompt [1, Lp, heads, D], if any, and each run of completions [n, longest, heads, D].

    Zeros follow each completion: causal attention never reads them, and they have no gradient.
    """
    lp = block.prompt_len
    parts = [x[:lp][None]] if lp else []
    rest = list(x[lp:].split(block.completion_lens)) if block.completion_lens else []
    for run in _runs(block.completion_lens):
        parts.append(pad_sequence(rest[: len(run)], batch_first=True))
        rest = rest[len(run) :]
    return parts


def _unpad(out: Tensor, parts: list[Tensor], block: Block) -> None:
    """Inverse of `_pad`: write the parts into `out` [Tb, heads, D]."""
    lp = block.prompt_len
    if lp:
        out[:lp] = parts[0][0]
    if block.completion_lens:
        rows = [row for part in parts[bool(lp) :] for row in part]
        for target, row in zip(out[lp:].split(block.completion_lens), rows, strict=True):
            target.copy_(row[: len(target)])


def _block_gradient(grads: list[Tensor], block: Block, window: Window | None) -> list[Tensor]:
    """Gradients of the parts, [n, heads, length, D], as pieces [*, heads, D] in packed order.

    Gradients of the prompt's keys and values sum over the prompt and every completion.
    """
    lp, runs, first = block.prompt_len, _runs(block.completion_lens), _first_seen(block, window)
    pieces: list[Tensor] = []
    if lp:
        prompt = grads[0][0]
        for run, grad in zip(runs, grads[1:], strict=True):
            if grad.shape[2] > max(run):  # keys or values: the first columns are the prompt's
                of_prompt = grad[:, :, : lp - first].sum(dim=0)
                prompt = prompt + (F.pad(of_prompt, (0, 0, first, 0)) if first else of_prompt)
        pieces.append(prompt.transpose(0, 1))
    for run, grad in zip(runs, grads[bool(lp) :], strict=True):
        before = grad.shape[2] - max(run)
        pieces += [row[:, before : before + n].transpose(0, 1) for row, n in zip(grad, run, strict=True)]
    return pieces


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """q [n, H, Lq, D], k [n, Hkv, Lk, D], v [n, Hkv, Lk, Dv] -> [n, H, Lq, Dv].

    The keys stand at positions 0, 1, ... of their sequence (in a sliding window: or of its end), the queries at the
    last Lq of them: if there are more keys than queries, the first ones belong to the prompt.
    """
    queries, keys = q.shape[2], k.shape[2]
    window = scoring.window if scoring.window is not None and scoring.window.hides(keys) else None
    if not scoring.fused:
        seen = _causal_mask(queries, keys - queries, window, torch.float32, q.device)
        return _scored_attention(q, k, v, seen, scoring)
    plain = queries == keys and window is None
    mask = None if plain else _causal_mask(queries, keys - queries, window, q.dtype, q.device)
    if q.is_meta:  # no kernel on meta; `hone plan` counts the memory of a fused one, which every device has
        fused: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        size = v.shape[-1]
        same = v if size == q.shape[-1] else F.pad(v, (0, q.shape[-1] - size))
        out: Tensor = fused(q, k, same, 0.0, mask is None, attn_mask=mask, scale=scoring.scaling)[0]
        return out[..., :size]
    if q.is_cuda:  # not every PyTorch has a fused float32 kernel for grouped heads; without one all scores are stored
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scoring.scaling, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )


def _scored_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    """As `causal_attention`, with all scores of some rows at once; they are computed again in the backward pass."""
    rows = max(1, SCORES // (q.shape[1] * mask.numel()))
    parts = [
        checkpoint(_scored, *part, mask, scoring, use_reentrant=False, preserve_rng_state=False)
        for part in zip(q.split(rows), k.split(rows), v.split(rows), strict=True)
    ]
    return torch.cat(parts)


def _scored(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    n, heads, queries, _ = q.shape
    groups = (n, k.shape[1], heads // k.shape[1] * queries)  # queries that share keys meet them in one product
    products = q.reshape(*groups, -1) @ k.transpose(2, 3)
    scores = scoring.capped(products.view(n, heads, queries, -1).float() * scoring.scaling) + mask
    if scoring.sinks is not None:
        sinks = scoring.sinks.float()[:, None, None].expand(n, -1, queries, 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights.to(v.dtype).reshape(*groups, -1) @ v).view(n, heads, queries, -1)


@lru_cache(maxsize=32)
def _causal_mask(queries: int, before: int, window: Window | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[queries, before + queries], 0 or -inf; cached because all layers use the same few."""
    seen = torch.ones(queries, before + queries, dtype=torch.bool, device=device).tril(before)
    if window is not None:
        first = window.first(torch.arange(before, before + queries, device=device))
        seen &= torch.arange(before + queries, device=device) >= first[:, None]
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, float("-inf"))


def hone_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: tuple[Block, ...] | None = None,
    decode_cache: Any = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function registered with transformers; returns ([B, Tq, H, D], no weights).

    Raises UserError if the layer requests a feature that this attention does not compute.
    """
    current = _CURRENT.get()
    if current is not None:
        current.calls += 1
        if layout is None and decode_cache is None:
            layout, decode_cache = current.layout, current.decode_cache
    if layout is None and decode_cache is None:
        raise ValueError("a model loaded with hone's attention needs layout= or decode_cache= in its forward call")
    features = {
        "its own attention mask": attention_mask is not None,
        "dropout": bool(dropout),
        "attention that is not causal": is_causal is False,
    }
    if used := [what for what, is_used in features.items() if is_used]:
        raise UserError(
            f"layer {getattr(module, 'layer_idx', '?')} uses {' and '.join(used)}; hone supports causal attention "
            "only: choose a model without"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    scoring = scoring_of(module, scale, sliding_window, softcap, s_aux)
    if decode_cache is not None:
        return decode_cache.attend(layer_index(module), query, key, value, scoring), None
    assert layout is not None
    _check_tokens(module, query, key, sum(block.num_tokens for block in layout))
    return packed_attention(query, key, value, layout, scoring), None


def layer_index(module: torch.nn.Module) -> int:
    """The layer's index in the KV cache. Raises UserError if the attention module does not have one."""
    index = getattr(module, "layer_idx", None)
    if index is None:
        raise UserError(f"{type(module).__name__} does not say which layer it is (layer_idx); choose another model")
    return int(index)


def _check_tokens(module: torch.nn.Module, query: Tensor, key: Tensor, tokens: int) -> None:
    if query.shape[0] != 1 or query.shape[2] != tokens or key.shape[2] != tokens:
        raise UserError(
            f"{type(module).__name__} attends from {query.shape[0]} x {query.shape[2]} queries to {key.shape[2]} keys, "
            f"but the packed row has {tokens} tokens; hone supports causal self-attention only: choose "
            "another model"
        )


def register() -> None:
    """Make `attn_implementation="hone"` known to transformers. Idempotent.

    No mask function is registered with it, so transformers builds no mask. With one, it would search the positions
    for packed sequences at every step, and wait for the GPU to do so.
    """
    if NAME not in AttentionInterface():
        AttentionInterface.register(NAME, hone_attention)


def keep_out_of_graphs() -> None:
    """Break compiled graphs at the attention, which needs the layout from Python."""
    AttentionInterface.register(NAME, torch.compiler.disable(hone_attention))
