"""CUDA graphs: the kernels of one decode step are recorded once, and launched together from then on.

A step is some forty small kernels a layer. With few rows a GPU is done with each before Python has launched the next;
a recorded step is launched in one call. Recording needs that nothing changes its shape or its place from one step to
the next. Between two `rebuild`s of a `DecodeCache` that is `static` nothing does: the step reads where it is from
tensors, and writes there.

    step = GraphStep(forward, CudaRecorder(device), gave_up)
    step.forget(steps=256)               # shapes have changed: the next call records
    logits = step(tokens, positions)     # valid until the next call

What a recording must not have: a number that comes back to Python, a copy from the CPU, memory that lives on after it.
See "CUDA Graphs" in https://docs.pytorch.org/docs/stable/notes/cuda.html. Sampling stays outside: its kernels are
launched while the recorded ones run.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

Forward = Callable[[Tensor, Tensor], Tensor]  # tokens [B] and their positions [B] -> logits [B, V]

#: For fewer steps than this a recording is not made: it takes as long as a few without one, and empties the allocator's
#: cache. An estimate; it has not been measured.
WORTH_STEPS = 16


class CannotRecord(Exception):
    """Why the step cannot be recorded."""


class Recorder(Protocol):
    """Both run `step` with the same inputs at the same place of the cache, where writing twice changes nothing; states
    of recurrent mixers are put back afterwards (`undone` of `GraphStep`)."""

    def rehearse(self, step: Callable[[], Tensor]) -> None:
        """Run it as it is to be recorded: what libraries set up at their first call must not be in a recording.

        Raises CannotRecord if something in it waits for the device.
        """
        ...

    def record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """What launches the step, and the tensor that holds its result from then on. Raises CannotRecord."""
        ...


class CudaRecorder:
    """One stream and one pool of memory for all recordings, of which the last one is alive."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream(device)
        self._last: torch.cuda.CUDAGraph | None = None

    def rehearse(self, step: Callable[[], Tensor]) -> None:
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        # A recording that fails leaves PyTorch's allocator, in some versions its random generator too, half in it, and
        # training goes on in this process. What would make it fail is therefore looked for before.
        try:
            with torch.cuda.stream(self._stream), _waiting_is_an_error():
                step()
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as reason:
            raise CannotRecord(str(reason)) from reason
        finally:
            here.wait_stream(self._stream)

    def record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        here, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        # The memory of the last recording serves the new one. A pool without a recording is gone, so the last one is
        # dropped only when the new one is there; it never runs again.
        pool = None if self._last is None else self._last.pool()
        try:
            # thread_local: what other threads do meanwhile (the watchdog of NCCL, a server) does not end the recording.
            kept = torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local")
            with torch.cuda.device(self._device), kept:
                result = step()
        except RuntimeError as reason:
            # What ends the recording complains of what went wrong in it.
            raise CannotRecord(str(reason.__context__ or reason)) from reason
        finally:
            torch.cuda.set_stream(here)  # a recording that fails does not go back by itself
        self._last = graph
        return graph.replay, result


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all batches: libraries keep their workspace for each stream that they have met."""
    return torch.cuda.Stream(device)


@contextmanager
def _waiting_is_an_error() -> Iterator[None]:
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that not all of what waits is found: the rest fails in `record`
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class GraphStep:
    """`forward`, recorded at its first call after `forget`.

    `gave_up` is told why, once, if that cannot be done; from then on `forward` runs as it is. Steps inside `undone()`
    leave the cache as it was: to record is to run a step more than once.
    """

    def __init__(
        self,
        forward: Forward,
        recorder: Recorder | None,
        gave_up: Callable[[str], None],
        undone: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._forward, self._recorder, self._gave_up, self._undone = forward, recorder, gave_up, undone
        self._steps = 0  # until the next rebuild, at most
        self._inputs: tuple[Tensor, Tensor] | None = None
        self._replay: Callable[[], None] | None = None
        self._logits: Tensor | None = None

    @property
    def records(self) -> bool:
        """Whether the cache has to be static."""
        return self._recorder is not None

    def forget(self, steps: int) -> None:
        """The cache was rebuilt; `steps` tokens fit it."""
        self._steps = steps
        self._inputs = self._replay = self._logits = None

    def close(self) -> None:
        """What was recorded is given back."""
        self.forget(0)
        self._recorder = None

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens and positions [B]. Returns logits [B, V], valid until the next call."""
        if self._replay is None and self._recorder is not None and self._steps >= WORTH_STEPS:
            self._record(self._recorder, tokens, positions)
        if self._replay is None or self._inputs is None or self._logits is None:
            return self._forward(tokens, positions)
        for mine, new in zip(self._inputs, (tokens, positions)):
            mine.copy_(new)
        self._replay()
        return self._logits

    def _record(self, recorder: Recorder, tokens: Tensor, positions: Tensor) -> None:
        inputs = tokens.clone(), positions.clone()

        def step() -> Tensor:
            return self._forward(*inputs)

        try:
            with self._undone():
                recorder.rehearse(step)
                self._replay, self._logits = recorder.record(step)
        except CannotRecord as reason:
            self._recorder = None
            self._gave_up(str(reason).strip().splitlines()[0])
            return
        self._inputs = inputs
