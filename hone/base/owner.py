"""The owner of a lock or a container: a process, and whether it still runs.

{"token": "5f...", "host": "node3", "boot": "c1...", "namespace": "pid:[4026531836]", "pid": 4242,
 "process": "8812345", "command": "hone train demo", "since": "2025-01-31 12:00:00", "beat": 17}
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import sys
import uuid
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import psutil

#: Bytes of a lock file, always the same: a renewal writes over it in place, and a reader never sees half of a line.
SIZE = 1024


@dataclass(frozen=True)
class Owner:
    """A process of hone that holds something."""

    token: str
    host: str
    boot: str  # id of the machine's boot
    namespace: str  # the PID namespace of `pid`: containers on one machine have their own
    pid: int
    process: str  # start time of the process, in the machine's units, because process ids are reused
    command: str
    since: str  # local time, only for display
    beat: int = 0

    def __str__(self) -> str:
        return f"`{self.command}` (process {self.pid} on {self.host}, since {self.since})"

    @property
    def here(self) -> bool:
        """Whether the owner is on this machine, where its process can be checked."""
        return bool(self.boot) and (self.host, self.boot, self.namespace) == _machine()

    @property
    def dead(self) -> bool:
        """Whether the owner is known to have ended; for another machine that is unknown."""
        return self.here and started(self.pid) != self.process


def myself() -> Owner:
    host, boot, namespace = _machine()
    program = Path(sys.argv[0]).name
    command = " ".join(["hone" if program == "__main__.py" else program, *sys.argv[1:]])[:200]
    since = datetime.datetime.now().isoformat(" ", "seconds")
    return Owner(uuid.uuid4().hex, host, boot, namespace, os.getpid(), started(os.getpid()) or "", command, since)


def _machine() -> tuple[str, str, str]:
    """(name, boot, PID namespace): equal for two processes that can see each other."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if not boot.exists():  # not Linux
        return socket.gethostname(), f"{psutil.boot_time():.0f}", ""
    try:
        return socket.gethostname(), boot.read_text().strip(), os.readlink(namespace)
    except OSError:  # a sandbox that shows neither: then no process counts as one of this machine
        return socket.gethostname(), "", ""


def started(pid: int) -> str | None:
    """The start time of a process, in units of its machine; None if it has ended."""
    stat = Path("/proc") / str(pid) / "stat"
    if Path("/proc/self/stat").exists():
        try:
            state, *rest = stat.read_text(errors="replace").rpartition(")")[2].split()  # the name may hold blanks
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if state in "ZX" else rest[18]  # field 22 of proc_pid_stat(5), in clock ticks since the boot
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.NoSuchProcess:
        return None


def as_bytes(owner: Owner) -> bytes:
    text = json.dumps(asdict(owner))
    if len(text) >= SIZE:
        text = json.dumps({**asdict(owner), "command": "hone"})
    return text.ljust(SIZE - 1).encode() + b"\n"


def parse(content: bytes) -> Owner | None:
    """The owner in a lock file; None if the content is empty, truncated or of another form."""
    try:
        values = json.loads(content)
        return Owner(**{field.name: values[field.name] for field in fields(Owner)})
    except (ValueError, KeyError, TypeError):
        return None
