"""The real SGLang server, on a CPU: what it does with weights, tokens and seeds, and steps of RL against it.

    HONE_SGLANG_PYTHON=/path/to/venv/bin/python pytest -m sglang tests/rollout/test_sglang.py

The interpreter needs SGLang (0.5.23 was run); without the variable it is the one of the tests. Its compiled kernels
cannot be imported without CUDA: a stub that refuses to be called stands in for them (stand_ins/kernels/sgl_kernel).
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from hone.base import jsonl
from hone.base.http import Http, ServerLost
from hone.base.settings import UserError
from hone.learn.policy import Policy, Trainable
from hone.model import tiny
from hone.recipe.recipe import Recipe
from hone.recipe.sections.model import LoraConfig, ModelConfig, TinyConfig
from hone.recipe.sections.optim import OptimConfig
from hone.recipe.sections.rollout import RolloutConfig, SamplingConfig, SGLangConfig
from hone.rollout import make_engine
from hone.rollout.identity import Verified, policy_logprobs
from hone.stages.pipeline import train_loop
from hone.types import Turn

PYTHON = os.environ.get("HONE_SGLANG_PYTHON", sys.executable)
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        sys.executable == PYTHON and importlib.util.find_spec("sglang") is None, reason="set HONE_SGLANG_PYTHON"
    ),
]
TINY = TinyConfig(vocab_size=400, hidden_size=64, layers=2, heads=2, kv_heads=1, mlp_size=128, max_positions=256)
KERNELS = Path(__file__).parent / "stand_ins" / "kernels"
SETTINGS = SGLangConfig(
    python=PYTHON,
    arguments=("--device", "cpu", "--attention-backend", "torch_native", "--max-total-tokens", "20000"),
    environment={"PYTHONPATH": str(KERNELS), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
    start_timeout=1200.0,
)
PROMPTS = [np.arange(5, 15), np.arange(30, 50), np.arange(60, 63)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny.create(path, TINY, ["Zoey is a knight. Let me think: 1 + 2 = 3."] * 20, seed=0)
    return path


@pytest.fixture(scope="module")
def live(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Policy, Verified, list[Any]]]:
    """A policy with an adapter, which is handed over merged, one server for several tests, and its events."""
    policy = Policy.load(ModelConfig(path=str(folder)), OptimConfig(), 10, Trainable(LoraConfig(rank=4, alpha=6.0)))
    events: list[tuple[str, str]] = []
    config = RolloutConfig(engine="sglang", sglang=SETTINGS, max_sequences=32)
    place = tmp_path_factory.mktemp("server")
    engine = make_engine(config, policy, place, lambda kind, message: events.append((kind, message)))
    assert isinstance(engine, Verified)
    try:
        engine.sync(policy, 0)
        yield policy, engine, events
    finally:
        engine.close()


@torch.no_grad()
def step(policy: Policy, size: float) -> None:
    for p in policy.parameters:
        p.add_(size * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))


@torch.no_grad()
def logprobs(policy: Policy, turn: Turn, temperature: float) -> np.ndarray:
    """By transformers alone, of the whole distribution at this temperature."""
    policy.model.config._attn_implementation = "eager"
    ids = torch.as_tensor(np.concatenate([turn.prompt_ids, turn.completion_ids]))[None]
    logits = policy.model(ids, use_cache=False).logits[0, len(turn.prompt_ids) - 1 : -1].float() / temperature
    policy.model.config._attn_implementation = "hone"
    return logits.log_softmax(-1).gather(-1, torch.as_tensor(turn.completion_ids)[:, None])[:, 0].numpy()


def agree(policy: Policy, groups: list[list[Turn]], version: int) -> None:
    turns = [turn for group in groups for turn in group]
    served = np.concatenate([turn.logprobs for turn in turns])
    np.testing.assert_allclose(served, policy_logprobs(policy, turns), atol=1e-4)
    assert np.abs(served - policy_logprobs(policy, turns)).mean() < 5e-6
    assert all(turn.policy_version == version for turn in turns)
    assert all((turn.completion_ids[-1] in policy.stop_ids) == (turn.finish == "stop") for turn in turns)


def test_tokens_and_logprobs_follow_through_updates_of_a_merged_adapter(live: Any) -> None:
    policy, engine, events = live
    for version in range(1, 5):
        step(policy, 5e-2)
        assert engine.sync(policy, version)["identity/gap"] < 1e-5
        groups = engine.generate(PROMPTS, SamplingConfig(max_tokens=24), samples=8, seed=version)
        agree(policy, groups, version)
        assert len({tuple(turn.completion_ids) for turn in groups[0]}) == 8
    assert {kind for kind, _ in events} <= {"identity"}  # no digests: said once


@pytest.mark.parametrize("cut", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.9}])
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_logprobs_are_at_the_temperature_and_of_the_whole_distribution(
    live: Any, temperature: float, cut: dict[str, Any]
) -> None:
    policy, engine, _ = live
    settings = SamplingConfig(max_tokens=24, temperature=temperature, **cut)
    for group in engine.generate(PROMPTS, settings, samples=2, seed=1):
        for turn in group:
            np.testing.assert_allclose(turn.logprobs, logprobs(policy, turn, temperature), atol=1e-4)


def test_seeds_have_no_effect(live: Any) -> None:
    _, engine, _ = live
    a, b = (engine.generate(PROMPTS[:1], SamplingConfig(max_tokens=24), samples=4, seed=7) for _ in range(2))
    assert [turn.completion_ids.tolist() for turn in a[0]] != [turn.completion_ids.tolist() for turn in b[0]]


def test_what_does_not_fit_is_a_clear_error_and_the_rest_is_not_cut(live: Any) -> None:
    _, engine, events = live
    server, before = engine._engine, len(events)
    with pytest.raises(UserError, match=r"prompt 0 has 200 tokens .* 256 do not fit the context of 254"):
        engine.generate([np.full(200, 5)], SamplingConfig(max_tokens=56), samples=1, seed=0)
    with pytest.raises(UserError, match=r"refuses prompt 0: Input length \(250 tokens\) exceeds .* \(status 400\)"):
        engine.generate([np.full(250, 5)], SamplingConfig(max_tokens=4), samples=1, seed=0)
    context, server._context = server._context, None
    with pytest.raises(UserError, match=r"refuses prompt 0: Requested token count exceeds .*256.* \(status 400\)"):
        engine.generate([np.full(200, 5)], SamplingConfig(max_tokens=60), samples=1, seed=0)
    server._context = context
    groups = engine.generate([np.full(200, 5)], SamplingConfig(max_tokens=54), samples=8, seed=0)
    assert {len(turn.completion_ids) for turn in groups[0] if turn.finish == "length"} <= {54}
    with pytest.raises(UserError, match="prompt 0 contains the token id 400, and the model has the ids 0 to 399"):
        engine.generate([np.asarray([5, 400])], SamplingConfig(max_tokens=4), samples=1, seed=0)
    assert len(events) == before


def test_answers_that_another_ends_are_asked_for_again(live: Any) -> None:
    policy, engine, events = live
    server, before = engine._engine, len(events)
    abort = threading.Timer(
        0.7, lambda: server.http.post("/abort_request", {"abort_all": True}, seconds=20, what="the abort")
    )
    abort.start()
    groups = engine.generate([np.full(10, 5)], SamplingConfig(max_tokens=240), samples=16, seed=0)
    abort.join()
    agree(policy, groups, server._version)
    kinds = [kind for kind, _ in events[before:]]
    assert kinds == ["server_retry"]
    assert "abort" in events[-1][1]


def test_an_answer_across_an_update_is_refused(live: Any) -> None:
    """The update comes behind the engine's back and keeps what is under way."""
    policy, engine, _ = live
    server = engine._engine

    def update() -> None:
        http = Http(server.http.url)
        http.post("/pause_generation", {"mode": "retract"}, seconds=20, what="pause")
        body = {"model_path": str(server._served.model), "flush_cache": True, "weight_version": "900"}
        http.post("/update_weights_from_disk", body, seconds=60, what="update")
        http.post("/continue_generation", {}, seconds=20, what="continuation")

    timer = threading.Timer(0.7, update)
    timer.start()
    with pytest.raises(UserError, match=r"old weights: it comes from weight_version \d, 900, not from \d alone"):
        engine.generate([np.full(10, 5)], SamplingConfig(max_tokens=240), samples=16, seed=0)
    timer.join()
    engine.sync(policy, server._version + 1)


