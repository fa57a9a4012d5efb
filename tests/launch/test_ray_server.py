"""A rollout server as an actor of a Ray cluster: `pytest -m ray tests/launch`. The server is a stand-in for vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from hone.base import jsonl

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'ray[default]'"),
]

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = ROOT / "tests" / "rollout" / "stand_ins"

RECIPE = """
name: NAME
model: {path: tiny, tiny: {vocab_size: 400, hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, mlp_size: 64}}
task: {name: knights, people: [2], quiz: brief, names: 4, train: 60, validation: 10, test: 20, repeats: true}
prompt: {style: raw, system: "", template: "{user}\\n"}
checkpoint: {every: 2}
stages:
  - name: rl
    stage: rl
    steps: 6
    prompts_per_step: 2
    samples_per_prompt: 4
    sampling: {max_tokens: 16}
    optim: {lr: 1.0e-3}
    reward: {parts: {outcome: 1.0, overlong: 1.0}, overlong: {buffer: 12, max_tokens: 16}}
    eval: {problems: 2, sampling: {max_tokens: 16}}
    rollout: {engine: vllm}
parallel: {replicate: 2}
launch: {kind: ray, ray: {cpus: 0.5, server: {cpus: 0.5}}}
"""


def train(folder: Path, name: str, address: str, fault: str = "none", *more: str) -> subprocess.Popen[str]:
    (folder / f"{name}.yaml").write_text(RECIPE.replace("NAME", name))
    (folder / "state").mkdir()
    (folder / "state" / "fault").write_text(fault)
    variables = {
        "PYTHONPATH": os.pathsep.join([str(STAND_INS), str(STAND_INS / "true")]),
        "STAND_IN": str(folder / "state"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "hone", "train", f"{name}.yaml", f"launch.ray.address={address}"]
    if fault != "real":
        command.append(f"stages.rl.rollout.vllm.environment={json.dumps(variables)}")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *more], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )


def servers(folder: Path) -> list[psutil.Process]:
    """Those of the run in this folder, which is in their command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = process.info["cmdline"] or []
        if "vllm.entrypoints.openai.api_server" in command and str(folder) in " ".join(command):
            found.append(process)
    return found


def bits(run: Path) -> dict[str, bytes]:
    names = [p for pattern in ("rollouts/*", "tokens/*", "model/model.safetensors") for p in sorted(run.glob(pattern))]
    return {str(p.relative_to(run)): p.read_bytes() for p in names}


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 600
    while not any(row["step"] >= step for row in jsonl.read(run / "metrics.jsonl")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_server_and_then_its_actor_are_killed_and_the_result_is_the_same(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    process = train(tmp_path / "a", "whole", cluster.address)
    out, _ = process.communicate(timeout=900)
    assert process.returncode == 0, out
    assert not servers(tmp_path / "a")
    whole = tmp_path / "a" / "runs" / "whole" / "rl"
    kinds = [row["kind"] for row in jsonl.read(whole / "events.jsonl")]
    assert not {kind for kind in kinds if kind.startswith(("server", "worker"))}  # on one machine: loopback

    process = train(tmp_path / "b", "cut", cluster.address)
    cut = tmp_path / "b" / "runs" / "cut" / "rl"
    wait_for_step(cut, 1, process)
    (server,) = servers(tmp_path / "b")
    assert "ServerActor" in " ".join(server.parent().cmdline())
    assert server.cmdline()[server.cmdline().index("--host") + 1] == "127.0.0.1"
    server.kill()
    wait_for_step(cut, 3, process)
    (server,) = servers(tmp_path / "b")
    server.parent().kill()
    out, _ = process.communicate(timeout=900)
    assert process.returncode == 0, out
    restarts = [row["message"] for row in jsonl.read(cut / "events.jsonl") if row["kind"] == "server_restart"]
    assert len(restarts) == 2, restarts
    assert "restart 1 of 3). It ended with code -9. Its log" in restarts[0]
    assert "restart 2 of 3). It was lost with its actor. Its log" in restarts[1]
    assert "stand-in" in restarts[1], "the end of the log"
    assert not [row for row in jsonl.read(cut / "events.jsonl") if row["kind"].startswith("worker")]
    same = bits(whole)
    assert len(same) == 13
    assert bits(cut) == same
    assert not servers(tmp_path / "b")


def test_a_server_that_does_not_start_shows_its_log(cluster: Any, tmp_path: Path) -> None:
    process = train(tmp_path, "broken", cluster.address, "no memory")
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 2, out
    assert "the vLLM server ended with code 1 before it answered; its log is" in out
    assert "8.00 GiB KV cache is needed" in out


def test_a_killed_launcher_leaves_no_server(cluster: Any, tmp_path: Path) -> None:
    process = train(tmp_path, "gone", cluster.address)
    wait_for_step(tmp_path / "runs" / "gone" / "rl", 0, process)
    assert servers(tmp_path)
    process.kill()
    end = time.monotonic() + 60
    while servers(tmp_path):
        assert time.monotonic() < end
        time.sleep(0.2)


def test_no_room_for_the_server_says_so(cluster: Any, tmp_path: Path) -> None:
    process = train(
        tmp_path, "large", cluster.address, "none", "launch.ray.server.cpus=4", "launch.ray.placement_timeout=3"
    )
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "for 2 x 0.5 CPU, 0 GPU, and 4 CPU, 0 GPU for the server. It has 2 machines (" in out


@pytest.mark.vllm
@pytest.mark.skipif("HONE_VLLM_PYTHON" not in os.environ, reason="set HONE_VLLM_PYTHON")
def test_vllm_itself(cluster: Any, tmp_path: Path) -> None:
    """Two steps, the second after its actor was killed."""
    settings = {
        "python": os.environ["HONE_VLLM_PYTHON"],
        "arguments": ["--enforce-eager"],
        "environment": {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"},
        "start_timeout": 1200.0,
    }
    more = [f"stages.rl.rollout.vllm={json.dumps(settings)}", "stages.rl.steps=2", "model.tiny.hidden_size=64"]
    process = train(tmp_path, "vllm", cluster.address, "real", *more)
    run = tmp_path / "runs" / "vllm" / "rl"
    wait_for_step(run, 0, process)
    (server,) = servers(tmp_path)
    below = server.children(recursive=True)
    server.parent().kill()
    out, _ = process.communicate(timeout=1500)
    assert process.returncode == 0, out
    assert "stand-in" not in (run / "vllm.log").read_text()
    assert all(row["identity/gap"] < 1e-5 for row in jsonl.read(run / "metrics.jsonl"))
    assert [row["kind"] for row in jsonl.read(run / "events.jsonl")].count("server_restart") == 1
    assert not [child for child in below if child.is_running()]
    assert not servers(tmp_path)
