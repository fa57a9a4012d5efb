"""`hone serve`: the API on a port, until Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hone.base.extras import needed
from hone.base.settings import UserError
from hone.base.web import listen, settings


def serve(target: str, overrides: Sequence[str], checkpoint: Path | None, host: str, port: int) -> None:
    """Serve until Ctrl-C. Raises UserError before loading the model if libraries are missing or the port is taken."""
    try:
        import uvicorn

        from hone.base.guard import allowed_hosts
        from hone.serve.app import make_app
    except ImportError as error:
        raise UserError(f"hone serve needs {error.name}: {needed('serve')}") from error
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
