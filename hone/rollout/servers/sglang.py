"""SGLang behind its own HTTP interface.

    rollout: {engine: sglang, sglang: {python: /path/to/sglang/venv/bin/python}}

Endpoints: /generate (token ids in and out), /health_generate, /pause_generation, /update_weights_from_disk,
/flush_cache, /continue_generation. Sources: https://docs.sglang.ai (native API, sampling parameters, SGLang for RL
systems) and the source of sglang/srt/entrypoints/http_server.py. Observed behaviour of 0.5.23: docs/rollout.md.

Seeds are sent but have no effect unless the server runs with `--enable-deterministic-inference`: nothing here may
depend on them.
"""

from __future__ import annotations

from typing import Any

from hone.base import streams
from hone.base.http import Http, ServerRefused
from hone.recipe.sections.rollout import SamplingConfig
from hone.rollout.servers.lifecycle import SHORT
from hone.rollout.servers.server import Aborted, ServerEngine, StaleAnswer, ordinary
from hone.rollout.servers.weight_transfer import ServedWeights
from hone.types import Finish

#: SGLang's value for no top-k filter.
NO_TOP_K = -1
#: SGLang ends answers with `length` this many tokens before the context is full.
RESERVED = 2


class SGLangEngine(ServerEngine):
    """Log-probs are at the sampling temperature, and not renormalised after top-p, top-k or min-p."""

    name = "SGLang"
    module = "sglang"
    reserved = RESERVED

    def _command(self, served: ServedWeights, port: int) -> list[str]:
        options = {
            "--model-path": served.model,
            "--host": self._host.address,
            "--port": port,
            "--dtype": self._traits.dtype,
            "--max-running-requests": self._max_sequences,
            "--sampling-defaults": "openai",  # nothing from the model's generation_config.json
            "--weight-version": self._version,
        }
        command = [self._python(), "-m", "sglang.launch_server"]
        return command + [str(part) for option in options.items() for part in option]

    def _environment(self) -> dict[str, str]:
        # Without it, log-probs are those before the temperature is applied.
        return {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}

    def _healthy(self, http: Http) -> bool:
        http.get("/health_generate", seconds=SHORT + 20, what="SGLang's health")  # its own time-out is 20 s
        return True

    def _update(self, new: ServedWeights, old: ServedWeights | None) -> None:
        """Pause, update, continue: the order that SGLang's guide prescribes.

        None of our requests is running. Any other request was abandoned by us or belongs to another client, and would
        continue with the new weights: `abort` ends it.
        """
        self._post("/pause_generation", {"mode": "abort"}, "SGLang's pause")
        body = {"model_path": str(new.model), "flush_cache": True, "weight_version": str(new.version)}
        reply = self._post("/update_weights_from_disk", body, "SGLang's update of the weights")
        if not reply.get("success"):
            raise ServerRefused(200, reply.get("message", "success is false"), "SGLang's update of the weights")
        self._post("/flush_cache", None, "SGLang's flush of its cache")
        self._post("/continue_generation", {}, "SGLang's continuation")
        served = self.http.get("/get_model_info", seconds=SHORT, what="SGLang's model info").get("weight_version")
        if served != str(new.version):
            raise ServerRefused(
                200, f"it says weight_version {served} after the update to {new.version}", "SGLang's update"
            )

    def _answers(
        self, prompt: list[int], sampling: SamplingConfig, samples: int, seed: int
    ) -> list[tuple[list[int], list[float], Finish]]:
        """Sends the prompt `samples` times: SGLang's documentation advises against `n`."""
        settings = {
            **ordinary(sampling),
            "top_k": sampling.top_k or NO_TOP_K,
            "max_new_tokens": sampling.max_tokens,
            "stop_token_ids": list(self._traits.stop_ids),
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if sampling.stop:
            settings["stop"] = list(sampling.stop)
        body = {
            "input_ids": [prompt] * samples,
            "sampling_params": [
                {**settings, "sampling_seed": streams.endpoint(seed, sample=g)} for g in range(samples)
            ],
            "return_logprob": True,
            "stream": False,
        }
        answers = self.http.post(
            "/generate", body, seconds=self.config.request_timeout, what="SGLang's answers to a prompt"
        )
        return [self._answer(one["meta_info"], len(prompt)) for one in answers]

    def _answer(self, meta: dict[str, Any], length: int) -> tuple[list[int], list[float], Finish]:
        """Read one answer. `length`: tokens of the prompt."""
        reason = self._finish(meta)
        self._check_version(meta)
        if meta["prompt_tokens"] != length:  # --allow-auto-truncate among the server's arguments
            message = f"it answers {meta['prompt_tokens']} of the prompt's {length} tokens"
            raise ServerRefused(400, message, "SGLang's answers to a prompt")
        rows = meta["output_token_logprobs"]  # of (log-prob, token, its text or None)
        return [int(row[1]) for row in rows], [float(row[0]) for row in rows], reason

    @staticmethod
    def _finish(meta: dict[str, Any]) -> Finish:
        """The finish reason. Raises Aborted for aborted answers, which also have status 200."""
        reason: Finish = meta["finish_reason"]["type"]
        if reason not in ("stop", "length"):
            raise Aborted(f"an answer ended with finish_reason {meta['finish_reason']}")
        return reason

    def _check_version(self, meta: dict[str, Any]) -> None:
        """`weight_version` is that of the last token; newer servers report the version of every part."""
        last = str(meta.get("weight_version"))
        versions = list(dict.fromkeys([*(str(part["version"]) for part in meta.get("weight_versions") or ()), last]))
        if versions != [str(self._version)]:
            raise StaleAnswer(f"it comes from weight_version {', '.join(versions)}, not from {self._version} alone")

    def _score(self, ids: list[int]) -> list[float]:
        body = {
            "input_ids": ids,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        meta = self.http.post("/generate", body, seconds=self.config.sync_timeout, what="SGLang's probe")["meta_info"]
        self._finish(meta)
        self._check_version(meta)
        rows = meta["input_token_logprobs"]  # the first token has none
        if [row[1] for row in rows] != ids:
            raise ServerRefused(400, "the log-probs belong to other tokens than those sent", "SGLang's probe")
        return [float(row[0]) for row in rows[1:]]

    def _post(self, path: str, body: Any, what: str) -> Any:
        return self.http.post(path, body, seconds=self.config.sync_timeout, what=what)
