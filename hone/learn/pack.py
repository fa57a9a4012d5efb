"""Packing: samples to micro-batches without padding. The only shift of the system is here.

The prompt of a group is laid out once and shared by its completions (`Block`), so that its
forward and backward passes are computed once. Token t of a sequence is predicted from the hidden
state of token t-1: `sources` and `targets` of a `MicroBatch` say so, and nothing else shifts.

    batches = Packer(tokens_per_microbatch=8192)(samples, weights)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hone.types import TOKEN_FIELDS, Block, FloatArray, MicroBatch, Sample

#: Sequences without a shared prompt are put into blocks of this many, sorted by length.
ROWS = 16


@dataclass(frozen=True)
class _Packed:
    """A block with the samples that fill it (by index into the step's list)."""

    block: Block
    members: tuple[int, ...]


@dataclass(frozen=True)
class Packer:
    """Distributes samples over micro-batches of at most `tokens_per_microbatch` packed tokens.

    `share_prompts`: lay out the common prompt of samples once. `parts`: number of processes; the number of
    micro-batches is a multiple of it if there is enough to divide.
    """

    tokens_per_microbatch: int
    share_prompts: bool = True
    parts: int = 1

    def __call__(
        self,
        samples: Sequence[Sample],
        weights: Sequence[float],
        ids: Sequence[int] | None = None,
        **per_token: Sequence[FloatArray] | None,
    ) -> list[MicroBatch]:
        """Pack the samples. Micro-batches are balanced by tokens; a sequence longer than the budget has one to itself.

        weights: [S] the weight of every trained token of each sample in the loss of the whole batch
        (`hone.learn.reduce`); they are global, so any division into micro-batches has the same gradient.
        ids: [S] the ids of the samples in `MicroBatch.sample_ids`; their indices by default.
        per_token: further fields of `MicroBatch`, such as old_logprobs: [S] arrays with one value per trained token.
        Raises ValueError if there are no samples.
        """
        if not samples:
            raise ValueError("pack: no samples")
        budget = self._block_budget(samples)
        blocks = _shared_blocks(samples, budget) if self.share_prompts else _plain_blocks(samples, budget)
        fields = {name: values for name, values in per_token.items() if values is not None}
        names = range(len(samples)) if ids is None else ids
        bins = _balance(blocks, self.tokens_per_microbatch, self.parts)
        return [_micro_batch(bin_, samples, weights, names, fields) for bin_ in bins]

    def _block_budget(self, samples: Sequence[Sample]) -> int:
        """Tokens of a block at most: few enough for every process to get a micro-batch."""
        if self.parts == 1:
            return self.tokens_per_microbatch
        prompts = {s.token_ids[: s.prompt_len].tobytes(): s.prompt_len for s in samples} if self.share_prompts else {}
        own = [len(s.token_ids) - (s.prompt_len if self.share_prompts else 0) for s in samples]
        return min(self.tokens_per_microbatch, -(-(sum(own) + sum(prompts.values())) // self.parts))


def _shared_blocks(samples: Sequence[Sample], budget: int) -> list[_Packed]:
    """Samples with the same prompt share a block; those that exceed the budget open another."""
    by_prompt: dict[bytes, list[int]] = {}
    for i, s in enumerate(samples):
        by_prompt.setdefault(s.token_ids[: s.prompt_len].tobytes(), []).append(i)
    blocks: list[_Packed] = []
    alone: list[int] = []
    for members in by_prompt.values():
        if len(members) == 1:
            alone.append(members[0])
            continue
        # Similar lengths stand together, so that padding inside the attention stays small.
        members.sort(key=lambda i: (len(samples[i].token_ids), i))
        prompt = samples[members[0]].prompt_len
        room: list[int] = []
        used = prompt
        for i in members:
            length = len(samples[i].token_ids) - prompt
            if room and used + length > budget:
                blocks.append(_shared_block(samples, room))
                room, used = [], prompt
            room.append(i)
            used += length
        blocks.append(_shared_block(samples, room))
    return blocks + (_plain_blocks(samples, budget, alone) if alone else [])


def _shared_block(samples: Sequence[Sample], members: list[int]) -> _Packed:
    prompt = samples[members[0]].prompt_len
    return _Packed(Block(prompt, tuple(len(samples[i].token_ids) - prompt for i in members)), tuple(members))


def _plain_blocks(samples: Sequence[Sample], budget: int, members: Sequence[int] | None = None) -> list[_Packed]:
    """Whole sequences, sorted by length, at most ROWS of them and `budget` tokens; no prompt is shared."""
    order = sorted(members if members is not None else range(len(samples)), key=lambda i: len(samples[i].token_ids))
    rows: list[list[int]] = []
    used = 0
    for i in order:
        length = len(samples[i].token_ids)
        if not rows or len(rows[-1]) == ROWS or used + length > budget:
            rows.append([])
            used = 0
        rows[-1].append(i)
        used += length
    return [_Packed(Block(0, tuple(len(samples[i].token_ids) for i in row)), tuple(row)) for row in rows]


def deal(batches: Sequence[MicroBatch], parts: int) -> list[list[int | None]]:
    """The indices of the micro-batches of each of `parts` processes, equally many each; None: an `empty_batch`.

    Micro-batches that are processed at the same time have similar sizes.
    """
    if parts == 1:
        return [list(range(len(batches)))]
    order: list[int | None] = [*sorted(range(len(batches)), key=lambda i: -len(batches[i].inputs))]
    order += [None] * (-len(batches) % parts)
    return [order[part::parts] for part in range(parts)]


def empty_batch(like: MicroBatch) -> MicroBatch:
    """A micro-batch of one untrained token: its pass touches every weight, and all its gradients are 0.

    Processes that work together must run the same number of passes, even if one has run out of samples.
    """
    nothing: dict[str, Any] = {
        name: None if getattr(like, name) is None else getattr(like, name)[:0] for name in TOKEN_FIELDS
    }
    one = torch.zeros_like(like.inputs[:1])
    return MicroBatch(inputs=one, positions=one, layout=(Block(0, (1,)),), targets=like.targets[:0], **nothing)


def _balance(blocks: list[_Packed], budget: int, parts: int) -> list[list[_Packed]]:
    """Longest-processing-time rule: each block into the emptiest bin that has room."""
    total = sum(b.block.num_tokens for b in blocks)
    rounds = -(-max(1, -(-total // budget)) // parts)
    bins: list[list[_Packed]] = [[] for _ in range(rounds * parts)]
    used = [0] * len(bins)
    for packed in sorted(blocks, key=lambda b: -b.block.num_tokens):
        size = packed.block.num_tokens
        best = min(range(len(bins)), key=used.__getitem__)
        if bins[best] and used[best] + size > budget:
            bins.append([])
            used.append(0)
            best = len(bins) - 1
        bins[best].append(packed)
        used[best] += size
    return [b for b in bins if b]


def _micro_batch(
    bin_: list[_Packed],
    samples: Sequence[Sample],
    weights: Sequence[float],
    names: Sequence[int],
    fields: Mapping[str, Sequence[FloatArray]],
) -> MicroBatch:
    inputs: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    sources: list[np.ndarray] = []
    members: list[int] = []
    start = 0  # of the block, in packed tokens
    for packed in bin_:
        lp = packed.block.prompt_len
        if lp:
            inputs.append(samples[packed.members[0]].token_ids[:lp])
            positions.append(np.arange(lp))
        at = start + lp
        for i in packed.members:
            s = samples[i]
            length = len(s.token_ids) - lp
            inputs.append(s.token_ids[lp:])
            positions.append(np.arange(lp, lp + length))
            # The shift: token t is predicted from token t-1, which for the first token of a
            # completion is the last token of the (shared) prompt.
            source = np.arange(at - 1, at + length - 1)
            if lp:
                source[0] = start + lp - 1
            sources.append(source[s.trained[lp:]])
            at += length
        members += packed.members
        start = at
    chosen = [samples[i] for i in members]
    counts = np.asarray([int(s.trained.sum()) for s in chosen])

    def flat(values: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(np.concatenate(values)).to(dtype)

    return MicroBatch(
        inputs=flat(inputs, torch.int64),
        positions=flat(positions, torch.int64),
        layout=tuple(p.block for p in bin_),
        sources=flat(sources, torch.int64),
        targets=flat([s.token_ids[s.trained] for s in chosen], torch.int64),
        samples=torch.as_tensor(np.repeat(np.arange(len(chosen)), counts)),
        sampled_logprobs=flat([s.logprobs[s.trained] for s in chosen], torch.float32),
        advantages=flat([s.advantages[s.trained] for s in chosen], torch.float32),
        weights=torch.as_tensor(np.repeat([weights[i] for i in members], counts)).to(torch.float32),
        sample_ids=tuple(names[i] for i in members),
        **{name: flat([values[i] for i in members], torch.float32) for name, values in fields.items()},
    )
