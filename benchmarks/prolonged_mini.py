"""Prolonged training on a miniature, over seeds: resets against one uninterrupted run, pass@k, and new ability.

    .venv/bin/python recipes/prolonged-mini/make_rows.py        # once, before the first run
    .venv/bin/python benchmarks/prolonged_mini.py               # seeds 0, 1, 2; writes results.json of the recipe
    .venv/bin/python benchmarks/prolonged_mini.py --seeds 1     # trains and evaluates that one; keeps the others' rows
    .venv/bin/python benchmarks/prolonged_mini.py --collect     # evaluates the runs that are there, without training

Each model answers the same problems 64 times; the base twice, with different random numbers, since the problems that it
never solves must not be chosen and scored by the same samples.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hone.base import jsonl, stats
from hone.measure.reproduce import SCHEMA, bands
from hone.measure.stats import measured, passk
from hone.measure.stats.ability import new_ability
from hone.measure.stats.measured import Measured
from hone.measure.store import read_measured, stored
from hone.report.runs import over_runs

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "prolonged-mini"
SAMPLES = 64
KS = (1, 4, 16, 64)
ARMS = ("uninterrupted", "widened", "resets")
#: A step of a worked answer: the digit, the carry if there is one, what comes out.
STEP = re.compile(r"[a-z](\d)(?:\+(\d))?=(\d+)")
#: What `hone verify prolonged-mini` compares: 8 samples a puzzle, without the evaluation above.
MEASURES = [
    "stages.uninterrupted.before.accuracy",
    *(f"stages.{arm}.after.accuracy" for arm in ARMS),
    *(f"stages.{arm}.after.accuracy - stages.{arm}.before.accuracy" for arm in ARMS),
    *(f"stages.resets.after.accuracy - stages.{arm}.after.accuracy" for arm in ARMS[:2]),
    "stages.resets.after.pass_at_k.8",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RECIPE / "results.json")
    parser.add_argument("--collect", action="store_true", help="train nothing, read the runs that are there")
    arguments = parser.parse_args()
    known = json.loads(arguments.out.read_text())["seeds"] if arguments.out.exists() else []
    rows = {row["seed"]: row for row in known}
    for seed in arguments.seeds:
        name = f"prolonged-mini-seed{seed}"
        given = [str(RECIPE / "recipe.yaml"), f"seed={seed}", f"name={name}"]
        if not arguments.collect:
            subprocess.run([sys.executable, "-m", "hone", "train", *given], cwd=ROOT, check=True)
        rows[seed] = measure(ROOT / "runs" / name)
    each = [rows[seed] for seed in sorted(rows)]
    recorded: dict[str, Any] = {"schema": SCHEMA, "runs": {"main": {"recipe": "recipe.yaml", "overrides": []}}}
    recorded |= {"bands": bands(each, MEASURES) if len(each) > 1 else {}, "over_seeds": over_seeds(each), "seeds": each}
    arguments.out.write_text(json.dumps(recorded, indent=1) + "\n")
    print(table(each))
    for key, found in recorded["over_seeds"].items():
        print(f"{key}: {interval(found)}" if found else f"{key}: no interval of one seed")


def measure(folder: Path) -> dict[str, Any]:
    """The row of one seed: results.json of the run, pass@k of the three models, and what is new."""
    out = folder / "pass_at_k"
    started = os.times()
    evaluate(folder, out, ["warmup", *ARMS], seed=0)
    evaluate(folder, out, ["warmup"], seed=1)
    ended = os.times()
    found, folders = {}, {}
    for place in stored(out):
        m = read_measured(place)
        name = str(m.label).split("/")[-1].split()[0]
        found[name, m.seed], folders[name, m.seed] = m, place
    base, again = found["warmup", 0], found["warmup", 1]
    arms = {name: found[name, 0] for name in ARMS}
    row = json.loads((folder / "results.json").read_text())
    row["evaluation_cpu_seconds"] = round(ended.children_user - started.children_user, 1)
    row["pass_at_k"] = {"base": curve(base), **{name: curve(m) for name, m in arms.items()}}
    row["resets_less_base"] = differences(base, arms["resets"])
    for name in ARMS[:2]:
        row[f"resets_less_{name}"] = differences(arms[name], arms["resets"])
    row["by_level"] = {"base": levels(base), **{name: levels(m) for name, m in arms.items()}}
    row["carries_kept"] = {name: carries_kept(folders[key, 0]) for name, key in (("base", "warmup"), *zip(ARMS, ARMS))}
    row["new_ability"] = ability(base, again, list(arms.values()))
    about = json.loads((folder / "resets" / "manifest.json").read_text())
    return {**row, **{key: about[key] for key in ("hardware", "versions")}}


def evaluate(folder: Path, out: Path, models: Sequence[str], seed: int) -> None:
    command = ["eval", str(folder), *(str(folder / name / "model") for name in models), f"eval.samples={SAMPLES}"]
    command += ["--seed", str(seed), "--out", str(out)]
    subprocess.run([sys.executable, "-m", "hone", *command], cwd=ROOT, check=True)


def curve(model: Measured) -> dict[str, Any]:
    return {str(k): asdict(point) for k, point in zip(KS, model.pass_curve(KS), strict=True)}


def levels(model: Measured) -> dict[str, Any]:
    """pass@1 and pass@64 by level."""
    found = {}
    for level in sorted(set(model.levels), key=int):
        part = model.where(np.asarray([own == level for own in model.levels]))
        found[level] = {str(k): asdict(point) for k, point in zip((1, SAMPLES), part.pass_curve((1, SAMPLES)))}
    return found


def carries_kept(folder: Path) -> float:
    """Of the carries that the steps of the answers leave, the share that the next step adds."""
    there = kept = 0
    for row in jsonl.read(folder / "samples.jsonl"):
        carry = 0
        for _, added, total in STEP.findall(row["text"].partition("</think>")[0]):
            there += carry > 0
            kept += carry > 0 and added == str(carry)
            carry = int(total) // 10
    return kept / max(1, there)


def differences(before: Measured, after: Measured) -> dict[str, Any]:
    """pass@k of the one less that of the other, for each k, paired by problem."""
    a, b = (passk.pass_at_k(m.drawn.tolist(), m.correct.tolist(), KS) for m in measured.shared(before, after))
    return {str(k): difference(stats.compare(a[:, i], b[:, i])) for i, k in enumerate(KS)}


def difference(found: stats.Comparison) -> dict[str, float]:
    d = found.difference
    return {"value": d.value, "low": d.low, "high": d.high, "p": found.p_value}


def ability(base: Measured, again: Measured, arms: Sequence[Measured]) -> dict[str, Any] | None:
    """On the problems that the base never solved: how many each model solves at least once, and pass@k."""
    found = new_ability(base, again, arms)
    if found is None:
        return None
    rows = {}
    for name, row in zip(("base again", *ARMS), found.rows, strict=True):
        solved = int(np.count_nonzero(row.rates))
        gain = None if row.gain is None else difference(row.gain)
        rows[name] = {"solved": solved, "pass_at_k": asdict(row.solved[-1]), "gain": gain}
    return {"problems": len(found.problems), "of": found.of, "tries": found.tries, "models": rows}


# --- over seeds --------------------------------------------------------------------------------------


def over_seeds(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float] | None]:
    """Differences at each k with Student's t interval over seeds: what one may expect of another seed's mean."""
    found = {}
    for against in ("base", *ARMS[:2]):
        for k in map(str, KS):
            found[f"pass@{k}, resets less {against}"] = t_interval(
                [row[f"resets_less_{against}"][k]["value"] for row in rows]
            )
    return found


def t_interval(values: Sequence[float]) -> dict[str, float] | None:
    found = over_runs(values)
    return None if found is None else {"value": found.value, "low": found.low, "high": found.high}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: pass@k of each model by seed, differences paired by problem, new ability, levels, time."""
    return "\n\n".join(part(rows) for part in (curves, gains, new_problems, steps, costs))


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body))


