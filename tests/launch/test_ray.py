"""Workers on a Ray cluster of two machines, which are processes of this one: `pytest -m ray tests/launch`."""

from __future__ import annotations

import os
import signal
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

RECIPE = """
name: NAME
model: {path: tiny, tiny: {vocab_size: 400, hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, mlp_size: 64}}
task: {name: knights, people: [2], quiz: brief, names: 4, train: 60, validation: 10, test: 20, repeats: true}
prompt: {style: raw, system: "", template: "{user}\\n"}
checkpoint: {every: 2, keep: 2}
tokens_per_microbatch: 2048
stages:
  - name: warmup
    stage: sft
    sft: {examples: 48, examples_per_step: 8, styles: {hasty: 0.9, careful: 0.1}}
    optim: {lr: 5.0e-3, decay: cosine}
  - name: rl
    stage: rl
    steps: 9
    prompts_per_step: 4
    samples_per_prompt: 4
    sampling: {max_tokens: 48}
    optim: {lr: 1.0e-3}
    reward: {parts: {outcome: 1.0, overlong: 1.0}, overlong: {buffer: 40, max_tokens: 48}}
    eval: {problems: 20, every: 4, sampling: {max_tokens: 48}}
parallel: {replicate: 2}
"""


def train(folder: Path, name: str, address: str, *more: str) -> subprocess.Popen[str]:
    (folder / f"{name}.yaml").write_text(RECIPE.replace("NAME", name))
    command = [sys.executable, "-m", "hone", "train", f"{name}.yaml", "launch=ray", f"launch.ray.address={address}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *more], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )


def bits(run: Path) -> dict[str, bytes]:
    """Everything that must not depend on where a run was cut."""
    names = [
        p
        for stage in ("warmup", "rl")
        for pattern in ("metrics.jsonl", "evals.jsonl", "evals/*", "rollouts/*", "tokens/*", "model/model.safetensors")
        for p in sorted((run / stage).glob(pattern))
    ]
    return {str(p.relative_to(run)): p.read_bytes() for p in names}


@pytest.fixture(scope="module")
def whole(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    process = train(folder, "whole", cluster.address)
    out, _ = process.communicate(timeout=900)
    assert process.returncode == 0, out
    assert "2 workers on the Ray cluster" in out
    assert "after: accuracy" in out  # what rank 0 says
    return folder / "runs" / "whole"


def worker(name: str, rank: int) -> psutil.Process:
    """The process of a run with this rank."""
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if f"{name}.yaml" in command and "--resume" in command and process.environ().get("RANK") == str(rank):
            return process
    raise AssertionError(f"no rank {rank} of {name}")


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 600
    while not any(row["step"] >= step for row in jsonl.read(run / "rl" / "metrics.jsonl")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_worker_and_then_an_actor_are_killed_and_the_result_is_the_same(
    cluster: Any, whole: Path, tmp_path: Path
) -> None:
    process = train(tmp_path, "cut", cluster.address)
    run = tmp_path / "runs" / "cut"
    wait_for_step(run, 3, process)
    worker("cut", 1).kill()
    wait_for_step(run, 6, process)
    worker("cut", 0).parent().kill()  # the actor: its worker ends with it
    out, _ = process.communicate(timeout=900)
    assert process.returncode == 0, out
    rows = [row for row in jsonl.read(run / "rl" / "events.jsonl") if row["kind"] == "worker_lost"]
    assert [(row["rank"], row["restart"]) for row in rows] == [(1, 1), (0, 2)]
    assert "was killed by SIGKILL; the others were stopped; restart 1 of 3 from the last checkpoint" in out
    assert "was lost with its actor" in out
    assert [row["kind"] for row in jsonl.read(run / "rl" / "events.jsonl")].count("resumed") == 2
    same = bits(whole)
    assert len(same) > 20
    assert bits(run) == same


def test_a_failure_is_brought_back_with_its_rank_and_its_machine(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\n\nif os.environ.get('RANK') == '1':\n    raise ValueError('of rank 1')\n\n\n"
        "def reward(prompts, completions, **columns):\n    return [0.0 for _ in completions]\n"
    )
    process = train(tmp_path, "broken", cluster.address, "stages.rl.reward.parts={mine.py:reward: 1.0}")
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 2, out
    rank, said = next(line for line in out.splitlines() if "of rank 1" in line).split("] ", 1)
    assert rank.startswith("[rank 1, on ")
    assert said == "mine.py:reward: cannot be imported: ValueError: of rank 1 (mine.py:4)"
    assert "restart" not in out  # it would be the same again


def test_no_room_names_what_was_asked_for_and_what_there_is(cluster: Any, tmp_path: Path) -> None:
    process = train(tmp_path, "large", cluster.address, "launch.ray.cpus=2", "launch.ray.placement_timeout=3")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "had no room within 3 s (launch.ray.placement_timeout) for 2 x 2 CPU, 0 GPU. It has 2 machines (" in out


def test_ctrl_c_stops_the_workers_after_saving(cluster: Any, tmp_path: Path) -> None:
    process = train(tmp_path, "stop", cluster.address)
    run = tmp_path / "runs" / "stop"
    wait_for_step(run, 1, process)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 130, out
    assert "Continue with" in out
    assert not jsonl.read(run / "rl" / "events.jsonl")[-1]["kind"].startswith("worker")


def test_without_a_cluster_it_says_how_to_start_one(tmp_path: Path) -> None:
    process = train(tmp_path, "nowhere", "127.0.0.1:1")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "launch.ray.address: no Ray cluster at 127.0.0.1:1: " in out
    assert not (tmp_path / "runs").exists()
