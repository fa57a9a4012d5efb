"""Predicted peak memory against measured: real RL steps on a CPU, each run in a process of its own.

    .venv/bin/python benchmarks/plan.py             # writes benchmarks/results/plan.json, five minutes of one core
    .venv/bin/python benchmarks/plan.py --quick     # the smallest model only
    .venv/bin/python benchmarks/plan.py --base      # what a process holds whatever the model

Random Qwen2 models of three sizes answer puzzles; a function of the text rewards them, so that there is something to
learn from. The medium one also with LoRA, and with a KL penalty against a frozen reference; a fourth, as large as that
of `recipes/demo`, for 24 steps; a Gemma 3, a Qwen3.5 and an LFM2 of the medium size. Measured is the peak of the
resident memory of the process (`ru_maxrss`), predicted what `hone.preflight.plan` says at the start of the run. The
last line is JSON; `error` is predicted over measured, less one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

REWARD = """
import zlib

def even(problem, rollouts):
    return [float(zlib.crc32(r.text.encode()) % 2) for r in rollouts]
"""
TASK = {"name": "knights", "people": [2], "quiz": "brief", "names": 2, "width": 3, "repeats": True}
RECIPE: dict[str, Any] = {
    "stage": "rl",
    "task": {**TASK, "train": 200, "validation": 10, "test": 10},
    "prompt": {"style": "raw", "system": "", "template": "Puzzle: {user}\n"},
    "steps": 3,
    "prompts_per_step": 4,
    "samples_per_prompt": 6,
    "tokens_per_microbatch": 1024,
    "sampling": {"max_tokens": 96},
    "eval": {"problems": 4, "sampling": {"max_tokens": 16}},
    "optim": {"lr": 1e-5},
}
MODELS: dict[str, dict[str, Any]] = {
    "none": {"hidden_size": 16, "layers": 1, "heads": 1, "kv_heads": 1, "mlp_size": 16},
    "1M": {"hidden_size": 128, "layers": 4, "mlp_size": 352},
    "3M": {"hidden_size": 256, "layers": 4, "mlp_size": 688},
    "30M": {"hidden_size": 512, "layers": 10, "heads": 8, "kv_heads": 4, "mlp_size": 1408},
    "152k": {"hidden_size": 64, "layers": 2, "heads": 2, "kv_heads": 1, "mlp_size": 128, "vocab_size": 151_936},
    "120M": {"hidden_size": 896, "layers": 13, "heads": 14, "kv_heads": 2, "mlp_size": 2432, "vocab_size": 8192},
}
MODELS |= {f"30M {kind}": {**MODELS["30M"], "architecture": kind} for kind in ("gemma3", "qwen3_5", "lfm2")}
CASES: dict[str, dict[str, Any]] = {
    "3M": {},
    "30M": {},
    "120M": {"steps": 2},
    "152k": {"steps": 2},
    "3M, two processes": {"parallel": {"replicate": 2}},
    "30M, two processes": {"parallel": {"replicate": 2}},
    "30M, shard": {"parallel": {"shard": 2}},
    "1M, long": {"steps": 24, "prompts_per_step": 32, "samples_per_prompt": 8, "tokens_per_microbatch": 4096},
    "30M, LoRA": {"lora": {"rank": 16}},
    "30M, KL reference": {"algo": {"kl": {"coef": 0.01}}},
    "30M gemma3": {},
    "30M qwen3_5": {},
    "30M lfm2": {},
}
BASE = {
    "none": {"sampling": {"max_tokens": 8}, "tokens_per_microbatch": 256},
    "none, LoRA": {"sampling": {"max_tokens": 8}, "tokens_per_microbatch": 256, "lora": {"rank": 4}},
}
CHILD = "import sys; from hone.recipe.load import load; from hone.stages.pipeline import run; run(load(sys.argv[1]))"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest model only; writes nothing")
    parser.add_argument("--base", action="store_true", help="a model of next to nothing; writes nothing")
    parser.add_argument("--only", help="one of the cases; its row takes the place of the one in the file")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "plan.json")
    arguments = parser.parse_args()
    cases = BASE if arguments.base else {"3M": CASES["3M"]} if arguments.quick else CASES
    rows: dict[str, Any] = {}
    if arguments.only is not None:
        cases = {arguments.only: CASES[arguments.only]}
        rows = json.loads(arguments.out.read_text())["cases"] if arguments.out.exists() else {}
    for name, more in cases.items():
        rows[name] = run(MODELS[name.split(",")[0]], more)
        print(f"{name:20} predicted {rows[name]['predicted_mib']:6} MiB, measured {rows[name]['measured_mib']:6} MiB, "
              f"{rows[name]['error']:+.1%}", flush=True)  # fmt: skip
    worst = max(abs(row["error"]) for row in rows.values())
    found = {"worst_error": worst, "cases": rows, "torch": version("torch"), "transformers": version("transformers")}
    if not (arguments.quick or arguments.base):
        arguments.out.write_text(json.dumps({**found, "settings": RECIPE}, indent=1))
    print(json.dumps({"worst_error": worst, "errors": {name: row["error"] for name, row in rows.items()}}))


def run(model: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """One run in a process of its own; its own record of predicted and measured memory."""
    with tempfile.TemporaryDirectory() as folder:
        reward = Path(folder) / "reward.py"
        reward.write_text(REWARD)
        recipe = {**RECIPE, "name": "plan", "runs": folder, "model": {"path": "tiny", "tiny": model}}
        recipe |= {"reward": {"parts": {f"{reward}:even": 1.0}}, **more}
        file = Path(folder) / "recipe.yaml"  # JSON is YAML
        file.write_text(json.dumps(recipe))
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        alone = [sys.executable, "-c", CHILD, str(file)]
        command = [sys.executable, "-m", "hone", "train", str(file)] if "parallel" in more else alone
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        memory = json.loads((Path(folder) / "plan" / "results.json").read_text())["memory"]
        (stage,) = memory["stages"].values()
        parts = max(stage["parts"].values(), key=lambda sizes: sum(sizes.values()))
        return {
            "predicted_mib": memory["predicted_bytes"] >> 20,
            "measured_mib": max(memory["measured_bytes"]) >> 20,
            "error": memory["error"],
            "parts_mib": {name: size >> 20 for name, size in parts.items()},
        }


if __name__ == "__main__":
    main()
