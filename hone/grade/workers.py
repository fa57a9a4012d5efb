"""Runs calls that may hang, crash or exhaust memory in processes that can be killed.

    with Workers("hone.tasks.latex:equal", count=2, deadline=5.0) as workers:
        workers.map([("1/2", "0.5"), ("x", "y")])       # [True, False], or a Failure for a call without a result

The target is imported in separate interpreters, started when first needed and not forked from the trainer, so that
they share none of its threads and weights. Every call has a deadline; a call that exceeds it is killed with all its
child processes, and another worker takes its place. A thread, or an alarm in the trainer, cannot do that: code that
holds the interpreter lock is not interrupted. The processes run `hone.grade.child`.

Limits: the target is trusted not to attack us (it has the user's rights). On Linux the memory limit applies to each
process of a call, and counts address space; on macOS it applies to the resident memory of all, checked four times a
second, and a process that left the group and lost its parent is not killed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hone.base.places import locate_target
from hone.base.settings import UserError
from hone.grade import child
from hone.grade.targets import read_target

#: Time limits for importing a target, and for a keeper to exit.
START_SECONDS, STOP_SECONDS = 120.0, 10.0
#: A call during which a worker died is retried once if the worker had answered other calls: they may be the cause.
MAX_TRIES = 2
#: Where RLIMIT_AS has no effect, the keeper polls the memory in use.
WATCH_MEMORY = not sys.platform.startswith("linux")
TAIL = 4096  # bytes of a worker's output that are kept


@dataclass(frozen=True, slots=True)
class Failure:
    """A call without a result; `kind` is a `Verdict` of `hone.types`."""

    kind: Literal["verifier_timeout", "verifier_error"]
    message: str


class Workers:
    """`count` processes that call `target`, which is "package.module:function" or "path/file.py:function".

    deadline: seconds per call. memory_mb: memory of a call beyond the imported target. The first `map` (or `start`)
    starts the processes. Output of the target is not shown, except for its end if the worker dies. A file is read once,
    here: later edits do not affect the run. Raises UserError if the target is malformed or missing.
    """

    def __init__(self, target: str, *, count: int = 2, deadline: float = 5.0, memory_mb: int = 2048) -> None:
        if count < 1 or memory_mb < 1 or not 0 < deadline < float("inf"):
            raise ValueError(f"Workers: count {count}, deadline {deadline}, memory_mb {memory_mb} must be above 0")
        self.target, self.count, self.deadline, self.memory_mb = target, count, deadline, memory_mb
        self._source = read_target(target)
        self._place = locate_target(target)  # files beside it can be imported
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []  # in use, and spares
        self._loaded = False  # the target has been imported successfully
        self._looks: dict[str, Any] | None = None
        self._stop = weakref.finalize(self, _stop, self._workers, os.getpid())  # at exit too

    def start(self) -> None:
        """Import the target in one worker, to detect errors early. Raises UserError."""
        with self._lock:
            self._run(_Calls([], []), ready=1)

    def looks(self) -> dict[str, Any]:
        """`hone.grade.child.looks_of` the target, without importing it here. Raises UserError."""
        if self._looks is None:
            self.close()  # workers report it only when they start
            self._looks = {}
            self.start()
        return self._looks or {}

    def map(self, calls: Sequence[tuple[Any, ...]], keywords: Sequence[Mapping[str, Any]] | None = None) -> list[Any]:
        """target(*call, **keywords) for each call, in order; a `Failure` for a call without a result.

        An `async` target is awaited. Takes at most about ceil(len(calls) / count) * deadline. Arguments and results
        are pickled. Raises UserError if the target cannot be imported.
        """
        with self._lock:
            work = _Calls(calls, keywords or [{}] * len(calls))
            self._run(work, ready=0)
            return work.results

    def close(self) -> None:
        """End all processes. A later `map` starts new ones."""
        with self._lock:
            _stop(self._workers, os.getpid())

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, work: _Calls, ready: int) -> None:
        """Run until all calls have results and `ready` workers have imported the target."""
        broken = 0  # consecutive failed starts
        try:
            while work.unfinished or sum(w.state == "idle" for w in self._workers) < ready:
                self._staff(work, ready)
                self._assign(work)
                self._wait()
                for worker in list(self._workers):
                    for kind, last, number, payload in worker.frames():
                        if kind == child.BROKEN:
                            raise UserError(f"{self.target}: cannot be imported: {payload.decode()}")
                        if kind == child.READY:
                            broken, self._loaded = 0, True
                            pid, looks = pickle.loads(payload)
                            worker.loaded(pid)
                            self._looks = looks or self._looks
                        elif number == worker.number:
                            work.finish(number, kind, payload)
                            worker.answered(last)
                    if worker.state == "starting" and (worker.gone or worker.age() > START_SECONDS):
                        broken += 1
                        self._end(worker)
                        if broken > 2 or not self._loaded:
                            raise UserError(f"{self.target}: {worker.reason('while it was imported', START_SECONDS)}")
                    elif worker.state == "busy" and worker.gone:
                        self._end(worker)
                        work.lost(worker, worker.reason("in this call"))
                    elif worker.state == "busy" and worker.age() > self.deadline:
                        work.late(worker.number, self.deadline)
                        self._end(worker)
                    elif worker.gone or worker.state == "leaving":
                        self._end(worker)
        except BaseException:  # Ctrl-C too: leave no process behind
            _stop(self._workers, os.getpid())
            raise

    def _staff(self, work: _Calls, ready: int) -> None:
        """Start as many workers as the calls need, and a spare for each call that is likely to be killed."""
        late = sum(w.state == "busy" and w.age() > self.deadline / 2 for w in self._workers)
        needed = max(ready, min(self.count, work.unfinished) + min(late, len(work.waiting)))
        while len(self._workers) < needed:
            self._workers.append(_Worker(self._place, self._source, self.memory_mb, look=self._looks == {}))

    def _assign(self, work: _Calls) -> None:
        free = self.count - sum(w.state == "busy" for w in self._workers)
        for worker in [w for w in self._workers if w.state == "idle" and not w.dead()][:free]:
            if (call := work.next()) is not None:
                worker.call(*call)

    def _wait(self) -> None:
        """Wait until a worker sends something, or a time limit is near."""
        ends = {"starting": START_SECONDS, "busy": self.deadline}
        with selectors.DefaultSelector() as selector:
            pause = 1.0
            for worker in self._workers:
                worker.register(selector)
                if worker.state in ends:
                    remaining = ends[worker.state] - worker.age()
                    half = self.deadline / 2 - worker.age() if worker.state == "busy" else remaining
                    pause = min(pause, max(0.0, half if half > 0 else remaining) + 0.001)
            for key, _ in selector.select(pause):
                key.data()

    def _end(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.stop()


class _Calls:
    """The calls of one `map`, and their results."""

    def __init__(self, calls: Sequence[tuple[Any, ...]], keywords: Sequence[Mapping[str, Any]]) -> None:
        self.calls = list(zip(calls, keywords, strict=True))
        self.results: list[Any] = [None] * len(calls)
        self.waiting = deque(range(len(calls)))
        self.unfinished = len(calls)
        self.tries = [0] * len(calls)

    def next(self) -> tuple[int, bytes] | None:
        """(number, pickled arguments) of the next call; None if no call is waiting."""
        while self.waiting:
            number = self.waiting.popleft()
            try:
                payload = pickle.dumps(self.calls[number], protocol=pickle.HIGHEST_PROTOCOL)
            except Exception as error:  # pickling the caller's objects may raise anything
                self._set(number, Failure("verifier_error", f"the arguments cannot be sent: {child.describe(error)}"))
                continue
            self.tries[number] += 1
            return number, payload
        return None

    def finish(self, number: int, kind: int, payload: bytes) -> None:
        if kind == child.ERROR:
            return self._set(number, Failure("verifier_error", payload.decode(errors="replace")))
        try:
            result = pickle.loads(payload)
        except Exception as error:  # for example of a class that cannot be imported here
            result = Failure("verifier_error", f"the result cannot be read: {child.describe(error)}")
        self._set(number, result)

    def late(self, number: int, deadline: float) -> None:
        self._set(number, Failure("verifier_timeout", f"no result within {deadline:g} s"))

    def lost(self, worker: _Worker, message: str) -> None:
        number = worker.number
        if worker.answers and self.tries[number] < MAX_TRIES:
            self.waiting.appendleft(number)
        else:
            self._set(number, Failure("verifier_error", message))

    def _set(self, number: int, result: Any) -> None:
        self.results[number] = result
        self.unfinished -= 1


class _Worker:
    """A keeper and its worker, with two connections: the link to the worker and the lifeline to the keeper."""

    def __init__(self, target: str, source: bytes | None, memory_mb: int, look: bool) -> None:
        self.state: Literal["starting", "idle", "busy", "leaving"] = "starting"
        self.number = -1  # of the current call
        self.answers = 0
        self.gone = False
        self._since = time.monotonic()
        self._pid: int | None = None
        self._inbox, self._outbox, self._output = bytearray(), bytearray(), b""
        self._link, link = socket.socketpair()
        self._lifeline, lifeline = socket.socketpair()
        script = [sys.executable, child.__file__, str(link.fileno()), str(memory_mb if WATCH_MEMORY else 0)]
        with link, lifeline:
            self._process = subprocess.Popen(
                script,
                stdin=lifeline.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[link.fileno()],
                start_new_session=True,  # Ctrl-C in the terminal is for the trainer
            )
        assert self._process.stdout is not None
        self._stdout = self._process.stdout
        for end in (self._link.fileno(), self._lifeline.fileno(), self._stdout.fileno()):
            os.set_blocking(end, False)
        path = [p or os.getcwd() for p in sys.path]
        spec = {"path": path, "target": target, "source": source, "memory_mb": memory_mb, "look": look}
        self._send(child.SPEC, 0, pickle.dumps(spec))

    def age(self) -> float:
        """Seconds since the start of the worker, or of its current call."""
        return time.monotonic() - self._since

    def loaded(self, pid: int) -> None:
        self._pid, self.state = pid, "idle"

    def call(self, number: int, payload: bytes) -> None:
        self.number, self.state, self._since = number, "busy", time.monotonic()
        self._send(child.CALL, number, payload)

    def answered(self, last: bool) -> None:
        self.answers, self.number, self.state = self.answers + 1, -1, "leaving" if last else "idle"

    def _send(self, kind: int, number: int, payload: bytes) -> None:
        self._outbox += child.HEADER.pack(kind, False, number, len(payload)) + payload
        self._write()

    # --- connections: nothing here blocks ---

    def register(self, selector: selectors.BaseSelector) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
        selector.register(self._link, events, self._exchange)
        if not self._stdout.closed:
            selector.register(self._stdout, selectors.EVENT_READ, self._drain)
        selector.register(self._lifeline, selectors.EVENT_READ, self.dead)

    def _exchange(self) -> None:
        self._write()
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while piece := self._link.recv(2**20):
                self._inbox += piece

    def _write(self) -> None:
        # The lifeline shows whether the worker is gone.
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._outbox:
                del self._outbox[: self._link.send(memoryview(self._outbox)[: 2**20])]

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            piece = os.read(self._stdout.fileno(), 2**16)
            self._output = (self._output + piece)[-TAIL:]
            if not piece:
                self._stdout.close()

    def dead(self) -> bool:
        """Whether the keeper and all processes below it have ended. Reads what was sent before."""
        with contextlib.suppress(BlockingIOError):
            self.gone = self.gone or not self._lifeline.recv(1)
        if self.gone:
            self._exchange()
        return self.gone

    def frames(self) -> list[tuple[int, bool, int, bytes]]:
        """Complete messages that have arrived."""
        messages, size = [], child.HEADER.size
        while len(self._inbox) >= size:
            kind, last, number, length = child.HEADER.unpack_from(self._inbox)
            if kind not in (child.READY, child.BROKEN, child.RESULT, child.ERROR) or length > child.MAX_RESULT:
                self.gone = True  # something else wrote to the link
                return []
            if len(self._inbox) < size + length:
                break
            messages.append((kind, last, number, bytes(self._inbox[size : size + length])))
            del self._inbox[: size + length]
        return messages

    # --- the end ---

    def order_end(self) -> None:
        """Tell the keeper to end. `shutdown`, not `close`: a process forked from the trainer may hold the socket."""
        with contextlib.suppress(OSError):  # it has already ended
            self._lifeline.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """End the keeper and everything below it, in bounded time."""
        self.order_end()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_SECONDS)
        if self._process.returncode < 0 and self._pid:  # it was killed before it could clean up
            with contextlib.suppress(OSError):
                os.killpg(self._pid, signal.SIGKILL)
        if not self._stdout.closed:
            self._drain()
            self._stdout.close()
        self._link.close()
        self._lifeline.close()

    def reason(self, when: str, limit: float = 0.0) -> str:
        """The cause of death, after `stop`; `when` it happened; `limit`: the time limit in seconds, if any."""
        code = self._process.returncode
        if code == child.ORDERED:
            what = f"not done within {limit:g} s" if limit else "the worker broke its connection"
        elif code == child.OUT_OF_MEMORY:
            what = "the worker was killed: out of memory"
        elif code > 128 or code < 0:
            what = f"the worker was killed ({_signal_name(code - 128 if code > 0 else -code)})"
        else:
            what = f"the worker ended (exit code {code})"
        output = self._output.decode(errors="replace").strip().splitlines()
        return f"{what} {when}" + (f": {output[0][:200]}" if output else "")


def _stop(workers: list[_Worker], owner: int) -> None:
    """End all workers at once, then wait for each. Does nothing in a fork of the process that started them."""
    if os.getpid() == owner:
        for worker in workers:
            worker.order_end()
        while workers:
            workers.pop().stop()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
