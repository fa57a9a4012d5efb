"""What runs beside the trainer: a keeper and, below it, the worker that calls the target.

    trainer ── keeper ── worker ── whatever the target starts

`Workers` starts this file as a script. The keeper imports nothing of the target's, so that it always answers: it ends
when the worker ends, or when its lifeline (standard input) does, which also happens if the trainer is killed; and when
it ends, nothing below it is left. The worker leads a process group of its own, which is killed as a whole. On Linux
what left the group is found too, since orphans below a keeper become its children; elsewhere only while its parent
lives. Only the standard library is imported here, so that a worker starts quickly and holds nothing but its target.

Messages in both directions are a header (kind, last, number of the call, bytes that follow) and bytes.
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
#: Most bytes of a pickled result.
MAX_RESULT = 16 * 2**20
#: Exit codes of the keeper: the worker's own, 128 + the signal that killed it, or one of these.
OUT_OF_MEMORY, ORDERED = 126, 127
WATCH_SECONDS = 0.25
KILL_SECONDS = 5.0


# --- the target ------------------------------------------------------------------------------------------------------


def is_path(place: str) -> bool:
    """Whether the part of a target before the colon is a file, not a module."""
    return place.endswith(".py") or "/" in place


def load_target(target: str, source: bytes | None) -> Callable[..., Any]:
    """The function of `path/file.py:function` (given its source) or `package.module:function`.

    Files beside it can be imported; for a module also what lies in the current folder. Installed packages come first.
    Raises whatever importing raises; LookupError and TypeError if there is no such function.
    """
    place, _, name = target.rpartition(":")
    if is_path(place):
        file = os.path.abspath(os.path.expanduser(place))
        folder = os.path.dirname(file)
        name_of_module = os.path.basename(place)  # with its .py: it hides no module that can be imported
        while name_of_module in sys.modules:
            name_of_module += "_"
        # Dataclasses look their own module up there.
        module = sys.modules[name_of_module] = types.ModuleType(name_of_module)
        module.__file__ = file
    else:
        folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    if is_path(place):
        # The source as it was read at the start, not the file: edited during a run, it would change the run.
        exec(compile(source or b"", file, "exec"), module.__dict__)
    else:
        module = importlib.import_module(place)
    function: Any = module
    for part in name.split("."):
        try:
            function = getattr(function, part)
        except AttributeError:
            there = ", ".join(sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_")))
            raise LookupError(f"no function {name!r} in {place}; there are {there or 'none'}") from None
    if not callable(function):
        raise TypeError(f"{target} is {type(function).__name__}, not a function")
    return function


def looks_of(function: Callable[..., Any]) -> dict[str, Any]:
    """What a caller has to know: `parameters` as (name, kind, required, annotation), and the `source`, if it is there.

    Plain data, so that a target in a worker need not be imported by the trainer.
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
    """The source of a function, and of the functions of its module that it names: what it does may be in a helper."""
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
    """Names that code mentions, those in comprehensions and inner functions too."""
    inner = [_names(constant) for constant in getattr(code, "co_consts", ()) if isinstance(constant, types.CodeType)]
    return dict.fromkeys([*getattr(code, "co_names", ()), *(name for names in inner for name in names)])


def finished(result: Any) -> Any:
    """The result; of an `async` function, what it comes to."""
    if hasattr(result, "__await__"):
        import asyncio

        async def wait() -> Any:
            return await result

        return asyncio.run(wait())
    return result


def describe(error: BaseException) -> str:
    """The last line of the traceback and where it was raised; one line of at most 500 characters."""
    text = " ".join(traceback.format_exception_only(type(error), error)[-1].split())
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return text[:400] + place[:100]


# --- worker ----------------------------------------------------------------------------------------------------------


def serve(link: socket.socket) -> None:
    """Load the target, then answer calls until the link is closed."""
    faulthandler.enable()  # a crash leaves its stack on standard error, which the trainer keeps the end of
    spec = pickle.loads(_receive(link)[1])
    sys.path[:] = spec["path"]
    try:
        function = load_target(spec["target"], spec["source"])
    except BaseException as error:  # of user code, SystemExit too; the trainer raises it
        return _send(link, BROKEN, True, 0, describe(error).encode())
    limit_memory(spec["memory_mb"])
    me, helpers = os.getpid(), has_children()  # some packages start helpers of their own when they are imported
    _send(link, READY, False, 0, pickle.dumps((me, spec["look"] and looks_of(function))))
    while True:
        number, payload = _receive(link)
        try:
            arguments, keywords = pickle.loads(payload)
            kind, answer, last = RESULT, _encoded(finished(function(*arguments, **keywords))), False
        except MemoryError as error:  # what is left of it would fail the calls to come
            kind, answer, last = ERROR, describe(error).encode(), True
        except BaseException as error:  # of user code, SystemExit too: it is the answer
            kind, answer, last = ERROR, describe(error).encode(), False
        if os.getpid() != me:  # the target forked and came back twice; the trainer talks to one of them
            os._exit(0)
        _send(link, kind, last or (not helpers and has_children()), number, answer)


def _encoded(result: Any) -> bytes:
    data = pickle.dumps(result, protocol=pickle.HIGHEST_PROTOCOL)
    if len(data) > MAX_RESULT:
        raise ValueError(f"the result has {len(data) / 2**20:.0f} MB; at most {MAX_RESULT // 2**20} MB are allowed")
    return data


def limit_memory(megabytes: int) -> None:
    """At most so much address space beyond what is in use now. Linux only; see `keep` for other systems."""
    if not sys.platform.startswith("linux"):
        return
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def has_children() -> bool:
    """Whether a process started here still runs; collects those that have ended."""
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
    """Start the worker and stay until it or the trainer is gone; returns the exit code. `watched_mb`: see `keep`."""
    wake, waker = socket.socketpair()
    for end in (wake, waker):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler must be there for the wake-up to be written
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
    """Wait for the end of the worker or of the lifeline. `watched_mb`: most resident memory of all below this process,
    for systems on which RLIMIT_AS does nothing (macOS); 0: not looked at."""
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
    """Kill the worker's group and everything else below this process, and collect it: no zombie is left."""
    if not sys.platform.startswith("linux"):
        _kill_all()  # before their parent dies: then they are nobody's here
    _kill(worker)
    _kill(-worker)
    end = time.monotonic() + KILL_SECONDS
    pause = 0.001
    while has_children() and time.monotonic() < end:
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
        if pause > 0.01:  # the group would be gone by now: some process has left it
            _kill_all()


def _kill_all() -> None:
    import psutil  # not at the top: most workers end without

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
    """Linux: orphans among the descendants become children of this process (PR_SET_CHILD_SUBREAPER, prctl(2))."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])))
