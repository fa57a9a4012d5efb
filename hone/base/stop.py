"""Stopping a run by a signal, and how it then ends.

Ctrl-C      the step in progress is finished and saved; exit code 130. A second one stops at once.
SIGTERM     the machine is about to be taken away: finished work is saved, and the process ends within a time limit;
            exit code 75 (EX_TEMPFAIL of sysexits.h: try again), so that a scheduler can restart it.
An error    of the user, such as a reward that returns nonsense: the finished steps are saved; exit code 2.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import psutil

from hone.base.settings import UserError
from hone.base.visible import visible

_leave = os._exit  # saved here: it is replaced while user functions run (`no_exit` in hone.rewards)

#: Exit code after SIGTERM, saved or not: the run folder can be resumed.
EX_TEMPFAIL = 75


class Interrupted(KeyboardInterrupt):
    """The run was stopped by the user and has saved; `--resume` continues it. Exit code 130, as for any Ctrl-C."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped before step {step}, saved")
        self.step = step


class Preempted(SystemExit):
    """Like `Interrupted`, but by SIGTERM."""

    def __init__(self, step: int) -> None:
        super().__init__(EX_TEMPFAIL)
        self.step = step

    def __str__(self) -> str:
        return f"stopped before step {self.step}, saved"


class Halted(UserError):
    """An error in step `step` stopped the run; the steps before it are saved. Exit code as of any error of the user."""

    def __init__(self, step: int, problem: str, how: str = "") -> None:
        """`how`: the command that continues the run."""
        on = f". When that is mended, continue with: {how}" if how else ""
        super().__init__(f"step {step}: {problem}\nstopped before step {step}, saved{on}")
        self.step, self.problem = step, problem


class Stopping(BaseException):
    """Abandon the step in progress. Only the run itself catches it."""


class Stop:
    """The signals that this process has received."""

    def __init__(self, within: float, speaks: bool) -> None:
        """`within`: seconds from SIGTERM to the end; `speaks`: whether this process prints (one of several does)."""
        self.asked = False
        self.preempted = False
        self._within, self._speaks = within, speaks
        self._last_resort: threading.Timer | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        before = {s: signal.signal(s, self._hear) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def cancel(self) -> None:
        """Cancel the forced exit: the run has ended."""
        if self._last_resort is not None:
            self._last_resort.cancel()

    def _hear(self, number: int, _: Any) -> None:
        if number == signal.SIGTERM:
            self._preempt()
        elif self.asked:
            raise KeyboardInterrupt
        else:
            self.asked = True
            self._say("\nstopping after this step, then saving (again: stop at once)")

    def _preempt(self) -> None:
        if self.preempted:
            return
        self.asked = self.preempted = True
        self._last_resort = threading.Timer(self._within, self._too_late)
        self._last_resort.daemon = True
        self._last_resort.start()
        self._say(f"\nSIGTERM: saving what is finished, within {self._within:g} s")

    def _too_late(self) -> None:
        self._say(
            f"stopped {self._within:g} s after SIGTERM (checkpoint.stop_within_seconds), in the middle of a step: "
            f"--resume continues from the last checkpoint"
        )
        for child in psutil.Process().children(recursive=True):  # servers that we started
            with contextlib.suppress(psutil.NoSuchProcess):
                child.terminate()
        _leave(EX_TEMPFAIL)

    def _say(self, text: str) -> None:
        if self._speaks:
            print(visible(text), file=sys.stderr, flush=True)
