"""A server process that hone starts: in a session of its own, on loopback, its output in a file.

    process = ServerProcess([sys.executable, "-m", "http.server", "8000"], {}, Path("server.log"), "file server")
    process.wait_until(healthy, seconds=60)
    process.stop()

The process is noted in a file beside the log, so that one that a killed run left behind is stopped by the next.
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

#: Seconds between two looks at whether a server answers, and seconds to end by itself before it is killed.
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
        """A connection breaks a moment before the process is gone."""

    @abstractmethod
    def how(self) -> str:
        """How it has ended."""

    @abstractmethod
    def tail(self) -> str:
        """The last lines that this process wrote."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the process and all that it started."""

    @property
    def running(self) -> bool:
        return not self.ended_within(0.0)

    @property
    def lost(self) -> bool:
        """Whether it has ended because its machine, or what started it there, is gone."""
        return False

    def wait_until(self, healthy: Callable[[], bool], seconds: float) -> None:
        """Raises UserError, with the end of the log, if the process ends or is not healthy in time; it is stopped.

        Raises ServerLost if it is `lost`: started again it may well come up.
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
    """Starts `command` on this machine, with `environment` added to ours; `name` is used in messages.

    `prefix`: a command that becomes this one.
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
        self._process.wait(timeout=GRACE)  # it is killed by now; this only collects it
        self._note.unlink(missing_ok=True)


def last_lines(log: Path, begin: int = 0) -> str:
    """Of what was written after byte `begin`."""
    with log.open("rb") as file:
        file.seek(max(begin, log.stat().st_size - 8192))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return "\n".join(lines[-LOG_LINES:])


def stop_leftover(log: Path) -> bool:
    """Stops the server that an earlier run with this log was killed before it could stop. Returns whether there was."""
    note = log.with_suffix(".pid")
    try:
        found = json.loads(note.read_text())
        same = psutil.Process(found["pid"]).create_time() == found["born"]
    except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
        same = False
    if same:
        _end_group(int(found["pid"]))
    note.unlink(missing_ok=True)
    return same


def _end_group(leader: int) -> None:
    """SIGTERM, and after a grace SIGKILL, to the process group whose leader we started."""
    for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
        try:
            os.killpg(leader, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + seconds
        while _members(leader) and time.monotonic() < deadline:
            time.sleep(0.05)


def _members(group: int) -> bool:
    """Whether somebody of the process group still runs; zombies do not count."""
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
        except ProcessLookupError:
            continue
    return False
