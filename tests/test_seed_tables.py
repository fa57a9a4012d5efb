"""The tables of recipes with several seeds, from hand-made results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "seed_tables.py"
    spec = importlib.util.spec_from_file_location("seed_tables", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def evaluation(*levels: float) -> dict[str, Any]:
    cells = [{"value": v, "low": v - 0.1, "high": v + 0.1, "n": 100} for v in levels]
    return {
        "accuracy": cells[0],
        "by_level": {str(2 + i): cell for i, cell in enumerate(cells)},
        "response_tokens": 21.4,
        "well_formed_rate": 0.97,
    }


ROWS = [
    {"seed": seed, "seconds": 120.0, "cpu_seconds": 90.0, "peak_rss_bytes": 2**30,
     "stages": {"rl": {"before": evaluation(0.5, 0.3), "after": evaluation(0.7, 0.3 + gain),
                       "collapse": {"length_collapse": 20 + seed} if seed else {}}}}
    for seed, gain in ((0, 0.1), (1, 0.2), (2, 0.3))
]  # fmt: skip


def test_gains_of_a_level_are_paired_by_seed(tables: ModuleType) -> None:
    lines = tables.by_level(ROWS).splitlines()
    # Gains 0.1, 0.2, 0.3: mean 0.2, s = 0.1, t_{2, 0.975} = 4.303, half = 4.303 * 0.1 / sqrt(3) = 0.248
    assert lines[-1] == "| rl | 3 | gain | +0.10 | +0.20 | +0.30 | +0.20 [-0.05, +0.45] |"
    assert lines[2] == (
        "| rl | 2 | before | 0.50 [0.40, 0.60] | 0.50 [0.40, 0.60] | 0.50 [0.40, 0.60] | 0.50 [0.50, 0.50] |"
    )
    assert len(lines) == 2 + 2 * 3


def test_a_stage_shows_format_and_what_the_watch_named(tables: ModuleType) -> None:
    *_, after, gain = tables.by_stage(ROWS).splitlines()
    assert after.startswith("| rl, after | 0.70 [0.60, 0.80] |")
    assert after.endswith("| 21 21 21 | 0.97 0.97 0.97 | –; length_collapse 21; length_collapse 22 |")
    assert gain.startswith("| rl, gain | +0.200 | +0.200 | +0.200 | +0.200 [+0.200, +0.200] |")


def test_one_seed_has_no_interval_over_seeds(tables: ModuleType) -> None:
    assert tables.by_level(ROWS[:1]).splitlines()[-1] == "| rl | 3 | gain | +0.10 | +0.10 |"
    assert tables.costs(ROWS[:1]).splitlines()[-1] == "| 0 | 1.5 | 2.0 | 1.0 |"


def test_paired_gains_average_the_seeds_of_a_problem(tables: ModuleType, tmp_path: Path) -> None:
    solved = {"before": ([True, False], [False, False]), "after": ([True, True], [True, False])}  # by seed, problem
    for label, seeds in solved.items():
        for seed, verdicts in enumerate(seeds):
            rows = [{"level": "3", "problem_id": str(i), "verdict": "correct" if v else "wrong"}
                    for i, v in enumerate(verdicts)]  # fmt: skip
            path = tmp_path / f"{seed}" / "rl" / "evals" / f"{label}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Problem 0: from 0.5 to 1; problem 1: from 0 to 0.5. Both gain 0.5, so there is no spread.
    found = tables.paired([tmp_path / "0", tmp_path / "1"], ["rl"])
    assert "| rl | 3 | mean | +0.500 [" in found
    assert "| rl | 3 | 0 | +0.500 [" in found


def test_answers_with_a_pattern_are_told_from_the_others(tables: ModuleType, tmp_path: Path) -> None:
    rows = [("I guess 4", "correct"), ("I guess 5", "wrong"), ("2+2=4", "correct"), ("2+2=", "truncated")]
    for label in ("before", "after"):
        path = tmp_path / "rl" / "evals" / f"{label}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": text, "verdict": verdict}) + "\n" for text, verdict in rows))
    last = tables.matching([tmp_path], ["rl"], "guess").splitlines()[-1]
    assert last.endswith("| 0.50 | 0.50 | 0.50 | 0.25 |")


def test_accuracy_in_training_at_both_ends(tables: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "rl" / "metrics.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"step": i, "accuracy": i / 10}) + "\n" for i in range(10)))
    # The means of 0, .1, .2, .3, .4 and of .5, .6, .7, .8, .9
    assert tables.training([tmp_path], ["rl"]).splitlines()[-1] == "| rl | 0.20 0.70 |"