def test_a_server_killed_while_it_generates_and_during_a_check_comes_back(live: Any) -> None:
    policy, engine, events = live
    server, before = engine._engine, len(events)
    timer = threading.Timer(0.7, lambda: psutil.Process(server._process.pid).kill())
    timer.start()
    groups = engine.generate(PROMPTS, SamplingConfig(max_tokens=200), samples=8, seed=3)
    timer.join()
    agree(policy, groups, server._version)
    assert [kind for kind, _ in events[before:]] == ["server_restart"]
    step(policy, 5e-2)
    score, calls = server._score, []

    def dying(ids: list[int]) -> list[float]:
        calls.append(ids)
        if len(calls) == 2:
            psutil.Process(server._process.pid).kill()
        return score(ids)

    server._score = dying
    version = server._version + 1
    assert engine.sync(policy, version)["identity/gap"] < 1e-5
    agree(policy, engine.generate(PROMPTS, SamplingConfig(max_tokens=24), samples=4, seed=4), version)
    assert [kind for kind, _ in events[before:]] == ["server_restart"] * 2
    # Last: it ends the server. hone's own engine never sends such a token.
    body = {"input_ids": [5, 448], "sampling_params": {"max_new_tokens": 4}}
    with pytest.raises(ServerLost):
        server.http.post("/generate", body, seconds=60, what="a token that the model does not have")


