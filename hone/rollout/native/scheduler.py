"""Which samples are decoded now, and what each has said so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hone.rollout.native.sampler import uniforms
from hone.types import IntArray, Turn

Work = tuple[int, int]  # (prompt, sample of it)


class Queue:
    """Samples still to be started: whole groups, the longest prompts first.

    Prompts of like length are then decoded together, and little of the padded rectangle is wasted.
    """

    def __init__(self, lengths: Sequence[int], samples: int) -> None:
        order = sorted(range(len(lengths)), key=lambda prompt: (-lengths[prompt], prompt))
        self._waiting: deque[Work] = deque((prompt, sample) for prompt in order for sample in range(samples))

    def take(self, count: int) -> list[Work]:
        return [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]

    def waits(self, prompt: int) -> bool:
        """Whether samples of the prompt that was taken last are still waiting."""
        return bool(self._waiting) and self._waiting[0][0] == prompt


@dataclass(slots=True)
class Rows:
    """The samples being decoded. Finished ones stay in place, and cost a row, until they are replaced.

    The buffers have a column more than `max_tokens`: a finished row goes on writing there.
    """

    work: list[Work]  # [B]
    prompt_lens: Tensor  # [B]
    tokens: Tensor  # [B, max_tokens + 1] int64
    logprobs: Tensor  # [B, max_tokens + 1] float32
    draws: Tensor | None  # [B, max_tokens + 1] float32; None: greedy
    lengths: Tensor  # [B] tokens said
    live: Tensor  # [B] bool
    last: Tensor  # [B] the token said last

    @staticmethod
    def enter(
        work: list[Work], prompt_lens: Sequence[int], max_tokens: int, seed: int | None, device: torch.device
    ) -> Rows:
        """Rows that have said nothing yet. `seed` None: greedy, no random numbers."""
        shape = (len(work), max_tokens + 1)
        draws = None
        if seed is not None:
            numbers = uniforms(seed, [p for p, _ in work], [g for _, g in work], max_tokens + 1)
            draws = torch.from_numpy(numbers).to(device)
        return Rows(
            work,
            torch.tensor([prompt_lens[p] for p, _ in work], dtype=torch.int64, device=device),
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.zeros(shape, device=device),
            draws,
            torch.zeros(len(work), dtype=torch.int64, device=device),
            torch.ones(len(work), dtype=torch.bool, device=device),
            torch.zeros(len(work), dtype=torch.int64, device=device),
        )

    def next_draws(self) -> Tensor | None:
        """One uniform number per row, that of its next token. [B]"""
        return None if self.draws is None else self.draws.gather(1, self.lengths[:, None]).squeeze(1)

    def record(self, tokens: Tensor, logprobs: Tensor, stops: Tensor) -> None:
        """tokens [B], logprobs [B], stops [number of stop tokens]."""
        at = self.lengths[:, None]
        self.tokens.scatter_(1, at, tokens[:, None])
        self.logprobs.scatter_(1, at, logprobs[:, None])
        self.lengths += self.live
        self.live &= (tokens[:, None] != stops).all(dim=1)
        self.live &= self.lengths < self.tokens.shape[1] - 1
        self.last = tokens

    def select(self, keep: Sequence[int]) -> Rows:
        index = torch.tensor(keep, dtype=torch.int64, device=self.live.device)
        return Rows(
            [self.work[row] for row in keep],
            self.prompt_lens[index],
            self.tokens[index],
            self.logprobs[index],
            None if self.draws is None else self.draws[index],
            self.lengths[index],
            self.live[index],
            self.last[index],
        )

    def append(self, other: Rows) -> Rows:
        def join(a: Tensor, b: Tensor) -> Tensor:
            return torch.cat((a, b))

        return Rows(
            self.work + other.work,
            join(self.prompt_lens, other.prompt_lens),
            join(self.tokens, other.tokens),
            join(self.logprobs, other.logprobs),
            None if self.draws is None or other.draws is None else join(self.draws, other.draws),
            join(self.lengths, other.lengths),
            join(self.live, other.live),
            join(self.last, other.last),
        )

    def turns(self, rows: Sequence[int], prompts: Sequence[IntArray], stops: Tensor, version: int) -> list[Turn]:
        """The finished samples in these rows, as records."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.live.device)
        ends = set(stops.tolist())
        lengths = self.lengths[index].tolist()
        longest = max(lengths, default=0)
        tokens = self.tokens[index, :longest].cpu().numpy()
        logprobs = self.logprobs[index, :longest].cpu().numpy()
        return [
            Turn(
                prompt_ids=np.asarray(prompts[self.work[row][0]], dtype=np.int64),
                completion_ids=tokens[i, :length].copy(),
                logprobs=logprobs[i, :length].copy(),
                finish="stop" if int(tokens[i, length - 1]) in ends else "length",
                policy_version=version,
            )
            for i, (row, length) in enumerate(zip(rows, lengths))
        ]
