"""The machine that a server is started on: this one, or that of a Ray actor (`hone.rollout.servers.remote`)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hone.base.http import free_port, port_is_free
from hone.base.processes import Server, ServerProcess, stop_leftover
from hone.recipe.sections.rollout import ServerConfig

#: Set in rank 0 by a launcher with an actor for the server: the actor's name, and the address of the Ray cluster.
ACTOR, CLUSTER = "HONE_SERVER_ACTOR", "HONE_RAY_CLUSTER"
#: Also set if the server may listen on an address that other machines can reach.
OPEN = "HONE_SERVER_OPEN"
#: The Ray namespace of the actors' names.
NAMESPACE = "hone"
LOOPBACK = "127.0.0.1"
#: How a server ended if its actor is gone.
LOST = "was lost with its actor"
#: Seconds for a short command.
COMMAND = 60.0
#: Runs a command that gets SIGTERM, so that it ends its own children, when its parent ends.
FOLLOW = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)  # PR_SET_PDEATHSIG, which outlives exec: prctl(2)
if os.getppid() != int(sys.argv[1]):
    sys.exit(143)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Host:
    """This machine."""

    #: Where servers listen.
    address = LOOPBACK

    @property
    def python(self) -> str:
        return sys.executable

    @property
    def inside(self) -> str:
        """The folder with the module that vLLM's workers load."""
        return str(Path(__file__).resolve().parent / "inside")

    def output(self, command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
        """Exit code and output of a short command. Raises OSError, subprocess.TimeoutExpired."""
        env = {**os.environ, **environment}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=COMMAND)
        return done.returncode, done.stdout

    def free_port(self) -> int:
        return free_port(self.address)

    def port_is_free(self, port: int) -> bool:
        return port_is_free(port, self.address)

    def stop_leftover(self, log: Path) -> bool:
        """See `hone.base.processes.stop_leftover`."""
        return stop_leftover(log)

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path, name: str) -> Server:
        """See `hone.base.processes.ServerProcess`."""
        return ServerProcess(command, environment, log, name)

    def sees(self, folder: Path) -> bool:
        """Whether the host sees files that this process writes into the folder."""
        return True

    def ready(self, seconds: float) -> None:
        """Wait for the machine. Raises UserError if it does not come back in time."""


class ServerAgent:
    """The parent of a server on another machine, one at a time. Every method returns soon."""

    def __init__(self, variables: Mapping[str, str], working: str) -> None:
        """`variables`: environment of the servers; `working`: the folder for relative paths."""
        os.environ.update(variables)
        if Path(working).is_dir():  # checked and reported later
            os.chdir(working)
        self._host = Host()
        self._server: ServerProcess | None = None

    def place(self) -> tuple[str, str]:
        """The machine's interpreter, and its folder `inside`."""
        return self._host.python, self._host.inside

    def output(self, command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
        return self._host.output(command, environment)

    def free_port(self, address: str) -> int:
        return free_port(address)

    def port_is_free(self, port: int, address: str) -> bool:
        return port_is_free(port, address)

    def is_there(self, path: Path) -> bool:
        os.listdir(path.parent)  # refresh the cache of shared storage
        return path.exists()

    def stop_leftover(self, log: Path) -> bool:
        return stop_leftover(log)

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path, name: str) -> int:
        """Returns the process id."""
        self.stop()
        follow = [sys.executable, "-I", "-c", FOLLOW, str(os.getpid())] if sys.platform == "linux" else []
        self._server = ServerProcess(command, environment, log, name, follow)
        return self._server.pid

    def ended(self, seconds: float) -> str | None:
        """How the server ended; None if it still runs after `seconds`."""
        if self._server is None:  # the agent was restarted without it
            return LOST
        return self._server.how() if self._server.ended_within(seconds) else None

    def tail(self) -> str:
        return "" if self._server is None else self._server.tail()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None


def host_of_servers(config: ServerConfig) -> Host:
    """The machine on which this process starts its server, if it starts one."""
    if ACTOR not in os.environ or config.url is not None:
        return Host()
    from hone.rollout.servers.remote import RemoteHost

    host = RemoteHost(os.environ[ACTOR], os.environ[CLUSTER], OPEN in os.environ)
    host.ready(config.start_timeout)
    return host
