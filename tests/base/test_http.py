"""The client against servers on loopback that cheat: redirects, drips, floods, secrets, broken text."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from hone.base import http as client
from hone.base.http import AnswerTooLarge, Http, ServerHangs, ServerLost, ServerRefused, Unreadable, clean, may_pass
from hone.base.settings import UserError
from hone.recipe.sections.rollout import SamplingConfig
from hone.rewards.judge.client import Judge, Question, Schema
from hone.rewards.judge.config import JudgeConfig
from hone.rollout.hosted import Endpoint, complete

SECRET = "sk-very-secret-0123456789"
Behave = Callable[[socket.socket, bytes], None]


class Hostile:
    """Accepts connections, keeps what it is sent, and does with each whatever it likes."""

    def __init__(self, behave: Behave) -> None:
        self.behave, self.got = behave, list[bytes]()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                request = connection.recv(1 << 20)
                if request:
                    self.got.append(request)
                    self.behave(connection, request)
            except OSError:  # the client has left
                pass


@contextmanager
def hostile(behave: Behave) -> Iterator[Hostile]:
    server = Hostile(behave)
    try:
        yield server
    finally:
        server.listener.close()


def replies(status: int, body: bytes = b"", **headers: str) -> Behave:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{lines}\r\n".encode()
    return lambda connection, _: connection.sendall(head + body)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.001)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)


def judge_at(server: Hostile, **settings: object) -> Judge:
    return Judge(JudgeConfig(url=server.url, model="m", cache=None, **settings))


YES = Schema("yes", {"yes": {"type": "boolean"}}, lambda answer: answer["yes"])


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_the_key_and_the_body_are_not_sent_on_to_where_a_redirect_points(status: int) -> None:
    good = json.dumps({"choices": [{"message": {"content": "x"}}]}).encode()
    with (
        hostile(replies(200, good)) as other,
        hostile(replies(status, Location=f"http://127.0.0.1:{other.port}/v1/chat/completions")) as server,
    ):
        for method in ("GET", "POST"):
            with pytest.raises(ServerRefused, match=r"redirects to http://127.*redirects are not followed"):
                Http(server.url, key_env="OPENAI_API_KEY").ask(method, "/x", {"a": 1}, seconds=5, what="it")
        with pytest.raises(UserError, match="redirects are not followed"):
            complete(Endpoint.parse(f"{server.url}#m"), [], SamplingConfig(), 0)
        (failure,) = judge_at(server).ask([Question("?", YES)])
        assert "redirects are not followed" in failure.message
        assert other.got == []
        assert len(server.got) == 4  # none was repeated


def drip(first: bytes, piece: bytes) -> Behave:
    def behave(connection: socket.socket, _: bytes) -> None:
        connection.sendall(first)
        for _ in range(400):
            time.sleep(0.02)
            connection.sendall(piece)

    return behave


@pytest.mark.parametrize(
    "behave",
    [
        drip(b"", b"H"),
        drip(b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n"),
        drip(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b" "),
        drip(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        lambda connection, _: time.sleep(6),
    ],
    ids=["status line", "headers", "body", "chunks", "silence"],
)
def test_a_server_that_drips_does_not_outlast_the_deadline(behave: Behave) -> None:
    with hostile(behave) as server:
        begin = time.monotonic()
        with pytest.raises(ServerHangs, match=r"it: no answer from .* within 0.5 s"):
            Http(server.url).get("/x", seconds=0.5, what="it")
        assert time.monotonic() - begin < 2.5


def test_answers_are_read_up_to_a_bound() -> None:
    sent = [0]

    def flood(connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        for _ in range(20_000):  # 1.3 GB
            connection.sendall(piece)
            sent[0] += len(piece)

    with hostile(flood) as server:
        with pytest.raises(AnswerTooLarge, match="it: the answer has more than 1000000 bytes"):
            Http(server.url, most=1_000_000).get("/x", seconds=30, what="it")
        assert not may_pass(AnswerTooLarge(""))
        with pytest.raises(UserError, match=f"more than {client.MOST} bytes"):
            complete(Endpoint.parse(f"{server.url}#m"), [], SamplingConfig(), 0)
        (failure,) = judge_at(server).ask([Question("?", YES)])
        assert "bytes" in failure.message
    assert sent[0] < 3 * (client.MOST + (8 << 20))


def test_a_compressed_answer_is_refused_before_it_is_unpacked() -> None:
    bomb = gzip.compress(b" " * 50_000_000)
    with (
        hostile(replies(200, bomb, Content_Encoding="gzip")) as server,
        pytest.raises(ServerLost, match="compressed"),
    ):
        Http(server.url).get("/x", seconds=10, what="it")


def test_headers_without_end_are_refused() -> None:
    with (
        hostile(lambda connection, _: connection.sendall(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200_000)) as server,
        pytest.raises(ServerLost),
    ):
        Http(server.url).get("/x", seconds=10, what="it")


def test_messages_hold_neither_the_key_nor_control_characters() -> None:
    text = f"\x1b]0;owned\x07 Incorrect key {SECRET}\r\n\u202egnp.exe sk-another-1234567890 " + "z" * 5000
    for body in (json.dumps({"error": {"message": text}}).encode(), text.encode()):
        with hostile(replies(400, body)) as server, pytest.raises(ServerRefused) as caught:
            Http(server.url, key_env="OPENAI_API_KEY").get("/x", seconds=5, what="it")
        message = str(caught.value)
        assert server.got[0].count(f"Bearer {SECRET}".encode()) == 1
        assert SECRET not in message
        assert "sk-another" not in message
        assert not set("\x1b\x07\r\n\u202e") & set(message)
        assert "owned" in message
        assert len(message) < 700
        assert str(pickle.loads(pickle.dumps(caught.value))) == message
    with hostile(replies(302, Location=f"http://x/{SECRET}\x1b[2J")) as server, pytest.raises(UserError) as redirected:
        Http(server.url, key_env="OPENAI_API_KEY").get("/x", seconds=5, what="it")
    assert SECRET not in str(redirected.value)
    assert "\x1b" not in str(redirected.value)
    assert clean("a\x00b") == "a⟨U+0000⟩b"


def test_halves_of_characters_and_brackets_without_end_are_text_that_can_be_written() -> None:
    with hostile(replies(200, rb'{"a": ["\ud800x", {"\udfff": "\ud83d\ude00"}]}')) as server:
        answer = Http(server.url).get("/x", seconds=5, what="it")
    assert answer == {"a": ["\ufffdx", {"\ufffd": "😀"}]}
    with hostile(replies(200, b"[" * 200_000)) as server:
        assert Http(server.url).get("/x", seconds=5, what="it") == "[" * 200_000


def test_what_may_pass_is_tried_again_and_nothing_else() -> None:
    statuses = iter([429, 500, 503, 529, 408, 425, 409, 200])
    with hostile(lambda connection, request: replies(next(statuses), b"1")(connection, request)) as server:
        http, again = Http(server.url), []
        assert http.retrying(lambda: http.get("/", seconds=5, what="it"), 9, lambda: again.append(1)) == 1
        assert (len(server.got), len(again)) == (8, 7)
    for status in (400, 401, 403, 404, 413, 422, 501, 505):
        with hostile(replies(status, b"no")) as server:
            http = Http(server.url)
            with pytest.raises(ServerRefused, match=f"answered {status}: no"):
                http.retrying(lambda http=http: http.get("/", seconds=5, what="it"), 9)
            assert len(server.got) == 1
    calls = []
    with pytest.raises(Unreadable), hostile(replies(200)) as server:
        http.retrying(lambda: calls.append(1) or (_ for _ in ()).throw(Unreadable("no")), 3)
    assert len(calls) == 3


@pytest.mark.parametrize("value", ["99999999", "inf", "nan", "-5", "Wed, 21 Oct 2065 07:28:00 GMT", "1e400"])
def test_a_retry_after_cannot_hold_us_for_long(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LONGEST_PAUSE", 0.2)
    statuses = iter([503, 200])
    with hostile(lambda c, r: replies(next(statuses), b"1", Retry_After=value)(c, r)) as server:
        http, begin = Http(server.url), time.monotonic()
        assert http.retrying(lambda: http.get("/", seconds=5, what="it"), 2) == 1
        assert time.monotonic() - begin < 3


def test_hanging_up_ends_a_pause_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE", 50.0)
    with hostile(replies(503)) as server:
        http, begin = Http(server.url), time.monotonic()
        threading.Timer(0.3, http.hang_up).start()
        with pytest.raises(ServerLost, match="given up"):
            http.retrying(lambda: http.get("/", seconds=5, what="it"), 5)
        assert time.monotonic() - begin < 5
        with pytest.raises(ServerRefused):  # it can be used again
            http.get("/", seconds=5, what="it")


@pytest.mark.parametrize(
    "url", ["ftp://h", "http://", "x", "http://h:99999", "http://u:p@h", "https://h?key=1", "https://h#x", "http://h:0"]
)
def test_what_is_no_address_is_an_error(url: str) -> None:
    with pytest.raises(UserError, match=r"not an address|no key or password"):
        Http(url)


def test_a_key_does_not_travel_unencrypted() -> None:
    with pytest.raises(UserError, match="OPENAI_API_KEY would travel unencrypted"):
        Http("http://example.org/v1", key_env="OPENAI_API_KEY")
    Http("http://example.org/v1")
    Http("https://example.org/v1", key_env="OPENAI_API_KEY")
    Http("http://localhost/v1", key_env="OPENAI_API_KEY")


def test_a_forked_child_can_ask() -> None:
    with hostile(replies(200, b"7")) as server:
        http = Http(server.url)
        assert http.get("/", seconds=5, what="it") == 7
        child = os.fork()
        if not child:
            os._exit(http.get("/", seconds=5, what="it"))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize("used", [-1_000_000, 0, 10**400, True, 0.5, "9", None])
def test_what_a_judge_says_of_its_tokens_cannot_lift_the_budget(used: object) -> None:
    body = {"choices": [{"message": {"content": '{"yes": true}'}}], "usage": {"total_tokens": used}}
    with hostile(replies(200, json.dumps(body).encode())) as server:
        judge = judge_at(server, max_tokens=50, concurrency=1)
        answers = judge.ask([Question(f"Is {i} a number? Think about it for long.", YES) for i in range(50)])
        assert answers[0] is True
        assert "judge.max_tokens" in answers[-1].message
        assert 2 <= len(server.got) <= 6
        assert judge.costs()["tokens"] >= 50


@pytest.mark.parametrize("used", [-5, 10**400, True, "9", None, [1]])
def test_what_a_hosted_model_says_of_its_tokens_is_bounded(used: object) -> None:
    body = {"choices": [{"message": {"content": "four"}}], "usage": {"completion_tokens": used}}
    with hostile(replies(200, json.dumps(body).encode())) as server:
        got = complete(Endpoint.parse(f"{server.url}#m"), [], SamplingConfig(max_tokens=9), 0)
    assert 0 <= got.tokens <= 16
