"""Stand-ins for the servers of vLLM 0.32 and SGLang 0.5.23: their endpoints, fields, error answers, a toy for a model.

They know the fields that the real ones know and refuse others, so that a misspelt setting fails here too. Sources:
vllm/entrypoints/{openai/completion/protocol.py, serve/dev/*, rl/online/api_router.py, serve/lora}, and SGLang's
srt/entrypoints/http_server.py, managers/io_struct.py and docs (sampling_params.md, sglang_for_rl.md), and what both
servers were seen to do (tests/rollout/test_vllm.py, test_sglang.py).

Only the standard library is used here, so that a process with one starts at once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMPLETION_FIELDS = {
    *("model", "prompt", "n", "seed", "max_tokens", "top_k", "temperature", "top_p", "min_p", "stop_token_ids"),
    *("stop", "include_stop_str_in_output"),
    *("logprobs", "return_token_ids", "skip_special_tokens", "prompt_logprobs"),
}
GENERATE_FIELDS = {"input_ids", "sampling_params", "return_logprob", "logprob_start_len", "stream", "lora_path"}
SGLANG_SAMPLING = {
    *("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "stop_token_ids", "sampling_seed", "stop"),
    *("skip_special_tokens", "no_stop_trim"),
}
STOP = 2
#: Without this option SGLang samples as it likes, whatever the seed.
DETERMINISTIC = "--enable-deterministic-inference"


class Refusal(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Toy:
    """A model of one number, the version in its folder: log-probs are -1 - version / 1000 - token / 1e6.

    Sample g of a prompt is a function of (prompt, seed + g), as vLLM promises; SGLang's stand-in draws the seed.
    """

    context = 64
    vocabulary = 100

    def __init__(self, folder: str) -> None:
        self.load(folder)

    def load(self, folder: str) -> None:
        self.version = int((Path(folder) / "version").read_text())

    def load_adapter(self, folder: str) -> None:
        self.load(folder)

    def score(self, ids: list[int]) -> list[float]:
        return [self._logprob(token) for token in ids[1:]]

    def sample(self, prompt: list[int], seed: int, max_tokens: int) -> tuple[list[int], list[float], str]:
        draw = random.Random(f"{prompt}{seed}")
        ids = [draw.randrange(3, 100) for _ in range(draw.randrange(1, max_tokens + 1))]
        reason = "length" if len(ids) == max_tokens else "stop"
        if reason == "stop":
            ids[-1] = STOP
        return ids, [self._logprob(token) for token in ids], reason

    def digests(self) -> dict[str, Any] | None:
        return None

    def _logprob(self, token: int) -> float:
        return -1.0 - self.version / 1000 - token / 1e6


class Server(ThreadingHTTPServer):
    """`fault` is called with the number of each request for answers, from 1, before it is answered."""

    daemon_threads = True

    def __init__(
        self, handler: type[BaseHTTPRequestHandler], model: Any, port: int = 0, host: str = "127.0.0.1"
    ) -> None:
        super().__init__((host, port), handler)
        self.model = model
        self.asked = 0
        self.paused = False
        self.weight_version = "default"
        self.adapters: list[str] = []
        self.calls: list[str] = []
        self.options: list[str] = []  # of its command line
        self.aborts = 0  # how often all that was under way has been ended
        self.dead = False
        self.losses: dict[str, int] = {}  # path -> how many of the next requests get no answer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fault(self, number: int | str) -> None: ...

    def reached(self, path: str) -> None:
        """Called before a path is answered."""
        if self.losses.get(path, 0):
            self.losses[path] -= 1
            raise ConnectionAbortedError(path)  # the connection is closed without an answer

    def die(self) -> None:
        """Connections are closed without an answer from now on."""
        self.dead = True


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self._handle({})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._handle(json.loads(content) if content else {})

    def _handle(self, body: dict[str, Any]) -> None:
        path, _, query = self.path.partition("?")
        self.server.calls.append(path)
        self.server.reached(path)
        try:
            status, answer = 200, self.answer(path, query, body)
        except Refusal as refusal:
            status, answer = refusal.status, self.refusal(refusal)
        if self.server.dead:
            self.close_connection = True
            return
        content = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def answer(self, path: str, query: str, body: dict[str, Any]) -> Any:
        raise NotImplementedError

    def refusal(self, refusal: Refusal) -> Any:
        return {"error": {"message": str(refusal), "code": refusal.status}}

    def models(self) -> Any:
        return {"object": "list", "data": [{"id": "policy", "max_model_len": self.server.model.context}]}

    def begin(self, prompt: list[int], max_tokens: int) -> None:
        self.server.asked += 1
        self.server.fault(self.server.asked)
        if len(prompt) + max_tokens > self.server.model.context:
            raise Refusal(400, f"This model's maximum context length is {self.server.model.context} tokens")


def known(body: dict[str, Any], fields: set[str]) -> None:
    if other := set(body) - fields:
        raise Refusal(400, f"unknown fields: {', '.join(sorted(other))}")


class VLLM(Handler):
    def answer(self, path: str, query: str, body: dict[str, Any]) -> Any:
        server = self.server
        if path == "/health":
            return None
        if path == "/v1/models":
            return self.models()
        if path == "/v1/completions":
            known(body, COMPLETION_FIELDS)
            if body["model"] not in ("policy", *server.adapters):
                raise Refusal(404, f"The model `{body['model']}` does not exist.")
            return self.score(body) if "prompt_logprobs" in body else self.complete(body)
        if path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            return self.adapter(path, body)
        if path == "/pause":
            if query != "mode=wait":
                raise Refusal(400, query)
            server.paused = True
            return {"status": "paused"}
        if path == "/resume":
            server.paused = False
            return {"status": "resumed"}
        if path == "/collective_rpc":
            return self.rpc(body)
        if path == "/reset_prefix_cache":
            return {"success": True}
        raise Refusal(404, "Not Found")

    def adapter(self, path: str, body: dict[str, Any]) -> Any:
        name, adapters = body["lora_name"], self.server.adapters
        if path == "/v1/unload_lora_adapter":
            known(body, {"lora_name", "lora_int_id"})
            if name not in adapters:
                raise Refusal(404, f"The lora adapter '{name}' cannot be found.")
            adapters.remove(name)
            return "Success"
        known(body, {"lora_name", "lora_path", "load_inplace", "is_3d_lora_weight"})
        if name in adapters:
            raise Refusal(400, f"The lora adapter '{name}' has already been loaded.")
        self.server.model.load_adapter(body["lora_path"])
        adapters.append(name)
        return "Success"

    def rpc(self, body: dict[str, Any]) -> Any:
        known(body, {"method", "args", "kwargs", "timeout"})
        if body["method"] == "reload_weights":
            if not self.server.paused:
                raise Refusal(500, "weights were changed under running requests")
            self.server.model.load(body["kwargs"]["weights_path"])
            return {"results": [None]}
        if body["method"] == "hone_digests" and (found := self.server.model.digests()):
            return {"results": [found]}
        raise Refusal(500, f"no method {body['method']}")

    def complete(self, body: dict[str, Any]) -> Any:
        prompt, count = body["prompt"], body["n"]
        if count > 1 and body["temperature"] == 0:
            raise Refusal(400, f"n must be 1 when using greedy sampling, got {count}.")
        self.begin(prompt, body["max_tokens"])
        choices = []
        for g in range(count):
            ids, logprobs, reason = self.server.model.sample(prompt, body["seed"] + g, body["max_tokens"])
            logprobs_of = {"token_logprobs": logprobs, "tokens": [str(i) for i in ids], "top_logprobs": None}
            choices.append(
                {"index": g, "token_ids": ids, "logprobs": logprobs_of, "finish_reason": reason, "text": "x"}
            )
        return {"object": "text_completion", "choices": choices[::-1]}  # the order is not promised

    def score(self, body: dict[str, Any]) -> Any:
        ids = body["prompt"]
        self.server.fault("probe")
        rows = [
            {str(token): {"logprob": value, "rank": 1, "decoded_token": "x"}}
            for token, value in zip(ids[1:], self.server.model.score(ids))
        ]
        return {"choices": [{"index": 0, "prompt_logprobs": [None, *rows], "finish_reason": "length"}]}


class SGLang(Handler):
    def answer(self, path: str, query: str, body: dict[str, Any]) -> Any:
        server = self.server
        if path == "/health_generate":
            return None
        if path == "/v1/models":
            return self.models()
        if path == "/get_model_info":
            return {"model_path": "x", "is_generation": True, "weight_version": server.weight_version}
        if path == "/generate":
            known(body, GENERATE_FIELDS)
            return self.generate(body)
        if path == "/pause_generation":
            known(body, {"mode"})
            server.paused = True
            server.aborts += body["mode"] == "abort"
            return {"message": "Generation paused successfully.", "status": "ok"}
        if path == "/continue_generation":
            server.paused = False
            return {"message": "Generation continued successfully.", "status": "ok"}
        if path == "/update_weights_from_disk":
            known(body, {"model_path", "load_format", "abort_all_requests", "weight_version", "flush_cache"})
            server.model.load(body["model_path"])
            server.weight_version = body["weight_version"]
            return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        if path == "/flush_cache":
            return "Cache flushed.\nPlease check backend logs for more details."
        raise Refusal(404, "Not Found")

    def refusal(self, refusal: Refusal) -> Any:
        return {"error": {"message": str(refusal)}}

    def generate(self, body: dict[str, Any]) -> Any:
        many = isinstance(body["input_ids"][0], list)
        prompts = body["input_ids"] if many else [body["input_ids"]]
        settings = body["sampling_params"] if many else [body["sampling_params"]]
        if len(settings) != len(prompts):
            raise Refusal(400, "sampling_params and input_ids differ in length")
        for prompt in prompts:
            self.look_up(prompt)
        version, aborts = self.server.weight_version, self.server.aborts
        if many:
            self.begin(prompts[0], settings[0]["max_new_tokens"])
        else:
            self.server.fault("probe")
        while self.server.paused:  # what comes in meanwhile waits
            time.sleep(0.01)
        aborted = self.server.aborts > aborts
        start = body.get("logprob_start_len", -1)
        found = [self.one(p, s, start, version, aborted) for p, s in zip(prompts, settings)]
        return found if many else found[0]

    def look_up(self, prompt: list[int]) -> None:
        """An empty prompt and ids that the table of embeddings lacks end a server on a CPU. The table is rounded up to
        64 rows: an id beyond the vocabulary and within it is answered."""
        rows = -(-self.server.model.vocabulary // 64) * 64
        if not prompt or not all(0 <= token < rows for token in prompt):
            self.server.die()

    def begin(self, prompt: list[int], max_tokens: int) -> None:
        self.server.asked += 1
        self.server.fault(self.server.asked)
        length, context = len(prompt), self.server.model.context
        if length >= context:
            message = f"The input ({length} tokens) is longer than the model's context length ({context} tokens)."
            raise Refusal(400, message)
        if length + max_tokens > context:
            raise Refusal(400, f"Requested token count exceeds the model's maximum context length of {context} tokens.")
        if length >= context - 6:
            message = f"Input length ({length} tokens) exceeds the maximum allowed length ({context - 6} tokens)."
            raise Refusal(400, f"{message} Use a shorter input or enable --allow-auto-truncate.")

    def one(self, prompt: list[int], settings: dict[str, Any], start: int, version: str, aborted: bool) -> Any:
        """`version`: of the weights when the request came; `aborted`: it was ended meanwhile, which is status 200."""
        known(settings, SGLANG_SAMPLING)
        model, server = self.server.model, self.server
        seed = settings.get("sampling_seed", 0) if DETERMINISTIC in server.options else random.getrandbits(62)
        room = model.context - 2 - len(prompt)  # for longer answers it ends early and says `length`
        ids, logprobs, reason = model.sample(prompt, seed, min(settings["max_new_tokens"], room))
        finish = {"type": reason, "matched": STOP} if reason == "stop" else {"type": reason, "length": len(ids)}
        if aborted:
            finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        parts = [{"version": version, "start": 0, "end": len(ids)}]
        if version != server.weight_version and len(ids) > 1:
            parts = [{"version": version, "start": 0, "end": 1}]
            parts += [{"version": server.weight_version, "start": 1, "end": len(ids)}]
        meta = {
            "id": "x",
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "weight_version": server.weight_version,  # of the last token
            "weight_versions": parts,
            "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, ids)],
        }
        if start == 0:
            scores = [None, *model.score(prompt)]
            meta["input_token_logprobs"] = [[value, token, None] for value, token in zip(scores, prompt)]
        return {"text": "x", "output_ids": ids, "meta_info": meta}


class Mortal(Server):
    """In a process of its own. STAND_IN is a folder: `lives` counts the starts; `fault` says what happens, and when,
    as `die 3` (at the third request, in the first life), `hang 3`, `die probe` (asked to score), `die /pause` (that
    path), `die always`, `slow start`."""

    def __init__(self, *arguments: Any) -> None:
        self.state = Path(os.environ["STAND_IN"])
        with (self.state / "lives").open("a") as file:
            file.write(f"{os.getpid()}\n")
        self.life = len((self.state / "lives").read_text().split())
        plan = self.state / "fault"
        self.plan = plan.read_text().split() if plan.exists() else ["none"]
        if self.plan == ["slow", "start"]:
            time.sleep(600)
        if self.plan == ["no", "memory"]:
            raise SystemExit("ValueError: To serve at least one request, 8.00 GiB KV cache is needed")
        super().__init__(*arguments)

    def die(self) -> None:
        os._exit(9)

    def reached(self, path: str) -> None:
        if self.plan == ["die", path] and self.life == 1:
            os._exit(9)

    def fault(self, number: int | str) -> None:
        what, when = (*self.plan, "")[:2]
        if when == "always" or (self.life == 1 and when == str(number)):
            if what == "die":
                os._exit(9)
            if what == "hang":
                time.sleep(600)


def main(handler: type[Handler], model_option: str, make: Callable[[str], Any] = Toy) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument(model_option, dest="model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    arguments, rest = parser.parse_known_args()
    print("stand-in", rest, flush=True)
    server = Mortal(handler, make(arguments.model), arguments.port, arguments.host)
    server.options = rest
    if "--weight-version" in rest:
        server.weight_version = rest[rest.index("--weight-version") + 1]
    server.serve_forever()
