"""One GRPO step in hone and in TRL's GRPOTrainer: the same model, prompts, group size, lengths and settings.

    .venv/bin/python benchmarks/train_step.py          # writes benchmarks/results/train_step.json
    .venv/bin/python benchmarks/train_step.py --quick  # a minute, smaller
    .venv/bin/python benchmarks/train_step.py --architecture lfm2  # `model.tiny.architecture`; train_step-lfm2.json

A random Qwen2 (4 layers x 256, vocabulary 512, float32; or another `--architecture` of these sizes) answers 8 prompts
of about 150 tokens 16 times each; one update per rollout, no KL, token mean. `fixed`: exactly 128 new tokens. `varied`:
five of the 512 tokens, which the untrained model says about equally often, end an answer, so that lengths are geometric
with a mean of about 100, and 384 at most. Each side is a process of its own with the same number of threads and the
same allocator; the two take turns, the first step of a process is not counted, figures are medians. TRL runs with
micro-batches of 16, its fastest here.

`memory`: one update on 4096 packed tokens (4 prompts of 64 tokens x 4 answers of 240) with a vocabulary of 151 936 and
a trunk of 2 layers x 256; the answers are given, nothing is generated. Counted is what the step adds to the peak of the
process over what it held when model and trainer were ready.

The last line is JSON; ratios are TRL's figure over ours, so above 1 hone is better. Seconds are compared per generated
token, since in `varied` each side draws its own lengths.
"""

from __future__ import annotations

import argparse
import ctypes.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from train_step_sides import make_models

from hone.recipe.sections.model import TinyConfig

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = ("fixed", "varied", "memory")
ARCHITECTURES = get_args(TinyConfig.model_fields["architecture"].annotation)
#: Name of a ratio -> the setting and the figure that it compares.
RATIOS = {
    "step_ratio_fixed": ("fixed", "step"),
    "step_ratio_varied": ("varied", "step"),
    "train_ratio": ("fixed", "train"),
    "memory_ratio": ("memory", "added_bytes"),
    "generate_ratio": ("fixed", "generate"),
    "train_ratio_varied": ("varied", "train"),
}


def shape(quick: bool) -> dict[str, int]:
    if quick:
        return {"prompts": 4, "samples": 8, "fixed": 64, "varied": 192, "micro": 16, "answer": 60}
    return {"prompts": 8, "samples": 16, "fixed": 128, "varied": 384, "micro": 16, "answer": 240}


# --- the driver -------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller, and one process of each kind")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="seconds of CPU time: where other work runs")
    parser.add_argument("--repeats", type=int, default=2, help="processes of each kind")
    parser.add_argument("--steps", type=int, default=2, help="counted steps of each process")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default=ARCHITECTURES[0])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS, help="default: all")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/train_step.json, or -ARCHITECTURE.json")
    arguments = parser.parse_args()
    repeats = 1 if arguments.quick else arguments.repeats
    rows: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder), arguments.architecture)
        for _ in range(repeats):
            for setting in (s for s in arguments.settings if s != "memory"):
                for side in ("trl", "hone"):
                    rows.setdefault(f"{side}/{setting}", []).append(child(side, setting, folder, arguments))
        if "memory" in arguments.settings:
            with ThreadPoolExecutor() as both:  # at once: nothing is timed here
                memory = both.map(lambda side: child(side, "memory", folder, arguments), ("trl", "hone"))
                rows |= {f"{side}/memory": [one] for side, one in zip(("trl", "hone"), memory, strict=True)}
    result = summary(rows, arguments)
    print(table(result))
    if not arguments.quick:
        suffix = "" if arguments.architecture == "qwen2" else f"-{arguments.architecture}"
        out = arguments.out or ROOT / "benchmarks" / "results" / f"train_step{suffix}.json"
        out.parent.mkdir(exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["ratios"]))


def child(side: str, setting: str, folder: str, arguments: argparse.Namespace) -> dict[str, Any]:
    steps = 1 if arguments.quick else arguments.steps
    script = str(Path(__file__).with_name("train_step_sides.py"))
    command = [sys.executable, script, side, setting, folder, "--size", json.dumps(shape(arguments.quick))]
    command += ["--steps", str(steps), "--threads", str(arguments.threads)]
    command += ["--cpu-time"] if arguments.cpu_time else []
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(arguments.threads),
        "PYTHONPATH": str(ROOT),
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    if library := allocator():
        environment["LD_PRELOAD"] = library
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{side} {setting} failed:\n{done.stderr[-3000:]}")
    print(f"{side} {setting}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def allocator() -> str | None:
    """tcmalloc, if it is installed: the backward pass of both is faster with it."""
    return ctypes.util.find_library("tcmalloc_minimal")


def summary(rows: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> dict[str, Any]:
    sides: dict[str, dict[str, float]] = {}
    for name, repeats in rows.items():
        if name.endswith("memory"):
            sides[name] = repeats[0]
            continue
        steps = [step for one in repeats for step in one["steps"]]
        sides[name] = {key: statistics.median(step[key] for step in steps) for key in steps[0]}
        sides[name]["peak_rss_bytes"] = max(one["peak_rss_bytes"] for one in repeats)

    def ratio(setting: str, key: str) -> float:
        trl, hone = sides[f"trl/{setting}"], sides[f"hone/{setting}"]
        return trl[key] / trl.get("tokens", 1) / (hone[key] / hone.get("tokens", 1))

    ratios = {
        name: round(ratio(setting, key), 2) for name, (setting, key) in RATIOS.items() if setting in arguments.settings
    }
    if "fixed" in arguments.settings:
        ratios["train_share_of_ceiling"] = round(rows["hone/fixed"][0]["train_share"], 2)
    return {
        "ratios": {**ratios, "quick": arguments.quick},
        "sides": sides,
        "setting": {
            **shape(arguments.quick),
            "architecture": arguments.architecture,
            "repeats": arguments.repeats,
            "steps": arguments.steps,
            "threads": arguments.threads,
            "cpu_time": arguments.cpu_time,
            "allocator": allocator() or "the system's",
        },
        "hardware": {"machine": platform.machine(), "cpus": os.cpu_count(), "cpu": cpu_name()},
        "versions": {p: version(p) for p in ("torch", "transformers", "trl")} | {"python": platform.python_version()},
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{'':<14} {'step s':>8} {'generate':>9} {'score':>7} {'train':>7} {'tokens':>8} {'longest':>8} {'GiB':>6}"
    ]
    for name, row in result["sides"].items():
        if name.endswith("memory"):
            gib = {key: row[key] / 2**30 for key in ("added_bytes", "peak_rss_bytes")}
            lines.append(f"{name:<14} the step adds {gib['added_bytes']:.2f} GiB, peak {gib['peak_rss_bytes']:.2f} GiB")
            continue
        lines.append(
            f"{name:<14} {row['step']:8.2f} {row['generate']:9.2f} {row['score']:7.2f} {row['train']:7.2f} "
            f"{row['tokens']:8.0f} {row['longest']:8.0f} {row['peak_rss_bytes'] / 2**30:6.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
