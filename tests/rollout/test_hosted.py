"""The client of hosted models, against a server on the loopback interface that fails as real ones do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hone.base.settings import UserError
from hone.measure import run as evals
from hone.measure.store import read_measured, stored
from hone.recipe.load import load
from hone.recipe.sections.prompt import PromptConfig
from hone.recipe.sections.rollout import SamplingConfig
from hone.rollout.hosted import Endpoint, HostedModel, complete
from hone.types import Problem

SAMPLING = SamplingConfig(temperature=0.7, max_tokens=9)


class Server(ThreadingHTTPServer):
    """Says what `replies` holds, one after the other (the last for ever), and keeps what it was sent."""

    def __init__(self, *replies: tuple[int, Any]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies, self.got, self.lock = list(replies), [], threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1#big/model"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.got.append((self.path, self.headers.get("Authorization"), body))
            code, reply = self.server.replies[0]
            if len(self.server.replies) > 1:
                self.server.replies.pop(0)
        self.send_response(code)
        self.end_headers()
        self.wfile.write(reply if isinstance(reply, bytes) else json.dumps(reply).encode())

    def log_message(self, *_: Any) -> None:
        pass


def says(text: str | None, finish: str = "stop", **more: Any) -> tuple[int, dict[str, Any]]:
    message = {"role": "assistant", "content": text, **more}
    return 200, {"choices": [{"message": message, "finish_reason": finish}], "usage": {"completion_tokens": 5}}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    servers: list[Server] = []
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("hone.base.http.FIRST_PAUSE", 0.001)

    def start(*replies: tuple[int, Any]) -> Server:
        servers.append(Server(*replies))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_what_is_sent_and_read(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    server = serve(says("<answer>2</answer>", reasoning_content="hm"))
    got = complete(Endpoint.parse(server.endpoint), [{"role": "user", "content": "1 + 1?"}], SAMPLING, seed=3)
    assert (got.text, got.tokens, got.finish) == ("<think>hm</think><answer>2</answer>", 5, "stop")
    path, key, body = server.got[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer sk-secret")
    expected = {"model": "big/model", "temperature": 0.7, "top_p": 1.0, "max_tokens": 9, "seed": 3}
    assert body == {**expected, "messages": [{"role": "user", "content": "1 + 1?"}]}


def test_it_tries_again_where_that_can_help_and_not_elsewhere(serve: Any) -> None:
    server = serve((429, {}), (503, {}), (200, b"not json"), (200, {"choices": []}), says("x", "length"))
    assert complete(Endpoint.parse(server.endpoint), [], SAMPLING, 0).finish == "length"
    assert len(server.got) == 5
    refused = serve((401, {"error": "no such key"}))
    with pytest.raises(UserError, match=r"answered 401: .*no such key"):
        complete(Endpoint.parse(refused.endpoint), [], SAMPLING, 0)
    assert len(refused.got) == 1
    down = serve((500, {}))
    with pytest.raises(UserError, match=r"no answer after 3 tries: .* 500.*Finished samples are kept"):
        complete(Endpoint.parse(down.endpoint), [], SAMPLING, 0, tries=3)


@pytest.mark.parametrize("target", ["http://127.0.0.1/v1", "ftp://h/v1#m", "http://#m"])
def test_an_address_that_is_none(target: str) -> None:
    with pytest.raises(UserError, match=r"give a hosted model as URL#model|is not an address"):
        Endpoint.parse(target)


def test_a_key_is_neither_in_the_address_nor_unencrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no key or password in the URL") as error:
        Endpoint.parse("https://user:sk-secret@host/v1#m")
    assert "sk-secret" not in str(error.value)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with pytest.raises(UserError, match="unencrypted"):
        Endpoint.parse("http://example.com/v1#m")


def test_a_hosted_model_is_evaluated_like_any_other(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    path = tmp_path / "recipe.yaml"
    path.write_text(f"name: x\nruns: {tmp_path}\ntask: {{name: knights, people: [2], train: 5, test: 6}}\n")
    recipe = load(path, ["eval.problems=4", "eval.samples=2", "eval.sampling.temperature=0.3"])
    server = serve(says("<think>so</think><answer>(1) Nobody is a knight</answer>"))
    folder = evals.cli_eval(recipe, [server.endpoint], ks=[2])
    got = read_measured(stored(folder)[0])
    assert (got.label, len(got), got.accuracy().value, got.tokens.mean()) == ("big/model", 4, 0.0, 5)
    sent = [body for _, _, body in server.got]
    assert len(sent) == 8
    assert len({body["seed"] for body in sent}) == 8
    assert sent[0]["messages"][0]["role"] == "system"
    assert {body["temperature"] for body in sent} == {0.3}
    evals.cli_eval(recipe, [server.endpoint])
    assert len(server.got) == 8
    assert not any("sk-secret" in file.read_text() for file in folder.rglob("*") if file.is_file())


def test_the_system_prompt_of_the_recipe_replaces_that_of_the_task() -> None:
    problem = Problem("p", "t", ({"role": "user", "content": "?"},), "1")
    for configured, sent in ((None, "the task's"), ("own", "own"), ("", None)):
        system = PromptConfig(system=configured).system_prompt("the task's")
        messages = HostedModel(Endpoint.parse("http://127.0.0.1:1/v1#m"), SAMPLING, system).messages(problem)
        assert [m["content"] for m in messages if m["role"] == "system"] == ([] if sent is None else [sent])
