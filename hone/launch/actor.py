"""The Ray actors: each runs a worker or a server as a separate process, and so survives its end.

The classes do not use Ray, except in `about`. Every method returns at once: an actor runs one at a time.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hone
from hone.grade.child import adopt_orphans
from hone.launch.process import below, end, started
from hone.rollout.servers.host import ServerAgent

#: Seconds until a file written by one machine is visible to another: shared storage caches lookups.
SHARED = 30.0
#: Most bytes of a worker's output returned at once.
CHUNK = 1 << 20


class Machine:
    """The part of every actor that reports on its machine."""

    def about(self) -> dict[str, Any]:
        """The machine's address, its name in the cluster, and the devices assigned to this actor."""
        import ray

        context = ray.get_runtime_context()
        return {
            "node": context.get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "cluster": context.gcs_address,
            "devices": [str(device) for device in context.get_accelerator_ids().get("GPU", [])],
            "version": hone.__version__,
            "pid": os.getpid(),
        }

    def sees(self, working: str, token: Path, text: str) -> str | None:
        """The folder that this machine does not share (the working folder or the run folder); None if it shares
        both."""
        if not Path(working).is_dir():
            return f"the folder {working}, in which hone was started, does not exist"
        end = time.monotonic() + SHARED
        while not token.is_file():
            if time.monotonic() > end:
                return f"{token.parent} does not have the file that rank 0 wrote there"
            time.sleep(0.2)
        return None if token.read_text() == text else f"{token} is not the file that rank 0 wrote"


class ServerActor(Machine, ServerAgent):
    """Runs the server of the first worker."""


class WorkerActor(Machine):
    def __init__(self) -> None:
        adopt_orphans()
        self._others = below()
        self._process: subprocess.Popen[bytes] | None = None
        self._log = Path()

    def write(self, token: Path, text: str) -> None:
        token.parent.mkdir(parents=True, exist_ok=True)
        token.write_text(text)

    def free_port(self) -> int:
        """A port that is free now on every address of this machine."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path, working: str) -> None:
        """Start the worker. `arguments`: for the actor's own interpreter, which has hone."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._process = started([sys.executable, *arguments], environment, log, Path(working))

    def poll(self, offset: int | None) -> tuple[bytes, int | None]:
        """The worker's output from byte `offset` of its log on, and its exit code in the form of `subprocess`."""
        assert self._process is not None, "start first"
        code = self._process.poll()  # before reading, so that the log is complete if it has ended
        if offset is None:
            return b"", code
        with self._log.open("rb") as file:
            file.seek(offset)
            output = file.read(CHUNK)
        return output, None if len(output) == CHUNK else code

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.Signals(number))

    def stop(self) -> None:
        """Kill the worker and everything that it started."""
        if self._process is not None:
            end([self._process], self._others)
