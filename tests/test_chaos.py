"""Killed anywhere, a run goes on as if nothing had happened. The long form is benchmarks/chaos.py itself."""

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
    """What benchmarks/chaos.py found; it fails if one run was other than the one that nobody touched, or hung."""
    command = [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), "--out", "-", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_few_kills() -> None:
    found = chaos("--kills", "6", "--steps", "3", seconds=280)
    assert found["kills"] == 6
    assert found["kills_while_a_checkpoint_was_written"] >= 1
    assert found["kills_by_place"]["sampling"] >= 1
    assert found["runs_finished_the_same"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", [(), ("--replicate", "2"), ("--shard", "2")], ids=["one", "replicas", "shards"])
def test_sixty_kills(layout: tuple[str, ...]) -> None:
    found = chaos("--kills", "60", *layout, seconds=1700)
    assert found["kills"] == 60
    assert found["kills_while_a_checkpoint_was_written"] >= 10
    assert found["kills_by_place"]["sampling"] >= 10
