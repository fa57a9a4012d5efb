"""Generation: hone's native engine beside `transformers` and vLLM on one CPU, same model, prompts and lengths.

    .venv/bin/python benchmarks/rollout.py          # writes benchmarks/results/rollout.json
    .venv/bin/python benchmarks/rollout.py --quick  # a minute, smaller
    .venv/bin/python benchmarks/rollout.py --vllm-python OTHER/bin/python    # with vLLM's CPU build from there

The model is that of `train_step.py` (Qwen2, 4 layers x 256, vocabulary 512, float32, random). `fixed`: exactly 128
new tokens; `varied`: five tokens of the vocabulary end an answer, so that lengths are geometric with a mean of about
100 and 384 at most. Sides: `hone`; `hone eager`, without its compiled kernel; `generate` of transformers with its
default cache, and `static` with the other one; `batching`, its continuous batching; vLLM with log-probs, as RL needs
them. hone's figures include them too. Each cell of a side is measured in turn with the others', in processes of one
thread with the same allocator, once to warm up and then `--repeats` times; figures are medians of tokens per second.

`floor_share`: the time that hone would take if every product ran at the speed of the fastest product of these shapes,
plus the time to read the keys and values of every token once at the speed of memory, over the time that it takes. Both
speeds are measured in the same process. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rollout_sides import write_prompts
from train_step import ROOT, allocator, cpu_name
from train_step_sides import make_models

SIDES = ("hone", "hone eager", "generate", "static", "batching", "vllm")


def cells(quick: bool) -> dict[str, dict[str, Any]]:
    """What is measured: prompts, answers to each, prompt length in tokens, and how long answers are."""
    if quick:
        small = {"prompts": 4, "samples": 8, "prompt": 110}
        return {
            "fixed 4x8": {**small, "setting": "fixed", "longest": 64},
            "varied 4x8": {**small, "setting": "varied", "longest": 192},
        }
    sizes = {"1x1": (1, 1), "1x16": (1, 16), "8x16": (8, 16)}
    found = {
        f"{setting} {name}": {"prompts": p, "samples": g, "prompt": 110, "setting": setting, "longest": longest}
        for setting, longest in (("fixed", 128), ("varied", 384))
        for name, (p, g) in sizes.items()
    }
    return found | {"fixed 8x16 long": {**found["fixed 8x16"], "prompt": 440}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller, two cells, without batching and vLLM")
    parser.add_argument("--repeats", type=int, default=2, help="counted runs of each cell")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each side and cell")
    parser.add_argument("--sides", nargs="+", choices=SIDES, help="only these; default: all")
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM's CPU build")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "rollout.json")
    arguments = parser.parse_args()
    skipped = {"vllm"} if arguments.vllm_python is None else set()
    skipped |= set() if arguments.sides is None else {s for s in SIDES if s not in arguments.sides}
    sides = [s for s in SIDES if s not in skipped and not (arguments.quick and s in ("batching", "vllm"))]
    rows: dict[str, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder))
        write_prompts(Path(folder), cells(arguments.quick).values())
        for _ in range(1 if arguments.quick else arguments.rounds):
            for side in sides:
                try:
                    measured = child(side, folder, arguments)
                except subprocess.CalledProcessError as error:  # what the others gave is not thrown away
                    if side == "hone":
                        raise
                    print(f"{side} failed and is left out:\n{error.stderr[-2000:]}", file=sys.stderr)
                    continue
                for name, found in measured.items():
                    rows.setdefault(name, {}).setdefault(side, []).append(found)
    result = summary(rows, arguments)
    print(table(result))
    if not arguments.quick:
        arguments.out.parent.mkdir(exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["ratios"]))


def child(side: str, folder: str, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Every cell of one side, in a process of its own."""
    python = arguments.vllm_python if side == "vllm" else sys.executable
    repeats = 1 if arguments.quick else arguments.repeats
    chosen = cells(arguments.quick)
    if side == "batching":  # minutes for each of the others
        chosen, repeats = {"fixed 8x16": chosen["fixed 8x16"]}, 1
    script = str(Path(__file__).with_name("rollout_sides.py"))
    command = [python, script, side, folder, "--cells", json.dumps(chosen), "--repeats", str(repeats)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "" if side == "vllm" else str(ROOT)}
    if library := allocator():
        environment["LD_PRELOAD"] = library
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600, check=True)
    print(f"{side}: done", file=sys.stderr, flush=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def summary(rows: dict[str, dict[str, list[dict[str, float]]]], arguments: argparse.Namespace) -> dict[str, Any]:
    table = {
        cell: {
            side: {key: statistics.median(one[key] for one in found) for key in found[0]}
            for side, found in sides.items()
        }
        for cell, sides in rows.items()
    }
    largest = {setting: next(c for c in reversed(table) if c.startswith(setting)) for setting in ("fixed", "varied")}
    if not arguments.quick:
        largest["fixed"] = "fixed 8x16"

    def ratio(setting: str, peer: str, ours: str = "hone") -> float:
        cell = table[largest[setting]]
        return round(cell[ours]["tokens_per_s"] / cell[peer]["tokens_per_s"], 2)

    return {
        "ratios": {
            "generate_ratio_fixed": ratio("fixed", "generate"),
            "generate_ratio_varied": ratio("varied", "generate"),
            "floor_share": round(table[largest["fixed"]]["hone"]["floor_share"], 2),
            "static_ratio_fixed": ratio("fixed", "static"),
            "static_ratio_varied": ratio("varied", "static"),
            "eager_ratio_fixed": ratio("fixed", "generate", "hone eager"),
            "eager_ratio_varied": ratio("varied", "generate", "hone eager"),
            "quick": arguments.quick,
        },
        "cells": table,
        "setting": {**cells(arguments.quick), "threads": 1, "allocator": allocator() or "the system's"},
        "hardware": {"machine": platform.machine(), "cpus": os.cpu_count(), "cpu": cpu_name()},
        "versions": {p: version(p) for p in ("torch", "transformers")} | {"python": platform.python_version()},
    }


def table(result: dict[str, Any]) -> str:
    sides = [side for side in SIDES if any(side in row for row in result["cells"].values())]
    lines = ["tokens/s".ljust(18) + "".join(f"{side:>12}" for side in sides) + f"{'floor share':>13}{'GiB hone':>10}"]
    for cell, row in result["cells"].items():
        figures = "".join(f"{row[side]['tokens_per_s']:12.0f}" if side in row else " " * 12 for side in sides)
        ours = row["hone"]
        lines.append(f"{cell:<18}{figures}{ours['floor_share']:13.2f}{ours['peak_rss_bytes'] / 2**30:10.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
