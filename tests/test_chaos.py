"""Interrupted anywhere, a run goes on as if nothing had happened. The long form is benchmarks/chaos.py itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def chaos(*arguments: str, seconds: float) -> dict[str, Any]:
    """The counts of benchmarks/chaos.py, which fails if a run differs from an uninterrupted one, or hangs."""
    command = [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), "--out", "-", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_a_few_interruptions() -> None:
    result = chaos("--times", "6", "--steps", "3", seconds=280)
    assert set(result["by_kind"]) == {"kill", "kill sampling", "kill writing", "damage", "suspended", "SIGTERM"}
    assert result["kills_while_a_checkpoint_was_written"] >= 1
    assert result["kills_by_place"]["sampling"] >= 1
    assert result["runs_finished_the_same"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_interruptions() -> None:
    result = chaos("--times", "200", seconds=3500)
    assert result["interruptions"] == 200
    assert min(result["by_kind"].values()) >= 20
    assert result["kills_while_a_checkpoint_was_written"] >= 10
    assert result["kills_by_place"]["sampling"] >= 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", [("--replicate", "2"), ("--shard", "2")], ids=["replicas", "shards"])
def test_sixty_kills_of_two_processes(layout: tuple[str, ...]) -> None:
    result = chaos("--times", "60", *layout, seconds=1700)
    assert result["interruptions"] == 60
    assert result["kills_while_a_checkpoint_was_written"] >= 10
    assert result["kills_by_place"]["sampling"] >= 10
