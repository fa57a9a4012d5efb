"""A Ray cluster of several machines, which are addresses of this one: `pytest -m ray tests/launch`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from hone.base import jsonl

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'ray[default]'"),
    pytest.mark.skipif(sys.platform != "linux", reason="other systems listen at 127.0.0.1 only"),
]

ROOT = Path(__file__).resolve().parents[2]

RECIPE = """
name: NAME
model: {path: tiny, tiny: {vocab_size: 400, hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, mlp_size: 64}}
task: {name: knights, people: [2], quiz: brief, names: 4, train: 60, validation: 10, test: 20, repeats: true}
prompt: {style: raw, system: "", template: "{user}\\n"}
checkpoint: {every: 2, keep: 2}
tokens_per_microbatch: 2048
prompts_per_step: 4
samples_per_prompt: 4
sampling: {max_tokens: 48}
optim: {lr: 1.0e-3}
reward: {parts: {outcome: 1.0, overlong: 1.0}, overlong: {buffer: 40, max_tokens: 48}}
eval: {problems: 4, every: 20, sampling: {max_tokens: 48}}
parallel: {replicate: 2}
"""


def train(folder: Path, name: str, *more: str) -> subprocess.Popen[str]:
    (folder / f"{name}.yaml").write_text(RECIPE.replace("NAME", name))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hone", "train", f"{name}.yaml", *more]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def bits(run: Path) -> dict[str, bytes]:
    """Everything that must not depend on where a run was interrupted."""
    patterns = ("metrics.jsonl", "evals.jsonl", "evals/*", "rollouts/*", "tokens/*", "model/model.safetensors")
    return {str(p.relative_to(run)): p.read_bytes() for pattern in patterns for p in sorted(run.glob(pattern))}


def workers(name: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if f"{name}.yaml" in command and "--resume" in command and "RANK" in process.environ():
            found.append(process)
    return found


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 300
    while not any(row["step"] >= step for row in jsonl.read(run / "metrics.jsonl")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_raylet_of_the_launcher_is_lost_and_resume_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "180")  # 30 s are too few on a busy machine
    head = {"num_cpus": 0, "include_dashboard": False, "node_ip_address": "127.0.0.2"}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    run = tmp_path / "runs" / "cut"
    try:
        for number in (3, 4):
            cluster.add_node(num_cpus=1, node_ip_address=f"127.0.0.{number}")
        options = ("launch=ray", f"launch.ray.address={cluster.address}")
        process = train(tmp_path, "cut", *options, "steps=10000")  # Ray takes some 15 s to notice the loss
        wait_for_step(run, 3, process)
        cluster.head_node.all_processes["raylet"][0].process.kill()  # the launcher's: it has connected to the head
        out, _ = process.communicate(timeout=200)
        assert process.returncode == 2, out
        assert "Ray on this machine, where hone was started, has ended (its raylet was lost)" in out
        assert "resume from the last checkpoint with the same command and --resume" in out
        assert "rank 0 (" not in out  # no worker is to blame
        assert jsonl.read(run / "events.jsonl")[-1]["kind"] == "launcher_lost"
        end = time.monotonic() + 60
        while workers("cut"):
            assert time.monotonic() < end
            time.sleep(0.2)
        steps = f"steps={len(jsonl.read(run / 'metrics.jsonl')) + 3}"
        cluster.add_node(num_cpus=0, node_ip_address="127.0.0.5")
        process = train(tmp_path, "cut", *options, steps, "--resume")
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0, out
    finally:
        cluster.shutdown()
    whole = train(tmp_path, "whole", steps)
    out, _ = whole.communicate(timeout=300)
    assert whole.returncode == 0, out
    same = bits(tmp_path / "runs" / "whole")
    assert len(same) > 15
    assert bits(run) == same
