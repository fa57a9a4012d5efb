"""JSON over HTTP: hone's only client, for judges, teachers, hosted models and generation servers.

    http = Http("https://api.openai.com/v1", key_env="OPENAI_API_KEY")
    models = http.get("/models", seconds=10, what="the list of models")
    reply = http.retrying(lambda: http.post("/chat/completions", body, seconds=60, what="the answer"), tries=6)

For every request:
- It goes only to the configured origin. Redirects are never followed: they would send the key and the body elsewhere.
- `seconds` limits its total time, from DNS lookup to the last byte, however slowly the server responds.
- Responses are read up to `most` bytes. Compressed ones are refused, since their size is unknown until unpacked.
- `RETRIED`, `may_pass` and `retrying` are hone's only retry rule.
- A server's text is shown truncated, without the key and without control characters.

Requests run in an event loop in a daemon thread, where any wait can be cancelled. Callers are ordinary functions in any
number of threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import json
import math
import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from hone.base.settings import UserError
from hone.base.visible import visible, well_formed

T = TypeVar("T")

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOST = 16 << 20  # bytes of a response
MOST_OF_AN_ERROR = 64 << 10  # bytes read of an error response
SHOWN = 600  # characters shown of a server's message
#: HTTP statuses that are retried.
RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0  # seconds between tries; Retry-After is honoured up to the longest


class ServerError(UserError):
    """A request to a server failed."""


class ServerLost(ServerError):
    """The connection was refused or lost."""


class ServerHangs(ServerError):
    """No complete response within the time limit."""


class AnswerTooLarge(ServerError):
    """The response exceeds the size limit."""


class Unreadable(ServerError):
    """The response is not of the expected form; a retry may be."""


class ServerRefused(ServerError):
    """The server responded with an error status or a redirect."""

    def __init__(self, status: int, message: str, what: str) -> None:
        super().__init__(f"{what}: the server answered {status}: {message}")
        self.status, self.message, self.what = status, message, what

    def __reduce__(self) -> Any:  # it is passed between processes
        return ServerRefused, (self.status, self.message, self.what)


def may_pass(error: Exception) -> bool:
    """Whether a retry can succeed."""
    if isinstance(error, ServerRefused):
        return error.status in RETRIED
    return isinstance(error, (ServerLost, ServerHangs, Unreadable))


def backoff(tries: int) -> float:
    """Seconds to wait after this many tries: exponential, with jitter so that clients do not all retry at once."""
    return random.uniform(0.5, 1.0) * min(LONGEST_PAUSE, FIRST_PAUSE * 2.0**tries)


class Http:
    """A client for one server. Connections are not kept alive: they are few, long, and made from many threads.

    `key_env`: the environment variable that holds the key, read for each request; without it no key is sent.
    `most`: maximum bytes of a response. `proxies`: use the environment's proxies for other machines.

    Raises UserError for an invalid address, or if the key would be sent unencrypted.
    """

    def __init__(self, url: str, *, key_env: str | None = None, most: int = MOST, proxies: bool = False) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise UserError(f"{visible(url)!r} is not an address; give one such as http://127.0.0.1:8000") from None
        if parts.username or parts.password or parts.query or parts.fragment:
            raise UserError(
                f"{parts.hostname}: no key or password in the URL, nor ?query or #part; give the address only"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise UserError(f"{visible(url)!r} is not an address; give one such as http://127.0.0.1:8000")
        self.url, self._key_env, self._most = url.rstrip("/"), key_env, most
        self._tls = parts.scheme == "https"
        if self.key and not self._tls and parts.hostname not in LOOPBACK:
            raise UserError(f"{self.url}: {key_env} would travel unencrypted; use https, or unset it if none is needed")
        self._proxies = proxies and parts.hostname not in LOOPBACK
        self._open: set[concurrent.futures.Future[Any]] = set()
        self._hung_up = threading.Event()
        self._held_until = 0.0  # of the monotonic clock

    @property
    def key(self) -> str:
        return os.environ.get(self._key_env, "") if self._key_env else ""

    def hang_up(self) -> None:
        """End all requests in progress, and pauses between tries, with ServerLost."""
        before, self._hung_up = self._hung_up, threading.Event()
        before.set()
        for future in list(self._open):
            future.cancel()

    def get(self, path: str, *, seconds: float, what: str) -> Any:
        return self.ask("GET", path, None, seconds=seconds, what=what)

    def post(self, path: str, body: Any = None, *, seconds: float, what: str) -> Any:
        return self.ask("POST", path, body, seconds=seconds, what=what)

    def ask(self, method: str, path: str, body: Any, *, seconds: float, what: str) -> Any:
        """The decoded response; text if it is not JSON, None if it is empty. `what` names the request in errors.

        Raises ServerLost, ServerHangs, ServerRefused or AnswerTooLarge.
        """
        import httpx  # imported here to keep the command line fast

        place, key = f"{self.url}{path}", self.key
        headers = {"Accept-Encoding": "identity"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            headers["Content-Type"] = "application/json"
        verify = _tls_context() if self._tls else False
        options = {"verify": verify, "trust_env": self._proxies, "timeout": None}
        exchange = asyncio.wait_for(self._exchange(options, method, place, headers, data), seconds)
        future = asyncio.run_coroutine_threadsafe(exchange, _loop())
        self._open.add(future)
        try:
            status, answer_headers, content = future.result()
        except (TimeoutError, asyncio.TimeoutError, concurrent.futures.TimeoutError, httpx.TimeoutException) as error:
            raise ServerHangs(f"{what}: no answer from {place} within {seconds:g} s") from error
        except concurrent.futures.CancelledError as error:
            raise ServerLost(f"{what}: the connection to {place} was given up") from error
        except (OSError, httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # refused, reset, cut off, not HTTP
            raise ServerLost(f"{what}: the connection to {place} is lost ({clean(_reason(error), key)})") from error
        except AnswerTooLarge as error:
            raise AnswerTooLarge(f"{what}: {error} at {place}") from None
        finally:
            self._open.discard(future)
            future.cancel()  # after an interrupt it would go on running
        return self._outcome(status, answer_headers, content, what, key)

    def retrying(self, ask: Callable[[], T], tries: int, on_retry: Callable[[], object] = lambda: None) -> T:
        """The result of `ask` within at most `tries` tries; `ask` may raise Unreadable to reject a response.

        `on_retry` is called before each retry. Raises the error of the last try, or one that `may_pass` excludes.
        """
        hung_up = self._hung_up
        for done in range(1, tries + 1):
            self._pause(self._held_until - time.monotonic(), hung_up)  # a Retry-After applies to all threads
            try:
                return ask()
            except ServerError as error:
                if not may_pass(error) or done == tries:
                    raise
            on_retry()
            self._pause(backoff(done), hung_up)
        raise ValueError(f"tries is {tries}: at least one is needed")

    def pause(self, tries: int) -> None:
        """Wait after this many tries. Raises ServerLost if `hang_up` is called meanwhile."""
        self._pause(max(backoff(tries), self._held_until - time.monotonic()), self._hung_up)

    def _pause(self, seconds: float, hung_up: threading.Event) -> None:
        if hung_up.wait(seconds) if seconds > 0 else hung_up.is_set():
            raise ServerLost(f"{self.url} was given up")

    async def _exchange(
        self, options: dict[str, Any], method: str, place: str, headers: dict[str, str], data: bytes | None
    ) -> tuple[int, Any, bytes]:
        import httpx

        async with (
            httpx.AsyncClient(**options) as client,
            client.stream(method, place, content=data, headers=headers, follow_redirects=False) as answer,
        ):
            wrong = answer.status_code >= 300
            if not wrong and answer.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise ValueError("the answer is compressed, which was not asked for")
            chunks, size = [], 0
            async for chunk in answer.aiter_raw():
                size += len(chunk)
                if wrong and size > MOST_OF_AN_ERROR:
                    break
                if size > self._most:
                    raise AnswerTooLarge(f"the answer has more than {self._most} bytes")
                chunks.append(chunk)
            return answer.status_code, answer.headers, b"".join(chunks)

    def _outcome(self, status: int, headers: Any, content: bytes, what: str, key: str) -> Any:
        answer = _decode(content)
        if status < 300:
            return answer
        if status < 400:
            target = clean(str(headers.get("Location", "nowhere")), key)
            message = f"it redirects to {target}; redirects are not followed, give the address of the server itself"
            raise ServerRefused(status, message, what)
        if status in RETRIED:
            self._hold(headers.get("Retry-After"))
        raise ServerRefused(status, clean(_message(answer), key) or "without a word", what)

    def _hold(self, retry_after: str | None) -> None:
        try:
            seconds = float(retry_after or 0.0)
        except ValueError:  # a date: use the usual pause
            return
        if seconds > 0 and not math.isnan(seconds):
            self._held_until = max(self._held_until, time.monotonic() + min(seconds, LONGEST_PAUSE))


def clean(text: str, key: str = "") -> str:
    """A server's text made safe to show: one line, truncated, visible, without keys, which some servers echo."""
    text = text.replace(key, "***") if len(key) > 3 else text
    text = re.sub(r"\b(sk|key|Bearer)[-_ ][\w*.-]{8,}", "***", text[: 100 * SHOWN])
    text = visible(" ".join(text.split()))
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _reason(error: BaseException) -> str:
    """The operating system's message if there is one: libraries above it only report that they failed."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.errno:
            return os.strerror(inner.errno) if inner.errno > 0 else str(inner)  # negative: DNS lookup
        inner = inner.__cause__ or inner.__context__
    return str(error) or type(error).__name__


# --- the loop ---------------------------------------------------------------------------------------------------------

_start = threading.Lock()
_running: asyncio.AbstractEventLoop | None = None


def _loop() -> asyncio.AbstractEventLoop:
    """The event loop for all requests of this process."""
    global _running
    with _start:
        if _running is None:
            _running = asyncio.new_event_loop()
            threading.Thread(target=_running.run_forever, name="hone http", daemon=True).start()
        return _running


def _forget_loop() -> None:
    """Reset the loop in a forked child, which lacks its thread."""
    global _running, _start
    _running, _start = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_loop)


@functools.cache
def _tls_context() -> Any:
    """Cached, because reading the certificates takes longer than most requests."""
    import httpx

    return httpx.create_ssl_context()


# --- answers ----------------------------------------------------------------------------------------------------------


def _decode(content: bytes) -> Any:
    if not content:
        return None
    try:
        value = json.loads(content)
        return _repaired(value) if re.search(rb"\\u[dD][89a-fA-F]", content) else value
    except (ValueError, RecursionError):  # an HTML page, plain text (health checks), or endless brackets
        return content.decode(errors="replace")


def _repaired(value: Any) -> Any:
    """Repair lone surrogates, which JSON allows but UTF-8 does not: writing them would end the run later."""
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, list):
        return [_repaired(item) for item in value]
    if isinstance(value, dict):
        return {well_formed(key): _repaired(item) for key, item in value.items()}
    return value


def _message(answer: Any) -> str:
    """The message of an error response, in any of the usual forms."""
    while isinstance(answer, dict):
        inner = answer.get("error") or answer.get("message") or answer.get("detail")
        if inner is None:
            break
        answer = inner
    return "" if answer is None else str(answer)


# --- ports ------------------------------------------------------------------------------------------------------------


def free_port(address: str = "127.0.0.1") -> int:
    """A port of this address on which no program listens at the moment."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int, address: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        # A recently closed connection does not occupy the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind((address, port))
            return True
    return False
