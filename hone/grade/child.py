"""The processes beside the trainer: a keeper and, below it, the worker that calls the target.

    trainer ── keeper ── worker ── processes of the target

`Workers` starts this file as a script. The keeper does not import the target, so that it always responds: it ends when
the worker ends, or when its lifeline (standard input) closes, which also happens if the trainer is killed; when it
ends, it kills everything below it. The worker leads its own process group, which is killed as a whole. On Linux,
processes that left the group are killed too, since orphans below a keeper become its children; elsewhere only while
their parent lives. Only the standard library is imported here, so that a worker starts fast and holds only its target.

A message, in both directions, is a header (kind, last, number of the call, length) and a payload.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
import types
from collections.abc import Callable
from typing import Any

HEADER = struct.Struct("!B?IQ")
SPEC, CALL, READY, BROKEN, RESULT, ERROR = range(6)
#: Limit of a pickled result, in bytes.
MAX_RESULT = 16 * 2**20
#: Exit codes of the keeper: the worker's own, 128 + the signal that killed it, or one of these.
OUT_OF_MEMORY, ORDERED = 126, 127
WATCH_SECONDS = 0.25
KILL_SECONDS = 5.0


# --- the target ------------------------------------------------------------------------------------------------------


class NoFunction(LookupError):
    """The target's file or module has no such function."""


def is_path(place: str) -> bool:
    """Whether the part of a target before the colon is a file, not a module."""
    return place.endswith(".py") or "/" in place


