"""The key/value cache: each prompt is stored once, each sample's own tokens beside it.

Rows are decoded in lock step, so all of them write the same column; a row that entered later starts at a later column,
and the mask hides the columns before it. A write is then one slice, whatever the lengths.

    columns   0 1 2 3 4 5 | column = 6 is written next
    row 0     a b c d e f   start 0
    row 1     . . . g h i   start 3: entered when a finished row left

`rebuild` is the only operation that moves data: rows leave, rows enter, columns that no row needs are dropped, and the
capacity is chosen again.

A `static` cache is for recorded steps (`graph`): between two calls of `rebuild`, a step reads no changing number from
Python. The column is a tensor, all columns take part in attention, and the mask hides those not yet written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.base.settings import UserError
from hone.model.mixers import States
from hone.model.scoring import Scoring, Window
from hone.rollout.native.attention import Grid, continued_attention, decode_attention, prefill_attention
from hone.rollout.native.kernel import Kernel
from hone.rollout.native.memory import CHUNK, STATIC_CHUNK, columns
from hone.rollout.native.states import PromptStates, RowStates


class PromptPass:
    """The `decode_cache` of a prefill over packed prompts; keeps their keys and values.

    `lengths` [P]: tokens of each prompt in this pass. `pasts` [P]: what has been read of it before; without it, no
    prompt has been begun.
    """

    def __init__(self, lengths: Sequence[int], pasts: Sequence[Prompt | None] = ()) -> None:
        self.lengths, self.pasts = list(lengths), list(pasts)
        self.layers: dict[int, list[tuple[Tensor, Tensor]]] = {}  # layer -> keys and values [Hkv, n, D] of each prompt
        self.states = PromptStates(self.lengths, [None if past is None else past.states for past in self.pasts])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """query [1, H, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv]. Returns [1, T, H, Dv].

        Raises UserError for a layer that attends twice: the keys of its first call would be missing in decoding.
        """
        if layer in self.layers:
            raise UserError(
                f"layer {layer} of this model computes attention twice in one pass, so keys and values have no single "
                "place in the cache; choose another model"
            )
        new = list(zip(key[0].split(self.lengths, dim=1), value[0].split(self.lengths, dim=1)))
        if not self.pasts:
            self.layers[layer] = new
            return prefill_attention(query, key, value, self.lengths, scoring)
        self.layers[layer] = [
            own if past is None else _joined(past.layers[layer], own) for past, own in zip(self.pasts, new, strict=True)
        ]
        return continued_attention(query, self.layers[layer], self.lengths, scoring)

    def mix(self, mixer: nn.Module, hidden: Tensor) -> Tensor:
        """hidden [1, T, D] -> [1, T, D]: the part of a recurrent mixer (`hone.model.mixers`)."""
        return self.states.mix(mixer, hidden)

    def prompts(self) -> list[Prompt]:
        """The prompts, separated, in their order."""
        before = [0 if past is None else past.length for past in self.pasts] or [0] * len(self.lengths)
        return [
            Prompt(start + n, {layer: parts[i] for layer, parts in self.layers.items()}, self.states.of(i))
            for i, (start, n) in enumerate(zip(before, self.lengths, strict=True))
        ]


@dataclass(frozen=True, slots=True)
class Prompt:
    length: int
    layers: Mapping[int, tuple[Tensor, Tensor]]  # layer -> keys and values, each [Hkv, length, D]
    states: Mapping[int, States] = field(default_factory=dict)  # layer -> a mixer's state after the prompt


@dataclass(slots=True)
class _Layer:
    prompt: tuple[Tensor, Tensor]  # keys and values, [Hkv, P, Lp, D], zero beyond a prompt's length
    suffix: tuple[Tensor, Tensor]  # keys and values, [Hkv, B, capacity, D]


@dataclass(slots=True)
class DecodeCache:
    """The `decode_cache` of a step that decodes one token of every row."""

    kernel: Kernel | None = None  # replaces `decode_attention` if it fits
    static: bool = False  # takes effect at the next `rebuild`
    column: int = 0  # the column of the next token
    capacity: int = 0
    lengths: dict[int, int] = field(default_factory=dict)  # prompt -> its length, in the order of the grid [P]
    row_prompts: list[int] = field(default_factory=list)  # [B]
    starts: list[int] = field(default_factory=list)  # [B] first column of each row
    states: RowStates = field(default_factory=RowStates)
    _layers: dict[int, _Layer] = field(default_factory=dict)
    _grid: Grid | None = None
    _mask: Tensor | None = None  # [B, Lp + capacity]; None: nothing to hide
    _rows: Tensor | None = None  # [4, B], see `_seen`
    _windows: dict[Window, Tensor] = field(default_factory=dict)  # `_seen` at this column
    _at: Tensor | None = None  # [1] int64, `column` on the device; only in a static cache

    @property
    def full(self) -> bool:
        return self.column >= self.capacity

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """query [B, H, 1, D], key [B, Hkv, 1, D], value [B, Hkv, 1, Dv]. Returns [B, 1, H, Dv].

        Rows beyond those of the cache are padding (`memory.padded_rows`): nothing is stored, zeros are returned.
        """
        assert self._grid is not None, "rebuild comes before the first token"
        assert self._rows is not None
        rows = len(self.row_prompts)
        if rows < len(query):
            out = self.attend(layer, query[:rows], key[:rows], value[:rows], scoring)
            return F.pad(out, (0, 0) * 3 + (0, len(query) - rows))
        state = self._layers[layer]
        keys, values = state.suffix
        if self._at is not None:
            keys.index_copy_(2, self._at, key.transpose(0, 1))
            values.index_copy_(2, self._at, value.transpose(0, 1))
            mask = self._mask if scoring.window is None else self._windowed_mask(scoring.window)
            return decode_attention(query, state.prompt, state.suffix, self._grid, mask, scoring)
        end = self.column + 1
        keys[:, :, self.column] = key[:, :, 0].transpose(0, 1)
        values[:, :, self.column] = value[:, :, 0].transpose(0, 1)
        if self.kernel is not None and self.kernel.fits(query, value):
            return self.kernel(query, state.prompt, state.suffix, self._seen(scoring.window), end, scoring)
        mask = self._mask if scoring.window is None else self._windowed_mask(scoring.window)
        mask = None if mask is None else mask[:, : state.prompt[0].shape[2] + end]
        return decode_attention(query, state.prompt, (keys[:, :, :end], values[:, :, :end]), self._grid, mask, scoring)

    def mix(self, mixer: nn.Module, hidden: Tensor) -> Tensor:
        """hidden [B, 1, D] -> [B, 1, D]: the part of a recurrent mixer; states advance by one token."""
        return self.states.mix(mixer, hidden)

    def advance(self) -> None:
        """Go to the next column, after all rows have written this one."""
        self.column += 1
        self._windows = {}
        if self._at is not None and self._mask is not None and not self.full:
            self._at.fill_(self.column)
            self._mask[:, self.column - self.capacity].zero_()

    def sequence(self, row: int, tokens: int) -> Prompt:
        """A copy of the row's prompt and of its first `tokens` sampled tokens; mixers' states are the current ones."""
        prompt, start = self.row_prompts[row], self.starts[row]
        place, length = list(self.lengths).index(prompt), self.lengths[prompt]
        own = slice(start, start + tokens)

        def both(prompts: Tensor, suffixes: Tensor) -> Tensor:
            return torch.cat((prompts[:, place, :length], suffixes[:, row, own]), dim=1)

        layers = {
            layer: (both(parts.prompt[0], parts.suffix[0]), both(parts.prompt[1], parts.suffix[1]))
            for layer, parts in self._layers.items()
        }
        return Prompt(length + tokens, layers, self.states.of(row))

    def rebuild(
        self,
        keep: Sequence[int],
        entering: Sequence[int],
        new: Mapping[int, Prompt],
        steps: int,
        max_tokens: int,
        live: Sequence[int],
    ) -> None:
        """Keep these rows, in this order, and append one row for each prompt of `entering`.

        `new` holds at least the prompts that the cache does not have yet; prompts without rows are dropped.
        `steps`: tokens that the newest row may still write; `max_tokens`: the most tokens of any row. They bound the
        capacity (see `memory.columns`). Columns before the first of the `live` rows are dropped.
        """
        low = min((self.starts[row] for row in live), default=self.column)
        used = self.column - low
        window = slice(low, self.column)
        old_order = {prompt: place for place, prompt in enumerate(self.lengths)}
        self.starts = [max(0, self.starts[row] - low) for row in keep] + [used] * len(entering)
        self.row_prompts = [self.row_prompts[row] for row in keep] + list(entering)
        self.lengths = {
            prompt: self.lengths[prompt] if prompt in self.lengths else new[prompt].length
            for prompt in sorted(set(self.row_prompts))
        }
        self.column = used
        self.states.static = self.static
        self.states.rebuild(keep, [new[prompt].states for prompt in entering])
        # Grow in small steps: empty columns lie between those that are read, and slow reading down.
        piece = max(STATIC_CHUNK, used // 4) if self.static else max(CHUNK, used // 16)
        grown = used + min(steps, piece)
        self.capacity = min(grown, max(used + 1, columns(max_tokens)))
        if not self.row_prompts:
            self._layers, self._grid, self._mask, self._rows, self._at = {}, None, None, None, None
            self._windows = {}
            return
        for layer in self._layers or (next(iter(new.values())).layers if new else ()):
            old = self._layers.get(layer)
            prompt = old.prompt if old and list(old_order) == list(self.lengths) else None
            if prompt is None:
                parts = [
                    (old.prompt[0][:, old_order[p], :n], old.prompt[1][:, old_order[p], :n])
                    if old and p in old_order
                    else new[p].layers[layer]
                    for p, n in self.lengths.items()
                ]
                prompt = _pad([keys for keys, _ in parts]), _pad([values for _, values in parts])
            moved = [self._move(old.suffix[i] if old else None, keep, window, prompt[i]) for i in (0, 1)]
            self._layers[layer] = _Layer(prompt, (moved[0], moved[1]))
        device = next(iter(self._layers.values())).prompt[0].device if self._layers else self.states.device
        order = {prompt: place for place, prompt in enumerate(self.lengths)}
        places = [order[prompt] for prompt in self.row_prompts]
        lengths = [self.lengths[prompt] for prompt in self.row_prompts]
        self._grid = Grid.of(places, len(order), device)
        self._mask = self._hide(lengths, device)
        self._rows = torch.tensor([places, [0] * len(places), lengths, self.starts], device=device)
        self._windows = {}
        self._at = torch.tensor([self.column], device=device) if self.static else None

    def _move(self, old: Tensor | None, keep: Sequence[int], window: slice, like: Tensor) -> Tensor:
        """Copy the suffixes of the rows that stay, from `old` [Hkv, B, capacity, D]; add room for those that enter."""
        new = like.new_empty(like.shape[0], len(self.row_prompts), self.capacity, like.shape[3])
        if old is not None and keep:
            rows = torch.tensor(keep, device=old.device)
            new[:, : len(keep), : self.column] = old[:, :, window].index_select(1, rows)
        # Masked columns are multiplied by 0, and 0 times uninitialised memory could be nan.
        new[:, len(keep) :, : self.column] = 0
        if self.static:
            new[:, :, self.column :] = 0
        return new

    def _seen(self, window: Window | None) -> Tensor:
        """[4, B] int64: the place of the row's prompt, the first position in it that the next token sees, the prompt's
        length, and the first column of the row that the next token sees."""
        assert self._rows is not None
        if window is None:
            return self._rows
        if window in self._windows:
            return self._windows[window]
        places, _, lengths, starts = self._rows
        column = self.column if self._at is None else self._at
        first = window.first(lengths + column - starts)
        seen = torch.stack((places, first.minimum(lengths), lengths, starts + (first - lengths).clamp(min=0)))
        if self._at is None:  # a recorded step computes it anew
            self._windows[window] = seen
        return seen

    def _windowed_mask(self, window: Window) -> Tensor:
        """[B, Lp + capacity] at this column: 0, or -inf for what is hidden."""
        _, first, lengths, starts = self._seen(window)[..., None]
        prompt = torch.arange(max(self.lengths.values()), device=first.device)
        columns = torch.arange(self.capacity, device=first.device)
        column = self.column if self._at is None else self._at
        hidden = torch.cat(((prompt < first) | (prompt >= lengths), (columns < starts) | (columns > column)), dim=1)
        return torch.zeros(hidden.shape, device=first.device).masked_fill(hidden, -math.inf)

    def _hide(self, lengths: Sequence[int], device: torch.device) -> Tensor | None:
        """The mask [B, Lp + capacity]: -inf before a row's first column and beyond its prompt's end, `lengths` [B].

        In a static cache also after the next column.
        """
        longest = max(lengths)
        if not self.static and not any(self.starts) and min(lengths) == longest:
            return None
        length = torch.tensor(lengths, device=device)[:, None]
        start = torch.tensor(self.starts, device=device)[:, None]
        mask = torch.zeros(len(lengths), longest + self.capacity, device=device)
        mask[:, :longest].masked_fill_(torch.arange(longest, device=device) >= length, -math.inf)
        mask[:, longest:].masked_fill_(torch.arange(self.capacity, device=device) < start, -math.inf)
        if self.static:
            mask[:, longest + self.column + 1 :] = -math.inf
        return mask


def _joined(past: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat((past[0], new[0]), dim=1), torch.cat((past[1], new[1]), dim=1)


def _pad(parts: Sequence[Tensor]) -> Tensor:
    """[Hkv, length, D] of each prompt -> [Hkv, P, Lp, D], padded with zeros."""
    longest = max(part.shape[1] for part in parts)
    out = parts[0].new_zeros(parts[0].shape[0], len(parts), longest, parts[0].shape[2])
    for place, part in enumerate(parts):
        out[:, place, : part.shape[1]] = part
    return out
