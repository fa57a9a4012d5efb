"""vLLM in this process: what it is asked for, with a stand-in; and where this interpreter has vLLM, itself:

python -m pytest -m vllm tests/rollout/test_vllm_inside.py
"""

from __future__ import annotations

import importlib.util
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hone.base.settings import UserError
from hone.base.streams import server_prompt
from hone.learn.policy import Policy, Trainable
from hone.model import tiny
from hone.recipe.sections.model import LoraConfig, ModelConfig, TinyConfig
from hone.recipe.sections.optim import OptimConfig
from hone.recipe.sections.rollout import RolloutConfig, SamplingConfig, VLLMConfig
from hone.rollout import make_engine
from hone.rollout.engine import ModelTraits
from hone.rollout.identity import PolicyMismatch, Verified, policy_logprobs
from hone.rollout.servers import vllm_inside
from hone.rollout.servers.vllm import engine_options
from hone.rollout.servers.weight_transfer import ServedWeights

REAL = importlib.util.find_spec("vllm") is not None
PROMPTS = [np.arange(5, 9), np.arange(10, 12)]


class Params:
    """vLLM's SamplingParams: whatever it is given."""

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)


class Stub:
    """vLLM's LLM: token g of sample g, log-probs -g; the samples in no order."""

    model_config = types.SimpleNamespace(max_model_len=32)

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.calls: list[Any] = []

    def generate(self, prompts: Any, settings: Any, *, use_tqdm: bool, lora_request: Any) -> list[Any]:
        self.asked += zip(prompts, settings, [lora_request] * len(prompts))
        return [types.SimpleNamespace(outputs=[self._output(g) for g in reversed(range(s.n))]) for s in settings]

    def _output(self, g: int) -> Any:
        row = {g: types.SimpleNamespace(logprob=-float(g))}
        return types.SimpleNamespace(index=g, token_ids=[g, g], logprobs=[row, row], finish_reason="length")

    def collective_rpc(self, method: str, timeout: float, kwargs: Any) -> list[Any]:
        self.calls.append((method, kwargs))
        return [None]

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return True


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Stub]:
    monkeypatch.setitem(__import__("sys").modules, "vllm", types.SimpleNamespace(SamplingParams=Params))
    monkeypatch.setattr(vllm_inside, "find_spec", lambda name: object())
    engine, stub = vllm_inside.VLLMInside(VLLMConfig(in_process=True), ModelTraits((2,)), 8, tmp_path), Stub()
    monkeypatch.setattr(engine, "_start", lambda served: stub)
    monkeypatch.setattr(engine, "stop", lambda: None)
    return engine, stub


def test_every_prompt_has_its_seed_and_every_sample_its_place(inside: Any) -> None:
    engine, stub = inside
    engine.sync(types.SimpleNamespace(export=lambda folder: None), 7)
    groups = engine.generate(PROMPTS, SamplingConfig(max_tokens=4, top_p=0.5), samples=3, seed=5, stream_ids=[10, 11])
    assert [[turn.completion_ids.tolist() for turn in group] for group in groups] == [[[0, 0], [1, 1], [2, 2]]] * 2
    assert groups[1][2].logprobs.tolist() == [-2.0, -2.0]
    assert {turn.policy_version for group in groups for turn in group} == {7}
    assert [given["prompt_token_ids"] for given, _, _ in stub.asked] == [p.tolist() for p in PROMPTS]
    assert [s.seed for _, s, _ in stub.asked] == [server_prompt(5, 10), server_prompt(5, 11)]
    assert {(s.n, s.top_p, s.logprobs, tuple(s.stop_token_ids)) for _, s, _ in stub.asked} == {(3, 0.5, 0, (2,))}
    greedy = engine.generate(PROMPTS[:1], SamplingConfig(max_tokens=4, temperature=0.0), samples=3, seed=5)
    assert stub.asked[-1][1].n == 1
    assert len(greedy[0]) == 3
    with pytest.raises(UserError, match="prompt 0 has 4 tokens and may be followed by 29: 33 do not fit"):
        engine.generate(PROMPTS, SamplingConfig(max_tokens=29), samples=1, seed=0)


def test_new_weights_are_taken_over_in_place_and_caches_dropped(inside: Any) -> None:
    engine, stub = inside
    for version in (1, 2):
        engine.sync(types.SimpleNamespace(export=lambda folder: None), version)
    assert [call if call == "reset" else call[0] for call in stub.calls] == ["reset", "reload_weights", "reset"]
    assert stub.calls[1][1]["weights_path"].endswith("version_000002")
    engine.close()
    assert not list(engine._transfer._folder.iterdir())


def test_an_interpreter_without_vllm_is_an_error(tmp_path: Path) -> None:
    if not REAL:
        with pytest.raises(UserError, match=r"rollout.vllm.in_process: .* has no vllm; install it there"):
            vllm_inside.VLLMInside(VLLMConfig(in_process=True), ModelTraits((2,)), 8, tmp_path)


def test_options_of_the_engine() -> None:
    plain = engine_options(ServedWeights(0, Path("m")), "bfloat16", 8, cpu=False)
    assert plain[plain.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert not {"--enable-lora", "--no-enable-chunked-prefill"} & set(plain)
    assert "--no-enable-chunked-prefill" in engine_options(ServedWeights(0, Path("m")), "float32", 8, cpu=True)
    adapter = engine_options(ServedWeights(0, Path("m"), Path("a"), 33), "float32", 8, cpu=False)
    assert adapter[adapter.index("--max-lora-rank") + 1] == "64"


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not REAL, reason="this interpreter has no vllm")
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, alpha=6.0)])
def test_the_real_one_follows_and_stale_weights_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: LoraConfig | None
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    sizes = TinyConfig(vocab_size=400, hidden_size=64, layers=2, heads=2, kv_heads=1, mlp_size=128)
    tiny.create(tmp_path / "model", sizes, ["Zoey is a knight. Let me think: 1 + 2 = 3."] * 20, seed=0)
    policy = Policy.load(ModelConfig(path=str(tmp_path / "model")), OptimConfig(), 10, Trainable(lora))
    settings = VLLMConfig(in_process=True, lora="adapter" if lora else "merged", arguments=("--enforce-eager",))
    events: list[Any] = []
    config = RolloutConfig(engine="vllm", vllm=settings, max_sequences=32)
    engine = make_engine(config, policy, tmp_path, lambda kind, message: events.append((kind, message)))
    assert isinstance(engine, Verified)
    try:
        for version in range(3):
            synced = engine.sync(policy, version)
            assert synced["identity/gap"] < 1e-5
            assert synced["identity/tensors"] >= (16 + 28 if lora else 16)
            groups = engine.generate(PROMPTS, SamplingConfig(max_tokens=24), samples=4, seed=version)
            turns = [turn for group in groups for turn in group]
            served = np.concatenate([turn.logprobs for turn in turns])
            np.testing.assert_allclose(served, policy_logprobs(policy, turns), atol=2e-4)
            with torch.no_grad():
                for p in policy.parameters:
                    p.add_(1e-2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        assert not events
        monkeypatch.setattr(type(engine._engine), "sync", lambda *_: None)
        with pytest.raises(PolicyMismatch):
            engine.sync(policy, 3)
    finally:
        engine.close()
