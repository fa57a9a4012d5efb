"""One worker process: it ends with this process, and is killed with everything that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from hone.launch.job import PARENT

#: Seconds for killed processes to end.
KILLED = 10.0


def started(
    command: Sequence[str], environment: Mapping[str, str], log: Path | None, folder: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start `command` in `folder`, in its own session; its output is appended to `log`, or with None goes to the
    terminal.

    `environment` is added to ours. Call it from the main thread: on Linux the worker ends with the thread.
    """
    more = {
        **environment,
        "PYTHONUNBUFFERED": "1",  # a killed worker's output is complete
        PARENT: str(os.getpid()),
    }
    with contextlib.ExitStack() as stack:
        file = None if log is None else stack.enter_context(log.open("ab"))
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd=folder,
            env={**os.environ, **more},
            start_new_session=True,
        )


def below() -> set[psutil.Process]:
    """All descendants of this process, with the orphans that it adopted (see `adopt_orphans`)."""
    return set(psutil.Process().children(recursive=True))


def end(processes: Sequence[subprocess.Popen[bytes]], others: set[psutil.Process]) -> None:
    """Kill the groups of these processes, and all our other descendants except `others`.

    Those have their own sessions, such as a generation server. Where orphans cannot be adopted (not on Linux), the
    next run in the same folder stops them.
    """
    for process in processes:
        if process.returncode is None or _group_runs(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait(timeout=KILLED)
    remaining = [process for process in below() if process not in others]
    for child in remaining:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(remaining, timeout=KILLED)


def _group_runs(group: int) -> bool:
    """Whether a process of this worker's group still runs: if not, its number may have been reused."""
    return any(_group_of(process.pid) == group for process in below())


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1
