"""Containers for tasks that need an image, with docker or podman.

    runtime = Runtime.find()                              # raises UserError where neither works
    runtime.build(folder, seconds=600)                    # from folder/Dockerfile
    container = runtime.start(image_of(folder), ContainerLimits(memory_mb=512))
    container.run("ls", seconds=30)                       # Ran(ended=True, status=0, output="...")
    container.remove()

How containers run here (OCI runtime, storage, registries, ulimits) is the configuration of docker or podman. Each is
labelled with the process that started it, and the next process that looks for a runtime removes those of dead ones.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hone.base import owner
from hone.base.settings import UserError
from hone.environments.process import Bounds, Process

LABEL = "hone.owner"
PROGRAMS = ("docker", "podman")
MOST_PROCESSES = 512  # of a container
_ANSWER, _START = 60.0, 300.0  # seconds for docker or podman to answer, and to start a container
_GONE = 10.0  # seconds for a command to end after it was killed
#: Process 1. It ends all others in the container when docker or podman sends it a signal, which needs no new process;
#: and itself after a day, for a hone that cannot.
_FIRST = (
    'trap "kill -9 -1" USR1; end=$(($(date +%s) + 86400)); '
    'while [ "$(date +%s)" -lt "$end" ]; do sleep 3600 & wait; done'
)
#: Set to nothing: docker gives containers those of its client's configuration, whose addresses may hold passwords.
_PROXIES = tuple(f"{name}_PROXY" for name in ("HTTP", "HTTPS", "FTP", "NO"))


@dataclass(frozen=True)
class ContainerLimits:
    """The limits of one container; `network`: whether it has one."""

    memory_mb: int = 2048
    cpus: float = 1.0
    network: bool = False


@dataclass(frozen=True)
class Ran:
    """What a command in a container did. `note`: why it was ended, if hone did."""

    ended: bool  # by itself
    status: int | None
    output: str  # the end of it, errors included
    note: str = ""

    @classmethod
    def of(cls, process: Process, ended: bool) -> Ran:
        """`ended`: whether the process ended before it was killed for its time."""
        return cls(ended and not process.note, process.status, process.tail, process.note)


class Runtime:
    """docker or podman. `program` is its path."""

    def __init__(self, program: str) -> None:
        self.program = program
        self._alive: set[str] = set()
        self._lock = threading.Lock()
        weakref.finalize(self, _remove, program, self._alive)  # also when hone ends, unless by os._exit

    @classmethod
    def find(cls) -> Runtime:
        """The first of the two that works; removes the containers of hone's processes that were killed.

        Raises UserError if neither is installed, or works.
        """
        failures = []
        for name in PROGRAMS:
            path = shutil.which(name)
            if path is None:
                failures.append(f"{name} is not installed")
                continue
            runtime = cls(path)
            try:
                runtime.check()
            except RuntimeError as error:
                failures.append(str(error))
                continue
            try:
                runtime._remove_orphans()
            except RuntimeError as error:  # they are in the way of nothing
                print(f"containers of an earlier run stay: {error}", file=sys.stderr)
            return runtime
        raise UserError(f"containers need docker or podman: {'; '.join(failures)}")

    @property
    def is_podman(self) -> bool:
        return Path(self.program).name == "podman"

    def check(self) -> None:
        """Raises RuntimeError where docker or podman does not work."""
        _run([self.program, "info"], _ANSWER)

    def has(self, image: str) -> bool:
        """Whether an image is on this machine."""
        try:
            _run([self.program, "image", "inspect", image], _ANSWER)
        except RuntimeError:  # both fail so for an image that is not there
            return False
        return True

    def pull(self, image: str, seconds: float) -> None:
        """Fetch an image. Raises RuntimeError."""
        _run([self.program, "pull", image], seconds)

    def build(self, folder: Path, seconds: float) -> None:
        """Build the image `image_of(folder)` from the folder's Dockerfile. Raises RuntimeError."""
        _run([self.program, "build", "--tag", image_of(folder), str(folder)], seconds)

    def start(self, image: str, limits: ContainerLimits) -> Container:
        """A new container. Raises RuntimeError."""
        name, memory = f"hone-{uuid.uuid4().hex}", f"{limits.memory_mb}m"
        with self._lock:
            self._alive.add(name)  # before it begins: where that fails half-way, it is removed at the end
        _run(
            [
                *(self.program, "run", "--detach", "--rm", "--name", name, "--label", f"{LABEL}={_own_label()}"),
                *(() if limits.network else ("--network", "none")),
                *("--memory", memory, "--memory-swap", memory),  # the same: no swap
                *("--cpus", f"{min(limits.cpus, os.cpu_count() or 1):g}"),  # docker refuses more than there are
                *("--pids-limit", str(MOST_PROCESSES), "--stop-signal", "KILL"),
                *("--cap-drop", "NET_RAW", "--cap-drop", "MKNOD", "--security-opt", "no-new-privileges"),
                *self._no_proxies(),
                *("--entrypoint", "sh", image, "-c", _FIRST),
            ],
            _START,
        )
        return Container(self, name)

    def remove(self, name: str) -> None:
        """End a container and delete its files; one that is gone is ignored. Raises RuntimeError."""
        _remove(self.program, [name])
        with self._lock:
            self._alive.discard(name)

    def _no_proxies(self) -> list[str]:
        names = [spelled for name in _PROXIES for spelled in (name, name.lower())]
        options = [part for name in names for part in ("--env", f"{name}=")]
        return [*options, "--http-proxy=false"] if self.is_podman else options

    def _remove_orphans(self) -> None:
        label = f"label={LABEL}"
        labelled = _run([self.program, "ps", "--all", "--quiet", "--no-trunc", "--filter", label], _ANSWER).split()
        _remove(self.program, [name for name in labelled if self._is_orphan(name)])

    def _is_orphan(self, name: str) -> bool:
        template = f'{{{{index .Config.Labels "{LABEL}"}}}}'
        try:
            text = _run([self.program, "container", "inspect", "--format", template, name], _ANSWER)
        except RuntimeError:  # removed in the meantime
            return False
        starter = owner.parse(text.encode())
        return starter is not None and starter.dead


