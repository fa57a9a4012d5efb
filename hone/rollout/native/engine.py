"""Generation in the training process, with the policy's own model: no second copy of the weights.

The model is an unmodified `transformers` causal LM; our attention (`hone.model.attention`) hands the
queries, keys and values of every layer to the cache given in the forward call. A prompt is read once
for all of its samples, and finished samples make room for waiting ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hone.config import UserError
from hone.model import attention
from hone.model.linear import onednn
from hone.model.lora import for_sampling
from hone.rollout.config import RolloutConfig, SamplingConfig
from hone.rollout.native.cache import DecodeCache, Prompt, PromptPass
from hone.rollout.native.sampler import sample
from hone.rollout.native.scheduler import Queue, Rows, Work
from hone.types import IntArray, Turn

if TYPE_CHECKING:
    from hone.train.policy import Policy

Progress = Callable[[int, int], None]

_PREFILL_TOKENS = 8192  # prompt tokens read in one forward pass, at most (one prompt may be longer)
_IDLE_SHARE = 8  # rows are replaced when one in eight has finished: moving the others costs about a step
_STEPS_PER_LOOK = 8  # on a GPU, tokens between two looks at what has finished: a look waits for the device


class NativeEngine:
    """Implements `hone.rollout.base.Engine`. `stop_token_ids`: every token that ends a completion."""

    def __init__(
        self, model: PreTrainedModel, stop_token_ids: Sequence[int], config: RolloutConfig, version: int = 0
    ) -> None:
        attention.register()
        self._model = model
        self._stops = tuple(stop_token_ids)
        self._config = config
        self._version = version

    def sync(self, policy: Policy, version: int) -> None:
        """The weights are shared, so there is nothing to copy."""
        self._model = policy.model
        self._version = version

    def generate(
        self,
        prompts: Sequence[IntArray],
        sampling: SamplingConfig,
        *,
        samples: int,
        seed: int,
        progress: Progress | None = None,
    ) -> list[list[Turn]]:
        """See `hone.rollout.base.Engine`. Greedy log-probabilities are the model's own: see `sampler`."""
        if samples < 1:
            raise ValueError(f"samples is {samples}: ask for at least one completion per prompt")
        self._check_room([len(prompt) for prompt in prompts], sampling.max_tokens)
        done: dict[Work, Turn] = {}
        # Not inference_mode: a rotary embedding that rescales itself would keep inference tensors as buffers.
        with torch.no_grad(), serving(self._model):
            job = _Job(self._model, prompts, sampling, samples, seed, self._stops, self._config.max_sequences)
            while True:
                if not job.due():
                    job.step()
                    continue
                finished = job.turnover(self._version)
                done.update(finished)
                if progress is not None and finished:
                    progress(len(done), len(prompts) * samples)
                if job.empty:
                    break
        return [[done[prompt, sample] for sample in range(samples)] for prompt in range(len(prompts))]

    def _check_room(self, lengths: Sequence[int], max_tokens: int) -> None:
        """Every prompt with its completion must fit the positions that the model was made for."""
        limit = getattr(self._model.config, "max_position_embeddings", None)
        for i, length in enumerate(lengths):
            if length == 0:
                raise UserError(f"prompt {i} is empty: give it at least one token")
            if limit is None or length + max_tokens <= limit:
                continue
            if length >= limit:
                raise UserError(
                    f"prompt {i} has {length} tokens and leaves no room for a completion in the model's context of "
                    f"{limit} (max_position_embeddings): shorten or drop it"
                )
            raise UserError(
                f"prompt {i} has {length} tokens and may be followed by {max_tokens}: {length + max_tokens} do not fit "
                f"the model's context of {limit} (max_position_embeddings); set sampling.max_tokens to "
                f"{limit - length} or less, or shorten the prompt"
            )


@contextmanager
def serving(model: PreTrainedModel) -> Iterator[None]:
    """Our attention, fast linear layers and no dropout, for the duration; what was set before comes back."""
    training, implementation = model.training, model.config._attn_implementation
    try:
        if implementation != attention.NAME:
            model.config._attn_implementation = attention.NAME
        if training:
            model.eval()
        with for_sampling(model), onednn(model):
            yield
    finally:
        if implementation != attention.NAME:
            model.config._attn_implementation = implementation
        if training:
            model.train()


