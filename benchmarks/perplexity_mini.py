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

from hone.base import stats
from hone.environments.play import Episodes
from hone.measure.evaluate import eval_problems, load_evaluated
from hone.measure.two_model import contexts_of, two_model
from hone.recipe.load import load
from hone.rollout.answerer import LocalAnswerer
from hone.tasks import make_task

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "perplexity-mini"

NAMES = ("reward", "gold_nll")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RECIPE / "results.json")
    parser.add_argument("--collect", action="store_true", help="train nothing, read the runs that are there")
    arguments = parser.parse_args()
    rows, each = [], []
    for seed in arguments.seeds:
        name = f"perplexity-mini-seed{seed}"
        command = [sys.executable, "-m", "hone", "train", str(RECIPE / "recipe.yaml"), f"seed={seed}", f"name={name}"]
        if not arguments.collect:
            subprocess.run(command, cwd=ROOT, check=True)
        row, by_problem = measure(ROOT / "runs" / name)
        rows.append(row)
        each.append(by_problem)
    over = over_seeds(each)
    arguments.out.write_text(json.dumps({"seeds": rows, "over_seeds": over}, indent=1) + "\n")
    print(table(rows))
    for name, d in over.items():
        print(f"\n{name}: {d['value']:+.4f} [{d['low']:+.4f}, {d['high']:+.4f}], p {d['p']:.2g}")


Each = dict[str, dict[str, list[float]]]  # before and after: reward and gold_nll of each problem


def over_seeds(each: list[Each]) -> dict[str, dict[str, float]]:
    """After less before, of the means over seeds: paired by puzzle, and puzzles are what is resampled."""
    mean = {label: {n: np.mean([e[label][n] for e in each], axis=0) for n in NAMES} for label in ("before", "after")}
    return {name: difference(mean["before"][name], mean["after"][name]) for name in NAMES}


def difference(before: Any, after: Any) -> dict[str, float]:
    paired = stats.compare(list(before), list(after))
    d = paired.difference
    return {"value": d.value, "low": d.low, "high": d.high, "p": paired.p_value}


def measure(folder: Path) -> tuple[dict[str, Any], Each]:
    """Before and after of one run, and what is between them, by problem."""
    stage = load(folder, check_files=False).stages[-1]
    frozen = folder / "warmup" / "model"
    found: dict[str, Any] = {}
    each: Each = {}
    for label, path in (("before", frozen), ("after", folder / "rl" / "model")):
        task = make_task(stage.task, stage.seed)
        writer, reader = (load_evaluated(stage, one, task) for one in (path, frozen))
        problems = eval_problems(task, stage.eval)
        episodes = Episodes(writer.renderer)
        groups = episodes.sample(problems, writer.engine, stage.eval.sampling, samples=1, seed=stage.seed)
        contexts, config = contexts_of(task, problems, groups, stage.reward.perplexity), stage.reward.perplexity
        answerer = LocalAnswerer(reader.model, reader.renderer)
        row = two_model(problems, contexts, task, answerer, reader.engine, config)
        each[label] = row.pop("by_problem")
        found[label] = {**row, "median_gold_perplexity": math.exp(float(np.median(each[label]["gold_nll"])))}
    found["differences"] = {name: difference(each["before"][name], each["after"][name]) for name in NAMES}
    manifest = json.loads((folder / "rl" / "manifest.json").read_text())
    result = json.loads((folder / "results.json").read_text())
    policy = {label: result[label]["accuracy"] for label in ("before", "after")}
    about = {key: manifest[key] for key in ("hardware", "versions")}
    row = {"seed": result["seed"], "seconds": result["seconds"], **found, "policy_accuracy": policy, **about}
    return row, each


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: two tables, one row per seed."""
    lines = [
        "| seed | reward before | after | gold perplexity before | after | its median before | after |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        b, a = row["before"], row["after"]
        cells = [str(row["seed"]), interval(b["reward"]), interval(a["reward"])]
        cells += [interval(x["context"]["gold_perplexity"]) for x in (b, a)]
        cells += [f"{x['median_gold_perplexity']:.4f}" for x in (b, a)]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| seed | answerer's accuracy: no context | before | after | policy's before | after | minutes |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in rows:
        b, a = row["before"], row["after"]
        of = [x["accuracy"] for x in (b["none"], b["context"], a["context"])]
        cells = [interval(x) for x in (*of, *(row["policy_accuracy"][label] for label in ("before", "after")))]
        lines.append(f"| {row['seed']} | {' | '.join(cells)} | {row['seconds'] / 60:.1f} |")
    return "\n".join(lines)


def interval(a: dict[str, float]) -> str:
    return f"{a['value']:.3f} [{a['low']:.3f}, {a['high']:.3f}]"


if __name__ == "__main__":
    main()
