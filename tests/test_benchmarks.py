"""The benchmarks run, and say what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quick_train_step_prints_its_ratios_last() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "train_step.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    ratios = json.loads(done.stdout.strip().splitlines()[-1])
    assert {"step_ratio_fixed", "step_ratio_varied", "train_ratio", "memory_ratio"} <= ratios.keys()
    assert all(ratios[key] > 1 for key in ("step_ratio_fixed", "step_ratio_varied", "train_ratio", "memory_ratio"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quick_rollout_prints_its_ratios_last() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "rollout.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    ratios = json.loads(done.stdout.strip().splitlines()[-1])
    assert {"generate_ratio_fixed", "generate_ratio_varied", "floor_share"} <= ratios.keys()
    assert min(ratios["generate_ratio_fixed"], ratios["generate_ratio_varied"]) > 1
    assert 0 < ratios["floor_share"] < 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_runs_of_two_thousand_steps_are_compared_in_time() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "report.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert (found["runs"], found["steps"]) == (3, 2000)
    assert max(found["comparison"]["cpu_seconds"], found["one_run"]["cpu_seconds"]) < 20
