"""What runs in each actor of Ray: a worker or a server as a process of its own, so that its end is not the actor's.

Plain classes without Ray in them, but for `about`. Every method answers at once: an actor does one thing at a time.
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

#: Seconds until a file that one machine has written is seen by another: shared storage keeps what it has looked up.
SHARED = 30.0
#: Most that is handed on of a worker's output at once, bytes.
CHUNK = 1 << 20


class Machine:
    """What is asked of every actor about the machine it is on."""

    def about(self) -> dict[str, Any]:
        """The machine: its address, its name in the cluster, the devices that were given to this actor."""
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
        """What is missing here for the run: the folder it is started in, or its own. None: nothing."""
        if not Path(working).is_dir():
            return f"the folder {working}, in which hone was started, is not there"
        end = time.monotonic() + SHARED
        while not token.is_file():
            if time.monotonic() > end:
                return f"{token.parent} does not have the file that rank 0 has written there"
            time.sleep(0.2)
        return None if token.read_text() == text else f"{token} is not the file that rank 0 has written"


class ServerActor(Machine, ServerAgent):
    """Asked by the first worker for its server."""


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
        """That nobody listens on now, at any address of this machine."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path, working: str) -> None:
        """`arguments`: of the interpreter that runs the actor, as hone is installed in it."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._process = started([sys.executable, *arguments], environment, log, Path(working))

    def poll(self, offset: int | None) -> tuple[bytes, int | None]:
        """What it has said from byte `offset` of its log on, and how it ended, as `subprocess` has it."""
        assert self._process is not None, "start first"
        code = self._process.poll()  # first: what it says last is in the log then
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
        """The worker, and all that it started, is gone."""
        if self._process is not None:
            end([self._process], self._others)
