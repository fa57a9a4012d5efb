"""The running batch: requests are added while it runs, finished rows leave, waiting ones enter.

    with engine.open() as core:
        core.submit([Request(prompt_ids, sampling, seed=1)])
        while core.busy:
            for output in core.step(): ...

Rows of different prompts, settings and seeds are decoded together, one token per row and step. A finished row is
reported at once; it is replaced when enough rows have finished.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from hone.base.settings import UserError
from hone.model import attention, linear
from hone.model.limits import context_limit
from hone.model.logprobs import backbone, logits_of, output_head
from hone.rollout.native.cache import DecodeCache, Prompt, PromptPass
from hone.rollout.native.graph import GraphStep, Recorder
from hone.rollout.native.kernel import Kernel
from hone.rollout.native.memory import padded_prompt, padded_rows
from hone.rollout.native.requests import Output, Request, Top, Work
from hone.rollout.native.sampler import likeliest, sample_mix
from hone.rollout.native.scheduler import Queue, Rows
from hone.rollout.native.score import prompt_scores
from hone.rollout.text import Decode, StopText
from hone.types import Finish, Turn

_PREFILL_TOKENS = 8192  # prompt tokens in one forward pass, at most (a single prompt may be longer)
_IDLE_SHARE = 8  # rows are replaced when one in eight has finished: moving the others costs about one step
_STEPS_PER_CHECK = 8  # on a GPU, tokens between two checks for finished rows: a check waits for the device


_NOTHING = (np.empty(0, np.int64), np.empty(0, np.float32))  # no tokens, no log-probs


@dataclass(slots=True)
class _Watch:
    """A row whose tokens are read while it runs."""

    stop: StopText | None
    streamed: bool
    seen: int = 0  # tokens read so far


@dataclass(frozen=True, slots=True)
class Speedups:
    """What makes decoding faster on this device."""

    kernel: Kernel | None = None  # computes attention where it fits
    recorder: Recorder | None = None  # records decode steps
    gave_up: Callable[[str], None] = print  # called with the reason if steps cannot be recorded


class Core:
    """Not thread-safe; runs inside `NativeEngine.open`.

    `stops` are the token ids that end a completion; `decode` turns tokens into text, for requests with stop strings;
    `version` is the policy version of the turns.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        queue: Queue,
        stops: Sequence[int],
        decode: Decode | None,
        version: int,
        speedups: Speedups,
    ) -> None:
        self._model, self._device = model, next(model.parameters()).device
        self._head = None if model.dtype == torch.float32 else output_head(model)
        self._stop_ids = frozenset(stops)
        self._stops = torch.tensor(list(stops), dtype=torch.int64, device=self._device)
        self._decode_text, self._version = decode, version
        self._pads = linear.keeps_shapes(model)
        self._steps_per_check = 1 if self._device.type == "cpu" else _STEPS_PER_CHECK
        self._requests: dict[int, Request] = {}
        self._pending: dict[int, int] = {}  # request -> samples that wait or occupy a row
        self._submitted = 0
        self._queue, self._kept = queue, queue.kept
        self.read_tokens = 0  # tokens of prompts that were computed so far
        self._reads: dict[int, int] = {}  # of each request, those that no finished turn has been given
        self._arrived = False  # requests were submitted since rows last entered
        self._rows = Rows.enter([], self._requests, self._device)
        self._alive: list[bool] = []  # [B] as of the last check
        self._reported: set[Work] = set()  # finished rows that still occupy their place
        self._ended: dict[Work, Finish] = {}  # how a sample ended, if neither by a stop token nor by the limit
        self._watches: dict[Work, _Watch] = {}
        self._outputs: list[Output] = []
        self._most_top = 0  # the largest `top_logprobs` of any row
        self._tops: list[tuple[int, Tensor, Tensor]] = []  # since the last check: first row, then `likeliest` of it
        self._cache = DecodeCache(speedups.kernel)
        self._next = GraphStep(self._forward, speedups.recorder, speedups.gave_up, self._cache.states.kept)
        # Prefilled prompts with samples waiting: their keys and values, and the logits [V] after them.
        self._read: dict[int, tuple[Prompt, Tensor]] = {}

    def close(self) -> None:
        """Free the KV cache and recorded graphs, even if references to this batch remain."""
        self._next.close()
        self._cache, self._read = DecodeCache(), {}
        self._kept.clear()

    @property
    def busy(self) -> bool:
        """Whether samples are waiting or running, or outputs have not been returned yet."""
        return bool(self._rows.work or len(self._queue) or self._outputs)

    def submit(self, requests: Sequence[Request]) -> list[int]:
        """Accept requests, at any time; returns a number for each, which its outputs carry.

        Raises UserError, and accepts none of them, if a prompt is empty or leaves no room in the model's context, or
        if a request could never fit the memory for keys and values.
        """
        for request in requests:
            self._check(request)
        new = {self._submitted + i: request for i, request in enumerate(requests)}
        self._submitted += len(requests)
        self._requests |= new
        self._pending |= {i: request.samples for i, request in new.items()}
        self._queue.add(new)
        self._arrived = True
        return list(new)

    def cancel(self, request: int) -> None:
        """End the samples of a request now; they are reported with finish "abort". Finished requests are ignored."""
        for work in self._queue.drop(request):
            prompt = np.asarray(self._requests[request].prompt_ids, dtype=np.int64)
            turn = Turn(prompt, *_NOTHING, "abort", self._version)
            self._outputs.append(Output(*work, *_NOTHING, turn=turn))
            self._forget(request)
        for row, work in enumerate(self._rows.work):
            if work[0] == request and self._alive[row]:
                self._rows.end(row)
                self._ended[work] = "abort"

    def forget(self, work: Work) -> None:
        """Drop what is kept of a finished sample, which no request will continue."""
        self._kept.take(work)

    @property
    def evicted(self) -> int:
        """Number of kept samples that were dropped so far for lack of memory."""
        return self._kept.evicted

    def step(self) -> list[Output]:
        """Schedule rows, or decode a few tokens of every row. Returns new outputs, in no particular order."""
        if self.due:
            self._schedule()
        else:
            self._decode()
        outputs, self._outputs = [*self._outputs, *self._watch(), *self._finished()], []
        return outputs

    def _check(self, request: Request) -> None:
        """The prompt and its completion must fit the model's context, and the memory for keys and values."""
        bound = context_limit(self._model.config)
        limit, setting = (None, "") if bound is None else (bound.tokens, bound.setting)
        name, length, max_tokens = f"prompt {request.stream}", len(request.prompt_ids), request.sampling.max_tokens
        if length == 0:
            raise UserError(f"{name} is empty: give it at least one token")
        if request.sampling.stop and self._decode_text is None:
            raise ValueError("stop strings need the engine to know how tokens are decoded: give it `decode`")
        if limit is not None and length >= limit:
            raise UserError(
                f"{name} has {length} tokens and leaves no room for a completion in the model's context of "
                f"{limit} ({setting}): shorten or drop it"
            )
        if limit is not None and length + max_tokens > limit:
            raise UserError(
                f"{name} has {length} tokens and may be followed by {max_tokens}: {length + max_tokens} do not fit "
                f"the model's context of {limit} ({setting}); set sampling.max_tokens to "
                f"{limit - length} or less, or shorten the prompt"
            )
        self._queue.budget.check_alone(length, max_tokens, name)

    @property
    def due(self) -> bool:
        """Whether enough rows have finished to be worth scheduling, or new requests have room."""
        if _IDLE_SHARE * self._alive.count(False) >= len(self._rows.work):
            return True
        return self._arrived and self._queue.has_room(self._rows.work, self._requests)

    def _decode(self) -> None:
        """Decode a few tokens of every row."""
        rows = self._rows
        for _ in range(self._steps_at_once()):
            if self._cache.full:
                everything = range(len(rows.work))
                self._rebuild(everything, [], live=[row for row in everything if self._alive[row]])
            positions = rows.prompt_lens + rows.lengths - 1  # [B], of the last token
            logits = self._next(rows.last, positions)
            self._cache.advance()
            self._append_tokens(rows, logits)

    def _steps_at_once(self) -> int:
        """Steps until the next check. The states of a row that is kept must be copied immediately, since they
        advance."""
        kept = self._cache.states.layers and any(self._requests[request].keep for request, _ in self._rows.work)
        return 1 if kept else self._steps_per_check

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens and positions [B] -> logits [B, V]. May be recorded: see `graph`."""
        count = len(tokens)
        if spare := padded_rows(count) - count if self._pads else 0:
            tokens, positions = F.pad(tokens, (0, spare)), F.pad(positions, (0, spare))
        inputs = {"input_ids": tokens[:, None], "position_ids": positions[:, None], "decode_cache": self._cache}
        return self._logits(inputs, slice(-1, None))[:count, 0]

    def _logits(self, inputs: dict[str, Any], keep: slice | Tensor) -> Tensor:
        """Logits [B, K, V] at the kept positions. With bfloat16 weights they are not rounded to bfloat16, as in
        training; a float32 head is called as a module, since its weights may be packed."""
        if self._head is None:
            kept = -keep.start if isinstance(keep, slice) else keep
            logits: Tensor = self._call(self._model, inputs | {"logits_to_keep": kept}).logits
            return logits
        hidden = self._call(backbone(self._model), inputs).last_hidden_state[:, keep]  # [B, K, D]
        return logits_of(hidden.flatten(0, 1), self._head).unflatten(0, hidden.shape[:2])

    def _call(self, module: Any, inputs: dict[str, Any]) -> Any:
        this = attention.ForwardPass(decode_cache=inputs["decode_cache"])
        with attention.forward_pass(this):
            out = module(**inputs, use_cache=False)
        attention.check_called(self._model, this)
        return out

    def _append_tokens(self, rows: Rows, logits: Tensor, first: int = 0) -> None:
        """Sample the next token of `rows`, which begin at row `first` of the batch. logits [B, V]"""
        rows.record(*sample_mix(logits, rows.next_draws(), rows.kinds), self._stops)
        if self._most_top:
            self._tops.append((first, *likeliest(logits, rows.kinds, self._most_top)))

    def _schedule(self) -> None:
        """Remove finished rows, prefill and start waiting samples; each gets its first token."""
        keep = [row for row, alive in enumerate(self._alive) if alive]
        for row, alive in enumerate(self._alive):
            if not alive:
                self._reported.discard(self._rows.work[row])
                self._forget(self._rows.work[row][0])
        running = [self._rows.work[row] for row in keep]
        work = self._queue.take(running, self._requests)
        while not work and not running and len(self._queue) and len(self._kept):
            self._kept.evict()
            work = self._queue.take(running, self._requests)
        self._arrived = False
        self._most_top = max((self._requests[request].top_logprobs for request, _ in (*running, *work)), default=0)
        self._read_prompts(work)
        self._rows = self._rows.select(keep)
        entering = Rows.enter(work, self._requests, self._device)
        if work:
            logits = torch.stack([self._read[request][1] for request, _ in work])  # [N, V]
            self._append_tokens(entering, logits, first=len(keep))
        self._rows = self._rows.append(entering)
        self._alive = [True] * len(self._rows.work)
        self._watches |= {w: self._watched(self._requests[w[0]]) for w in work if self._requests[w[0]].is_watched}
        self._rebuild(keep, [request for request, _ in work], live=keep)
        self._read = {request: read for request, read in self._read.items() if self._queue.waits(request)}

    def _rebuild(self, keep: Sequence[int], entering: Sequence[int], live: Sequence[int]) -> None:
        rows = self._rows
        steps = int((rows.limits - rows.lengths).max()) + self._steps_per_check if rows.work else 0
        most = max((s.max_tokens for s in rows.settings), default=0)
        new = {request: read for request, (read, _) in self._read.items()}
        self._cache.static = self._next.records
        self._cache.rebuild(keep, entering, new, steps, most, live)
        self._next.forget(self._cache.capacity - self._cache.column)

    def _watched(self, request: Request) -> _Watch:
        stop = request.sampling.stop
        text = StopText(stop, self._decode_text) if stop and self._decode_text else None
        return _Watch(text, request.streamed or request.top_logprobs > 0)

    def _watch(self) -> list[Output]:
        """Read the new tokens of watched rows: stop strings end a row, streamed tokens become outputs."""
        tops, self._tops = self._tops, []
        if not self._watches:
            return []
        watched = [(row, work) for row, work in enumerate(self._rows.work) if work in self._watches]
        outputs = []
        new_tokens = self._rows.tokens_since(
            [row for row, _ in watched], [self._watches[work].seen for _, work in watched]
        )
        for (row, work), (tokens, logprobs) in zip(watched, new_tokens):
            watch = self._watches[work]
            n = len(tokens)
            if watch.stop is not None and work not in self._ended:
                hit = next((i for i, token in enumerate(tokens.tolist()) if watch.stop.push(token)), None)
                if hit is not None:
                    n = hit + 1
                    self._rows.end(row, watch.seen + n)
                    self._ended[work] = "stop"
            watch.seen += n
            if watch.streamed and n:
                outputs.append(Output(*work, tokens[:n], logprobs[:n], self._top(row, n, tops)))
        return outputs

    def _top(self, row: int, n: int, tops: Sequence[tuple[int, Tensor, Tensor]]) -> Top | None:
        """The likeliest tokens at each of this row's `n` tokens since the last check."""
        count = self._requests[self._rows.work[row][0]].top_logprobs
        if not count:
            return None
        ids = torch.stack([ids[row - first, :count] for first, ids, _ in tops[:n]])
        values = torch.stack([values[row - first, :count] for first, _, values in tops[:n]])
        return Top(ids.cpu().numpy(), values.cpu().numpy())

    def _finished(self) -> list[Output]:
        """Outputs of the rows that have ended since the last check."""
        self._alive = self._rows.live.tolist()
        rows = [r for r, alive in enumerate(self._alive) if not alive and self._rows.work[r] not in self._reported]
        if not rows:
            return []
        outputs = []
        turns = self._rows.turns(rows, self._requests, self._stop_ids, self._ended, self._version)
        for row, turn in zip(rows, turns):
            work = self._rows.work[row]
            watch = self._watches.pop(work, None)
            sent = watch.seen if watch is not None and watch.streamed else 0
            self._ended.pop(work, None)
            self._reported.add(work)
            if self._requests[work[0]].keep and turn.finish == "stop":
                # The last token has not been read: the next prompt begins with it.
                self._kept.add(work, self._cache.sequence(row, len(turn.completion_ids) - 1))
            turn = replace(turn, read=self._reads.pop(work[0], 0))
            outputs.append(Output(*work, turn.completion_ids[sent:], turn.logprobs[sent:], turn=turn))
        running = [work for row, work in enumerate(self._rows.work) if self._alive[row]]
        while len(self._kept) and not self._queue.fits(running, self._requests):
            self._kept.evict()
        return outputs

    def _forget(self, request: int) -> None:
        """Forget one of its samples, and with the last sample the request."""
        self._pending[request] -= 1
        if not self._pending[request]:
            del self._pending[request], self._requests[request]
            self._reads.pop(request, None)

    def _read_prompts(self, work: Sequence[Work]) -> None:
        """Prefill: one forward pass over each batch of new prompts, packed in one row.

        Of prompts that continue what was kept, only what follows it.
        """
        new = [request for request in dict.fromkeys(request for request, _ in work) if request not in self._read]
        known = {request: self._kept.length(self._requests[request].after) for request in new}
        for some in [i for i in new if not known[i]], [i for i in new if known[i]]:
            batch: list[int] = []
            size = 0
            for request in some:
                length = len(self._requests[request].prompt_ids) - known[request]
                if batch and size + length > _PREFILL_TOKENS:
                    self._read_batch(batch)
                    batch, size = [], 0
                batch.append(request)
                size += length
            if batch:
                self._read_batch(batch)

    def _read_batch(self, batch: Sequence[int]) -> None:
        requests = [self._requests[i] for i in batch]
        pasts = [self._kept.take(request.after) for request in requests]
        starts = [0 if past is None else past.length for past in pasts]
        prompts = [
            torch.as_tensor(request.prompt_ids[start:], dtype=torch.int64)
            for request, start in zip(requests, starts, strict=True)
        ]
        lengths = [len(prompt) for prompt in prompts]
        self.read_tokens += sum(lengths)
        for number, length in zip(batch, lengths, strict=True):
            self._reads[number] = self._reads.get(number, 0) + length
        tokens = torch.cat(prompts).to(self._device)  # [T]
        ends = torch.tensor(lengths, device=self._device).cumsum(0) - 1  # the last token of each prompt
        spare = padded_prompt(len(tokens)) - len(tokens) if self._pads else 0
        if spare:  # a padding prompt, which belongs to no request
            tokens, lengths, pasts = F.pad(tokens, (0, spare)), [*lengths, spare], [*pasts, None]
        places = [torch.arange(start, start + len(prompt)) for start, prompt in zip(starts, prompts, strict=True)]
        positions = torch.cat(places).to(self._device)
        positions = F.pad(positions, (0, spare))  # zeros: some rotary embeddings use the largest position
        cache = PromptPass(lengths, pasts if any(starts) else ())
        inputs = {"input_ids": tokens[None], "position_ids": positions[None], "decode_cache": cache}
        if any(request.echo for request in requests):
            hidden = self._call(backbone(self._model), inputs).last_hidden_state[0]  # [T, D]
            lengths = lengths[: len(batch)]
            hidden, tokens = hidden[: sum(lengths)], tokens[: sum(lengths)]
            logits = logits_of(hidden[ends], output_head(self._model))
            top = max(request.top_logprobs for request in requests)
            for i, request, scores in zip(batch, requests, prompt_scores(self._model, hidden, tokens, lengths, top)):
                if request.echo:
                    self._outputs.append(Output(i, 0, *_NOTHING, prompt=scores))
        else:
            logits = self._logits(inputs, ends)[0]
        self._read.update(zip(batch, zip(cache.prompts(), logits.unbind(0))))
