"""vLLM in this process: its `LLM` for offline inference, without a server.

    rollout: {engine: vllm, vllm: {in_process: true, arguments: [--gpu-memory-utilization, "0.4"]}}

The interpreter that runs hone must have vLLM. It is not restarted after a crash: the run ends, and resumes from its
last checkpoint. Source: https://docs.vllm.ai/en/latest/serving/offline_inference/
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hone.base import streams
from hone.base.settings import UserError
from hone.recipe.sections.rollout import SamplingConfig, VLLMConfig
from hone.rollout.engine import ModelTraits, Weights, check_room
from hone.rollout.servers.host import Host
from hone.rollout.servers.server import ordinary
from hone.rollout.servers.vllm import engine_options, held_weights, is_cpu_build, room
from hone.rollout.servers.weight_transfer import ServedWeights, WeightTransfer
from hone.types import IntArray, Turn

if TYPE_CHECKING:
    from hone.learn.policy import Policy


class VLLMInside:
    """Implements `hone.rollout.engine.Engine` and `hone.rollout.identity.Scorer`.

    Raises UserError if this interpreter has no vLLM.
    """

    def __init__(self, config: VLLMConfig, traits: ModelTraits, max_sequences: int, folder: Path) -> None:
        if find_spec("vllm") is None:
            raise UserError(
                f"rollout.vllm.in_process: {sys.executable} has no vllm; install it there, or remove in_process and "
                "name the interpreter that has it in rollout.vllm.python"
            )
        self._config, self._traits, self._max_sequences = config, traits, max_sequences
        weights = Path(config.weights_folder).expanduser() if config.weights_folder else folder / "serving"
        self._transfer = WeightTransfer(weights, adapter=config.serves_adapter)
        self._served: ServedWeights | None = None
        self._llm: Any = None
        self._room = 0
        self._adapter: Any = None  # vLLM's LoRARequest
        self.on_restart: Callable[[], None] = lambda: None  # never called

    # --- Engine -------------------------------------------------------------------------------

    def sync(self, policy: Policy, version: int) -> None:
        """Transfer the weights; the first time, start vLLM with them."""
        new, before = self._transfer.export(policy, version), self._served
        self._served = new
        if self._llm is None or new.rank > self._room:
            self.stop()
            self._llm, self._room = self._start(new), room(new.rank)
        elif before is None or before.model != new.model:
            self._rpc("reload_weights", {"weights_path": str(new.model)})
        if new.adapter:
            self._adapter = _adapter(new)  # loaded with the next request, that of the identity check
        if not self._llm.reset_prefix_cache():
            raise UserError("vLLM did not drop the keys and values of the old weights (reset_prefix_cache)")
        if before is not None:
            self._transfer.drop(before, new)

    def generate(
        self,
        prompts: Sequence[IntArray],
        sampling: SamplingConfig,
        *,
        samples: int,
        seed: int,
        progress: Callable[[int, int], None] | None = None,
        stream_ids: Sequence[int] | None = None,
    ) -> list[list[Turn]]:
        """See `hone.rollout.engine.Engine`, and `hone.rollout.servers.server.ServerEngine.generate` on seeds."""
        from vllm import SamplingParams

        if samples < 1:
            raise ValueError(f"samples is {samples}: ask for at least one completion per prompt")
        check_room([len(p) for p in prompts], sampling.max_tokens, self._llm.model_config.max_model_len)
        distinct = samples if sampling.temperature else 1  # greedy answers are all equal
        settings = {
            **ordinary(sampling),
            "n": distinct,
            "max_tokens": sampling.max_tokens,
            "top_k": sampling.top_k,
            "stop_token_ids": list(self._traits.stop_ids),
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "logprobs": 0,  # of the token that was drawn
        }
        numbers = range(len(prompts)) if stream_ids is None else stream_ids
        params = [SamplingParams(**settings, seed=streams.server_prompt(seed, number)) for number in numbers]
        groups = [self._turns(p, out) * (samples // distinct) for p, out in zip(prompts, self._ask(prompts, params))]
        if progress is not None:
            progress(len(prompts) * samples, len(prompts) * samples)
        return groups

    @property
    def context(self) -> int | None:
        length: int = self._llm.model_config.max_model_len
        return length

    def close(self) -> None:
        self.stop()
        if self._served is not None:
            self._transfer.drop(self._served)
            self._served = None

    def stop(self) -> None:
        """End vLLM's engine, which runs in a separate process, and free its memory."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None

    # --- for hone.rollout.identity ------------------------------------------------------------

    def probe(self, sequences: Sequence[IntArray]) -> tuple[list[Turn], Weights | None]:
        """`score` and `weights`."""
        return self.score(sequences), self.weights()

    def score(self, sequences: Sequence[IntArray]) -> list[Turn]:
        """The model's log-probs (temperature 1) of each token of fixed sequences after the first."""
        from vllm import SamplingParams

        settings = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0)
        turns = []
        for ids, out in zip(sequences, self._ask(sequences, [settings] * len(sequences))):
            rows = zip(out.prompt_logprobs[1:], ids[1:].tolist(), strict=True)
            logprobs = np.asarray([row[token].logprob for row, token in rows], np.float32)
            turns.append(Turn(ids[:1], ids[1:], logprobs, "length", self._version))
        return turns

    def weights(self) -> Weights | None:
        """None with several workers, whose tensors are parts of the policy's."""
        return held_weights(self._rpc("hone_digests", {}), self._adapter is not None)

    # --- vLLM ---------------------------------------------------------------------------------

    @property
    def _version(self) -> int:
        assert self._served is not None, "sync first: it starts vLLM"
        return self._served.version

    def _start(self, served: ServedWeights) -> Any:
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        host = Host()
        if host.inside not in sys.path:
            sys.path.insert(0, host.inside)  # its processes inherit our path
        from vllm import LLM, EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        cpu = is_cpu_build(host, sys.executable, {})
        line = [*engine_options(served, self._traits.dtype, self._max_sequences, cpu), *self._config.arguments]
        parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(line)
        return LLM.from_engine_args(EngineArgs.from_cli_args(parsed))

    def _ask(self, prompts: Sequence[IntArray], settings: Sequence[Any]) -> list[Any]:
        inputs = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        outputs: list[Any] = self._llm.generate(inputs, list(settings), use_tqdm=False, lora_request=self._adapter)
        return outputs

    def _turns(self, prompt: IntArray, output: Any) -> list[Turn]:
        turns = []
        for out in sorted(output.outputs, key=lambda out: out.index):
            if out.finish_reason not in ("stop", "length"):
                raise UserError(f"vLLM ended an answer with finish_reason {out.finish_reason}")
            ids = np.asarray(out.token_ids, np.int64)
            logprobs = [row[token].logprob for row, token in zip(out.logprobs, ids.tolist(), strict=True)]
            turns.append(Turn(prompt, ids, np.asarray(logprobs, np.float32), out.finish_reason, self._version))
        return turns

    def _rpc(self, method: str, kwargs: dict[str, str]) -> list[Any]:
        results: list[Any] = self._llm.collective_rpc(method, self._config.sync_timeout, kwargs=kwargs)
        return results


def _adapter(served: ServedWeights) -> Any:
    """A name and a number for each version, so that cached keys of two versions are not confused."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"policy-{served.version}", served.version + 1, str(served.adapter))
