"""JSON over HTTP to a server on this machine or in the same network: one request, one bound, one clear error.

    http = Http("http://127.0.0.1:8000")
    models = http.get("/v1/models", seconds=10, what="the list of models")

Nothing is retried here: what a failure means, and whether to ask again, is for the caller to say, who knows what the
request does. Proxies of the environment are not used.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from http.client import HTTPConnection, HTTPException, IncompleteRead
from typing import Any
from urllib.parse import urlsplit

from hone.base.settings import UserError

#: Most that is read of an answer at once, bytes.
CHUNK = 1 << 20


class ServerError(UserError):
    """Something went wrong with a generation server."""


class ServerLost(ServerError):
    """The connection was refused or broke: the server is not there (any more)."""


class ServerHangs(ServerError):
    """No whole answer within the time that was given."""


class ServerRefused(ServerError):
    """The server answered with an error status."""

    def __init__(self, status: int, message: str, what: str) -> None:
        super().__init__(f"{what}: the server answered {status}: {message}")
        self.status, self.message, self.what = status, message, what

    def __reduce__(self) -> Any:  # from the process that asks to the others
        return ServerRefused, (self.status, self.message, self.what)


class Http:
    """A server's address. Connections are not kept: they are few and long, and may be made from many threads."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.hostname is None:
            raise ValueError(f"{url!r} is no address; give http://host:port")
        self.url = url.rstrip("/")
        self._host, self._port = parts.hostname, parts.port or 80
        self._open: set[HTTPConnection] = set()

    def hang_up(self) -> None:
        """Everything under way ends at once, with ServerLost."""
        for connection in list(self._open):
            with contextlib.suppress(OSError, AttributeError):  # not connected yet, or closed by its own thread
                connection.sock.shutdown(socket.SHUT_RDWR)

    def get(self, path: str, *, seconds: float, what: str) -> Any:
        return self.ask("GET", path, None, seconds=seconds, what=what)

    def post(self, path: str, body: Any = None, *, seconds: float, what: str) -> Any:
        return self.ask("POST", path, body, seconds=seconds, what=what)

    def ask(self, method: str, path: str, body: Any, *, seconds: float, what: str) -> Any:
        """The decoded answer; text if it is not JSON, None if it is empty. `what` names the wait in errors.

        Raises ServerLost, ServerHangs or ServerRefused.
        """
        deadline = time.monotonic() + seconds
        connection = HTTPConnection(self._host, self._port, timeout=seconds)
        self._open.add(connection)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json"} if data is not None else {})
            answer = connection.getresponse()
            chunks = []
            while chunk := self._read(connection, answer, deadline):
                chunks.append(chunk)
            if answer.length:  # read1 says nothing of an answer that breaks off
                raise IncompleteRead(b"", answer.length)
            status, content = answer.status, b"".join(chunks)
        except TimeoutError as error:
            raise ServerHangs(f"{what}: no answer from {self.url}{path} within {seconds:g} s") from error
        except (OSError, HTTPException) as error:  # refused, reset, or closed in the middle of an answer
            reason = str(error) or type(error).__name__
            raise ServerLost(f"{what}: the connection to {self.url}{path} is lost ({reason})") from error
        finally:
            self._open.discard(connection)
            connection.close()
        found = _decode(content)
        if status >= 400:
            raise ServerRefused(status, _message(found), what)
        return found

    @staticmethod
    def _read(connection: HTTPConnection, answer: Any, deadline: float) -> bytes:
        """The next piece, within what is left of the time: a server that drips must not hold us for ever."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if connection.sock is not None:
            connection.sock.settimeout(left)
        piece: bytes = answer.read1(CHUNK)
        return piece


def _decode(content: bytes) -> Any:
    if not content:
        return None
    try:
        return json.loads(content)
    except ValueError:  # a page or a plain line, as health checks answer
        return content.decode(errors="replace")


def _message(found: Any) -> str:
    """What an error answer says, in the several forms that servers have for it."""
    while isinstance(found, dict):
        inner = found.get("error") or found.get("message") or found.get("detail")
        if inner is None:
            break
        found = inner
    text = str(found).strip()
    return text if len(text) <= 600 else text[:597] + "..."


def free_port(address: str = "127.0.0.1") -> int:
    """A port of this address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int, address: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection that was closed a moment ago is none
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