def load_target(target: str, source: bytes | None) -> Callable[..., Any]:
    """The function of `path/file.py:function` (given its source) or `package.module:function`.

    Files in its folder can be imported; for a module, those in the current folder. Installed packages take precedence.
    Raises what importing raises; LookupError for a missing name, TypeError if it is not a function.
    """
    place, _, name = target.rpartition(":")
    if is_path(place):
        file = os.path.abspath(os.path.expanduser(place))
        folder = os.path.dirname(file)
        name_of_module = os.path.basename(place)  # with .py, so that it cannot hide an importable module
        while name_of_module in sys.modules:
            name_of_module += "_"
        # Dataclasses look up their module there.
        module = sys.modules[name_of_module] = types.ModuleType(name_of_module)
        module.__file__ = file
    else:
        folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    if is_path(place):
        # The source as read at the start, not the file: an edit during the run must not change the run.
        exec(compile(source or b"", file, "exec"), module.__dict__)
    else:
        module = importlib.import_module(place)
    function: Any = module
    for part in name.split("."):
        try:
            function = getattr(function, part)
        except AttributeError:
            there = ", ".join(sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_")))
            raise NoFunction(f"no function {name!r} in {place}; there are {there or 'none'}") from None
    if not callable(function):
        raise TypeError(f"{target} is {type(function).__name__}, not a function")
    return function


def looks_of(function: Callable[..., Any]) -> dict[str, Any]:
    """`parameters` as (name, kind, required, annotation), and the `source`, if available.

    Plain data, so that the trainer need not import a target that runs in a worker.
    """
    import inspect  # not at the top: slow to import, and needed once

    try:
        declared = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        declared = {}.values()
    empty = inspect.Parameter.empty
    parameters = [
        (p.name, p.kind.name, p.default is empty, "" if p.annotation is empty else str(p.annotation)) for p in declared
    ]
    return {"parameters": parameters, "source": "\n".join(_sources(inspect.unwrap(function), set()))}


def _sources(function: Any, seen: set[str]) -> list[str]:
    """The source of a function, and of the helpers in its module that it uses."""
    import inspect

    try:
        own = inspect.getsource(function)
    except (OSError, TypeError):
        return []
    there = getattr(function, "__globals__", {})
    named = [there.get(name) for name in _names(getattr(function, "__code__", None)) if name not in seen]
    helpers = [f for f in named if inspect.isfunction(f) and f.__module__ == getattr(function, "__module__", None)]
    seen.update(f.__name__ for f in helpers)
    return [own, *(text for helper in helpers for text in _sources(helper, seen))]


def _names(code: Any) -> dict[str, None]:
    """Names that code uses, including comprehensions and inner functions."""
    inner = [_names(constant) for constant in getattr(code, "co_consts", ()) if isinstance(constant, types.CodeType)]
    return dict.fromkeys([*getattr(code, "co_names", ()), *(name for names in inner for name in names)])


def finished(result: Any) -> Any:
    """The result, awaited if the function is `async`."""
    if hasattr(result, "__await__"):
        import asyncio

        async def wait() -> Any:
            return await result

        return asyncio.run(wait())
    return result


def describe(error: BaseException) -> str:
    """The exception and where it was raised, in one line of at most 500 characters."""
    if isinstance(error, NoFunction):
        return str(error)[:400]  # the user's file is at fault, not a line of ours
    text = " ".join(traceback.format_exception_only(type(error), error)[-1].split())
    if isinstance(error, SyntaxError) and error.filename:  # the last frame is that of the compiler's caller
        return f"{text[:400]} ({os.path.basename(error.filename)}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return text[:400] + place[:100]


# --- worker ----------------------------------------------------------------------------------------------------------


def serve(link: socket.socket) -> None:
    """Load the target, then answer calls until the link is closed."""
    faulthandler.enable()  # prints the stack of a crash to standard error; the trainer keeps its end
    spec = pickle.loads(_receive(link)[1])
    sys.path[:] = spec["path"]
    try:
        function = load_target(spec["target"], spec["source"])
    except BaseException as error:  # from user code, SystemExit too; the trainer raises it
        return _send(link, BROKEN, True, 0, describe(error).encode())
    limit_memory(spec["memory_mb"])
    me, helpers = os.getpid(), has_children()  # some packages start helper processes on import
    _send(link, READY, False, 0, pickle.dumps((me, spec["look"] and looks_of(function))))
    while True:
        number, payload = _receive(link)
        try:
            arguments, keywords = pickle.loads(payload)
            kind, answer, last = RESULT, _encoded(finished(function(*arguments, **keywords))), False
        except MemoryError as error:  # what remains in memory would make later calls fail
            kind, answer, last = ERROR, describe(error).encode(), True
        except BaseException as error:  # from user code, SystemExit too: it is the answer
            kind, answer, last = ERROR, describe(error).encode(), False
        if os.getpid() != me:  # the target forked and returned twice; the trainer talks to the parent only
            os._exit(0)
        _send(link, kind, last or (not helpers and has_children()), number, answer)


def _encoded(result: Any) -> bytes:
    data = pickle.dumps(result, protocol=pickle.HIGHEST_PROTOCOL)
    if len(data) > MAX_RESULT:
        raise ValueError(f"the result has {len(data) / 2**20:.0f} MB; at most {MAX_RESULT // 2**20} MB are allowed")
    return data


def limit_memory(megabytes: int) -> None:
    """Limit the address space to `megabytes` more than now. Linux only; see `keep` for other systems."""
    if not sys.platform.startswith("linux"):
        return
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def has_children() -> bool:
    """Whether a child process still runs; reaps those that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _send(link: socket.socket, kind: int, last: bool, number: int, payload: bytes) -> None:
    link.sendall(HEADER.pack(kind, last, number, len(payload)) + payload)


def _receive(link: socket.socket) -> tuple[int, bytes]:
    _, _, number, size = HEADER.unpack(_exactly(link, HEADER.size))
    return number, _exactly(link, size)


def _exactly(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = link.recv(min(size - len(data), 2**20))
        if not piece:
            os._exit(0)  # the trainer is done with this worker
        data += piece
    return bytes(data)


# --- keeper ----------------------------------------------------------------------------------------------------------


def main(link: socket.socket, watched_mb: int) -> int:
    """Start the worker and wait until it or the trainer ends; returns the exit code. `watched_mb`: see `keep`."""
    wake, waker = socket.socketpair()
    for end in (wake, waker):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # the wake-up fd is written only if there is a handler
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    stops = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for number in stops:
        signal.signal(number, signal.SIG_IGN)  # the trainer decides, through the lifeline
    adopt_orphans()
    worker = os.fork()
    if worker:
        link.close()
        return keep(worker, wake, watched_mb)
    try:
        signal.set_wakeup_fd(-1)
        for number in (*stops, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        adopt_orphans()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        wake.close()
        waker.close()
        serve(link)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def keep(worker: int, wake: socket.socket, watched_mb: int) -> int:
    """Wait until the worker or the lifeline ends. `watched_mb`: limit of the resident memory of all descendants, for
    systems on which RLIMIT_AS has no effect (macOS); 0: no limit."""
    code = None
    while code is None:
        ready = select.select([0, wake.fileno()], [], [], WATCH_SECONDS if watched_mb else None)[0]
        if wake.fileno() in ready:
            wake.recv(4096)
        pid, status = os.waitpid(worker, os.WNOHANG)
        if pid:
            code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        elif 0 in ready:
            code = ORDERED
        elif watched_mb and resident_mb() > watched_mb:
            code = OUT_OF_MEMORY
    kill_below(worker)
    return code


def kill_below(worker: int) -> None:
    """Kill the worker's group and all other descendants, and reap them: no zombie remains."""
    if not sys.platform.startswith("linux"):
        _kill_all()  # before their parent dies: orphans are not found
    _kill(worker)
    _kill(-worker)
    end = time.monotonic() + KILL_SECONDS
    pause = 0.001
    while has_children() and time.monotonic() < end:
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
        if pause > 0.01:  # the group would have ended by now: some process has left it
            _kill_all()


def _kill_all() -> None:
    import psutil  # not at the top: most workers do not need it

    for process in psutil.Process().children(recursive=True):
        _kill(process.pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already; macOS: EPERM of a group of zombies
        os.kill(pid, signal.SIGKILL)


def resident_mb() -> float:
    import psutil

    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            total += process.memory_info().rss
        except psutil.Error:  # gone already, or a zombie
            continue
    return total / 2**20


def adopt_orphans() -> None:
    """Linux: orphaned descendants become children of this process (PR_SET_CHILD_SUBREAPER, prctl(2))."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])))
