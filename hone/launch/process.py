"""One worker process: started so that it ends with us, and ended with all that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from hone.launch.job import PARENT

#: Seconds in which killed processes are gone.
KILLED = 10.0


def started(
    command: Sequence[str], environment: Mapping[str, str], log: Path | None, folder: Path | None = None
) -> subprocess.Popen[bytes]:
    """`command` in `folder`, in a session of its own; what it says goes to the end of `log`, None: to our terminal.

    `environment` is added to ours. To be called by the main thread: on Linux the worker ends with the thread.
    """
    more = {
        **environment,
        "PYTHONUNBUFFERED": "1",  # a worker that is killed has said what it had to say
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
    """Everything that this process has started, and what was left to it: see `adopt_orphans`."""
    return set(psutil.Process().children(recursive=True))


def end(processes: Sequence[subprocess.Popen[bytes]], others: set[psutil.Process]) -> None:
    """Kill the groups of these, and everything else below us that is not one of `others`.

    The rest is what is in a session of its own, such as a generation server. Where orphans are not left to us (not on
    Linux), the next run in the same folder stops that.
    """
    for process in processes:
        if process.returncode is None or _group_left(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait(timeout=KILLED)
    left = [process for process in below() if process not in others]
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(left, timeout=KILLED)


def _group_left(group: int) -> bool:
    """Whether some process of the group that this worker led still runs: else its number may be another's by now."""
    return any(_group_of(process.pid) == group for process in below())


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1
