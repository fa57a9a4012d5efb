"""A server on the machine of a Ray actor, which the launcher has placed: see `hone.launch.ray`.

The first worker asks the actor, a `hone.rollout.servers.host.ServerAgent`, to start and stop the server. Answers come
over HTTP, as from a local server. Ray restarts a lost actor, on another machine if need be; the worker then restarts
the server.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from hone.base.http import ServerLost
from hone.base.processes import GRACE, Server, last_lines
from hone.base.settings import UserError
from hone.rollout.servers.host import COMMAND, LOOPBACK, LOST, NAMESPACE, Host

#: Seconds for an actor to answer a call that needs no work.
SHORT = 30.0
#: Seconds until a file written by one machine is visible to another.
SHARED = 30.0


class NotNow(ServerLost):
    """The actor does not answer now: it is slow, unreachable, or restarting."""


class RemoteHost(Host):
    """The machine of a Ray actor. `actor`: its name; `cluster`: the address of Ray's own store; `open`: servers may
    listen beyond loopback."""

    def __init__(self, actor: str, cluster: str, open: bool) -> None:
        if not ray.is_initialized():
            handler = signal.getsignal(signal.SIGTERM)  # Ray replaces it with its own
            ray.init(address=cluster, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
            signal.signal(signal.SIGTERM, handler)
        self._actor: Any = ray.get_actor(actor, NAMESPACE)
        self._open = open
        self._python = self._inside = ""

    @property
    def python(self) -> str:
        return self._python

    @property
    def inside(self) -> str:
        return self._inside

    def ready(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                about = self.ask("about")
                self._python, self._inside = self.ask("place")
                break
            except ServerLost as error:
                if time.monotonic() > deadline:
                    raise UserError(f"{error}; it did not come back within {seconds:g} s (start_timeout)") from error
                time.sleep(1.0)
        # On the same machine, the server listens on loopback only.
        own = about["address"] == ray.util.get_node_ip_address()
        if not own and not self._open:
            raise UserError(
                f"launch.ray.server.listen is loopback, but Ray has placed the server on {about['address']}, another "
                "machine than the first worker's. In a network that only you can reach, set it to cluster: the server "
                "has no password. Or let both fit on one machine: lower launch.ray.server.cpus and gpus"
            )
        self.address = LOOPBACK if own else str(about["address"])

    def output(self, command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
        code, text = self.ask("output", list(command), dict(environment), seconds=COMMAND + SHORT)
        return code, text

    def free_port(self) -> int:
        return int(self.ask("free_port", self.address))

    def port_is_free(self, port: int) -> bool:
        return bool(self.ask("port_is_free", port, self.address))

    def stop_leftover(self, log: Path) -> bool:
        return bool(self.ask("stop_leftover", log.resolve(), seconds=2 * GRACE + SHORT))

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path, name: str) -> Server:
        log = log.resolve()
        log.parent.mkdir(parents=True, exist_ok=True)
        return RemoteServer(self, self.ask("start", list(command), dict(environment), log, name), log, name)

    def sees(self, folder: Path) -> bool:
        folder.mkdir(parents=True, exist_ok=True)
        token = folder.resolve() / f".seen_{uuid.uuid4().hex}"
        token.touch()
        try:
            deadline = time.monotonic() + SHARED
            while not (seen := self.ask("is_there", token)) and time.monotonic() < deadline:
                time.sleep(1.0)
            return bool(seen)
        except FileNotFoundError:  # the folder itself
            return False
        finally:
            token.unlink()

    def ask(self, method: str, *arguments: Any, seconds: float = SHORT) -> Any:
        """Call a method of the actor. Raises what it raises, ServerLost if the actor is gone, NotNow if perhaps not."""
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=seconds)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, OSError | UserError | subprocess.TimeoutExpired):
                raise error.cause from None
            raise
        except ray.exceptions.GetTimeoutError as error:
            raise NotNow(f"the server's actor does not answer within {seconds:g} s ({method})") from error
        except ray.exceptions.ActorUnavailableError as error:
            raise NotNow("the server's actor cannot be reached") from error
        except ray.exceptions.RayActorError as error:
            raise ServerLost("the server's actor was lost") from error


class RemoteServer(Server):
    def __init__(self, host: RemoteHost, pid: int, log: Path, name: str) -> None:
        super().__init__(log, name)
        self._host, self._pid, self._how = host, pid, ""

    @property
    def pid(self) -> int:
        return self._pid

    def ended_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + SHORT
        while not self._how:
            try:
                self._how = self._host.ask("ended", seconds, seconds=seconds + SHORT) or ""
                break
            except NotNow:
                if time.monotonic() > deadline:
                    break  # it may still run
                time.sleep(0.5)
            except ServerLost:
                self._how = LOST
        return bool(self._how)

    @property
    def lost(self) -> bool:
        return self._how == LOST

    def how(self) -> str:
        return self._how

    def tail(self) -> str:
        try:
            return str(self._host.ask("tail")) or last_lines(self.log)
        except ServerLost:
            return last_lines(self.log)

    def stop(self) -> None:
        with contextlib.suppress(ServerLost):  # the server of a lost actor ends by itself
            self._host.ask("stop", seconds=3 * GRACE + SHORT)
