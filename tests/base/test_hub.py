"""What is said when the hub cannot be reached: one line, at once."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hone.base import hub
from hone.base.http import free_port
from hone.base.settings import UserError
from hone.model.load import load_tokenizer
from hone.preflight.plan.shapes import config_of
from hone.recipe.sections.model import ModelConfig
from hone.tasks.rows.sources import read_source


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)


@pytest.fixture
def server() -> Iterator[str]:
    """Refuses everything, as the hub does for a model that is not there."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(404)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_a_hub_out_of_reach_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    began = time.monotonic()
    with pytest.raises(UserError, match=r"model\.path: no/such: .*cannot be reached; .*give a folder") as caught:
        load_tokenizer(ModelConfig(path="no/such"))
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"source: no/such: .*cannot be reached"):
        read_source("no/such")
    assert time.monotonic() - began < 20


def test_a_hub_that_refuses_is_within_reach(server: str) -> None:
    assert hub.reachable(server)


def test_offline_by_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE forbids asking the hub; unset it, or wait"):
        hub.require("x", "wait")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(UserError, match="cannot be reached"):
        hub.require("x", "wait")


def test_a_misspelt_folder_is_no_question_for_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "require", lambda *_: pytest.fail("the hub was asked"))
    (tmp_path / "mymodel").mkdir()
    monkeypatch.chdir(tmp_path)
    for load in (load_tokenizer, config_of):
        with pytest.raises(UserError, match=r"mymodle: no folder of this name in .*; did you mean mymodel\?"):
            load(ModelConfig(path="mymodle"))


def test_the_shape_of_a_model_out_of_reach_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    for path in ("no/such", "gpt2"):
        with pytest.raises(UserError, match=r"cannot be reached; .*give a folder"):
            config_of(ModelConfig(path=path))
