"""Attention over a prompt that several samples share, and over each sample's own tokens.

Symbols: B rows (samples being decoded), P prompts among them, G rows of the largest group, H query
heads, Hkv key heads, R = H / Hkv, Lp prompt positions, W suffix positions, D head size. Key heads come
first in every array so that heads and rows fold into one batch dimension without a copy. Values may have a size Dv of
their own (multi-head latent attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.model import attention_gpu
from hone.model.attention import causal_attention
from hone.model.scoring import Scoring
from hone.types import Block


@dataclass(frozen=True, slots=True)
class Grid:
    """The cell of each row in the rectangle [P, G], in which all queries of a prompt meet its keys in one product.

    Worked example: rows of prompts 0, 1, 0 make G = 2, `rows` = [0, 2, 1] and `cells` = [0, 2, 1, 0];
    the last cell is empty: it repeats row 0, and its result is not read.
    """

    width: int  # G
    cells: Tensor  # [P * G] the row in each cell
    rows: Tensor  # [B] the cell of each row
    regular: bool  # cells and rows are both 0, 1, 2, ...: no gather is needed

    @staticmethod
    def of(prompts: Sequence[int], count: int, device: torch.device) -> Grid:
        """The grid of rows whose prompts are `prompts` [B], numbers below `count`."""
        seen = [0] * count
        places = []
        for prompt in prompts:
            places.append((prompt, seen[prompt]))
            seen[prompt] += 1
        width = max(seen)
        rows = [prompt * width + place for prompt, place in places]
        cells = [0] * (count * width)
        for row, cell in enumerate(rows):
            cells[cell] = row
        regular = rows == list(range(count * width))
        return Grid(width, torch.tensor(cells, device=device), torch.tensor(rows, device=device), regular)

    def to_cells(self, x: Tensor) -> Tensor:
        """[Hkv, B, ...] -> [Hkv, P * G, ...]"""
        return x if self.regular else x.index_select(1, self.cells)

    def to_rows(self, x: Tensor) -> Tensor:
        """[Hkv, P * G, ...] -> [Hkv, B, ...]"""
        return x if self.regular else x.index_select(1, self.rows)


def decode_attention(
    query: Tensor,  # [B, H, 1, D]
    prompt: tuple[Tensor, Tensor],  # keys [Hkv, P, Lp, D] and values [Hkv, P, Lp, Dv]
    suffix: tuple[Tensor, Tensor],  # keys [Hkv, B, W, D] and values [Hkv, B, W, Dv]
    grid: Grid,
    mask: Tensor | None,  # [B, Lp + W], 0 or -inf
    scoring: Scoring,
) -> Tensor:
    """One softmax over both parts. Returns [B, 1, H, Dv]."""
    batch, heads, _, size = query.shape
    value_size = suffix[1].shape[-1]
    kv_heads, prompts, prompt_len, _ = prompt[0].shape
    repeat, width = heads // kv_heads, suffix[0].shape[2]
    rows = (query * scoring.scaling).view(batch, kv_heads, repeat, size).transpose(0, 1).contiguous()  # [Hkv, B, R, D]
    cells = grid.to_cells(rows).view(kv_heads * prompts, grid.width * repeat, size)

    shared = _scores(cells, prompt[0].flatten(0, 1))  # [Hkv * P, G * R, Lp]
    shared = grid.to_rows(shared.view(kv_heads, -1, repeat, prompt_len))  # [Hkv, B, R, Lp]
    # Keys times queries, not queries times keys: with few queries per key head, MKL then streams the keys.
    own = _scores(suffix[0].flatten(0, 1), rows.flatten(0, 1)).view(kv_heads, batch, width, repeat)
    scores = scoring.capped(torch.cat((shared, own.transpose(2, 3)), dim=-1))  # [Hkv, B, R, Lp + W]
    if mask is not None:
        scores += mask[:, None, :]
    if scoring.sinks is not None:  # one more column, which has no value
        sinks = scoring.sinks.float().view(kv_heads, 1, repeat, 1).expand(-1, batch, -1, -1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)[..., : prompt_len + width]

    shared = grid.to_cells(weights[..., :prompt_len]).reshape(kv_heads * prompts, -1, prompt_len)
    shared = torch.bmm(shared, prompt[1].flatten(0, 1)).view(kv_heads, -1, repeat, value_size)
    own = torch.bmm(weights[..., prompt_len:].flatten(0, 1), suffix[1].flatten(0, 1))
    out = grid.to_rows(shared) + own.view(kv_heads, batch, repeat, value_size)
    return out.transpose(0, 1).reshape(batch, 1, heads, value_size)


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """[N, Q, D] x [N, K, D] -> [N, Q, K], accumulated in float32 where possible: bfloat16 would be off by 1 %."""
    if query.is_cuda and query.dtype != torch.float32:
        return torch.bmm(query, key.transpose(1, 2), out_dtype=torch.float32)
    return torch.bmm(query, key.transpose(1, 2)).float()


def prefill_attention(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scoring: Scoring) -> Tensor:
    """Causal attention of prompts packed in one row.

    query [1, H, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv], lengths [P] summing to T. Returns [1, T, H, Dv].
    """
    if attention_gpu.kind(query, value, scoring) == "flash":
        return attention_gpu.attention(query, key, value, (Block(0, tuple(lengths)),), scoring, "flash")
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    parts = zip(*(x[0].split(list(lengths), dim=1) for x in (key, value)))
    return continued_attention(query, list(parts), lengths, scoring)


def continued_attention(
    query: Tensor, parts: Sequence[tuple[Tensor, Tensor]], lengths: Sequence[int], scoring: Scoring
) -> Tensor:
    """Causal attention of the last tokens of P sequences, packed in one row.

    query [1, H, T, D], lengths [P] summing to T; `parts` [P]: all keys and values of each sequence, [heads, n, D] and
    [heads, n, Dv] with n at least its entry of `lengths`. Returns [1, T, H, Dv].
    """
    queries = query.split(list(lengths), dim=2)
    outputs = [causal_attention(q, k[None], v[None], scoring) for q, (k, v) in zip(queries, parts, strict=True)]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()  # as some models view it as [1, T, H * Dv]