def curves(rows: Sequence[dict[str, Any]]) -> str:
    body = [
        [str(row["seed"]), name, *(interval(points[str(k)]) for k in KS)]
        for row in rows
        for name, points in row["pass_at_k"].items()
    ]
    return markdown(["seed", "model", *(f"pass@{k}" for k in KS)], body)


def gains(rows: Sequence[dict[str, Any]]) -> str:
    body = [
        [str(row["seed"]), against, *(interval(row[f"resets_less_{against}"][str(k)], "+") for k in KS)]
        for row in rows
        for against in ("base", *ARMS[:2])
    ]
    return markdown(["seed", "resets less", *(f"pass@{k}" for k in KS)], body)


def new_problems(rows: Sequence[dict[str, Any]]) -> str:
    body = []
    for row in rows:
        if (new := row["new_ability"]) is not None:
            solved = [str(model["solved"]) for model in new["models"].values()]
            gain = interval(new["models"]["resets"]["gain"], "+")
            body.append([str(row["seed"]), f"{new['problems']} of {new['of']}", *solved, gain])
    return markdown(["seed", "never solved by the base", "solved by the base again", *ARMS, "gain of resets"], body)


def steps(rows: Sequence[dict[str, Any]]) -> str:
    sizes = [f"{size} digits" for size in rows[0]["by_level"]["base"]]
    body = [
        [str(row["seed"]), name, f"{row['carries_kept'][name]:.3f}",
         *(f"{points['1']['value']:.3f}, {points[str(SAMPLES)]['value']:.2f}" for points in found.values())]
        for row in rows for name, found in row["by_level"].items()
    ]  # fmt: skip
    return f"pass@1, pass@{SAMPLES} by size:\n\n" + markdown(["seed", "model", "carries kept", *sizes], body)


def costs(rows: Sequence[dict[str, Any]]) -> str:
    keys = ("cpu_seconds", "evaluation_cpu_seconds")
    body = [
        [str(row["seed"]), *("unknown" if row[key] is None else f"{row[key] / 60:.1f}" for key in keys)] for row in rows
    ]
    return markdown(["seed", "CPU minutes of training", "of evaluation"], body)


def interval(a: dict[str, Any], sign: str = "") -> str:
    return f"{a['value']:{sign}.3f} [{a['low']:{sign}.3f}, {a['high']:{sign}.3f}]"


if __name__ == "__main__":
    main()
