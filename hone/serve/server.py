"""`hone serve`: the API on a port, until Ctrl-C."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from hone.base.settings import UserError

LOOPBACK = ("127.0.0.1", "localhost")
_GRACE = 10  # seconds that running answers have left after a Ctrl-C; a second one ends them at once


def serve(target: str, overrides: Sequence[str], checkpoint: Path | None, host: str, port: int) -> None:
    """Raises UserError when the server's libraries are missing or the port is taken, before the model is loaded."""
    try:
        import uvicorn

        from hone.serve.app import make_app
    except ImportError as error:
        raise UserError(f"hone serve needs {error.name}: pip install 'hone-rl[serve]'") from error
    from hone.serve.model import load_served
    from hone.serve.worker import Worker

    listener = listen(host, port)
    model = load_served(target, overrides, checkpoint)
    hosts = LOOPBACK if host in LOOPBACK else ("*",)
    with Worker(model.engine) as worker:
        app = make_app(model, worker, hosts)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_GRACE)
        address = f"http://{host}:{listener.getsockname()[1]}/v1"
        print(f"{model.name} ({model.path}) at {address}; Ctrl-C ends it", file=sys.stderr, flush=True)
        uvicorn.Server(config).run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """Port 0: any that is free."""
    if host not in LOOPBACK:
        print(f"note: {host} can be reached from other machines, and nobody is asked for a password", file=sys.stderr)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise UserError(f"{host}:{port} {why}: give another with --port, or --port 0 for any that is free") from error
    return listener
