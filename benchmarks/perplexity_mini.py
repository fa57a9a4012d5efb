"""The perplexity reward on a miniature, over seeds: does it rise on held-out problems, and gold perplexity fall?

    .venv/bin/python benchmarks/perplexity_mini.py             # seeds 0, 1, 2; writes results.json of the recipe
    .venv/bin/python benchmarks/perplexity_mini.py --collect   # evaluates the runs that are there, without training

The frozen answerer is the warmed-up model, as in training. `before` are its own contexts, `after` those of the policy,
on the same held-out puzzles; differences are paired.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hone.analysis import stats
from hone.evaluate import eval_problems, served
from hone.recipe import load, stages
from hone.rollout.collect import rollouts
from hone.two_model import contexts_of, load_frozen, two_model

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "perplexity-mini"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RECIPE / "results.json")
    parser.add_argument("--collect", action="store_true", help="train nothing, read the runs that are there")
    arguments = parser.parse_args()
    rows = []
    for seed in arguments.seeds:
        name = f"perplexity-mini-seed{seed}"
        command = [sys.executable, "-m", "hone", "train", str(RECIPE / "recipe.yaml"), f"seed={seed}", f"name={name}"]
        if not arguments.collect:
            subprocess.run(command, cwd=ROOT, check=True)
        rows.append(measure(ROOT / "runs" / name))
    arguments.out.write_text(json.dumps({"seeds": rows}, indent=1) + "\n")
    print(table(rows))


def measure(folder: Path) -> dict[str, Any]:
    """Before and after of one run, and what is between them, by problem."""
    stage = stages(load(folder, check_files=False))[-1]
    frozen = folder / "warmup" / "model"
    found: dict[str, Any] = {}
    each: dict[str, dict[str, list[float]]] = {}
    for label, path in (("before", frozen), ("after", folder / "rl" / "model")):
        task, renderer, engine = served(stage, path)
        answerer, answerer_engine = load_frozen(stage, str(frozen), task)
        problems = eval_problems(task, stage.eval)
        groups = rollouts(problems, renderer, engine, stage.eval.sampling, samples=1, seed=stage.seed)
        contexts = contexts_of(task, problems, groups, stage.reward.perplexity)
        row = two_model(problems, contexts, task, answerer, answerer_engine, stage.reward.perplexity)
        each[label] = row.pop("by_problem")
        found[label] = row
    for name in ("reward", "gold_nll"):
        paired = stats.compare(each["before"][name], each["after"][name])
        d = paired.difference
        found[f"{name}_difference"] = {"value": d.value, "low": d.low, "high": d.high, "p": paired.p_value}
    manifest = json.loads((folder / "rl" / "manifest.json").read_text())
    result = json.loads((folder / "results.json").read_text())
    policy = {label: result[label]["accuracy"] for label in ("before", "after")}
    return {"seed": result["seed"], "seconds": result["seconds"], **found, "policy_accuracy": policy} | {
        key: manifest[key] for key in ("hardware", "versions")
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, one row per seed, and the means over seeds of the differences."""
    lines = [
        "| seed | reward before | after | gold perplexity before | after | policy accuracy before | after | minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        b, a, policy = row["before"], row["after"], row["policy_accuracy"]
        cells = [str(row["seed"]), interval(b["reward"]), interval(a["reward"])]
        cells += [interval(x["context"]["gold_perplexity"]) for x in (b, a)]
        cells += [interval(policy[label]) for label in ("before", "after")] + [f"{row['seconds'] / 60:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "| seed | answerer's accuracy: no context | before | after | answer given away |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        b, a = row["before"], row["after"]
        of = [b["none"], b["context"], a["context"], b["leaked"]]
        lines.append(f"| {row['seed']} | " + " | ".join(interval(x["accuracy"]) for x in of) + " |")
    for name in ("reward", "gold_nll"):
        values = np.array([row[f"{name}_difference"]["value"] for row in rows])
        error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else float("nan")
        lines.append(f"\n{name}: mean difference over seeds {values.mean():+.4f}, standard error {error:.4f}")
    return "\n".join(lines)


def interval(a: dict[str, float]) -> str:
    return f"{a['value']:.3f} [{a['low']:.3f}, {a['high']:.3f}]"


if __name__ == "__main__":
    main()
