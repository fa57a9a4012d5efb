"""Which samples are decoded now, and the tokens of each so far."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from hone.recipe.sections.rollout import SamplingConfig
from hone.rollout.native.kept import Kept
from hone.rollout.native.memory import Budget
from hone.rollout.native.requests import Request, Work
from hone.rollout.native.sampler import Mix, mix, uniforms
from hone.types import Finish, IntArray, Turn


class Queue:
    """Waiting samples: first come, first served, in whole groups.

    `reserve`: rows that a batch (requests submitted together) leaves free for others. Batches then take turns, so that
    a large one cannot block all others.
    """

    def __init__(self, budget: Budget, max_sequences: int, reserve: int = 0) -> None:
        self.kept = Kept(budget)
        self._batches: deque[deque[Work]] = deque()  # never empty ones; the first is next
        self._batch_of: dict[int, int] = {}  # request -> the number of its batch, while it waits or runs
        self._added = 0
        self.budget = budget
        self._max_sequences = max_sequences
        self._reserve = min(reserve, max_sequences - 1)

    def add(self, requests: Mapping[int, Request]) -> None:
        """Add requests as one batch, the longest prompts first.

        Prompts of similar length are then decoded together, which wastes little of the padded rectangle. Requests that
        continue a sample come before all that wait: memory is held for them.
        """
        order = sorted(requests, key=lambda i: (-len(requests[i].prompt_ids), i))
        if order:
            batch = deque((i, sample) for i in order for sample in range(requests[i].samples))
            continues = any(request.after is not None for request in requests.values())
            self._batches.appendleft(batch) if continues else self._batches.append(batch)
        self._added += 1
        self._batch_of |= dict.fromkeys(order, self._added)

    def take(self, running: Sequence[Work], requests: Mapping[int, Request]) -> list[Work]:
        """Take as many samples as fit beside the `running` ones; none overtakes one that has waited longer."""
        self._batch_of = {i: batch for i, batch in self._batch_of.items() if i in requests}
        room = _Room(self, running, requests)
        taken: list[Work] = []
        full = 0  # consecutive batches that have used up their share
        while full < len(self._batches):
            batch = self._batches[0]
            answer = room.for_one_of(batch[0][0])
            if answer == "no":
                break
            if self._reserve:
                self._batches.rotate(-1)
            if answer == "share used up":
                full += 1
                continue
            full = 0
            room.add(batch[0][0])
            taken.append(batch.popleft())
            if not batch:
                self._batches.remove(batch)
        return taken

    def fits(self, running: Sequence[Work], requests: Mapping[int, Request]) -> bool:
        """Whether what is kept fits beside the `running` samples."""
        return _Room(self, running, requests).fits

    def has_room(self, running: Sequence[Work], requests: Mapping[int, Request]) -> bool:
        """Whether `take` would return any."""
        room = _Room(self, running, requests)
        for batch in self._batches:
            answer = room.for_one_of(batch[0][0])
            if answer != "share used up":
                return answer == "yes"
        return False

    def drop(self, request: int) -> list[Work]:
        """Remove and return its samples."""
        gone = [work for batch in self._batches for work in batch if work[0] == request]
        kept = (deque(work for work in batch if work[0] != request) for batch in self._batches)
        self._batches = deque(batch for batch in kept if batch)
        return gone

    def waits(self, request: int) -> bool:
        """Whether the request is the next of its batch, with samples still waiting."""
        return any(batch[0][0] == request for batch in self._batches)

    def __len__(self) -> int:
        return sum(map(len, self._batches))


class _Room:
    """The room beside rows that are running or about to start."""

    def __init__(self, queue: Queue, running: Sequence[Work], requests: Mapping[int, Request]) -> None:
        self._queue, self._requests = queue, requests
        self._rows = self._longest = self._most = 0
        self._prompts: set[int] = set()
        self._kept = queue.kept.positions
        self._held: Counter[int] = Counter()  # batch -> rows
        for request, _ in running:
            self.add(request)

    def add(self, request: int) -> None:
        """Count one more row."""
        if request not in self._prompts:
            self._prompts.add(request)
            self._kept -= self._queue.kept.positions_of(self._requests[request].after)
            self._longest = max(self._longest, len(self._requests[request].prompt_ids))
            self._most = max(self._most, self._requests[request].sampling.max_tokens)
        self._rows += 1
        self._held[self._queue._batch_of[request]] += 1

    @property
    def fits(self) -> bool:
        """Whether these rows fit beside what is kept."""
        return self._queue.budget.fits(len(self._prompts), self._longest, self._rows, self._most, self._kept)

    def for_one_of(self, request: int) -> Literal["yes", "no", "share used up"]:
        """Whether a row of this request fits."""
        queue, spare = self._queue, self._queue._reserve
        if self._rows >= queue._max_sequences:
            return "no"
        prompts = len(self._prompts | {request})
        longest = max(self._longest, len(self._requests[request].prompt_ids))
        most = max(self._most, self._requests[request].sampling.max_tokens)
        own = 0 if request in self._prompts else queue.kept.positions_of(self._requests[request].after)
        if not queue.budget.fits(prompts, longest, self._rows + 1, most, self._kept - own):
            return "no"
        held = self._held[queue._batch_of[request]]
        if not spare or not held:
            return "yes"
        alone = held == self._rows
        if held >= queue._max_sequences - spare or (
            alone and not queue.budget.fits(prompts + 1, longest, self._rows + 1 + spare, most)
        ):
            return "share used up"
        return "yes"


@dataclass(slots=True)
class Rows:
    """The samples being decoded. Finished ones keep their row until they are replaced.

    W is the largest token limit of any row, plus one column into which finished rows keep writing.
    """

    work: list[Work]  # [B]
    settings: list[SamplingConfig]  # [B]
    kinds: Mix  # the same settings, grouped
    prompt_lens: Tensor  # [B]
    limits: Tensor  # [B] most tokens of each row
    tokens: Tensor  # [B, W] int64
    logprobs: Tensor  # [B, W] float32
    draws: Tensor | None  # [B, W] float32 uniform numbers; None: all rows are greedy
    lengths: Tensor  # [B] tokens so far
    live: Tensor  # [B] bool
    last: Tensor  # [B] the last token

    @staticmethod
    def enter(work: list[Work], requests: Mapping[int, Request], device: torch.device) -> Rows:
        """Rows without tokens."""
        row_requests = [requests[i] for i, _ in work]
        settings = [request.sampling for request in row_requests]
        limits = [s.max_tokens for s in settings]
        shape = (len(work), max(limits, default=0) + 1)
        draws = None
        if any(s.temperature for s in settings):
            keys = [r.seed for r in row_requests], [r.stream for r in row_requests], [g for _, g in work]
            draws = torch.from_numpy(uniforms(*keys, shape[1])).to(device)
        return Rows(
            work,
            settings,
            mix(settings, device),
            torch.tensor([len(r.prompt_ids) for r in row_requests], dtype=torch.int64, device=device),
            torch.tensor(limits, dtype=torch.int64, device=device),
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.zeros(shape, device=device),
            draws,
            torch.zeros(len(work), dtype=torch.int64, device=device),
            torch.ones(len(work), dtype=torch.bool, device=device),
            torch.zeros(len(work), dtype=torch.int64, device=device),
        )

    def next_draws(self) -> Tensor | None:
        """The uniform number [B] of each row's next token."""
        return None if self.draws is None else self.draws.gather(1, self.lengths[:, None]).squeeze(1)

    def record(self, tokens: Tensor, logprobs: Tensor, stops: Tensor) -> None:
        """Append tokens [B] and logprobs [B] to the live rows; `stops` [S] are the stop tokens."""
        at = self.lengths[:, None]
        self.tokens.scatter_(1, at, tokens[:, None])
        self.logprobs.scatter_(1, at, logprobs[:, None])
        self.lengths += self.live
        self.live &= (tokens[:, None] != stops).all(dim=1)
        self.live &= self.lengths < self.limits
        self.last = tokens

    def end(self, row: int, length: int | None = None) -> None:
        """End the row now, or at `length` tokens if given."""
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
            # Greedy rows do not use theirs.
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

    def tokens_since(self, rows: Sequence[int], since: Sequence[int]) -> list[tuple[IntArray, npt.NDArray[np.float32]]]:
        """Tokens and log-probs of each of these rows, starting at its token `since`."""
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
        """The finished samples in these rows. `ended`: how, for those ended neither by a stop token nor the limit."""
        return [
            Turn(
                prompt_ids=np.asarray(requests[self.work[row][0]].prompt_ids, dtype=np.int64),
                completion_ids=tokens,
                logprobs=logprobs,
                finish=ended.get(self.work[row]) or ("stop" if int(tokens[-1]) in stops else "length"),
                policy_version=version,
            )
            for row, (tokens, logprobs) in zip(rows, self.tokens_since(rows, [0] * len(rows)))
        ]


def _stack(a: Tensor, b: Tensor) -> Tensor:
    """Stack the rows of a and b, padding the narrower with zeros."""
    width = max(a.shape[1], b.shape[1])
    return torch.cat([F.pad(x, (0, width - x.shape[1])) for x in (a, b)])
