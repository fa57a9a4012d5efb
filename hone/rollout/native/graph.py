"""CUDA graphs: the kernels of one decode step are recorded once, and launched together from then on.

A step consists of about forty small kernels per layer. With few rows, a GPU finishes each before Python has launched
the next; a recorded step is launched in one call. A recording requires that no tensor changes its shape or address
between steps. That holds between two `rebuild`s of a `static` `DecodeCache`: the step reads its position from tensors,
and writes in place.

    step = GraphStep(forward, CudaRecorder(device), gave_up)
    step.forget(steps=256)               # shapes have changed: the next call records
    logits = step(tokens, positions)     # valid until the next call

A recording must not return numbers to Python, copy from the CPU, or keep memory allocated after it.
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

#: Fewer steps than this are not recorded: a recording takes as long as a few plain steps, and empties the allocator's
#: cache. An estimate; it has not been measured.
WORTH_STEPS = 16


class CannotRecord(Exception):
    """The step cannot be recorded; the message says why."""


class Recorder(Protocol):
    """Records a step. Both methods run `step` with the same inputs at the same column of the cache, where writing twice
    changes nothing; states of recurrent mixers are restored afterwards (`undone` of `GraphStep`)."""

    def rehearse(self, step: Callable[[], Tensor]) -> None:
        """Run the step once before recording: what libraries set up at their first call must not be recorded.

        Raises CannotRecord if an operation waits for the device.
        """
        ...

    def record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """(a function that launches the step, the tensor that then holds its result). Raises CannotRecord."""
        ...


class CudaRecorder:
    """One stream and one memory pool for all recordings; only the last recording is alive."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream(device)
        self._last: torch.cuda.CUDAGraph | None = None

    def rehearse(self, step: Callable[[], Tensor]) -> None:
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        # A failed recording leaves PyTorch's allocator, and in some versions its random generator, in recording mode,
        # although training continues in this process. So likely causes of failure are checked before.
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
        # The new recording reuses the memory of the last one. A pool is freed with its last recording, so that one is
        # dropped only once the new one exists; it never runs again.
        pool = None if self._last is None else self._last.pool()
        try:
            # thread_local: calls of other threads (the watchdog of NCCL, a server) do not end the recording.
            kept = torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local")
            with torch.cuda.device(self._device), kept:
                result = step()
        except RuntimeError as reason:
            # Ending the recording reports what went wrong in it.
            raise CannotRecord(str(reason.__context__ or reason)) from reason
        finally:
            torch.cuda.set_stream(here)  # a failed recording does not restore it
        self._last = graph
        return graph.replay, result


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all batches: libraries keep a workspace for each stream that they have seen."""
    return torch.cuda.Stream(device)


@contextmanager
def _waiting_is_an_error() -> Iterator[None]:
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # not every wait is detected: the others fail in `record`
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class GraphStep:
    """`forward`, recorded at its first call after `forget`.

    If recording fails, `gave_up` is called once with the reason, and `forward` runs unrecorded from then on. Steps
    inside `undone()` leave the cache unchanged, because recording runs a step more than once.
    """

    def __init__(
        self,
        forward: Forward,
        recorder: Recorder | None,
        gave_up: Callable[[str], None],
        undone: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._forward, self._recorder, self._gave_up, self._undone = forward, recorder, gave_up, undone
        self._steps = 0  # at most, until the next rebuild
        self._inputs: tuple[Tensor, Tensor] | None = None
        self._replay: Callable[[], None] | None = None
        self._logits: Tensor | None = None

    @property
    def records(self) -> bool:
        """Whether the cache must be static."""
        return self._recorder is not None

    def forget(self, steps: int) -> None:
        """The cache was rebuilt; `steps` tokens fit it."""
        self._steps = steps
        self._inputs = self._replay = self._logits = None

    def close(self) -> None:
        """Free the recording."""
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
