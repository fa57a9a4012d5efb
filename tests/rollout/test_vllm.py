"""The real vLLM server: two steps of RL against it, its own silent fault, and a crash.

    HONE_VLLM_PYTHON=/path/to/venv/bin/python pytest -m vllm tests/rollout/test_vllm.py

The interpreter needs vLLM (on a CPU, for instance vllm-cpu 0.32); without the variable it is the one of the tests.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from hone.base import jsonl
from hone.base.http import Http, ServerError, free_port
from hone.learn.policy import Policy, Trainable
from hone.model import tiny
from hone.recipe.recipe import Recipe
from hone.recipe.sections.model import LoraConfig, ModelConfig, TinyConfig
from hone.recipe.sections.optim import LayersConfig, OptimConfig
from hone.recipe.sections.rollout import RolloutConfig, SamplingConfig, VLLMConfig
from hone.rollout import make_engine
from hone.rollout.engine import Event
from hone.rollout.identity import PolicyMismatch, Verified, policy_logprobs
from hone.stages.pipeline import train_loop
from hone.tasks import make_task

PYTHON = os.environ.get("HONE_VLLM_PYTHON", sys.executable)
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        sys.executable == PYTHON and importlib.util.find_spec("vllm") is None, reason="set HONE_VLLM_PYTHON"
    ),
]
TINY = TinyConfig(vocab_size=400, hidden_size=64, layers=2, heads=2, kv_heads=1, mlp_size=128)
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
SETTINGS = VLLMConfig(python=PYTHON, arguments=("--enforce-eager",), environment=ENVIRONMENT, start_timeout=1200.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny.create(path, TINY, ["Zoey is a knight. Let me think: 1 + 2 = 3."] * 20, seed=0)
    return path


def engine_for(policy: Policy, folder: Path, settings: VLLMConfig, event: Event) -> Verified:
    return make_engine(RolloutConfig(engine="vllm", vllm=settings, max_sequences=32), policy, folder, event)


@torch.no_grad()
def step(policy: Policy, size: float) -> None:
    for p in policy.parameters:
        p.add_(size * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))


def test_tokens_logprobs_and_weights_follow_through_updates_and_a_crash(folder: Path, tmp_path: Path) -> None:
    policy = Policy.load(ModelConfig(path=str(folder)), OptimConfig(), 10)
    events: list[tuple[str, str]] = []
    engine = engine_for(policy, tmp_path, SETTINGS, lambda kind, message: events.append((kind, message)))
    prompts = [np.arange(5, 15), np.arange(30, 50), np.arange(60, 63)]
    try:
        for version in range(4):
            synced = engine.sync(policy, version)
            assert synced["identity/gap"] < 1e-5
            assert synced["identity/tensors"] == 16  # all of them: 26 of the policy's, some stacked
            groups = engine.generate(prompts, SamplingConfig(max_tokens=24), samples=8, seed=version)
            turns = [turn for group in groups for turn in group]
            served = np.concatenate([turn.logprobs for turn in turns])
            np.testing.assert_allclose(served, policy_logprobs(policy, turns), atol=2e-4)
            assert all(turn.policy_version == version for turn in turns)
            assert all((turn.completion_ids[-1] in policy.stop_ids) == (turn.finish == "stop") for turn in turns)
            assert len({tuple(turn.completion_ids) for turn in groups[0]}) == 8  # a seed for each sample
            step(policy, 1e-2)
        assert not events
        sampled = engine.generate(
            prompts[:1], SamplingConfig(max_tokens=24, temperature=0.5, top_p=0.9), samples=4, seed=1
        )
        step(policy, -1e-2)  # as it was handed over
        for turn in sampled[0]:
            np.testing.assert_allclose(turn.logprobs, cut_logprobs(policy, turn, 0.5, 0.9), atol=2e-3)
        psutil.Process(engine._engine._process.pid).kill()
        groups = engine.generate(prompts, SamplingConfig(max_tokens=24), samples=8, seed=9)
        assert [kind for kind, _ in events] == ["server_restart"]
        turns = [turn for group in groups for turn in group]
        served = np.concatenate([turn.logprobs for turn in turns])
        np.testing.assert_allclose(served, policy_logprobs(policy, turns), atol=2e-4)
        kill_during_check(engine)
        step(policy, 1e-2)
        synced = engine.sync(policy, 5)
        assert (synced["identity/gap"] < 1e-5, synced["identity/tensors"]) == (True, 16)
        assert [kind for kind, _ in events] == ["server_restart"] * 2
    finally:
        engine.close()


def kill_during_check(engine: Verified) -> None:
    """The server dies between the first and the second sequence of the next check."""
    server, calls = engine._engine, []
    score = server._score

    def dying(ids: list[int]) -> list[float]:
        calls.append(ids)
        if len(calls) == 2:
            psutil.Process(server._process.pid).kill()
        return score(ids)

    server._score = dying


def test_many_long_prompts_with_seeds_are_read_whole(folder: Path, tmp_path: Path) -> None:
    """On a CPU vLLM 0.32 ends when it reads a prompt with a seed in parts, as it does when a batch has no room for all
    of it: "CPU Generator does not use offset". 40 prompts of 300 tokens are many times its batch of 2048."""
    policy = Policy.load(ModelConfig(path=str(folder)), OptimConfig(), 10)
    events: list[tuple[str, str]] = []
    settings = SETTINGS.model_copy(update={"arguments": (*SETTINGS.arguments, "--no-enable-prefix-caching")})
    engine = engine_for(policy, tmp_path, settings, lambda kind, message: events.append((kind, message)))
    draw = np.random.default_rng(0)
    prompts = [draw.integers(5, 390, 300) for _ in range(40)]
    try:
        engine.sync(policy, 0)
        groups = engine.generate(prompts, SamplingConfig(max_tokens=8), samples=2, seed=0)
    finally:
        engine.close()
    assert not events
    turns = [turn for group in groups for turn in group]
    served = np.concatenate([turn.logprobs for turn in turns])
    np.testing.assert_allclose(served, policy_logprobs(policy, turns), atol=2e-4)


def test_an_adapter_beside_its_base_follows_and_one_wrong_matrix_stops_the_run(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    policy = Policy.load(ModelConfig(path=str(folder)), OptimConfig(), 10, Trainable(LoraConfig(rank=4, alpha=6.0)))
    events: list[tuple[str, str]] = []
    settings = SETTINGS.model_copy(update={"lora": "adapter"})
    engine = engine_for(policy, tmp_path, settings, lambda kind, message: events.append((kind, message)))
    prompts = [np.arange(5, 15), np.arange(30, 50)]
    try:
        for version in range(4):
            if version == 2:  # a new base, which the server takes over in place
                policy.merge_and_reset(2, OptimConfig(), LayersConfig(), LoraConfig(rank=8, targets="mlp"), {})
            synced = engine.sync(policy, version)
            assert synced["identity/gap"] < 1e-5
            assert synced["identity/tensors"] >= 16 + (28 if version < 2 else 12)  # every A and B of two layers
            groups = engine.generate(prompts, SamplingConfig(max_tokens=24), samples=4, seed=version)
            turns = [turn for group in groups for turn in group]
            served = np.concatenate([turn.logprobs for turn in turns])
            np.testing.assert_allclose(served, policy_logprobs(policy, turns), atol=2e-4)
            assert all(turn.policy_version == version for turn in turns)
            step(policy, 5e-2)
        psutil.Process(engine._engine._process.pid).kill()
        again = engine.generate(prompts, SamplingConfig(max_tokens=24), samples=4, seed=3)
        assert [kind for kind, _ in events] == ["server_restart"]
        assert {turn.policy_version for group in again for turn in group} == {3}

        def corrupted(to: Path) -> None:
            export(to)
            file = to / "adapter_model.safetensors"
            tensors = load_file(file)
            name = next(name for name in tensors if "layers.1.mlp.down_proj.lora_B" in name)
            save_file({**tensors, name: -tensors[name]}, file, metadata={"format": "pt"})

        export, policy.export_adapter = policy.export_adapter, corrupted
        with pytest.raises(
            PolicyMismatch, match=r"differ from the policy's, the first model.layers.1.mlp.down_proj.lora_B"
        ):
            engine.sync(policy, 4)
    finally:
        engine.close()


@torch.no_grad()
def cut_logprobs(policy: Policy, turn: object, temperature: float, top_p: float) -> np.ndarray:
    """Of the distribution that is sampled from, by transformers alone: temperature, then the nucleus renormalised."""
    prompt, completion = turn.prompt_ids, turn.completion_ids  # type: ignore[attr-defined]
    policy.model.config._attn_implementation = "eager"
    ids = torch.as_tensor(np.concatenate([prompt, completion]))[None]
    logits = policy.model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
    policy.model.config._attn_implementation = "hone"
    probs, order = logits.softmax(-1).sort(descending=True)
    kept = probs.cumsum(-1) - probs < top_p
    probs = (probs * kept) / (probs * kept).sum(-1, keepdim=True)
    place = (order == torch.as_tensor(completion)[:, None]).int().argmax(-1, keepdim=True)
    return probs.gather(-1, place)[:, 0].log().numpy()


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_of_rl(folder: Path, tmp_path: Path, ahead: bool) -> None:
    """`ahead`: the server samples a step while the policy learns from the one before."""
    recipe = Recipe(
        name="x",
        task={"name": "knights", "people": [2], "quiz": "brief", "names": 4, "train": 60, "test": 20},
        prompt={"style": "raw", "system": "", "template": "{user}\n"},
        reward={"parts": {"outcome": 1.0, "overlong": 1.0}, "overlong": {"buffer": 40, "max_tokens": 48}},
        sampling={"max_tokens": 48},
        rollout=RolloutConfig(engine="vllm", vllm=SETTINGS, ahead=ahead),
        # The bonus is a gradient, whatever the rewards of a random model are.
        algo={"entropy_coef": 0.01, "correction": {"kind": "tis" if ahead else "none"}},
        optim={"lr": 1e-3},
        eval={"problems": 8, "sampling": {"max_tokens": 48}},
        prompts_per_step=4,
        samples_per_prompt=4,
        steps=3 if ahead else 2,
    )
    assert make_task(recipe.task, 0).problems("train")
    train_loop(recipe, tmp_path / "run", ModelConfig(path=str(folder)))
    rows = jsonl.read(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == recipe.steps
    versions = [0, 0, 1] if ahead else [0, 1]
    fresh = [row for row, version in zip(rows, versions, strict=True) if row["step"] == version]
    assert all(row["mismatch/mean_abs"] < 1e-5 for row in fresh)
    assert all(row["mismatch/max"] < 1e-3 for row in fresh)
    assert all(row["mismatch/mean_abs"] > 1e-5 for row in rows if row not in fresh)
    assert all(row["identity/gap"] < 1e-5 for row in rows)
    for number, version in enumerate(versions):
        samples = jsonl.read(tmp_path / "run" / "rollouts" / f"step_{number:06d}.jsonl")
        assert {row["policy_version"] for row in samples} == {version}
    kinds = {row["kind"] for row in jsonl.read(tmp_path / "run" / "events.jsonl")}
    assert not kinds & {"server_restart", "server_retry", "policy_mismatch", "identity"}


def test_vllms_packed_weights_that_an_update_does_not_reach_stop_the_run(folder: Path, tmp_path: Path) -> None:
    """vLLM's CPU build, started by somebody without hone's extension: `reload_weights` answers 200 and refreshes only
    embeddings, norms and biases. No digests are told either: the log-probs alone must show it, for a small step."""
    port = free_port()
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8"]
    log = (tmp_path / "log").open("wb")
    environment = {**os.environ, **ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"}
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 1200
        while not answers(url):
            assert time.monotonic() < deadline
            assert server.poll() is None, (tmp_path / "log").read_text()[-2000:]
            time.sleep(1)
        platform = json.dumps(Http(url).get("/version", seconds=20, what="version"))
        if "cpu" not in platform and torch.cuda.is_available():
            pytest.skip("the fault is of the CPU build")
        check_packed_fault(url, folder, tmp_path)
    finally:
        for process in (psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)):
            process.kill()
        server.wait()
        log.close()


def check_packed_fault(url: str, folder: Path, tmp_path: Path) -> None:
    policy = Policy.load(ModelConfig(path=str(folder)), OptimConfig(), 10)
    events: list[tuple[str, str]] = []
    engine = engine_for(policy, tmp_path, VLLMConfig(url=url), lambda kind, message: events.append((kind, message)))
    assert engine.sync(policy, 0)["identity/gap"] < 1e-5
    step(policy, 1e-4)
    with pytest.raises(PolicyMismatch, match=r"only a part of version 1|answers as version 0"):
        engine.sync(policy, 1)
    assert [kind for kind, _ in events] == ["identity", "policy_mismatch"]


def answers(url: str) -> bool:
    try:
        Http(url).get("/health", seconds=5, what="health")
    except ServerError:
        return False
    return True


def test_a_sharded_policy_is_served_from_its_first_process(tmp_path: Path) -> None:
    """Two processes with half of the weights each: the server has all of them after every update."""
    (tmp_path / "vowels.py").write_text(
        "def vowels(completions, **columns):\n"
        "    return [sum(c in 'aeiou3' for c in text) / 10 for text in completions]\n"
    )
    vllm = {"python": PYTHON, "arguments": ["--enforce-eager"], "environment": ENVIRONMENT, "start_timeout": 1200}
    settings = {
        "name": "sharded",
        "model": {"tiny": TINY.model_dump()},
        "task": "countdown",
        "reward": f"{tmp_path}/vowels.py:vowels",
        "parallel": {"shard": 2},
        "rollout": {"engine": "vllm", "vllm": vllm, "max_sequences": 32},
        "sampling": {"max_tokens": 24},
        "eval": {"problems": 2},
        "optim": {"lr": 1e-3},
        "prompts_per_step": 2,
        "samples_per_prompt": 4,
        "steps": 3,
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(settings))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "hone"]
    subprocess.run([*launch, "train", "recipe.yaml"], cwd=tmp_path, check=True, timeout=1400)
    rows = jsonl.read(tmp_path / "runs" / "sharded" / "metrics.jsonl")
    assert len(rows) == 3
    assert all(row["grad_norm"] > 0 for row in rows)  # each sync brings other weights
    assert all(row["identity/gap"] < 1e-5 and row["identity/tensors"] == 16 for row in rows)
