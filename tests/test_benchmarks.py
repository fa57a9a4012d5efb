"""The benchmarks run, and say what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hone.measure.stats.measured import Measured, measured

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 1000  # several minutes of one core, on a machine that has other work too


def last_line_of(benchmark: str, *arguments: str) -> dict[str, Any]:
    """What a benchmark prints last."""
    command = [sys.executable, str(ROOT / "benchmarks" / benchmark), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    printed: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return printed


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 20)
def test_a_quick_train_step_prints_its_ratios_last() -> None:
    ratios = last_line_of("train_step.py", "--quick")
    assert {"step_ratio_fixed", "step_ratio_varied", "train_ratio", "memory_ratio"} <= ratios.keys()
    assert all(ratios[key] > 1 for key in ("step_ratio_fixed", "step_ratio_varied", "train_ratio", "memory_ratio"))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 20)
def test_a_quick_rollout_prints_its_ratios_last() -> None:
    ratios = last_line_of("rollout.py", "--quick")
    assert {"generate_ratio_fixed", "generate_ratio_varied", "floor_share"} <= ratios.keys()
    assert min(ratios["generate_ratio_fixed"], ratios["generate_ratio_varied"]) > 1
    assert 0 < ratios["floor_share"] < 1


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 20)
def test_three_runs_of_two_thousand_steps_are_compared_in_time() -> None:
    found = last_line_of("report.py")
    assert (found["runs"], found["steps"]) == (3, 2000)
    assert max(found["comparison"]["cpu_seconds"], found["one_run"]["cpu_seconds"]) < 20


def test_the_tables_of_prolonged_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: of 4 puzzles the base solves two, one in every second sample; resets solves all but one, always."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import prolonged_mini as p

    def model(label: str, seed: int, correct: list[int]) -> Measured:
        verdicts = [["correct"] * c + ["wrong"] * (p.SAMPLES - c) for c in correct]
        rows = [{"problem_id": f"p{i}", "verdict": v} for i, each in enumerate(verdicts) for v in each]
        return measured(label, rows, seed=seed, facts={"weights": "w"})

    base, again = model("b", 0, [32, 64, 0, 0]), model("b", 1, [32, 64, 1, 0])
    one, resets = model("u", 0, [32, 64, 0, 0]), model("r", 0, [64, 64, 64, 0])
    assert [round(p.differences(base, resets)[str(k)]["value"], 3) for k in (1, 64)] == [0.375, 0.25]
    assert p.differences(base, one)["16"]["value"] == 0
    new = p.ability(base, again, [one, one, resets])
    assert (new["problems"], new["of"], new["tries"]) == (2, 4, 64)
    assert [m["solved"] for m in new["models"].values()] == [1, 0, 0, 1]
    assert new["models"]["resets"]["gain"]["value"] == 0, "one of the two, as luck alone gives the base"
    row = {
        "seed": 0,
        "cpu_seconds": 60.0,
        "evaluation_cpu_seconds": 30.0,
        "pass_at_k": {"base": p.curve(base), "resets": p.curve(resets)},
        "resets_less_base": p.differences(base, resets),
        "resets_less_uninterrupted": p.differences(one, resets),
        "resets_less_widened": p.differences(one, resets),
        "by_level": {"base": {"4": p.curve(base)}},
        "carries_kept": {"base": 0.5},
        "new_ability": new,
    }
    assert "| 0 | 2 of 4 | 1 | 0 | 0 | 1 | +0.000 " in p.table([row])
    assert p.over_seeds([row])["pass@1, resets less base"] is None
    assert p.over_seeds([row, row])["pass@1, resets less base"]["value"] == pytest.approx(0.375)