@pytest.mark.parametrize("ahead, temperature, lora", [(False, 1.3, True), (True, 1.0, False)])
def test_steps_of_rl(folder: Path, tmp_path: Path, ahead: bool, temperature: float, lora: bool) -> None:
    """`ahead`: the server samples a step while the policy learns from the one before."""
    recipe = Recipe(
        name="x",
        task={"name": "knights", "people": [2], "quiz": "brief", "names": 4, "train": 60, "test": 20},
        prompt={"style": "raw", "system": "", "template": "{user}\n"},
        reward={"parts": {"outcome": 1.0, "overlong": 1.0}, "overlong": {"buffer": 40, "max_tokens": 48}},
        sampling={"max_tokens": 48, "temperature": temperature},
        rollout=RolloutConfig(engine="sglang", sglang=SETTINGS, ahead=ahead),
        # The bonus is a gradient, whatever the rewards of a random model are.
        algo={"entropy_coef": 0.01, "correction": {"kind": "tis" if ahead else "none"}},
        optim={"lr": 1e-2 if lora else 1e-3},
        lora={"rank": 4} if lora else None,
        eval={"problems": 8, "sampling": {"max_tokens": 48}},
        prompts_per_step=4,
        samples_per_prompt=4,
        steps=4,
    )
    train_loop(recipe, tmp_path / "run", ModelConfig(path=str(folder)))
    rows = jsonl.read(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == recipe.steps
    versions = [0, 0, 1, 2] if ahead else [0, 1, 2, 3]
    fresh = [row for row, version in zip(rows, versions, strict=True) if row["step"] == version]
    assert all(row["mismatch/mean_abs"] < 3e-6 for row in fresh)
    assert all(row["mismatch/max"] < 1e-4 for row in fresh)
    assert all(row["mismatch/mean_abs"] > 1e-5 for row in rows if row not in fresh)
    assert all(row["identity/gap"] < 1e-5 for row in rows)
    for number, version in enumerate(versions):
        samples = jsonl.read(tmp_path / "run" / "rollouts" / f"step_{number:06d}.jsonl")
        assert {row["policy_version"] for row in samples} == {version}
    kinds = {row["kind"] for row in jsonl.read(tmp_path / "run" / "events.jsonl")}
    assert not kinds & {"server_restart", "server_retry", "policy_mismatch"}
