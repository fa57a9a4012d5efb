"""Runs calls of environments in threads, each with a deadline: a call that hangs delays a step, but never stops it.

A thread cannot be killed: one that is past its deadline is left behind, and another takes its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from hone.base.settings import UserError

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """A call without a result: it raised (`error`) or did not return in time (`timeout`)."""

    kind: str
    why: str


class Pool:
    """`workers` calls at the same time, `timeout` seconds for each. `abandoned` counts threads that hang."""

    def __init__(self, workers: int, timeout: float, most_abandoned: int = 500) -> None:
        self.workers, self.timeout, self.most_abandoned = workers, timeout, most_abandoned
        self.abandoned = 0

    def run(self, calls: Sequence[Call]) -> list[Any]:
        """The results in order, a `Failed` for a call without one. Raises UserError if too many threads hang."""
        batch = _Batch(calls)
        for _ in range(min(self.workers, len(calls))):
            batch.start_worker()
        while (late := batch.wait(self.timeout)) is not None:
            for index in late:
                batch.give_up(index, Failed("timeout", f"no answer within {self.timeout:g} s"))
                self.abandoned += 1
                batch.start_worker()
            if self.abandoned > self.most_abandoned:
                raise UserError(
                    f"environment: {self.abandoned} of its calls hang; give environment.timeout more seconds, or fix "
                    f"the environment"
                )
        return batch.results


class _Batch:
    """Calls that several threads work through."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = list(calls)
        self.results: list[Any] = [None] * len(calls)
        self._open = set(range(len(calls)))  # without a result
        self._started: dict[int, float] = {}  # running call -> when it began
        self._next = 0
        self._changed = threading.Condition()

    def start_worker(self) -> None:
        threading.Thread(target=self._work, name="hone-environment", daemon=True).start()

    def wait(self, timeout: float) -> list[int] | None:
        """The calls that have run for longer than `timeout`; None when every call has a result."""
        with self._changed:
            while self._open:
                now = monotonic()
                late = [index for index, start in self._started.items() if now - start >= timeout]
                if late:
                    return late
                oldest = min(self._started.values(), default=now)
                self._changed.wait(max(0.0, oldest + timeout - now) + 0.001)
        return None

    def give_up(self, index: int, result: Failed) -> None:
        with self._changed:
            self._finish(index, result)

    def _work(self) -> None:
        while (index := self._take()) is not None:
            result: Any
            try:
                result = self._calls[index]()
            except (Exception, SystemExit) as error:  # the user's code
                result = Failed("error", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            with self._changed:
                if index not in self._started:  # abandoned: another thread has taken this one's place
                    return
                self._finish(index, result)

    def _take(self) -> int | None:
        with self._changed:
            if self._next == len(self._calls):
                return None
            index, self._next = self._next, self._next + 1
            self._started[index] = monotonic()
            return index

    def _finish(self, index: int, result: Any) -> None:
        if self._started.pop(index, None) is not None:
            self.results[index] = result
            self._open.discard(index)
            self._changed.notify_all()
