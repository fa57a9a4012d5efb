"""Runs calls of environments in threads, each with a deadline: a call that hangs delays others, but never stops them.

    pool = Pool(workers=16, timeout=30.0)
    tickets = pool.start(calls)
    ...                                # other work
    results = pool.results(tickets)

A thread cannot be killed: one that is past its deadline is left behind, and another takes its place.
"""

from __future__ import annotations

import threading
from collections import deque
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


class Here:
    """Runs calls in this thread when they are begun, without a deadline: for those that take no time worth a thread."""

    def __init__(self) -> None:
        self._results: list[Any] = []

    def start(self, calls: Sequence[Call]) -> list[int]:
        """As `Pool.start`."""
        first = len(self._results)
        self._results += map(_result, calls)
        return list(range(first, len(self._results)))

    def results(self, tickets: Sequence[int]) -> list[Any]:
        """As `Pool.results`."""
        return [self._results[ticket] for ticket in tickets]

    def run(self, calls: Sequence[Call]) -> list[Any]:
        return list(map(_result, calls))


class Pool:
    """`workers` calls at the same time, `timeout` seconds for each. `abandoned` counts threads that hang."""

    def __init__(self, workers: int, timeout: float, most_abandoned: int = 500) -> None:
        self.workers, self.timeout, self.most_abandoned = workers, timeout, most_abandoned
        self.abandoned = 0
        self._waiting: deque[tuple[int, Call]] = deque()  # those that no thread has begun
        self._started: dict[int, float] = {}  # running call -> when it began
        self._results: dict[int, Any] = {}
        self._threads = 0  # that are not left behind
        self._number = 0
        self._changed = threading.Condition()

    def start(self, calls: Sequence[Call]) -> list[int]:
        """Begin the calls; returns a ticket for each, with which `results` fetches its result."""
        tickets = list(range(self._number, self._number + len(calls)))
        self._number += len(calls)
        with self._changed:
            self._waiting += zip(tickets, calls, strict=True)
            self._start_threads()
        return tickets

    def results(self, tickets: Sequence[int]) -> list[Any]:
        """Wait for these calls; a `Failed` for one without a result. Raises UserError if too many threads hang."""
        while not self._wait(tickets):
            if self.abandoned > self.most_abandoned:
                raise UserError(
                    f"environment: {self.abandoned} of its calls hang; give environment.timeout more seconds, or fix "
                    f"the environment"
                )
        return [self._results.pop(ticket) for ticket in tickets]

    def run(self, calls: Sequence[Call]) -> list[Any]:
        """The results in order."""
        return self.results(self.start(calls))

    def _wait(self, tickets: Sequence[int]) -> bool:
        """Wait until all of these have results (True), or abandon the calls that are past their deadline (False)."""
        with self._changed:
            first = 0  # of the tickets that may be without a result
            while True:
                while first < len(tickets) and tickets[first] in self._results:
                    first += 1
                if first == len(tickets):
                    return True
                now = monotonic()
                late = [ticket for ticket, began in self._started.items() if now - began >= self.timeout]
                if late:
                    self._give_up(late)
                    return False
                oldest = min(self._started.values(), default=now)
                self._changed.wait(max(0.0, oldest + self.timeout - now) + 0.001)

    def _give_up(self, late: Sequence[int]) -> None:
        """Abandon the threads of these calls."""
        for ticket in late:
            self._finish(ticket, Failed("timeout", f"no answer within {self.timeout:g} s"))
        self.abandoned += len(late)
        self._threads -= len(late)
        self._start_threads()

    def _start_threads(self) -> None:
        while self._threads < min(self.workers, len(self._waiting) + len(self._started)):
            self._threads += 1
            threading.Thread(target=self._work, name="hone-environment", daemon=True).start()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            ticket, call = taken
            result = _result(call)
            with self._changed:
                if ticket not in self._started:  # abandoned: another thread has taken this one's place
                    return
                self._finish(ticket, result)

    def _take(self) -> tuple[int, Call] | None:
        with self._changed:
            if not self._waiting:
                self._threads -= 1
                return None
            ticket, call = self._waiting.popleft()
            self._started[ticket] = monotonic()
            return ticket, call

    def _finish(self, ticket: int, result: Any) -> None:
        del self._started[ticket]
        self._results[ticket] = result
        self._changed.notify_all()


def _result(call: Call) -> Any:
    """The result of the user's code, or how it failed."""
    try:
        return call()
    except TimeoutError as error:  # of an environment that bounds its own waiting
        return Failed("timeout", str(error) or "TimeoutError")
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        return Failed("error", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
