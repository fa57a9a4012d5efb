"""The real torchrun with --max-restarts, whose workers are killed: `pytest -m slow tests/launch/test_torchrun.py`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hone.base import jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]

RECIPE = """
name: NAME
model: {path: tiny, tiny: {vocab_size: 400, hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, mlp_size: 64}}
task: {name: knights, people: [2], quiz: brief, names: 4, train: 60, validation: 10, test: 20, repeats: true}
prompt: {style: raw, system: "", template: "{user}\\n"}
checkpoint: {every: 2, keep: 2}
tokens_per_microbatch: 2048
steps: 12
prompts_per_step: 4
samples_per_prompt: 4
sampling: {max_tokens: 48}
optim: {lr: 1.0e-3}
reward: {parts: {outcome: 1.0, overlong: 1.0}, overlong: {buffer: 40, max_tokens: 48}}
eval: {problems: 4, every: 6, sampling: {max_tokens: 48}}
parallel: {replicate: 2}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Torchrun:
    """The agents of one run, each as on a machine of its own; their workers are the ranks."""

    def __init__(self, folder: Path, name: str, agents: int, *options: str, resume: bool = True) -> None:
        (folder / f"{name}.yaml").write_text(RECIPE.replace("NAME", name))
        self.run = folder / "runs" / name
        self.log = folder / f"{name}.log"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={agents}",
            f"--nproc-per-node={2 // agents}",
        ]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", f"--rdzv-id={name}"]
        command += ["--local-addr=127.0.0.1", *options, "-m", "hone", "train", f"{name}.yaml"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with self.log.open("ab") as log:
            self.agents = [
                subprocess.Popen(
                    [*command, *(["--resume"] if resume else [])], cwd=folder, env=environment, stdout=log, stderr=log
                )
                for _ in range(agents)
            ]

    def wait(self, seconds: float = 300.0) -> str:
        """What all have said; all have to end well."""
        for agent in self.agents:
            agent.wait(timeout=seconds)
        text = self.log.read_text()
        assert [agent.returncode for agent in self.agents] == [0] * len(self.agents), text
        return text

    def wait_for_step(self, step: int, seconds: float = 200.0) -> None:
        end = time.monotonic() + seconds
        while not any(row["step"] >= step for row in jsonl.read(self.run / "metrics.jsonl")):
            assert all(agent.poll() is None for agent in self.agents), self.log.read_text()
            assert time.monotonic() < end, f"step {step} did not come:\n{self.log.read_text()}"
            time.sleep(0.02)

    def worker(self, rank: int) -> psutil.Process:
        for agent in self.agents:
            for process in psutil.Process(agent.pid).children(recursive=True):
                if "train" in process.cmdline() and process.environ().get("RANK") == str(rank):
                    return process
        raise AssertionError(f"no rank {rank}:\n{self.log.read_text()}")

    def close(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                for process in psutil.Process(agent.pid).children(recursive=True):
                    process.kill()
                agent.kill()
                agent.wait()


def bits(run: Path) -> dict[str, bytes]:
    """Everything that must not depend on where a run was interrupted."""
    patterns = ("metrics.jsonl", "evals.jsonl", "evals/*", "rollouts/*", "tokens/*", "model/model.safetensors")
    return {str(p.relative_to(run)): p.read_bytes() for pattern in patterns for p in sorted(run.glob(pattern))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, bytes]]:
    run = Torchrun(tmp_path_factory.mktemp("whole"), "whole", 1)
    try:
        run.wait()
        yield bits(run.run)
    finally:
        run.close()


@pytest.mark.parametrize("agents, kills", [(1, [(2, 1), (5, 0), (8, 1)]), (2, [(2, 1), (5, 0)])])
def test_workers_are_killed_and_the_result_is_the_same(
    whole: dict[str, bytes], tmp_path: Path, agents: int, kills: list[tuple[int, int]]
) -> None:
    """With two agents, TORCHELASTIC_RESTART_COUNT differs between them: an agent counts its own failures."""
    run = Torchrun(tmp_path, "cut", agents, "--max-restarts=3")
    try:
        for step, rank in kills:
            run.wait_for_step(step)
            run.worker(rank).kill()
        run.wait()
    finally:
        run.close()
    assert [row["kind"] for row in jsonl.read(run.run / "events.jsonl")].count("resumed") == len(kills)
    assert len(whole) > 20
    assert bits(run.run) == whole


def test_restarts_without_resume_are_refused_before_anything_is_set_aside(tmp_path: Path) -> None:
    run = Torchrun(tmp_path, "cut", 1, "--max-restarts=1", resume=False)
    try:
        assert run.agents[0].wait(timeout=200) == 1
    finally:
        run.close()
    assert "torchrun --max-restarts=1 would begin the run from its start after a failure: add --resume" in (
        run.log.read_text()
    )
    assert not run.run.exists()
