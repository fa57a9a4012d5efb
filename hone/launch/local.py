"""Workers on this machine: processes of the same interpreter that connect over loopback.

The first worker uses this terminal; the others write to RUN/logs/rank_N.log, which is shown if they fail. Each has its
own session, and all end with this process, even on SIGKILL (`hone.launch.job.follow_parent`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from hone.base.http import free_port
from hone.grade.child import adopt_orphans
from hone.launch.job import Job, cores, environment
from hone.launch.process import below, end, started
from hone.launch.supervise import Exit, announce, supervise


def check(job: Job) -> None:
    """Does nothing: the workers check the devices."""


def run(job: Job) -> int:
    """Returns the exit code of the first worker that failed, else 0."""
    adopt_orphans()  # the children of a killed worker become ours, to be killed too
    announce(job, f"on this machine, {threads(job.processes)} of {cores()} cores each")
    return supervise(job, lambda job: LocalWorkers(job, job.command()))


def threads(workers: int) -> int:
    """Threads of each worker: OMP_NUM_THREADS, else an equal share of the cores."""
    return int(os.environ.get("OMP_NUM_THREADS", "0")) or max(1, cores() // workers)


class LocalWorkers:
    """Starts `command` once for each rank. See `hone.launch.supervise.WorkerGroup`."""

    def __init__(self, job: Job, command: Sequence[str]) -> None:
        self._others = below()
        self._processes: list[subprocess.Popen[bytes]] = []
        port, size = free_port(), job.processes
        more = {"OMP_NUM_THREADS": str(threads(size))}
        if sys.platform == "linux":
            more["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        try:
            for rank in range(size):
                contract = environment(rank, size, rank, size, "127.0.0.1", port)
                self._processes.append(started(command, {**contract, **more}, job.log(rank) if rank else None))
        except BaseException:
            self.close()
            raise

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
        end(self._processes, self._others)
