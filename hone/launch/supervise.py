"""Supervise the workers of a job: the first failure stops the others, and the run restarts from its last checkpoint.

torch's elastic agent is not used: it leaves orphans when it is killed, kills workers that save for longer than 30
seconds, always ends with exit code 1, and would import torch once more.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hone.base.settings import PEER_LOST, UserError
from hone.base.visible import visible
from hone.launch.job import Job

#: Exit codes of workers stopped by Ctrl-C and by SIGTERM, which are not failures (see `hone.base.stop`).
INTERRUPTED, PREEMPTED = 130, 75

#: Seconds between two polls of the workers.
LOOK = 0.1
#: Seconds for the others to end by themselves after the first failure: they lose their peer and report it.
GRACE = 10.0
#: The same if the first one was told to stop: the others are saving.
SAVING = 600.0
#: Lines shown of a failed worker's output.
TAIL = 40


@dataclass(frozen=True)
class Exit:
    """How a worker ended."""

    code: int  # as in a shell: 128 + n for signal n
    how: str  # "was killed by SIGKILL"
    lost: bool = False  # it did not end by itself

    @classmethod
    def of(cls, code: int) -> Exit:
        """From the code of `subprocess`, which is -n for signal n."""
        if code >= 0:
            return cls(code, f"ended with exit code {code}")
        names = {number.value: number.name for number in signal.Signals}
        return cls(128 - code, f"was killed by {names.get(-code, f'signal {-code}')}", lost=True)


class WorkerGroup(Protocol):
    """The workers of one attempt, already started."""

    def ended(self) -> dict[int, Exit]:
        """The workers that have ended so far, by rank."""
        ...

    def signal(self, number: int) -> None:
        """Send a signal to every running worker."""
        ...

    def where(self, rank: int) -> str: ...

    def close(self) -> None:
        """Kill the running workers and everything that they started, and wait for their end."""
        ...


def supervise(job: Job, begin: Callable[[Job], WorkerGroup]) -> int:
    """Start the workers, as often as `restarts` allows; returns the exit code of the first that failed, else 0."""
    attempt = 0
    while True:
        sizes = {rank: _size(job.log(rank)) for rank in range(job.processes)}
        with _signals() as received:
            workers = begin(job)
            try:
                culprit, exits = watch(workers, job.processes, received)
            finally:
                workers.close()
        if culprit is None:
            return next((exits[rank].code for rank in sorted(exits) if exits[rank].code), 0)
        exit, where = exits[culprit], workers.where(culprit)
        again = exit.code != UserError.exit_code and not received and attempt < job.launch.max_restarts
        _report(job, culprit, exits, where, sizes)
        message = f"rank {culprit} ({where}) {exit.how}; the others were stopped"
        if again:
            attempt += 1
            message += f"; restart {attempt} of {job.launch.max_restarts} from the last checkpoint"
        elif job.launch.max_restarts and attempt == job.launch.max_restarts:
            message += f"; it has been restarted {attempt} times already (launch.restarts)"
        details = {"restart": attempt} if again else {}
        job.event("worker_lost" if exit.lost else "worker_failed", message, rank=culprit, code=exit.code, **details)
        print(visible(message), file=sys.stderr, flush=True)
        if not again:
            return exit.code


def watch(workers: WorkerGroup, size: int, received: list[int]) -> tuple[int | None, dict[int, Exit]]:
    """Wait until all workers have ended, or for a bounded time after the first failure.

    `received`: signals to forward, appended as they arrive. Returns the rank whose failure was the cause, if any, and
    how the workers ended. A killed worker is preferred as the cause over one with an error, and that over one that
    reports a lost peer.
    """
    seen: dict[int, Exit] = {}
    handed_on = 0
    deadline: float | None = None
    while True:
        for number in received[handed_on:]:
            workers.signal(number)
            handed_on += 1
        for rank, exit in sorted(workers.ended().items(), key=lambda item: (not item[1].lost, item[0])):
            seen.setdefault(rank, exit)
        stops = {INTERRUPTED, PREEMPTED, *(128 + number for number in received)}
        failed = [rank for rank, exit in seen.items() if exit.code and exit.code not in stops]
        stopped = any(exit.code in stops for exit in seen.values())
        if failed or stopped:
            bound = time.monotonic() + (GRACE if failed else SAVING)
            deadline = bound if deadline is None else min(deadline, bound)
        if len(seen) == size or (deadline is not None and time.monotonic() >= deadline):
            break
        time.sleep(LOOK)
    if not failed and len(seen) < size:  # one was told to stop and did not
        missing = min(set(range(size)) - set(seen))
        seen[missing] = Exit(128 + signal.SIGKILL, f"did not stop within {SAVING:g} s and was killed", lost=True)
        failed = [missing]
    failed.sort(key=lambda rank: 0 if seen[rank].lost else 2 if seen[rank].code == PEER_LOST else 1)
    return next(iter(failed), None), seen


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect signals to stop: workers have their own sessions, so the terminal does not signal them."""
    received: list[int] = []
    before = {n: signal.signal(n, lambda number, _: received.append(number)) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Context manager that ends the block at the first signal, for slow work before there are workers to signal."""

    def leave(number: int, _: object) -> None:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(PREEMPTED)

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(job: Job, culprit: int, exits: dict[int, Exit], where: str, sizes: dict[int, int]) -> None:
    """Print the end of the failed worker's output, unless it was the first, whose output was visible."""
    same = 0 in exits and exits[culprit].code == exits[0].code == UserError.exit_code  # the first shows it too
    if culprit == 0 or same:
        return
    for line in tail(job.log(culprit), sizes[culprit]):
        print(visible(f"[rank {culprit}, {where}] {line}"), file=sys.stderr)


def tail(path: Path, begin: int = 0) -> list[str]:
    """The last lines written after byte `begin`."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(begin, path.stat().st_size - 65536))
        return file.read().decode(errors="replace").splitlines()[-TAIL:]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def announce(job: Job, where: str) -> None:
    """Tell the user where the workers run."""
    workers = "1 worker" if job.processes == 1 else f"{job.processes} workers"
    print(visible(f"{workers} {where}; the output of all but the first is in {job.folder / 'logs'}"), file=sys.stderr)
