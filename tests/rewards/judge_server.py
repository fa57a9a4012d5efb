"""A local OpenAI-compatible server that misbehaves on demand."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, behave):
        super().__init__(("127.0.0.1", 0), Handler)
        self.behave = behave  # (body, how often it was asked this) -> (status, headers, text) or an action
        self.asked = defaultdict(int)
        self.requests = []  # (headers, body)
        self.lock = threading.Lock()
        self.now = self.most = 0  # requests at the same time

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        text = body["messages"][-1]["content"]
        with server.lock:
            server.requests.append((dict(self.headers), body))
            server.asked[text] += 1
            count = server.asked[text]
            server.now += 1
            server.most = max(server.most, server.now)
        try:
            try:
                status, headers, reply = server.behave(body, count)
            finally:
                with server.lock:  # before the reply, after which the client may ask again
                    server.now -= 1
            if status == "drop":
                self.close_connection = True
                return
            if status == "drip":  # a byte now and then: no read ever times out
                self.send_response(200)
                self.send_header("Content-Length", "1000000")
                self.end_headers()
                for _ in range(200):
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    time.sleep(0.05)
                return
            data = reply.encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def log_message(self, *_):
        pass


def completion(content: str, tokens: int | None = 10) -> str:
    usage = {} if tokens is None else {"usage": {"total_tokens": tokens}}
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}], **usage})


def says(value) -> tuple[int, dict, str]:
    return 200, {}, completion(json.dumps(value))


@contextmanager
def serving(behave):
    server = Server(behave)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
