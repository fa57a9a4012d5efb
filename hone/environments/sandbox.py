"""The tool `python`: runs Python code that a model wrote, in a sandbox.

    run_python("print(6 * 7)")          # "42\n"

Every call is a separate process with limits on memory, processor time, files and time, an empty environment and an
empty folder. With bubblewrap (`bwrap`) it sees only the standard library and that folder, which is in memory;
it has no network, and all its processes end with it. Without bubblewrap, Linux namespaces remove the network and end
all processes, if the system permits that to users; files are not protected then. `missing_protections` lists the
protections that are missing, and `hone check` prints them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONGEST_CODE = 100_000  # characters


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one call."""

    seconds: float = 10.0
    memory_mb: int = 512  # of each process
    processes: int = 16
    folder_mb: int = 32  # of the folder with bubblewrap; of each file without
    output: int = 8192  # bytes that are read; more ends the call


#: Sets the limits, then becomes the interpreter of the code. Arguments: memory, seconds, processes, file size in bytes,
#: and whether to make namespaces. The code is the text of standard input.
_START = r"""
import ctypes, os, resource, signal, sys
memory, seconds, processes, size, isolate = map(int, sys.argv[1:])
code = sys.stdin.buffer.read()
if isolate:
    libc = ctypes.CDLL(None, use_errno=True)
    flags = 0x10000000 | 0x40000000 | 0x20000000 | 0x08000000  # user, network, processes, inter-process communication
    if libc.unshare(flags) == 0:
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
        libc.prctl(1, signal.SIGKILL)  # end with the parent: PR_SET_PDEATHSIG
for kind, value in (
    ("AS", memory), ("CPU", seconds), ("NPROC", processes), ("FSIZE", size), ("NOFILE", 64), ("CORE", 0),
):
    kind = getattr(resource, "RLIMIT_" + kind)
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    try:
        resource.setrlimit(kind, (value, value))
    except (ValueError, OSError):  # macOS knows no limit of the address space
        pass
read, write = os.pipe()
if os.fork() == 0:  # feeds the code, which may be longer than a pipe holds
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        try:
            pipe.write(code)
        except BrokenPipeError:
            pass
    os._exit(0)
os.close(write)
os.dup2(read, 0)
os.execv(sys.executable, [sys.executable, "-I", "-B", "-"])
"""


ROOT = "processes: you are root, whose processes no limit counts (run as another user)"


def python(code: str) -> str:
    """Run Python code and return what it prints. Only the standard library is there, no network and no files.

    Args:
        code: The program; print the results.
    """
    return run_python(code)


def run_python(code: str, limits: Limits | None = None) -> str:
    """The output of the code, errors included, and the reason if it was ended."""
    limits = limits or Limits()
    if len(code) > LONGEST_CODE:
        return f"Error: the code has {len(code)} characters, at most {LONGEST_CODE} are run"
    with tempfile.TemporaryDirectory(prefix="hone-python-", ignore_cleanup_errors=True) as folder:
        return _run(_command(folder, limits), code, folder, limits)


def missing_protections() -> list[str]:
    """The protections that are missing on this machine; empty with bubblewrap for a user other than root."""
    if has_bubblewrap():
        return [ROOT] if os.geteuid() == 0 else []
    missing = ["files: it can read and write what you can (install bubblewrap)"]
    if not _has_namespaces():
        missing += [
            "network: it can open connections (install bubblewrap)",
            "processes: one that leaves its group may outlive the call (install bubblewrap)",
        ]
    if os.geteuid() == 0:
        missing.append(ROOT)
    if not sys.platform.startswith("linux"):
        missing.append("memory: the system has no limit on the address space")
    return missing


def _run(command: list[str], code: str, folder: str, limits: Limits) -> str:
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": folder},
        start_new_session=True,
        close_fds=True,
    )
    late = threading.Event()

    def end() -> None:
        late.set()
        _kill(process)

    clock = threading.Timer(limits.seconds, end)
    clock.start()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(code.encode("utf-8", "replace"))
        output = process.stdout.read(limits.output + 1)
    finally:
        clock.cancel()
        _kill(process)
        process.stdout.close()
    status = process.wait()
    text = output[: limits.output].decode("utf-8", "replace")
    if late.is_set():
        return f"{text}\nError: ended after {limits.seconds:g} s"
    if len(output) > limits.output:
        return f"{text}\nError: ended after {limits.output} bytes of output"
    ended_by = -status if status < 0 else status - 128 if status > 128 else 0
    if ended_by and not (ended_by == signal.SIGKILL and text):
        return f"{text}\nError: ended by signal {ended_by}"
    return text


def _kill(process: subprocess.Popen[Any]) -> None:
    """Kill the process and its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _command(folder: str, limits: Limits, bubblewrap: bool | None = None) -> list[str]:
    wrapped = has_bubblewrap() if bubblewrap is None else bubblewrap
    isolate = not wrapped and sys.platform.startswith("linux")
    numbers = (limits.memory_mb << 20, int(limits.seconds) + 1, limits.processes, limits.folder_mb << 20, int(isolate))
    start = [interpreter(), "-I", "-S", "-c", _START, *map(str, numbers)]
    return [*_wrapping(limits), *start] if wrapped else start


def _wrapping(limits: Limits) -> list[str]:
    """bubblewrap with nothing but the interpreter, its libraries, and a folder in memory."""
    binds = system_binds()
    packages = Path(sysconfig.get_path("purelib", "posix_prefix", {"base": sys.base_prefix}))
    if packages.is_dir():
        binds += ["--size", "65536", "--tmpfs", str(packages)]  # the standard library only
    memory = ["--size", str(limits.folder_mb << 20), "--tmpfs", "/work", "--size", "65536", "--tmpfs", "/tmp"]
    return [
        shutil.which("bwrap") or "bwrap",
        *("--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"),
        *binds,
        *("--proc", "/proc", "--dev", "/dev", *memory, "--remount-ro", "/"),
        *("--chdir", "/work", "--setenv", "HOME", "/work", "--"),
    ]


def system_binds() -> list[str]:
    """Arguments of bubblewrap: hone's interpreter without its virtual environment, and the system, to read."""
    seen = [place for place in (sys.base_prefix, sysconfig.get_path("stdlib"), "/usr", "/etc/ld.so.cache") if place]
    binds = [part for place in dict.fromkeys(seen) for part in ("--ro-bind-try", place, place)]
    for name in ("bin", "lib", "lib32", "lib64", "sbin"):
        path = Path("/", name)
        if path.is_symlink():
            binds += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            binds += ["--ro-bind", str(path), str(path)]
    return binds


def interpreter() -> str:
    """The interpreter outside of any virtual environment, so that its folder is all it needs."""
    return str(Path(getattr(sys, "_base_executable", None) or sys.executable).resolve())


@functools.cache
def has_bubblewrap() -> bool:
    """Whether bubblewrap is installed and may be used."""
    return shutil.which("bwrap") is not None and _works(bubblewrap=True)


@functools.cache
def _has_namespaces() -> bool:
    """Whether a user may make namespaces: then the code's first process has the number 1 there."""
    return sys.platform.startswith("linux") and _works(bubblewrap=False, code="import os; print(os.getpid() == 1)")


def _works(bubblewrap: bool, code: str = "print(True)") -> bool:
    limits = Limits()
    with tempfile.TemporaryDirectory(prefix="hone-python-") as folder:
        try:
            return _run(_command(folder, limits, bubblewrap), code, folder, limits) == "True\n"
        except OSError:  # the program cannot be started
            return False
