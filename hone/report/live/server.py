"""`hone view`: starts the live page, and `hone train --view`: starts it beside a training run."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from hone.base.extras import needed
from hone.base.settings import UserError
from hone.base.visible import visible
from hone.report.live.travel import Travel

#: The environment variable that holds the token, so that it does not appear in the list of processes.
TOKEN = "HONE_VIEW_TOKEN"

#: Lowest priority: training on the same machine goes first.
YIELDING = 19


def view(path: Path, host: str, port: int, travel: Travel | None = None) -> None:
    """Serve the page about a run or a folder of runs until Ctrl-C.

    `travel`: past answers may be scored again; None: the page only reads. Other machines need a token: the one in
    HONE_VIEW_TOKEN, or a new one, which is printed with the address. Raises UserError if libraries are missing, the
    path is a file, or the port is taken.
    """
    try:
        import uvicorn

        from hone.base.guard import allowed_hosts
        from hone.base.web import listen, settings
        from hone.report.live.app import make_app
    except ImportError as error:
        raise UserError(f"hone view needs {error.name}: {needed('view')}") from error
    from hone.report.live.library import Library

    library = Library.at(path)
    hosts = allowed_hosts(host)
    token = os.environ.get(TOKEN) or (None if hosts else secrets.token_urlsafe(24))
    listener = listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listener.getsockname()[1]}/" + (f"?token={token}" if token else "")
    what = library.root if library.only is None else library.root / library.only
    missing = "" if what.exists() else " (nothing is there yet)"
    print(f"{visible(what)}{missing} at {address} ; Ctrl-C ends it", file=sys.stderr, flush=True)
    if not hosts:
        print("note: the connection is not encrypted; an SSH tunnel to the default host is", file=sys.stderr)
    os.nice(YIELDING)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(settings(make_app(library, hosts, token, travel))).run(sockets=[listener])


@contextlib.contextmanager
def beside(run: Path) -> Iterator[None]:
    """Context manager that serves the page about a run from a separate process, so that training does not wait for
    it. The page ends with the run, and a line says how to look again: a script that trains must not wait for a
    reader."""
    command = [sys.executable, "-m", "hone", "view", str(run), "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        print(f"the page has ended with the command; to look again: hone view {visible(run)}", file=sys.stderr)
