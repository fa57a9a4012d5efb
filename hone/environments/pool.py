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
_IDLE = 2.0  # seconds that a thread waits for another call


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
    """`workers` calls at the same time, `timeout` seconds for each. `abandoned` counts threads that hang.

    Calls that take no time are run one after the other by a thread or two: a thread that begins a call wakes one other
    for the next, which runs when the first waits for something, or after a few milliseconds. Between two calls a thread
    takes no lock, since threads that take turns at one would change places at every call.
    """

    def __init__(self, workers: int, timeout: float, most_abandoned: int = 500) -> None:
        self.workers, self.timeout, self.most_abandoned = workers, timeout, most_abandoned
        self.abandoned = 0
        self._waiting: deque[tuple[int, Call]] = deque()  # those that no thread has begun
        self._started: dict[int, float] = {}  # running call -> when it began; who removes it has its result
        self._results: dict[int, Any] = {}
        self._missing: set[int] | None = None  # those whose results are waited for; None: nothing is waited for
        self._number = 0
        lock = threading.Lock()
        self._work, self._done = threading.Condition(lock), threading.Condition(lock)
        # With the lock held:
        self._threads = 0  # that are not left behind
        self._idle = 0  # of those, the ones without a call
        self._waking = False  # a thread has been told of a call, and has not looked for it yet

    def start(self, calls: Sequence[Call]) -> list[int]:
        """Begin the calls; returns a ticket for each, with which `results` fetches its result."""
        tickets = list(range(self._number, self._number + len(calls)))
        self._number += len(calls)
        self._waiting += zip(tickets, calls, strict=True)
        self._wake()
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
        self._missing = missing = set(tickets)
        missing.difference_update([ticket for ticket in tickets if ticket in self._results])
        late: list[int] = []
        with self._done:
            while missing:
                now, started = monotonic(), list(self._started.copy().items())  # others change it
                late = [ticket for ticket, began in started if now - began >= self.timeout]
                if late:
                    break
                oldest = min((began for _, began in started), default=now)
                self._done.wait(oldest + self.timeout - now + 0.001)
        self._missing = None
        self._give_up(late)
        return not missing

    def _give_up(self, late: Sequence[int]) -> None:
        """Abandon the threads of these calls, unless they have ended in the meantime."""
        for ticket in late:
            if self._started.pop(ticket, None) is not None:
                self._results[ticket] = Failed("timeout", f"no answer within {self.timeout:g} s")
                self.abandoned += 1
                with self._work:
                    self._threads -= 1
        self._wake()

    def _wake(self) -> None:
        """Have another thread take a call, if one waits."""
        if not self._waiting or self._waking:
            return
        with self._work:
            if self._waking:
                return
            if self._idle:
                self._waking = True
                self._work.notify()
            elif self._threads < self.workers:
                self._begin_thread()

    def _begin_thread(self) -> None:
        """With the lock held. Raises RuntimeError where the machine allows no thread, and there is none yet."""
        try:
            threading.Thread(target=self._run_calls, name="hone-environment", daemon=True).start()
        except RuntimeError:
            if not self._threads:
                raise
            return  # the others run all calls
        self._waking = True
        self._threads += 1

    # --- in a thread ---

    def _run_calls(self) -> None:
        while self._await_call():
            while self._waiting:
                try:
                    ticket, call = self._waiting.popleft()
                except IndexError:  # another thread was faster
                    break
                self._started[ticket] = monotonic()
                self._wake()
                result = _result(call)
                if self._started.pop(ticket, None) is None:  # abandoned: another thread takes this one's place
                    return
                self._results[ticket] = result
                self._report(ticket)

    def _report(self, ticket: int) -> None:
        missing = self._missing
        if missing is None:
            return
        missing.discard(ticket)
        if not missing:
            with self._done:
                self._done.notify_all()

    def _await_call(self) -> bool:
        """Whether there is a call; False after a while without one: then the thread ends."""
        with self._work:
            self._idle += 1
            notified = True
            while True:
                self._waking = False  # before it looks: `start`, without the lock, may see it and notify no thread
                if self._waiting or not notified:
                    break
                notified = self._work.wait(_IDLE)
            self._idle -= 1
            if not self._waiting:
                self._threads -= 1
                return False
            return True


def _result(call: Call) -> Any:
    """The result of the user's code, or how it failed."""
    try:
        return call()
    except TimeoutError as error:  # of an environment that bounds its own waiting
        return Failed("timeout", str(error) or "TimeoutError")
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        return Failed("error", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
