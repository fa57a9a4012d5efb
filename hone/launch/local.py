"""Workers on this machine: processes of the same interpreter that find each other on loopback.

The first worker has our terminal. The others write to RUN/logs/rank_N.log, shown when they fail. All are in sessions of
their own, and end when we end, even by SIGKILL (`hone.launch.job.follow_parent`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from hone.launch.job import PARENT, Job, cores, environment
from hone.launch.supervise import Exit, announce, supervise
from hone.rollout.http import free_port
from hone.verify.child import adopt_orphans

#: Seconds in which killed processes are gone.
KILLED = 10.0


def check(job: Job) -> None:
    """Nothing can be missing here: whether the devices suffice, the workers see."""


def run(job: Job) -> int:
    """Returns the exit code of the first worker that failed, else 0."""
    adopt_orphans()  # what a killed worker has started becomes ours, to be killed too
    announce(job, f"on this machine, {threads(job.processes)} of {cores()} cores each")
    return supervise(job, lambda job: LocalWorkers(job, job.command()))


def threads(workers: int) -> int:
    """Of a worker's arithmetic, if the user does not say."""
    return int(os.environ.get("OMP_NUM_THREADS", "0")) or max(1, cores() // workers)


class LocalWorkers:
    """`command` once for each rank, started now. See `hone.launch.supervise.Workers`."""

    def __init__(self, job: Job, command: Sequence[str]) -> None:
        import psutil

        self._others = {child.pid for child in psutil.Process().children(recursive=True)}
        self._processes: list[subprocess.Popen[bytes]] = []
        port = free_port()
        try:
            for rank in range(job.processes):
                self._processes.append(self._started(job, command, rank, port))
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _started(job: Job, command: Sequence[str], rank: int, port: int) -> subprocess.Popen[bytes]:
        more = {
            **environment(rank, job.processes, rank, job.processes, "127.0.0.1", port),
            "OMP_NUM_THREADS": str(threads(job.processes)),
            "PYTHONUNBUFFERED": "1",  # a worker that is killed has said what it had to say
            PARENT: str(os.getpid()),
        }
        if sys.platform == "linux":
            more["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(job.log(rank).open("ab")) if rank else None
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **more},
                start_new_session=True,
            )

    def ended(self) -> dict[int, Exit]:
        codes = [process.poll() for process in self._processes]
        return {rank: Exit.of(code) for rank, code in enumerate(codes) if code is not None}

    def signal(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def where(self, rank: int) -> str:
        return f"process {self._processes[rank].pid}"

    def close(self) -> None:
        import psutil

        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait(timeout=KILLED)
        # Such as a generation server, which is in a session of its own. Where orphans are not ours, the next run in
        # this folder stops it.
        left = [child for child in psutil.Process().children(recursive=True) if child.pid not in self._others]
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(left, timeout=KILLED)
