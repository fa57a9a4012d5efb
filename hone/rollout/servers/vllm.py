"""vLLM behind its OpenAI-compatible server, with the calls of its development mode for new weights.

    rollout: {engine: vllm, vllm: {python: /path/to/vllm/venv/bin/python}}

Endpoints: /v1/completions (token ids in and out), /pause, /collective_rpc, /reset_prefix_cache, /resume; for adapters
/v1/load_lora_adapter and /v1/unload_lora_adapter. Each version of an adapter has a name of its own, so that neither
answers nor cached keys and values of two versions can be confused.
Sources: https://docs.vllm.ai/en/latest/training/rlhf/, .../features/lora/ and the source of vllm/entrypoints.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from hone.base.http import Http, ServerRefused
from hone.recipe.sections.rollout import VLLM_RANKS, SamplingConfig, VLLMConfig
from hone.rollout.engine import Weights
from hone.rollout.servers.host import Host
from hone.rollout.servers.lifecycle import MODEL, SHORT
from hone.rollout.servers.server import Aborted, ServerEngine, ordinary
from hone.rollout.servers.weight_transfer import ServedWeights
from hone.types import Finish

#: Run by the server's interpreter: is this a CPU build? The test of vllm.platforms, without the slow import.
CPU_BUILD = """
import importlib.metadata as m, os, sys
names = m.packages_distributions().get("vllm", [])
told = os.environ.get("VLLM_TARGET_DEVICE") == "cpu" or sys.platform == "darwin"
print(told or any("cpu" in f"{name} {m.version(name)}" for name in names))
"""


def is_cpu_build(host: Host, python: str, environment: Mapping[str, str]) -> bool:
    return host.output([python, "-c", CPU_BUILD], environment)[1].strip() == "True"


def engine_options(served: ServedWeights, dtype: str, max_sequences: int, cpu: bool) -> list[str]:
    """Options for vLLM's command line and for its engine in this process."""
    options = {
        "--model": served.model,
        "--dtype": dtype,
        "--max-num-seqs": max_sequences,
        "--logprobs-mode": "processed_logprobs",  # after temperature, top-k, top-p: what was sampled from
        "--generation-config": "vllm",  # ignore the model's generation_config.json
        "--worker-extension-cls": "hone_worker.Extension",
    }
    if served.adapter:
        options |= {"--max-loras": 1, "--max-cpu-loras": 1, "--max-lora-rank": room(served.rank)}
    flags = ["--enable-lora"] if served.adapter else []
    # Chunked prefill of a request with a seed crashes the CPU engine (its generator has no `offset`).
    flags += ["--no-enable-chunked-prefill"] if cpu else []
    return [str(part) for option in options.items() for part in option] + flags


