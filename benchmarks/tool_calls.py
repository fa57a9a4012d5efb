"""Where a trained model calls its tools, and how often it is right with and without a call.

    .venv/bin/python benchmarks/tool_calls.py runs/countdown-tool-mini-seed0 runs/countdown-tool-mini-seed1

For the evaluations before and after reinforcement learning of each run (the last stage): the share of episodes with a
call, calls per episode, and the accuracy of all episodes, of those with a call and of those without one, with 95 %
Wilson intervals.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hone.base import jsonl
from hone.base.stats import wilson
from hone.runs import seal


def calls(row: dict[str, Any]) -> int:
    return sum(len(step["message"].get("tool_calls") or ()) for step in row.get("steps", ()))


def accuracy(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "-"
    right = wilson(sum(row["verdict"] == "correct" for row in rows), len(rows))
    return f"{right.value:.3f} [{right.low:.3f}, {right.high:.3f}]"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    with_call = [row for row in rows if calls(row)]
    return {
        "episodes": len(rows),
        "with a call": round(len(with_call) / len(rows), 3),
        "calls": round(sum(map(calls, rows)) / len(rows), 2),
        "accuracy": accuracy(rows),
        "accuracy with a call": accuracy(with_call),
        "accuracy without": accuracy([row for row in rows if not calls(row)]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    for run in parser.parse_args().runs:
        stage = seal.stage_folders(run)[-1]
        for label in ("before", "after"):
            rows = jsonl.read(stage / "evals" / f"{label}.jsonl")
            print(json.dumps({"run": run.name, "eval": label, **summary(rows)}))


if __name__ == "__main__":
    main()
