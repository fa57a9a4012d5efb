"""Our attention, plugged into unmodified Hugging Face models.

Models are loaded with `attn_implementation="hone"`; what the attention computes is decided by a
keyword that travels through the model's forward call:

- `layout=(Block, ...)`: packed training, one row of T tokens (`packed_attention`);
- `decode_cache=cache`: generation over our own key/value cache (`hone.rollout.native.cache`).

A forward call with neither is an error: the mask function returns None, so plain attention here
would silently let documents see each other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from hone.types import Block

NAME = "hone"


def packed_attention(
    query: torch.Tensor,  # [1, H, T, D]
    key: torch.Tensor,  # [1, Hkv, T, D]
    value: torch.Tensor,  # [1, Hkv, T, D]
    layout: tuple[Block, ...],
    scaling: float,
) -> torch.Tensor:  # [1, T, H, D]
    """Causal attention inside each block: completions see their prompt and themselves, no one else.

    One scaled-dot-product call per block for the prompt and one for its completions, which are
    padded to the longest of the block; the packer keeps lengths within a block alike.
    """
    groups = query.shape[1] // key.shape[1]
    outputs: list[torch.Tensor] = []
    start = 0
    for block in layout:
        stop = start + block.num_tokens
        q, k, v = (x[:, :, start:stop] for x in (query, key, value))
        outputs.append(_block_attention(q, k, v, block, scaling, groups))
        start = stop
    return torch.cat(outputs, dim=1)


def _block_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, scaling: float, groups: int
) -> torch.Tensor:
    """One block: q [1, H, Tb, D], k and v [1, Hkv, Tb, D] -> [1, Tb, H, D]."""
    lp, lens = block.prompt_len, block.completion_lens
    parts: list[torch.Tensor] = []
    if lp:
        out = _sdpa(q[:, :, :lp], k[:, :, :lp], v[:, :, :lp], scaling, groups, is_causal=True)
        parts.append(out.transpose(1, 2))
    if lens:
        longest = max(lens)
        qs, ks, vs = (_pad_completions(x[:, :, lp:], lens, longest) for x in (q, k, v))  # [n, h, longest, D]
        n = len(lens)
        mask = None
        if lp:
            ks = torch.cat([k[:, :, :lp].expand(n, -1, -1, -1), ks], dim=2)
            vs = torch.cat([v[:, :, :lp].expand(n, -1, -1, -1), vs], dim=2)
            mask = torch.ones(longest, lp + longest, dtype=torch.bool, device=q.device).tril(lp)
        out = _sdpa(qs, ks, vs, scaling, groups, is_causal=mask is None, mask=mask).transpose(1, 2)  # [n, longest, H, D]
        if min(lens) == longest:
            parts.append(out.reshape(1, n * longest, *out.shape[2:]))
        else:
            parts.append(torch.cat([out[i, :length] for i, length in enumerate(lens)])[None])
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _pad_completions(x: torch.Tensor, lens: tuple[int, ...], longest: int) -> torch.Tensor:
    """[1, h, sum(lens), D] -> [n, h, longest, D], zeros after each completion's end."""
    if min(lens) == longest:
        return x[0].unflatten(1, (len(lens), longest)).transpose(0, 1)
    pieces = x[0].split(lens, dim=1)
    return torch.stack([F.pad(piece, (0, 0, 0, longest - piece.shape[1])) for piece in pieces])


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    groups: int,
    *,
    is_causal: bool,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scaling, is_causal=is_causal, enable_gqa=groups > 1
    )


def hone_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    layout: tuple[Block, ...] | None = None,
    decode_cache: Any = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The function registered with transformers; returns ([B, Tq, H, D], no weights)."""
    if sliding_window is not None or softcap is not None:
        raise ValueError(
            f"layer {module.layer_idx} uses a sliding window ({sliding_window}) or soft-capped attention ({softcap}); "
            "hone supports full causal attention only: choose a model without them"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if decode_cache is not None:
        return decode_cache.attend(module.layer_idx, query, key, value, scale), None
    if layout is None:
        raise ValueError("a model loaded with hone's attention needs layout= or decode_cache= in its forward call")
    return packed_attention(query, key, value, layout, scale), None


def register() -> None:
    """Make `attn_implementation="hone"` known to transformers. Idempotent."""
    AttentionInterface.register(NAME, hone_attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
