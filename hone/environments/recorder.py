"""The server that agent programs call in place of OpenAI's: a call waits until the policy has answered it.

    recorder = Recorder()
    line = recorder.enter()                   # one rollout; its program gets line.url and line.key
    call = line.next(seconds=30)              # a ModelCall; None: `line.hang_up` was called
    line.answer({"role": "assistant", "content": "4", "finish": "stop", "tokens": (12, 2)})
    recorder.leave(line)

It listens on loopback and on a socket file, from the first line to the last. A request without the key of a line is
refused. What is read from a request: `hone.environments.chat`.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.base.settings import UserError
from hone.base.web import ApiError, listen, settings
from hone.environments.base import Message, ModelCall
from hone.environments.chat import completion, events, read_call

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

HOST = "127.0.0.1"
MOST_WAITING = 256  # calls of one program that wait at the same time
_POLL = 0.5  # seconds between two checks whether a client is still connected
_START = 20.0  # seconds for the server to begin


@dataclass(eq=False)
class _Waiting:
    """A call whose answer is not there yet."""

    call: ModelCall
    answer: Future[Message] = field(default_factory=Future)


class Line:
    """The calls of one program. `next` and `answer` belong to the environment, the rest to the server."""

    def __init__(self, url: str, socket: Path) -> None:
        self.url, self.socket, self.key = url, socket, f"hone-{secrets.token_urlsafe(24)}"
        self._calls: deque[_Waiting] = deque()  # not yet taken by `next`
        self._taken: _Waiting | None = None
        self._refusal: ApiError | None = None
        self._hung_up = False
        self._changed = threading.Condition()

    def next(self, seconds: float) -> ModelCall | None:
        """The next call, in the order of arrival; None after `hang_up`. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._calls or self._hung_up, seconds):
                raise TimeoutError(f"the program neither called the model nor ended within {seconds:g} s")
            if not self._calls:
                return None
            self._taken = self._calls.popleft()
            return self._taken.call

    def answer(self, message: Message) -> None:
        """Answer the call that `next` returned last, with a message as `chat.answer_message` makes it."""
        assert self._taken is not None, "there is no call to answer"
        waiting, self._taken = self._taken, None
        waiting.answer.set_result(message)

    def refuse(self, why: str, code: str) -> None:
        """Answer the call at hand, and all that follow, with an error that clients do not retry."""
        error = ApiError(why, 400, code=code)
        with self._changed:
            self._refusal = error
            waiting = [*([self._taken] if self._taken else []), *self._calls]
            self._taken = None
            self._calls.clear()
        for one in waiting:
            one.answer.set_exception(error)

    def hang_up(self) -> None:
        """The program has ended: what it still waits for is not sampled."""
        with self._changed:
            self._hung_up = True
            self._calls.clear()
            self._changed.notify_all()

    def wait(self, call: ModelCall) -> _Waiting:
        """Add a call. Raises ApiError where calls are refused."""
        with self._changed:
            if self._refusal is not None:
                raise self._refusal
            if len(self._calls) >= MOST_WAITING:
                raise ApiError(f"{MOST_WAITING} calls of this program wait already", 429)
            waiting = _Waiting(call)
            waiting.answer.set_running_or_notify_cancel()  # an answer is set even where its client has gone
            self._calls.append(waiting)
            self._changed.notify_all()
            return waiting

    def withdraw(self, waiting: _Waiting) -> None:
        """The client has gone: forget its call, unless it is being answered."""
        with self._changed:
            if waiting in self._calls:
                self._calls.remove(waiting)


class Recorder:
    """Runs the server while there are lines."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}
        self._lock = threading.Lock()
        self._running: _Running | None = None

    def enter(self) -> Line:
        """A new line; the first one starts the server."""
        with self._lock:
            if self._running is None:
                self._running = _Running(self._app())
            line = Line(self._running.url, self._running.socket)
            self._lines[line.key] = line
            return line

    def leave(self, line: Line) -> None:
        """End a line; the last one stops the server."""
        line.refuse("this rollout has ended", "rollout_ended")
        with self._lock:
            if self._lines.pop(line.key, None) is None or self._lines or self._running is None:
                return
            running, self._running = self._running, None
        running.stop()

    # --- in the server's thread ---

    def _app(self) -> Starlette:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        from hone.base.guard import Guard, allowed_hosts

        async def failed(_: Request, error: Any) -> Response:
            return JSONResponse(error.body, error.status)

        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
            ],
            middleware=[Middleware(Guard, hosts=allowed_hosts(HOST))],
            exception_handlers={ApiError: failed},
        )

    async def _models(self, http: Request) -> Response:
        from starlette.responses import JSONResponse

        self._line(http.headers)
        return JSONResponse({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "hone"}]})

    async def _chat(self, http: Request) -> Response:
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import JSONResponse, Response

        line = self._line(http.headers)
        call, model, stream = await run_in_threadpool(read_call, await http.body())
        waiting = line.wait(call)
        answer = asyncio.wrap_future(waiting.answer)
        while not (await asyncio.wait({answer}, timeout=_POLL))[0]:
            if await http.is_disconnected():
                line.withdraw(waiting)
                return Response(status_code=499)
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        message = await answer
        if stream:
            return Response(events(head, message), media_type="text/event-stream")
        return JSONResponse(completion(head, message))

    def _line(self, headers: Mapping[str, str]) -> Line:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        line = self._lines.get(key.strip()) if scheme.lower() == "bearer" else None
        if line is None:
            raise ApiError("the key is of no rollout that is being played", 401, code="invalid_api_key")
        return line


class _Running:
    """uvicorn in a thread, on a port of loopback and on a socket file in a folder of its own."""

    def __init__(self, app: Starlette) -> None:
        import socket

        import uvicorn

        self._folder = tempfile.TemporaryDirectory(prefix="hone-calls-")  # mode 0700
        self.socket = Path(self._folder.name, "http")
        local = socket.socket(socket.AF_UNIX)
        local.bind(str(self.socket))
        port = listen(HOST, 0)
        self.url = f"http://{HOST}:{port.getsockname()[1]}/v1"
        self._sockets = [port, local]
        self._server: uvicorn.Server = uvicorn.Server(settings(app))
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": self._sockets}, name="hone recorder", daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + _START
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise UserError("environment: the server for programs did not start; see the messages above")
            time.sleep(0.005)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(_START)
        for one in self._sockets:
            one.close()
        self._folder.cleanup()