class VLLMEngine(ServerEngine):
    name = "vLLM"
    module = "vllm"
    config: VLLMConfig
    _room = 0  # the largest adapter rank of the running server
    _adapter: str | None = None  # the served name of the adapter

    def _command(self, served: ServedWeights, port: int) -> list[str]:
        command = [self._python(), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--served-model-name", MODEL, "--host", self._host.address, "--port", str(port)]
        cpu = is_cpu_build(self._host, self._python(), self._environment() | self.config.environment)
        return command + engine_options(served, self._traits.dtype, self._max_sequences, cpu)

    def _environment(self) -> dict[str, str]:
        return {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": self._host.inside,  # not our PYTHONPATH: the interpreter is another one
            **({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if self.config.serves_adapter else {}),
        }

    def _fits(self, new: ServedWeights) -> bool:
        return new.rank <= self._room

    def _launch(self) -> None:
        super()._launch()
        assert self._served is not None
        self._room = room(self._served.rank)
        if self._served.adapter:
            self._load_adapter(self._served)

    def _healthy(self, http: Http) -> bool:
        http.get("/health", seconds=SHORT, what="vLLM's health")
        return True

    def _update(self, new: ServedWeights, old: ServedWeights | None) -> None:
        """Nothing is generated meanwhile: `wait` lets running requests end, and new ones wait for /resume."""
        self._post("/pause?mode=wait", None, "vLLM's pause")
        if old is None or new.model != old.model:
            self._rpc("reload_weights", {"weights_path": str(new.model)})
        if new.adapter:
            self._load_adapter(new)
        reply = self._post("/reset_prefix_cache", None, "vLLM's reset of its prefix cache")
        if isinstance(reply, dict) and reply.get("success") is False:
            raise ServerRefused(200, "success is false: keys and values of the old weights are still held", "the reset")
        self._post("/resume", None, "vLLM's resume")

    def _load_adapter(self, served: ServedWeights) -> None:
        """Load the adapter under a new name and unload the previous one: the server has room for one."""
        name, before = f"{MODEL}-{served.version}-{uuid.uuid4().hex[:8]}", self._adapter
        body = {"lora_name": name, "lora_path": str(served.adapter)}
        self._post("/v1/load_lora_adapter", body, "vLLM's load of the adapter", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")
        self._adapter = self._model = name
        if before is not None:
            with contextlib.suppress(ServerRefused):  # a restarted server does not know it
                self._post("/v1/unload_lora_adapter", {"lora_name": before}, "vLLM's unload of the old adapter")

    def _answers(
        self, prompt: list[int], sampling: SamplingConfig, samples: int, seed: int
    ) -> list[tuple[list[int], list[float], Finish]]:
        distinct = samples if sampling.temperature else 1  # vLLM refuses n greedy answers, which are all the same
        body = {
            "model": self._model,
            "prompt": prompt,
            "n": distinct,
            "seed": seed,  # sample i of a prompt is drawn with seed + i
            "max_tokens": sampling.max_tokens,
            "top_k": sampling.top_k,
            **ordinary(sampling),
            "stop_token_ids": list(self._traits.stop_ids),
            "logprobs": 0,  # of the token that was drawn
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        if sampling.stop:
            body |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
        reply = self.http.post(
            "/v1/completions", body, seconds=self.config.request_timeout, what="vLLM's answers to a prompt"
        )
        choices = sorted(reply["choices"], key=lambda choice: choice["index"])
        return [self._answer(choice) for choice in choices] * (samples // distinct)

    @staticmethod
    def _answer(choice: dict[str, Any]) -> tuple[list[int], list[float], Finish]:
        reason = choice["finish_reason"]
        if reason not in ("stop", "length"):
            raise Aborted(f"an answer ended with finish_reason {reason}")
        ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if ids is None or logprobs is None:
            raise ServerRefused(
                400, "it returns no token ids or no log-probs; vLLM >= 0.11 does (return_token_ids)", "the answer"
            )
        return ids, logprobs, reason

    def _score(self, ids: list[int]) -> list[float]:
        body = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
            "return_token_ids": True,
        }
        reply = self.http.post("/v1/completions", body, seconds=self.config.sync_timeout, what="vLLM's probe")
        rows = reply["choices"][0]["prompt_logprobs"]
        return [row[str(token)]["logprob"] for row, token in zip(rows[1:], ids[1:], strict=True)]

    def weights(self) -> Weights | None:
        """None without hone's extension, and for a sharded model, whose tensors are parts of the policy's."""
        try:
            reply = self._rpc("hone_digests", {})
        except ServerRefused:  # a server at `url` that was started without --worker-extension-cls
            return None
        return held_weights(reply["results"], self._adapter is not None)

    def _rpc(self, method: str, kwargs: dict[str, str]) -> Any:
        return self._post("/collective_rpc", {"method": method, "kwargs": kwargs}, f"vLLM's {method}")

    def _post(self, path: str, body: Any, what: str, variable: str = "VLLM_SERVER_DEV_MODE=1") -> Any:
        """Send a request. `variable`: the environment variable that makes the server offer this path."""
        try:
            return self.http.post(path, body, seconds=self.config.sync_timeout, what=what)
        except ServerRefused as error:
            if error.status == 404:
                raise ServerRefused(
                    404, f"it has no {path}; start it with {variable} in its environment", what
                ) from error
            raise


def held_weights(workers: Sequence[dict[str, Any]], adapter: bool) -> Weights | None:
    """The report of hone's extension; None with several workers, whose tensors are parts of the policy's."""
    if len(workers) != 1:
        return None
    tensors = workers[0]["tensors"]
    return Weights(
        {name: int(value) for name, (_, value) in tensors.items()},
        {name: dtype for name, (dtype, _) in tensors.items()},
        workers[0]["parts"],
        adapter=adapter,
    )


def room(rank: int) -> int:
    """The smallest supported rank >= `rank`; 0 without an adapter. `hone.recipe.recipe` has refused larger ones."""
    return next(size for size in (0, *VLLM_RANKS) if rank <= size)
