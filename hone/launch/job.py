"""A job: processes of `hone train`, each with its rank in the environment.

RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT: the names of torchrun, which can start the
same processes (https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from hone.base import jsonl
from hone.base.settings import UserError
from hone.recipe.sections.launch import LaunchConfig
from hone.runs import lock

#: Holds the id of the process that started this worker; the worker ends with it.
PARENT = "HONE_PARENT"
#: Whether this process is a worker of a launcher.
launched = False


@dataclass(frozen=True)
class Job:
    """A run to start."""

    folder: Path  # of the run
    arguments: tuple[str, ...]  # of hone, as in ("train", "demo", "steps=3")
    processes: int
    tensor: int  # size of a tensor-parallel group: neighbouring ranks, which belong on one machine
    launch: LaunchConfig
    stages: tuple[str, ...] = ()  # folders of the stages, if there are several
    server: bool = False  # a stage samples from a server that is started for it

    def command(self, python: str = sys.executable) -> list[str]:
        """A worker's command line. Always with --resume: the folder of an earlier run has been set aside."""
        return [python, "-m", "hone", *self.arguments, "--resume"]

    def log(self, rank: int) -> Path:
        return self.folder / "logs" / f"rank_{rank}.log"

    def event(self, kind: str, message: str, **details: object) -> None:
        """Record an event in the last stage that has begun, whose writers, the workers, have ended.

        Raises LockLost if another process has taken the run folder over.
        """
        lock.check(self.folder)
        begun = [self.folder / stage for stage in self.stages if (self.folder / stage).is_dir()]
        path = (begun[-1] if begun else self.folder) / "events.jsonl"
        jsonl.keep(path, lambda row: True)
        jsonl.append(path, {"step": None, "kind": kind, "message": message, **details})


def environment(rank: int, size: int, local_rank: int, local_size: int, address: str, port: int) -> dict[str, str]:
    """The contract between a launcher and `hone.base.World.from_env`."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def joined(processes: int) -> bool:
    """Whether this process is a worker, of torchrun or of hone. Raises UserError if the world has another size."""
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and size is None:
        return False
    if rank is None or size is None:
        there, missing = ("WORLD_SIZE", "RANK") if rank is None else ("RANK", "WORLD_SIZE")
        raise UserError(f"{there} is set and {missing} is not: set both, as torchrun does, or neither")
    if size != str(processes):
        raise UserError(
            f"WORLD_SIZE is {size}, and `parallel` asks for {processes} processes; start as many, or unset RANK and "
            "WORLD_SIZE to have hone start them"
        )
    return True


def follow_parent() -> None:
    """Kill this worker when the launcher ends, however it ends. Call this before anything else."""
    global launched
    parent = os.environ.pop(PARENT, None)
    if parent is None:
        return
    launched = True
    # Ray's own workers block SIGINT, and their children inherit that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG, prctl(2)
    else:
        threading.Thread(target=_watch_parent, args=(int(parent),), name="launcher", daemon=True).start()
    if os.getppid() != int(parent):  # it ended before the death signal was set
        os.kill(os.getpid(), signal.SIGKILL)


def silent() -> bool:
    """Whether another process prints the messages about the recipe."""
    return launched or os.environ.get("RANK", "0") != "0"


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