class Container:
    """A running container, in which commands are run one after the other."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime, self.name = runtime, name

    def run(
        self,
        command: str,
        seconds: float,
        *,
        variables: Mapping[str, str] | None = None,
        user: str | None = None,
        workdir: str | None = None,
        kept: int = 8192,
    ) -> Ran:
        """Run a command of bash. One that takes longer, or writes too much, is killed, with all other processes.

        `kept`: bytes of the end of its output. In a container that has ended, the output says so.
        """
        options = [part for name, value in (variables or {}).items() for part in ("--env", f"{name}={value}")]
        options += ["--user", user] if user is not None else []
        options += ["--workdir", workdir] if workdir is not None else []
        # Without podman's warnings, which would be read by the model, and hold the time of day.
        quiet = ["--log-level=error"] if self._runtime.is_podman else []
        line = [self._runtime.program, *quiet, "exec", *options, self.name, "bash", "-c", command]
        process = Process(line, _environment(), Path("/"), bounds=Bounds(kept, None))
        ended = process.wait(seconds)
        if not ended or process.note:
            self._end_commands(process)
        process.kill()
        return Ran.of(process, ended)

    def copy_in(self, folder: Path, place: str) -> None:
        """Copy what is in a folder to a folder of the container, over what is there. Raises RuntimeError."""
        _run([self._runtime.program, "cp", f"{folder}/.", f"{self.name}:{place}"], _START)

    def remove(self) -> None:
        """May be called again."""
        self._runtime.remove(self.name)

    def _end_commands(self, process: Process) -> None:
        """Kill all processes but the first; where that does not help, the container."""
        with contextlib.suppress(RuntimeError):  # of a container that has ended
            _run([self._runtime.program, "kill", "--signal", "USR1", self.name], _ANSWER)
        if not process.wait(_GONE):
            self.remove()


def image_of(folder: Path) -> str:
    """The name of the image that is built from a folder: it depends on the contents of all its files."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        kind = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b"folder"
        content = hashlib.sha256(kind).hexdigest()
        digest.update(f"{path.relative_to(folder)}\0{path.lstat().st_mode}\0{content}\0".encode())
    return f"hone-task:{digest.hexdigest()[:32]}"


@functools.cache
def _own_label() -> str:
    return json.dumps(asdict(owner.myself()))


def _environment() -> dict[str, str]:
    """Hone's, without the proxies, which podman would hand on to containers; their addresses may hold passwords."""
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}


def _remove(program: str, names: Collection[str]) -> None:
    """Remove containers: all at once, which is faster; else one by one, so that each has a message of its own."""
    names = list(names)
    failures: list[str] = []
    if len(names) > 1:
        with contextlib.suppress(RuntimeError):  # below, what stays raises again
            _run([program, "rm", "--force", "--volumes", *names], _START)
            return
    for name in names:
        try:
            _run([program, "rm", "--force", "--volumes", name], _START)
        except RuntimeError as error:
            if "no such container" not in str(error).lower() and "already in progress" not in str(error):
                failures.append(str(error))
    if failures:
        raise RuntimeError("; ".join(failures[:3]))


def _run(command: Sequence[str], seconds: float) -> str:
    """The output of docker or podman. Raises RuntimeError with the end of its output if it fails, or takes longer."""
    what = f"{Path(command[0]).name} {command[1]}"
    building = command[1] in ("build", "pull")
    with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as errors:
        client = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=errors,
            env=None if building else _environment(),
            start_new_session=True,  # a Ctrl-C in the terminal is for hone
        )
        try:
            status = client.wait(seconds)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{what} did not end within {seconds:g} s") from None
        finally:
            if client.returncode is None:  # also where hone is interrupted
                os.killpg(client.pid, signal.SIGKILL)  # podman builds in processes of its own
                client.wait()
        if status:
            message = _end_of(errors, 500) or _end_of(file, 500)
            raise RuntimeError(f"{what} failed: {message}")
        return _end_of(file, 1 << 20)


def _end_of(file: object, most: int) -> str:
    size = file.seek(0, os.SEEK_END)  # type: ignore[attr-defined]
    file.seek(max(0, size - most))  # type: ignore[attr-defined]
    return bytes(file.read()).decode("utf-8", "replace").strip()  # type: ignore[attr-defined]
