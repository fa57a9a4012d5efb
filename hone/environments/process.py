"""Starts programs that can be killed: in a session of their own, with bounded output, and without hone's environment.

    process = Process(["python", "agent.py"], {"HOME": ...}, folder, stdin=b"{}", ended=line.hang_up)
    process.status                                   # None while it runs
    process.kill()                                   # with everything in its group

With bubblewrap (`contained`) a program sees the system, its interpreter and the folders it is given, all to read, and
writes into its own folder; it has no network, but one port of loopback that leads to a socket file of hone's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.environments.sandbox import interpreter, system_binds

MOST_OUTPUT = 1 << 20  # bytes; more ends the program
LARGEST_FILE = 256 << 20  # bytes that it may write into one file
TAIL = 2000  # bytes of its output that are kept, unless said otherwise
PORT = 8000  # of loopback, inside bubblewrap

#: On Linux: ends with the thread that started it; limits the size of files; then becomes the command.
_START = """
import os, resource, sys
if sys.platform.startswith("linux"):
    import ctypes
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL: outlives exec
size = int(sys.argv[1])
if size:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.execvp(sys.argv[2], sys.argv[2:])
"""
#: Inside bubblewrap: connects the port to the socket file, and runs the command.
_RELAY = """
import os, socket, subprocess, sys, threading
path, port = sys.argv[1], int(sys.argv[2])
def copy(source, target):
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        source.close(), target.close()
def relay():
    while True:
        client, _ = listener.accept()
        server = socket.socket(socket.AF_UNIX)
        server.connect(path)
        for pair in ((client, server), (server, client)):
            threading.Thread(target=copy, args=pair, daemon=True).start()
listener = socket.create_server(("127.0.0.1", port))
threading.Thread(target=relay, daemon=True).start()
status = subprocess.call(sys.argv[3:])
os._exit(status if status >= 0 else 128 - status)
"""


@dataclass(frozen=True)
class Bounds:
    """`kept`: bytes of the end of a program's output. `largest_file`: bytes that it may write into one; None: any."""

    kept: int = TAIL
    largest_file: int | None = LARGEST_FILE


class Process:
    """A running program. `ended` is called once, from another thread, when it is gone.

    Raises OSError if it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        *,
        stdin: bytes = b"",
        ended: Callable[[], None] = lambda: None,
        bounds: Bounds = Bounds(),
    ) -> None:
        self._start = [interpreter(), "-I", "-S", "-c", _START, str(bounds.largest_file or 0), *command]
        self._environment, self._folder, self._stdin, self._ended = dict(environment), folder, stdin, ended
        self._kept = bounds.kept
        self.status: int | None = None
        self.note = ""  # why it was killed, if hone did
        self._output = bytearray()
        self._started, self._gone = threading.Event(), threading.Event()
        self._failure: OSError | None = None
        self._process: subprocess.Popen[bytes] | None = None
        threading.Thread(target=self._run, name="hone program", daemon=True).start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def tail(self) -> str:
        """The end of what it wrote to its output and error output."""
        return bytes(self._output).decode("utf-8", "replace").strip()

    def wait(self, seconds: float) -> bool:
        """Whether it ends within `seconds`."""
        return self._gone.wait(seconds)

    def kill(self, why: str = "") -> None:
        """End it and its group; returns when it is gone."""
        if not self._gone.is_set():
            self.note = self.note or why
        if self._process is not None:
            _kill(self._process.pid)
        self._gone.wait(10.0)

    # --- in a thread of its own, which lives as long as the program: see PR_SET_PDEATHSIG in prctl(2) ---

    def _run(self) -> None:
        try:
            with tempfile.TemporaryFile() as file:
                file.write(self._stdin)
                file.seek(0)
                self._process = subprocess.Popen(
                    self._start,
                    stdin=file,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    cwd=self._folder,
                    env=self._environment,
                    start_new_session=True,
                )
        except OSError as error:
            self._failure = error
            return
        except ValueError as error:  # a command cannot hold a NUL, or half of a surrogate pair
            self._failure = OSError(errno.EINVAL, f"the command cannot be run: {error}")
            return
        finally:
            self._started.set()
        process = self._process
        last = weakref.finalize(self, _kill, process.pid)  # also where hone itself ends
        reading = threading.Thread(target=self._read, name="hone program's output", daemon=True)
        reading.start()
        status = process.wait()
        _kill(process.pid)  # what it left behind
        last.detach()
        reading.join(1.0)
        self.status = status
        self._gone.set()
        self._ended()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        total = 0
        with self._process.stdout as output:
            while data := output.read1(1 << 16):  # type: ignore[attr-defined]
                total += len(data)
                self._output += data
                del self._output[: -self._kept]
                if total > MOST_OUTPUT:
                    self.note = f"it wrote more than {MOST_OUTPUT} bytes of output"
                    _kill(self._process.pid)
                    return


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


@dataclass(frozen=True)
class Contained:
    """What a program in bubblewrap has: folders to read, its own to write, and where its port leads (None: nowhere)."""

    folder: Path
    readable: tuple[Path, ...] = ()
    writable: tuple[tuple[Path, str], ...] = ()  # (folder, its place inside)
    socket: Path | None = None

    def command(self, command: Sequence[str]) -> list[str]:
        """The command inside bubblewrap."""
        seen = [part for place in self.readable for part in ("--ro-bind", str(place), str(place))]
        written = [part for place, inside in self.writable for part in ("--bind", str(place), inside)]
        line = [] if self.socket is None else ["--ro-bind", str(self.socket.parent), "/run/hone"]
        relay = (
            [interpreter(), "-I", "-S", "-c", _RELAY, f"/run/hone/{self.socket.name}", str(PORT)] if self.socket else []
        )
        return [
            shutil.which("bwrap") or "bwrap",
            *("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
            *system_binds(),
            *("--ro-bind-try", "/etc/alternatives", "/etc/alternatives", "--ro-bind-try", "/etc/passwd", "/etc/passwd"),
            *("--proc", "/proc", "--dev", "/dev", "--size", str(64 << 20), "--tmpfs", "/tmp"),
            *seen,
            *("--bind", str(self.folder), str(self.folder)),
            *written,
            *line,
            *("--remount-ro", "/", "--chdir", str(self.folder), "--"),
            *relay,
            *command,
        ]


def interpreter_folders(program: str) -> list[Path]:
    """What an executable needs to be read: itself and, of an interpreter, its installation and virtual environment.

    `program` is an absolute path; every link on the way to the file counts.
    """
    places: list[Path] = []
    path = Path(program)
    while True:
        root = path.parent.parent
        is_installation = path.parent.name == "bin" and root not in (Path("/"), Path("/usr"), Path.home())
        places.append(root if is_installation else path)
        if not path.is_symlink():
            break
        path = Path(os.path.normpath(path.parent / path.readlink()))
    if Path(program) == Path(sys.executable):  # with the folders that were added to its path
        places += [Path(place) for place in sys.path if place and Path(place).is_dir() and Path(place) != Path.cwd()]
    return [place for place in dict.fromkeys(places) if not str(place).startswith("/usr/")]


def clean_environment(added: Mapping[str, Any]) -> dict[str, str]:
    """Of hone's environment variables the few that no secret is in, and `added`."""
    kept = ("PATH", "LANG", "TZ", "TERM", "SYSTEMROOT")
    own = {name: value for name, value in os.environ.items() if name in kept or name.startswith("LC_")}
    return {**own, **{name: str(value) for name, value in added.items()}}
