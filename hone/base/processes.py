"""Server processes that hone starts: in their own session, on loopback, with output in a file.

    process = ServerProcess([sys.executable, "-m", "http.server", "8000"], {}, Path("server.log"), "file server")
    process.wait_until(healthy, seconds=60)
    process.stop()

The process id is kept in a file beside the log, so that the next run stops a server that a killed run left running.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from hone.base.http import ServerLost
from hone.base.settings import UserError

#: Seconds between health checks, and seconds from SIGTERM to SIGKILL.
LOOK = 0.2
GRACE = 10.0
LOG_LINES = 12


class Server(ABC):
    """A server process that was started, on this machine or on another."""

    def __init__(self, log: Path, name: str) -> None:
        self.log, self.name = log, name

    @property
    @abstractmethod
    def pid(self) -> int: ...

    @abstractmethod
    def ended_within(self, seconds: float) -> bool:
        """Whether the process ends within `seconds`: its connections break a moment before it is gone."""

    @abstractmethod
    def how(self) -> str:
        """How it ended, in words."""

    @abstractmethod
    def tail(self) -> str:
        """The last lines of this process's output."""

    @abstractmethod
    def stop(self) -> None:
        """End the process and everything it started."""

    @property
    def running(self) -> bool:
        return not self.ended_within(0.0)

    @property
    def lost(self) -> bool:
        """Whether it ended because its machine or launcher is gone."""
        return False

    def wait_until(self, healthy: Callable[[], bool], seconds: float) -> None:
        """Wait until `healthy`. If the process ends or times out, stops it and raises UserError with its log.

        Raises ServerLost if it is `lost`: a restart may succeed.
        """
        deadline = time.monotonic() + seconds
        while not healthy():
            if not self.running:
                if self.lost:
                    raise ServerLost(f"{self.name} {self.how()} before it answered")
                raise self._failed(f"{self.name} {self.how()} before it answered")
            if time.monotonic() > deadline:
                raise self._failed(f"{self.name} did not answer within {seconds:g} s (start_timeout)")
            time.sleep(LOOK)

    def _failed(self, what: str) -> UserError:
        tail = self.tail()
        self.stop()
        return UserError(f"{what}; its log is {self.log} and ends with:\n{tail or '(nothing)'}")


class ServerProcess(Server):
    """Runs `command` on this machine, with `environment` added to ours; `name` is used in messages.

    `prefix`: a command that executes `command`, in the same process.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        name: str,
        prefix: Sequence[str] = (),
    ) -> None:
        super().__init__(log, name)
        self._note = log.with_suffix(".pid")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            file.write(f"\n--- {' '.join(command)}\n".encode())
            file.flush()
            self._begin = file.tell()
            self._process = subprocess.Popen(
                [*prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,  # a Ctrl-C in the terminal is for hone, which stops the server itself
            )
        born = psutil.Process(self._process.pid).create_time()
        self._note.write_text(json.dumps({"pid": self._process.pid, "born": born}))

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended_within(self, seconds: float) -> bool:
        try:
            self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def how(self) -> str:
        return f"ended with code {self._process.returncode}"

    def tail(self) -> str:
        return last_lines(self.log, self._begin)

    def stop(self) -> None:
        _end_group(self._process.pid)
        self._process.wait(timeout=GRACE)  # already dead: this only reaps it
        self._note.unlink(missing_ok=True)


def last_lines(log: Path, begin: int = 0) -> str:
    """The last lines of what was written after byte `begin`."""
    with log.open("rb") as file:
        file.seek(max(begin, log.stat().st_size - 8192))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return "\n".join(lines[-LOG_LINES:])


def stop_leftover(log: Path) -> bool:
    """Stop a server that a killed run with this log left running. Returns whether there was one."""
    note = log.with_suffix(".pid")
    try:
        recorded = json.loads(note.read_text())
        same = psutil.Process(recorded["pid"]).create_time() == recorded["born"]
    except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
        same = False
    if same:
        _end_group(int(recorded["pid"]))
    note.unlink(missing_ok=True)
    return same


def _end_group(leader: int) -> None:
    """Send SIGTERM and, after `GRACE` seconds, SIGKILL to the process group of a leader that we started."""
    for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
        try:
            os.killpg(leader, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + seconds
        while _members(leader) and time.monotonic() < deadline:
            time.sleep(0.05)


def _members(group: int) -> bool:
    """Whether any process of the group still runs; zombies do not count."""
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
        except ProcessLookupError:
            continue
    return False
