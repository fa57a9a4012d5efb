"""Which samples are decoded now, and what each has said so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from hone.recipe.sections.rollout import SamplingConfig
from hone.rollout.native.memory import Budget
from hone.rollout.native.requests import Request, Work
from hone.rollout.native.sampler import Mix, mix, uniforms
from hone.types import Finish, IntArray, Turn


class Queue:
    """Samples still to be started: first come, first served, and whole groups."""

    def __init__(self, budget: Budget, max_sequences: int) -> None:
        self._waiting: deque[Work] = deque()
        self._budget = budget
        self._max_sequences = max_sequences

    def add(self, requests: Mapping[int, Request]) -> None:
        """Of those that come together, the longest prompts first.

        Prompts of like length are then decoded together, and little of the padded rectangle is wasted.
        """
        order = sorted(requests, key=lambda i: (-len(requests[i].prompt_ids), i))
        self._waiting.extend((i, sample) for i in order for sample in range(requests[i].samples))

    def take(self, running: Sequence[Work], requests: Mapping[int, Request]) -> list[Work]:
        """As many as there is room for beside the `running` ones; none overtakes one that waits longer."""
        prompts = {i for i, _ in running}
        longest = max((len(requests[i].prompt_ids) for i in prompts), default=0)
        most = max((requests[i].sampling.max_tokens for i in prompts), default=0)
        taken: list[Work] = []
        while self._waiting and len(running) + len(taken) < self._max_sequences:
            i, _ = self._waiting[0]
            prompts.add(i)
            longest = max(longest, len(requests[i].prompt_ids))
            most = max(most, requests[i].sampling.max_tokens)
            if not self._budget.fits(len(prompts), longest, len(running) + len(taken) + 1, most):
                break
            taken.append(self._waiting.popleft())
        return taken

    def has_room(self, running: Sequence[Work], requests: Mapping[int, Request]) -> bool:
        """Whether `take` would give anything."""
        if not self._waiting or len(running) >= self._max_sequences:
            return False
        asked = {i: requests[i] for i, _ in (*running, self._waiting[0])}
        longest = max(len(request.prompt_ids) for request in asked.values())
        most = max(request.sampling.max_tokens for request in asked.values())
        return self._budget.fits(len(asked), longest, len(running) + 1, most)

    def drop(self, request: int) -> list[Work]:
        """Take its samples out; returns them."""
        gone = [work for work in self._waiting if work[0] == request]
        self._waiting = deque(work for work in self._waiting if work[0] != request)
        return gone

    def waits(self, request: int) -> bool:
        """Whether samples of the request that was taken last are still waiting."""
        return bool(self._waiting) and self._waiting[0][0] == request

    def __len__(self) -> int:
        return len(self._waiting)


@dataclass(slots=True)
class Rows:
    """The samples being decoded. Finished ones stay in place, and cost a row, until they are replaced.

    W is the largest number of tokens that any of them may say, and one more: a finished row goes on writing there.
    """

    work: list[Work]  # [B]
    settings: list[SamplingConfig]  # [B]
    kinds: Mix  # the same, as sets of rows
    prompt_lens: Tensor  # [B]
    limits: Tensor  # [B] tokens that a row may say
    tokens: Tensor  # [B, W] int64
    logprobs: Tensor  # [B, W] float32
    draws: Tensor | None  # [B, W] float32; None: all greedy
    lengths: Tensor  # [B] tokens said
    live: Tensor  # [B] bool
    last: Tensor  # [B] the token said last

    @staticmethod
    def enter(work: list[Work], requests: Mapping[int, Request], device: torch.device) -> Rows:
        """Rows that have said nothing yet."""
        asked = [requests[i] for i, _ in work]
        settings = [request.sampling for request in asked]
        limits = [s.max_tokens for s in settings]
        shape = (len(work), max(limits, default=0) + 1)
        draws = None
        if any(s.temperature for s in settings):
            keys = [r.seed for r in asked], [r.stream for r in asked], [g for _, g in work]
            draws = torch.from_numpy(uniforms(*keys, shape[1])).to(device)
        return Rows(
            work,
            settings,
            mix(settings, device),
            torch.tensor([len(r.prompt_ids) for r in asked], dtype=torch.int64, device=device),
            torch.tensor(limits, dtype=torch.int64, device=device),
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
        self.live &= self.lengths < self.limits
        self.last = tokens

    def end(self, row: int, length: int | None = None) -> None:
        """Stop here; with `length`, already there."""
        self.live[row] = False
        if length is not None:
            self.lengths[row] = length

    def select(self, keep: Sequence[int]) -> Rows:
        index = torch.tensor(keep, dtype=torch.int64, device=self.live.device)
        settings = [self.settings[row] for row in keep]
        return Rows(
            [self.work[row] for row in keep],
            settings,
            mix(settings, index.device),
            self.prompt_lens[index],
            self.limits[index],
            self.tokens[index],
            self.logprobs[index],
            None if self.draws is None else self.draws[index],
            self.lengths[index],
            self.live[index],
            self.last[index],
        )

    def append(self, other: Rows) -> Rows:
        draws = None
        if self.draws is not None or other.draws is not None:
            # Greedy rows never look at theirs.
            draws = _stack(
                torch.zeros_like(self.logprobs) if self.draws is None else self.draws,
                torch.zeros_like(other.logprobs) if other.draws is None else other.draws,
            )
        settings = self.settings + other.settings
        return Rows(
            self.work + other.work,
            settings,
            mix(settings, self.live.device),
            torch.cat((self.prompt_lens, other.prompt_lens)),
            torch.cat((self.limits, other.limits)),
            _stack(self.tokens, other.tokens),
            _stack(self.logprobs, other.logprobs),
            draws,
            torch.cat((self.lengths, other.lengths)),
            torch.cat((self.live, other.live)),
            torch.cat((self.last, other.last)),
        )

    def said(self, rows: Sequence[int], since: Sequence[int]) -> list[tuple[IntArray, npt.NDArray[np.float32]]]:
        """Tokens and log-probs of these rows, from token `since` of each on."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.live.device)
        lengths = self.lengths[index].tolist()
        first, longest = min(since, default=0), max(lengths, default=0)
        tokens = self.tokens[index, first:longest].cpu().numpy()
        logprobs = self.logprobs[index, first:longest].cpu().numpy()
        return [
            (tokens[i, start - first : end - first].copy(), logprobs[i, start - first : end - first].copy())
            for i, (start, end) in enumerate(zip(since, lengths))
        ]

    def turns(
        self,
        rows: Sequence[int],
        requests: Mapping[int, Request],
        stops: Collection[int],
        ended: Mapping[Work, Finish],
        version: int,
    ) -> list[Turn]:
        """The finished samples in these rows, as records. `ended`: how, if neither by a stop token nor their limit."""
        return [
            Turn(
                prompt_ids=np.asarray(requests[self.work[row][0]].prompt_ids, dtype=np.int64),
                completion_ids=tokens,
                logprobs=logprobs,
                finish=ended.get(self.work[row]) or ("stop" if int(tokens[-1]) in stops else "length"),
                policy_version=version,
            )
            for row, (tokens, logprobs) in zip(rows, self.said(rows, [0] * len(rows)))
        ]


def _stack(a: Tensor, b: Tensor) -> Tensor:
    """Rows of a over rows of b, the narrower ones filled with zeros."""
    width = max(a.shape[1], b.shape[1])
    return torch.cat([F.pad(x, (0, width - x.shape[1])) for x in (a, b)])
