"""Generation in the training process, with the policy's own model: no second copy of the weights, unless rounded
weights are configured (`rollout.weights`), which are made for each batch.

The model is an unmodified `transformers` causal LM; our attention (`hone.model.attention`) passes the queries, keys
and values of every layer to the cache given in the forward call. A prompt is prefilled once for all of its samples,
and waiting samples replace finished ones (`core`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from hone.model import attention, mixers
from hone.model.limits import context_limit
from hone.model.linear import onednn
from hone.model.lora import for_sampling
from hone.model.norms import fast_norms
from hone.model.reduced import Weights, check, reduced
from hone.recipe.sections.rollout import RolloutConfig, SamplingConfig
from hone.rollout import turns
from hone.rollout.engine import FIRST_USE, Event, print_event
from hone.rollout.native import kernel
from hone.rollout.native.conversations import Conversations
from hone.rollout.native.core import Core, Speedups
from hone.rollout.native.graph import CudaRecorder, Recorder
from hone.rollout.native.kernel import Kernel
from hone.rollout.native.memory import Budget
from hone.rollout.native.requests import Request, Work
from hone.rollout.native.scheduler import Queue
from hone.rollout.text import Decode
from hone.types import IntArray, Turn

if TYPE_CHECKING:
    from hone.learn.policy import Policy

Progress = Callable[[int, int], None]


class NativeEngine:
    """Implements `hone.rollout.engine.Engine`.

    `stop_token_ids`: every token that ends a completion. `decode`: tokens to text, for stop strings. `event` is called
    if the kernel was compiled at this first use, if there is no compiler for it, or if the model's decode steps cannot
    be recorded.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stop_token_ids: Sequence[int],
        config: RolloutConfig,
        version: int = 0,
        decode: Decode | None = None,
        event: Event = print_event,
    ) -> None:
        attention.register()
        check(model, config.weights)
        self._model = model
        self._stops = tuple(stop_token_ids)
        self._config = config
        self._version = version
        self._decode = decode
        self._event = event
        self._told = False  # that the kernel was compiled

    @property
    def model(self) -> PreTrainedModel:
        return self._model

    @property
    def context(self) -> int | None:
        bound = context_limit(self._model.config)
        return None if bound is None else bound.tokens

    def sync(self, policy: Policy, version: int) -> None:
        """The weights are shared, so there is nothing to copy."""
        self._model = policy.model
        self._version = version

    @contextmanager
    def as_served(self, model: PreTrainedModel) -> Iterator[None]:
        """Context manager in which `model` computes the distribution that this engine samples from
        (`rollout.weights`)."""
        with for_sampling(model) if self.reduces else nullcontext(), reduced(model, self._config.weights):
            yield

    @property
    def reduces(self) -> bool:
        """Whether the engine samples from rounded weights."""
        return self._config.weights != "policy" and self._model.dtype == torch.float32

    @contextmanager
    def open(self, others: bool = False) -> Iterator[Core]:
        """A running batch, to be stepped in this thread; it owns the model until the end of the block.

        `others`: each submitted batch leaves some rows for later ones.
        """
        budget = Budget.of(self._model, self._config.kv_cache_gib)
        # Not inference_mode: a rotary embedding that rescales itself would keep inference tensors as buffers.
        with torch.no_grad(), serving(self._model, self._config.weights):
            reserve = max(1, self._config.max_sequences // 8) if others else 0
            queue = Queue(budget, self._config.max_sequences, reserve)
            speedups = Speedups(self._load_kernel(), self._recorder(), self._no_graphs)
            core = Core(self._model, queue, self._stops, self._decode, self._version, speedups)
            try:
                yield core
            finally:
                core.close()

    def _load_kernel(self) -> Kernel | None:
        if not self._config.compiled or self._model.device.type != "cpu" or self._model.dtype != torch.float32:
            return None
        try:
            loaded = kernel.load()
            if loaded.compile_seconds is not None and not self._told:
                self._told = True
                took = f"in {loaded.compile_seconds:.1f} s, once for this machine"
                self._event(FIRST_USE, f"the decode kernel was compiled {took}")
            return loaded
        except kernel.CannotCompile as reason:
            self._give_up("decode_kernel", f"generation runs without its compiled kernel and is slower: {reason}")
            return None

    def _recorder(self) -> Recorder | None:
        on_gpu = self._model.device.type == "cuda"
        return CudaRecorder(self._model.device) if self._config.compiled and on_gpu else None

    def _no_graphs(self, reason: str) -> None:
        self._give_up("decode_graph", f"generation runs without CUDA graphs and is slower: {reason}")

    def _give_up(self, kind: str, message: str) -> None:
        self._config = self._config.model_copy(update={"compiled": False})  # report it once
        self._event(kind, message)

    def generate(
        self,
        prompts: Sequence[IntArray],
        sampling: SamplingConfig,
        *,
        samples: int,
        seed: int,
        progress: Progress | None = None,
        stream_ids: Sequence[int] | None = None,
    ) -> list[list[Turn]]:
        """See `hone.rollout.engine.Engine`. Greedy log-probabilities are the model's own: see `sampler`."""
        if samples < 1:
            raise ValueError(f"samples is {samples}: ask for at least one completion per prompt")
        done: dict[Work, Turn] = {}
        with self.open() as core:
            # The first requests of a core are numbered like the prompts.
            numbers = range(len(prompts)) if stream_ids is None else stream_ids
            core.submit([Request(p, sampling, seed, n, samples) for p, n in zip(prompts, numbers, strict=True)])
            while core.busy:
                finished = {(out.request, out.sample): out.turn for out in core.step() if out.turn is not None}
                done |= finished
                if progress is not None and finished:
                    progress(len(done), len(prompts) * samples)
        return [[done[prompt, sample] for sample in range(samples)] for prompt in range(len(prompts))]

    @contextmanager
    def turns(
        self, sampling: SamplingConfig, seed: int, keep: bool, progress: turns.Progress | None
    ) -> Iterator[Conversations]:
        """See `hone.rollout.turns`. With mixers that cannot continue from a state, every conversation is read again."""
        keep = keep and all(map(mixers.continues, mixers.recurrent(self._model)))
        with self.open() as core:
            yield Conversations(core, sampling, seed, keep, progress)


@contextmanager
def serving(model: PreTrainedModel, weights: Weights = "policy") -> Iterator[None]:
    """Context manager in which the model uses hone's attention, fast linear layers and norms, and no dropout; restores
    everything at the end."""
    training, implementation = model.training, model.config._attn_implementation
    try:
        if implementation != attention.NAME:
            model.config._attn_implementation = attention.NAME
        if training:
            model.eval()
        with for_sampling(model), reduced(model, weights), onednn(model, frozen=True), fast_norms(model):
            yield
    finally:
        if implementation != attention.NAME:
            model.config._attn_implementation = implementation
        if training:
            model.train()
