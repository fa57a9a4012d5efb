"""What the HTTP services of hone share: the listening socket, uvicorn's settings, and errors in OpenAI's format."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING, Any

from hone.base.settings import UserError

if TYPE_CHECKING:
    import uvicorn

_GRACE = 10  # seconds for running answers after a Ctrl-C; a second one ends them at once
_KEEP_ALIVE = 5  # seconds that a connection may be idle between two requests
_HEADER_BYTES = 32 << 10  # of one request
HEADER_SECONDS = 20.0  # for the headers to arrive; a connection is closed at the latest after twice as long


class ApiError(Exception):
    """An error sent to the client in OpenAI's format."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def settings(app: Any) -> uvicorn.Config:
    """uvicorn's settings, with limits on time and size before a request is complete."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Impatient(H11Protocol):
        """Closes connections that send no complete request in time; uvicorn itself would wait forever."""

        _resting: Any = None  # the exchange that was already complete at the last check

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.loop.call_later(HEADER_SECONDS, self._check)

        def _check(self) -> None:
            if self.transport.is_closing():
                return
            over = self.cycle is None or self.cycle.response_complete
            if over and self._resting is (self.cycle or self):
                self.transport.abort()
                return
            self._resting = (self.cycle or self) if over else None
            self.loop.call_later(HEADER_SECONDS, self._check)

    return uvicorn.Config(
        app,
        http=Impatient,
        ws="none",
        log_level="warning",
        timeout_graceful_shutdown=_GRACE,
        timeout_keep_alive=_KEEP_ALIVE,
        h11_max_incomplete_event_size=_HEADER_BYTES,
    )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Port 0: any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets that name their protocol. Without it the body of a response, which is
    # sent after its head, waits for the client's acknowledgement: 40 ms on Linux, for every request.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # a client that is told the address may connect before the server has started
    except OSError as error:
        listener.close()
        why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise UserError(f"{host}:{port} {why}: give another with --port, or --port 0 for any free one") from error
    return listener
