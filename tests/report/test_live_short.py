"""The live page opens in a Chromium, if there is one; test_live_browser.py looks at all of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest
import uvicorn

from hone.base.web import listen, settings
from hone.report.live.app import make_app
from hone.report.live.library import Library
from hone.report.live.server import YIELDING, beside
from tests.report.live_run import make_run

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--virtual-time-budget=5000")  # fmt: skip


@pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on the PATH (CHROMIUM names another): the page was not opened"
)
def test_the_page_opens_in_a_browser(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "one")
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(settings(make_app(Library.at(run), ("127.0.0.1",), None)))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/#/one/-/overview"
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    finally:
        server.should_exit = True
        thread.join(15)
        listener.close()
    assert "no group of step 2 has a reward difference" in done.stdout  # among what needs a look
    assert "Validation accuracy" in done.stdout


def test_the_page_beside_a_run_ends_with_it_and_says_how_to_look_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with beside(tmp_path / "one"):
        assert "look again" not in capsys.readouterr().err
    assert f"to look again: hone view {tmp_path / 'one'}\n" in capsys.readouterr().err


def child_with(argument: str) -> psutil.Process:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # another test's, which has just ended
            if argument in child.cmdline():
                return child
    raise AssertionError(f"no child was started with {argument}")


def test_the_page_leaves_the_processor_to_training(tmp_path: Path) -> None:
    with beside(tmp_path / "one"):
        page = child_with(str(tmp_path / "one"))
        end = time.monotonic() + 60
        while page.nice() < YIELDING and page.is_running() and time.monotonic() < end:
            time.sleep(0.05)
        assert page.nice() == YIELDING
