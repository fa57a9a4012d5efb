"""`hone serve`: the API on a port, until Ctrl-C."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.base.settings import UserError

if TYPE_CHECKING:
    import uvicorn

_GRACE = 10  # seconds for running answers after a Ctrl-C; a second one ends them at once
_KEEP_ALIVE = 5  # seconds that a connection may be idle between two requests
_HEADER_BYTES = 32 << 10  # of one request
HEADER_SECONDS = 20.0  # for the headers to arrive; a connection is closed at the latest after twice as long


def serve(target: str, overrides: Sequence[str], checkpoint: Path | None, host: str, port: int) -> None:
    """Serve until Ctrl-C. Raises UserError before loading the model if libraries are missing or the port is taken."""
    try:
        import uvicorn

        from hone.serve.app import make_app
        from hone.serve.guard import allowed_hosts
    except ImportError as error:
        raise UserError(f"hone serve needs {error.name}: pip install 'hone-rl[serve]'") from error
    from hone.serve.engine_thread import EngineThread
    from hone.serve.model import load_served

    listener = listen(host, port)
    if not allowed_hosts(host):
        print(f"note: {host} can be reached from other machines, and there is no password", file=sys.stderr)
    model = load_served(target, overrides, checkpoint)
    with EngineThread(model.engine) as thread:
        app = make_app(model, thread, allowed_hosts(host))
        config = settings(app)
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listener.getsockname()[1]}/v1"
        print(f"{model.name} ({model.path}) at {address}; Ctrl-C ends it", file=sys.stderr, flush=True)
        uvicorn.Server(config).run(sockets=[listener])


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
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise UserError(f"{host}:{port} {why}: give another with --port, or --port 0 for any free one") from error
    return listener
