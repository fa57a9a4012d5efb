"""Where a run may stop: between steps, and within a step while answers are sampled.

What the signals mean and how a run then ends: `hone.base.stop`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from hone.base.progress import Track
from hone.base.settings import UserError
from hone.base.stop import Halted, Interrupted, Preempted, Stop, Stopping
from hone.base.visible import visible
from hone.runs import lock
from hone.runs.checkpoints import Checkpoints
from hone.runs.writer import RunWriter


class StopPoints:
    """Listens for Ctrl-C and SIGTERM, and stops a run where its work is saved."""

    def __init__(self, writer: RunWriter, checkpoints: Checkpoints) -> None:
        self._folder, self._world, self._checkpoints = writer.folder, writer.world, checkpoints
        self._stop = Stop(checkpoints.config.stop_within_seconds, self._world.main)
        self._stopping = False  # a process was asked to stop, and the step is saved
        self._preempted = False  # the same, by SIGTERM

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """The first Ctrl-C asks the loop to save and stop, a second one stops at once; SIGTERM: see `hone.base.stop`.

        An error of the user before the update of a step saves what is finished. However the loop ends, this waits for a
        checkpoint that is being written.
        """
        try:
            with self._stop.listening():
                try:
                    yield
                except Stopping:  # in the middle of a step: the state at its beginning still exists
                    raise Preempted(self._checkpoints.save_boundary()) from None
                except UserError as error:
                    if halted := self._save_before(error):
                        raise halted from error
                    raise
                except BaseException:
                    self._checkpoints.abandon()
                    raise
                self._checkpoints.settle()
        except Preempted:
            raise
        except BaseException:
            self._stop.cancel()
            raise

    def _save_before(self, error: UserError) -> Halted | None:
        """Save the beginning of the step that `error` ended; returns what to raise instead, or None if it is not saved.

        Nothing is saved once the update has begun, nor of several processes: the others do not know of the error.
        """
        step = self._checkpoints.savable
        if step is None or self._world.size > 1 or lock.lost(self._folder):
            self._checkpoints.abandon()
            return None
        try:
            return Halted(self._checkpoints.save_boundary(), str(error))
        except OSError as full:
            print(visible(full), file=sys.stderr, flush=True)
            return None

    def agree(self) -> bool:
        """Whether one of the processes was asked to stop; each is told the same. Raises OSError in all of them if the
        checkpoint before could not be written."""
        flags = self._stop.asked, self._stop.preempted, self._checkpoints.failed
        states = self._world.gather([flags], "whether to stop")
        self._stopping, self._preempted, failed = (any(column) for column in zip(*states, strict=True))
        if failed:
            self._checkpoints.settle()
        return self._stopping

    def stop_if_asked(self, step: int) -> None:
        """Between steps, when `step` is saved: raises `Interrupted` or `Preempted` if `agree` said so."""
        if self._stopping:  # requested since then: the next step saves first
            self._checkpoints.settle()
            raise Preempted(step) if self._preempted else Interrupted(step)

    def poll(self) -> None:
        """Abandon the step in progress if the machine is about to stop; called repeatedly while answers are sampled.

        Several processes synchronise within a step, so they stop together after it. Raises LockLost if another process
        has taken over the run folder.
        """
        lock.check(self._folder)
        if self._stop.preempted and self._world.size == 1:
            raise Stopping

    def track(self, title: str, total: int, done: int) -> Track:
        """The progress display; while answers are sampled, it also polls for a stop."""
        return Track(title, total, done, self._world.main, self.poll)