class _Job:
    """One call of generate: what is waiting, the rows being decoded, and their cache."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[IntArray],
        sampling: SamplingConfig,
        samples: int,
        seed: int,
        stops: Sequence[int],
        max_sequences: int,
    ) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._prompts = prompts
        self._lengths = [len(prompt) for prompt in prompts]
        self._sampling = sampling
        self._seed = None if sampling.temperature == 0.0 else seed
        self._stops = torch.tensor(list(stops), dtype=torch.int64, device=self._device)
        self._max_sequences = max_sequences
        self._steps_per_look = 1 if self._device.type == "cpu" else _STEPS_PER_LOOK
        self._queue = Queue(self._lengths, samples)
        self._rows = self._enter([])
        self._cache = DecodeCache()
        # Prompts that were read and have samples waiting: their keys and values, and the logits [V] after them.
        self._read: dict[int, tuple[Prompt, Tensor]] = {}

    @property
    def empty(self) -> bool:
        return not self._rows.work

    def due(self) -> bool:
        """Whether enough rows have finished to be worth a turnover."""
        idle = len(self._rows.work) - int(self._rows.live.sum())
        return _IDLE_SHARE * idle >= len(self._rows.work)

    def step(self) -> None:
        """A few tokens of every row."""
        rows = self._rows
        for _ in range(self._steps_per_look):
            if self._cache.full:
                self._rebuild(range(len(rows.work)), [])
            positions = rows.prompt_lens + rows.lengths - 1  # [B], of the token said last
            out = self._model(
                input_ids=rows.last[:, None],
                position_ids=positions[:, None],
                decode_cache=self._cache,
                use_cache=False,
                logits_to_keep=1,
            )
            self._cache.column += 1
            rows.record(*sample(out.logits[:, -1], rows.next_draws(), self._sampling), self._stops)

    def turnover(self, version: int) -> dict[Work, Turn]:
        """Finished rows leave, waiting samples enter and say their first token."""
        live = self._rows.live.tolist()
        keep = [row for row, alive in enumerate(live) if alive]
        leave = [row for row, alive in enumerate(live) if not alive]
        turns = self._rows.turns(leave, self._prompts, self._stops, version)
        finished = dict(zip((self._rows.work[row] for row in leave), turns))
        work = self._queue.take(self._max_sequences - len(keep))
        self._read_prompts(work)
        self._rows = self._rows.select(keep)
        entering = self._enter(work)
        if work:
            logits = torch.stack([self._read[prompt][1] for prompt, _ in work])  # [N, V]
            entering.record(*sample(logits, entering.next_draws(), self._sampling), self._stops)
        self._rows = self._rows.append(entering)
        self._rebuild(keep, [prompt for prompt, _ in work])
        self._read = {prompt: read for prompt, read in self._read.items() if self._queue.waits(prompt)}
        return finished

    def _enter(self, work: list[Work]) -> Rows:
        return Rows.enter(work, self._lengths, self._sampling.max_tokens, self._seed, self._device)

    def _rebuild(self, keep: Sequence[int], entering: Sequence[int]) -> None:
        youngest = int(self._rows.lengths.min()) if self._rows.work else 0
        new = {prompt: read for prompt, (read, _) in self._read.items()}
        self._cache.rebuild(keep, entering, new, self._sampling.max_tokens - youngest + self._steps_per_look)

    def _read_prompts(self, work: Sequence[Work]) -> None:
        """One forward pass over each batch of prompts that were not read yet, packed in one row."""
        batch: list[int] = []
        for prompt in dict.fromkeys(prompt for prompt, _ in work):
            if prompt in self._read:
                continue
            if batch and sum(self._lengths[p] for p in batch) + self._lengths[prompt] > _PREFILL_TOKENS:
                self._read_batch(batch)
                batch = []
            batch.append(prompt)
        if batch:
            self._read_batch(batch)

    def _read_batch(self, batch: Sequence[int]) -> None:
        lengths = [self._lengths[prompt] for prompt in batch]
        tokens = torch.cat([torch.as_tensor(self._prompts[prompt], dtype=torch.int64) for prompt in batch])
        positions = torch.cat([torch.arange(length) for length in lengths])
        cache = PromptPass(lengths)
        out = self._model(
            input_ids=tokens[None].to(self._device),  # [1, T]
            position_ids=positions[None].to(self._device),
            decode_cache=cache,
            use_cache=False,
            logits_to_keep=torch.tensor(lengths, device=self._device).cumsum(0) - 1,  # the last token of each prompt
        )
        self._read.update(zip(batch, zip(cache.prompts(), out.logits[0].unbind(0))))
