"""Several processes compute what one does: gloo on this machine, a model of a few thousand weights."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from hone.model.config import TinyConfig
from hone.model.tiny import create
from tests.train.policies import REWARDS
from tests.world_worker import five_steps

ROOT = Path(__file__).resolve().parents[1]
MODEL = TinyConfig(vocab_size=300, hidden_size=32, layers=2, heads=4, kv_heads=4, mlp_size=48)
TOLERANCE = 1e-5


def spawn(size: int, *arguments: str, module: str = "tests.world_worker") -> list[subprocess.Popen[str]]:
    """`size` processes that find each other as under torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        for rank in range(size)
    ]


def wait(processes: list[subprocess.Popen[str]], timeout: float) -> None:
    try:
        outputs = [p.communicate(timeout=timeout)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert not any(p.returncode for p in processes), "\n".join(outputs)


def together(size: int, cases: list[dict[str, Any]], folder: Path, timeout: float = 300) -> list[dict[str, Any]]:
    """What `size` processes find for each case."""
    (folder / "cases.json").write_text(json.dumps(cases))
    wait(spawn(size, str(folder / "cases.json"), str(folder)), timeout)
    return [torch.load(folder / f"{i}.pt") for i in range(len(cases))]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Qwen2 with shared embeddings and biases; Qwen3 with a head of its own and norms of queries and keys."""
    folder = tmp_path_factory.mktemp("models")
    create(folder / "qwen2", MODEL, ["Zoey is a knight."] * 3, seed=0)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=304, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=8, tie_word_embeddings=False, initializer_range=0.08,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder / "qwen3")
    AutoTokenizer.from_pretrained(folder / "qwen2").save_pretrained(folder / "qwen3")
    return {name: str(folder / name) for name in ("qwen2", "qwen3")}


def check_same(found: dict[str, Any], expected: dict[str, Any], label: str) -> None:
    for name in ("loss", "grad_norm", "entropy", "kl"):
        assert found[name] == pytest.approx(expected[name], rel=TOLERANCE, abs=TOLERANCE), f"{label}: {name}"
    for name in ("logprobs", "grad_norms"):
        for a, b in zip(itertools.chain(*found[name]), itertools.chain(*expected[name]), strict=True):
            torch.testing.assert_close(a, b, atol=TOLERANCE, rtol=TOLERANCE, msg=f"{label}: {name}")
    assert found["weights"].keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, atol=TOLERANCE, rtol=0, msg=f"{label}: {name}")


def test_two_processes_are_one(models: dict[str, str], tmp_path: Path) -> None:
    base = {"model": models["qwen2"], "rewards": REWARDS}
    cases = [{**base, "parallel": {"replicate": 2}}]
    expected = five_steps(base)
    for case, found in zip(cases, together(2, cases, tmp_path), strict=True):
        check_same(found, expected, str(case["parallel"]))
