"""Requests that are meant to harm: too much of everything, too slowly, or from a web page that knows of the server."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from hone.base import guard, web
from hone.base.guard import allowed_hosts, refusal
from hone.recipe.sections.rollout import SamplingConfig
from hone.rollout.native.memory import Budget
from hone.rollout.native.requests import Request
from hone.rollout.native.scheduler import Queue
from hone.serve import protocol
from hone.serve.model import ServedModel
from hone.serve.protocol import to_json


def connected(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=30)


def whole(connection: socket.socket) -> bytes:
    """All that the server sends before it closes the connection."""
    answer = b""
    with contextlib.suppress(OSError):
        while piece := connection.recv(5000):
            answer += piece
    return answer


def assert_refused(response: httpx.Response, status: int, text: str) -> None:
    assert response.status_code == status, response.text[:300]
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert text in error["message"], error["message"]
    assert len(error["message"]) < 1000


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        ({"stop": ["x"] * 17}, "17 stop strings; at most 16 are allowed"),
        ({"stop": [str(i) for i in range(20_000)]}, "20000 stop strings; at most 16 are allowed"),
        ({"stop": "y" * 257}, "a stop string of 257 characters; at most 256 are allowed"),
        ({"prompt": ["a"] * 2000, "n": 128}, "2000 prompts with n 128: 256000 answers; at most 1024 are allowed"),
        ({"prompt": ["a"] * 33, "n": 32}, "1056 answers; at most 1024 are allowed"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"n": 1024, "max_tokens": 5000}, "5120000 tokens are requested; at most 4194304 are allowed"),
        ({"n": 1000, "max_tokens": 200, "logprobs": 20}, "4200000 log-probs are requested; at most 200000 are allowed"),
        ({"prompt": [[5] * 100] * 500, "n": 2, "max_tokens": 1, "echo": True, "logprobs": 1}, ""),
        ({"prompt": "a" * 100_000}, "100000 characters do not fit the model's context of 256 tokens"),
        ({"prompt": [5] * 200_000 + [True]}, "give a text, a list of texts"),
        ({"prompt": [[5] * 3, "a"]}, "give a text, a list of texts"),
        ({"model": "x" * 100_000}, "model"),
        ({"z" * 100_000: 1}, "zzz is not supported here"),
        ({"best_of": "b" * 100_000}, "best_of"),
    ],
)
def test_more_than_a_request_may_ask_for_is_refused_at_once(
    url: str, model: ServedModel, ask: dict[str, Any], text: str
) -> None:
    begin = time.monotonic()
    for stream in (False, True):
        response = httpx.post(
            f"{url}/completions", json={"model": model.name, "prompt": "a", "stream": stream, **ask}, timeout=60
        )
        assert_refused(response, 400, text)
    assert time.monotonic() - begin < 10


def test_a_chat_has_the_same_bounds(url: str, model: ServedModel) -> None:
    def ask(**more: Any) -> httpx.Response:
        body = {"model": model.name, "messages": [{"role": "user", "content": "a"}], **more}
        return httpx.post(f"{url}/chat/completions", json=body, timeout=60)

    assert_refused(ask(messages=[{"role": "user", "content": "b" * 100_000}]), 400, "do not fit")
    assert_refused(ask(stop=["x"] * 17), 400, "stop strings")
    assert_refused(ask(n=1024, max_tokens=200, logprobs=True, top_logprobs=20), 400, "log-probs")
    assert_refused(ask(messages=[{"role": "user"}] * 50_000), 400, "Field required")


def test_a_body_may_not_be_too_large_whether_it_says_so_or_not(url: str) -> None:
    with connected(url) as said:
        said.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000000000\r\n\r\n")
        answer = whole(said)
    assert b" 413 " in answer.splitlines()[0]
    assert b"at most 4194304 are allowed" in answer
    with connected(url) as chunked:
        chunked.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            for _ in range(200):  # 13 MB
                chunked.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
        except OSError:  # it has answered and left
            pass
        answer = whole(chunked)
    assert b" 413 " in answer.splitlines()[0]
    assert b"more than 4194304 bytes" in answer


def test_slow_bodies_headers_and_connections_end(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_SECONDS", 1.0)
    with connected(url) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{")
        assert b" 408 " in slow.recv(5000).splitlines()[0]
    monkeypatch.setattr(web, "HEADER_SECONDS", 0.5)
    for first in (b"", b"GET /v1/models HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        with connected(url) as slow:
            begin = time.monotonic()
            slow.sendall(first)
            try:
                while time.monotonic() - begin < 20:
                    slow.sendall(b"X: y\r\n" if first else b"")
                    time.sleep(0.1)
                    slow.settimeout(0.05)
                    try:
                        if slow.recv(5000) == b"":
                            break
                    except TimeoutError:
                        pass
            except OSError:
                pass
            assert time.monotonic() - begin < 15
    with connected(url) as large:
        with contextlib.suppress(OSError):
            large.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 100_000)
        assert b" 400 " in large.recv(5000).splitlines()[0]


def test_web_pages_from_elsewhere_are_not_answered(url: str) -> None:
    own = url.removesuffix("/v1")
    for headers in (
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://[broken"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ):
        assert_refused(httpx.get(f"{url}/models", headers=headers), 403, "web pages from elsewhere")
        assert httpx.post(f"{url}/completions", headers=headers, content=b"{").status_code == 403
    for headers in ({"origin": own}, {"origin": own, "sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}):
        assert httpx.get(f"{url}/models", headers=headers).status_code == 200
    for name in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "[::2]", "", "[", "evil@x"):
        assert_refused(httpx.get(f"{url}/models", headers={"host": name}), 400, "answers only as")
    for name in ("localhost", "LOCALHOST:80", "127.0.0.1:9", "[::1]:8000"):
        assert httpx.get(f"{url}/models", headers={"host": name}).status_code == 200


def test_every_address_of_loopback_has_the_host_check() -> None:
    for host in ("::1", "127.0.0.1", "localhost", "127.0.0.9", "0:0:0:0:0:0:0:1"):
        assert refusal({"host": "evil.example"}, allowed_hosts(host)) is not None
        assert refusal({"host": "[::1]:8000"}, allowed_hosts(host)) is None
    assert refusal({"host": "127.0.0.9:80"}, allowed_hosts("127.0.0.9")) is None
    for host in ("0.0.0.0", "::", "192.168.1.2", "box.example"):
        assert refusal({"host": "box.example"}, allowed_hosts(host)) is None
        assert refusal({"host": "box.example", "origin": "http://evil.example"}, allowed_hosts(host)) is not None


def test_a_model_is_described_under_its_name(url: str, model: ServedModel) -> None:
    listed = httpx.get(f"{url}/models").json()["data"][0]
    assert httpx.get(f"{url}/models/{model.name}").json() == listed
    assert_refused(httpx.get(f"{url}/models/other"), 404, "there is no model 'other' here")


@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 1e-300, 5e-324, 9e-6])
def test_next_to_no_temperature_is_greedy(url: str, model: ServedModel, temperature: float) -> None:
    def text(value: float) -> str:
        body = {"model": model.name, "prompt": "the cat", "max_tokens": 9, "temperature": value}
        return str(httpx.post(f"{url}/completions", json=body, timeout=60).json()["choices"][0]["text"])

    assert text(temperature) == text(0.0) != ""
    with pytest.raises(ValueError, match="too small to divide by; give 0 for greedy answers"):
        SamplingConfig(temperature=temperature)


@pytest.fixture
def largest(model: ServedModel) -> bytes:
    """The request that asks for the most that is allowed."""
    body = {"model": model.name, "prompt": ["the cat sat"] * 128, "n": 8, "max_tokens": 200}
    body["stop"] = [f"{i:02d}" + "z" * 254 for i in range(protocol.MAX_STOPS)]
    text = json.dumps(body)
    return (text + " " * (guard.MAX_BODY - len(text))).encode()


def test_a_second_client_is_served_while_the_largest_request_runs(url: str, model: ServedModel, largest: bytes) -> None:
    answers: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{url}/completions", content=largest, timeout=280))
    )
    thread.start()
    waits, served, small = [], 0, {"model": model.name, "prompt": "a", "max_tokens": 2}
    while thread.is_alive():
        begin = time.monotonic()
        assert httpx.get(url.replace("/v1", "/health"), timeout=60).status_code == 200
        waits.append(time.monotonic() - begin)
        assert httpx.post(f"{url}/completions", json=small, timeout=60).status_code == 200
        served += thread.is_alive()
        time.sleep(0.1)
    thread.join()
    assert answers[0].status_code == 200
    assert len(answers[0].json()["choices"]) == 1024
    assert served >= 2  # not only after the large one
    assert max(waits) < 5, waits  # a busy machine; it was the whole time of the large request


def test_batches_that_leave_room_take_turns() -> None:
    requests = {i: Request(np.ones(3, np.int64), SamplingConfig(), samples=n) for i, n in enumerate([10, 2, 1])}
    queue = Queue(Budget(10_000, 1), max_sequences=4, reserve=1)
    queue.add({0: requests[0]})
    assert queue.take([], requests) == [(0, 0), (0, 1), (0, 2)]  # one row is left to others
    running = [(0, 0), (0, 1), (0, 2)]
    assert not queue.has_room(running, requests)
    assert queue.take(running, requests) == []
    queue.add({1: requests[1]})
    queue.add({2: requests[2]})
    assert queue.has_room(running, requests)
    assert queue.take(running, requests) == [(1, 0)]
    assert queue.take([(0, 1), (1, 0)], requests) == [(2, 0), (0, 3)]
    assert len(queue) == 7
    assert queue.drop(0) == [(0, g) for g in range(4, 10)]
    assert queue.take([], requests) == [(1, 1)]


def test_json_in_small_steps_is_json() -> None:
    value = {"a": [1.5, None, True, "\u2028é\ud800"] * 40, "b": {"c": [{"d": []}] * 100}, "e": ["x"]}
    assert json.loads(to_json(value)) == value
