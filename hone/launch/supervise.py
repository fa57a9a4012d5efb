"""Watch the workers of a job: the first failure stops the others, and the run begins again from its last checkpoint.

torch's elastic agent is not used: it leaves orphans when it is killed, kills workers that save for longer than 30
seconds, ends with 1 whatever the workers ended with, and is a second, heavy import of torch.
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

#: Exit codes that are no failure of a worker: asked to stop by Ctrl-C, and by SIGTERM (see `hone.runs.writer`).
INTERRUPTED, PREEMPTED = 130, 75

#: Seconds between two looks at the workers.
LOOK = 0.1
#: Seconds in which the others end by themselves after the first failure: they lose their peer and say so.
GRACE = 10.0
#: The same where the first one was asked to stop: the others are saving.
SAVING = 600.0
#: Lines shown of the output of a worker that failed.
TAIL = 40


@dataclass(frozen=True)
class Exit:
    """How a worker ended."""

    code: int  # as a shell has it: 128 + n for signal n
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
    """Those of one attempt, already started."""

    def ended(self) -> dict[int, Exit]:
        """By rank, all that have ended until now."""
        ...

    def signal(self, number: int) -> None:
        """To every worker that runs."""
        ...

    def where(self, rank: int) -> str: ...

    def close(self) -> None:
        """Kill what still runs, with all that it started, and wait until it is gone."""
        ...


def supervise(job: Job, begin: Callable[[Job], WorkerGroup]) -> int:
    """Start the workers, as often as `restarts` allows; returns the exit code of the first that failed, else 0."""
    attempt = 0
    while True:
        sizes = {rank: _size(job.log(rank)) for rank in range(job.processes)}
        with _signals() as asked:
            workers = begin(job)
            try:
                culprit, exits = watch(workers, job.processes, asked)
            finally:
                workers.close()
        if culprit is None:
            return next((exits[rank].code for rank in sorted(exits) if exits[rank].code), 0)
        exit, where = exits[culprit], workers.where(culprit)
        again = exit.code != UserError.exit_code and not asked and attempt < job.launch.max_restarts
        _report(job, culprit, exits, where, sizes)
        message = f"rank {culprit} ({where}) {exit.how}; the others were stopped"
        if again:
            attempt += 1
            message += f"; restart {attempt} of {job.launch.max_restarts} from the last checkpoint"
        elif job.launch.max_restarts and attempt == job.launch.max_restarts:
            message += f"; it has been started again {attempt} times already (launch.restarts)"
        details = {"restart": attempt} if again else {}
        job.event("worker_lost" if exit.lost else "worker_failed", message, rank=culprit, code=exit.code, **details)
        print(visible(message), file=sys.stderr, flush=True)
        if not again:
            return exit.code


def watch(workers: WorkerGroup, size: int, asked: list[int]) -> tuple[int | None, dict[int, Exit]]:
    """Until all have ended, or a bound after the first failure. `asked`: signals to hand on, as they come in.

    Returns the rank whose failure was the cause, if one failed, and how the workers ended. One that was killed is the
    cause before one that ended with an error, and that before those that say that they have lost a peer.
    """
    seen: dict[int, Exit] = {}
    handed_on = 0
    deadline: float | None = None
    while True:
        for number in asked[handed_on:]:
            workers.signal(number)
            handed_on += 1
        for rank, exit in sorted(workers.ended().items(), key=lambda item: (not item[1].lost, item[0])):
            seen.setdefault(rank, exit)
        stops = {INTERRUPTED, PREEMPTED, *(128 + number for number in asked)}
        failed = [rank for rank, exit in seen.items() if exit.code and exit.code not in stops]
        stopped = any(exit.code in stops for exit in seen.values())
        if failed or stopped:
            bound = time.monotonic() + (GRACE if failed else SAVING)
            deadline = bound if deadline is None else min(deadline, bound)
        if len(seen) == size or (deadline is not None and time.monotonic() >= deadline):
            break
        time.sleep(LOOK)
    if not failed and len(seen) < size:  # those that should have stopped did not
        missing = min(set(range(size)) - set(seen))
        seen[missing] = Exit(128 + signal.SIGKILL, f"did not stop within {SAVING:g} s and was killed", lost=True)
        failed = [missing]
    failed.sort(key=lambda rank: 0 if seen[rank].lost else 2 if seen[rank].code == PEER_LOST else 1)
    return next(iter(failed), None), seen


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Signals to stop are collected, each once: workers are in sessions of their own, so the terminal's miss them."""
    asked: list[int] = []
    before = {n: signal.signal(n, lambda number, _: asked.append(number)) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Around what takes long before there are workers to hand a signal on to: it ends with the first signal."""

    def leave(number: int, _: object) -> None:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(PREEMPTED)

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(job: Job, culprit: int, exits: dict[int, Exit], where: str, sizes: dict[int, int]) -> None:
    """The end of the output of the worker that failed, unless it was the first, whose output was seen."""
    same = 0 in exits and exits[culprit].code == exits[0].code == UserError.exit_code  # all of them say it
    if culprit == 0 or same:
        return
    for line in tail(job.log(culprit), sizes[culprit]):
        print(visible(f"[rank {culprit}, {where}] {line}"), file=sys.stderr)


def tail(path: Path, begin: int = 0) -> list[str]:
    """The last lines that were written after byte `begin`."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(begin, path.stat().st_size - 65536))
        return file.read().decode(errors="replace").splitlines()[-TAIL:]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def announce(job: Job, where: str) -> None:
    """Said at the start, to the user."""
    workers = "1 worker" if job.processes == 1 else f"{job.processes} workers"
    print(visible(f"{workers} {where}; what all but the first say is in {job.folder / 'logs'}"), file=sys.stderr)
