"""The tables of a recipe's README from its results.json: by level, and by stage. Trains nothing.

    .venv/bin/python benchmarks/seed_tables.py recipes/knights-people-mini
    .venv/bin/python benchmarks/seed_tables.py recipes/distil-mini --runs runs

A seed's interval is over problems (Wilson); that of "all seeds" is Student's t over the seeds' own values, so it says
what one may expect of training again, and with three seeds it is wide. `--runs`, the folder of the runs, adds what one
may expect of other problems: gains of the mean over seeds, paired by problem. `benchmarks/recipe_seeds.py` trains.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hone.analysis import stats
from hone.report.runs import over_runs
from hone.reproduce import RESULTS
from hone.train import jsonl

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="the folder of the recipe")
    parser.add_argument("--runs", type=Path, help="where the run folders are, for gains paired by problem")
    arguments = parser.parse_args()
    rows = json.loads((arguments.recipe / RESULTS).read_text())["seeds"]
    levels = any(len(stage["after"]["by_level"]) > 1 for stage in rows[0]["stages"].values())
    print("\n\n".join((*([by_level(rows)] if levels else []), by_stage(rows), costs(rows))))
    if arguments.runs:
        folders = [arguments.runs / f"{arguments.recipe.resolve().name}-seed{row['seed']}" for row in rows]
        print(f"\n{paired(folders, list(rows[0]['stages']))}")


def by_level(rows: Sequence[Row]) -> str:
    """Before and after each stage, and what it gained, for every level: each seed, then all of them."""
    lines = [header("stage", "level", "", *(f"seed {row['seed']}" for row in rows), "all seeds")]
    for name, first in rows[0]["stages"].items():
        for level in sorted(first["after"]["by_level"], key=int):
            found = {
                label: [row["stages"][name][label]["by_level"][level] for row in rows] for label in ("before", "after")
            }
            values = {label: [one["value"] for one in side] for label, side in found.items()}
            for label, side in found.items():
                lines.append(line(name, level, label, *map(interval, side), over_seeds(values[label])))
            gains = [after - before for before, after in zip(values["before"], values["after"], strict=True)]
            lines.append(line(name, level, "gain", *(f"{gain:+.2f}" for gain in gains), over_seeds(gains, sign="+")))
    return "\n".join(lines)


def by_stage(rows: Sequence[Row]) -> str:
    """Every evaluated state: accuracy of each seed and of all, tokens, format, warnings of the collapse watch."""
    lines = [header("model", *(f"seed {row['seed']}" for row in rows), "all seeds", "tokens", "format", "warnings")]
    for name in rows[0]["stages"]:
        stages = [row["stages"][name] for row in rows]
        for label in ("before", "after"):
            found = [stage[label] for stage in stages]
            accuracies = [one["accuracy"] for one in found]
            tokens = " ".join(f"{one['response_tokens']:.0f}" for one in found)
            shape = " ".join(f"{one['well_formed_rate']:.2f}" for one in found)
            said = [", ".join(f"{what} {step}" for what, step in stage["collapse"].items()) or "–" for stage in stages]
            pooled = over_seeds([accuracy["value"] for accuracy in accuracies])
            cells = (*map(interval, accuracies), pooled, tokens, shape, "; ".join(said) if label == "after" else "")
            lines.append(line(f"{name}, {label}", *cells))
    return "\n".join(lines)


def paired(folders: Sequence[Path], stages: Sequence[str]) -> str:
    """Gain of each stage and level: per problem the mean over seeds, and problems are what is resampled."""
    lines = [header("stage", "level", "gain", "p")]
    for name in stages:
        before, after = (outcomes([folder / name / "evals" / f"{label}.jsonl" for folder in folders])
                         for label in ("before", "after"))  # fmt: skip
        for level in sorted(before, key=int):
            problems = sorted(before[level])
            sides = [[float(np.mean(side[level][problem])) for problem in problems] for side in (before, after)]
            found = stats.compare(*sides)
            d = found.difference
            lines.append(line(name, level, f"{d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}]", f"{found.p_value:.2g}"))
    return "\n".join(lines)


def outcomes(files: Sequence[Path]) -> dict[str, dict[str, list[bool]]]:
    """level -> problem -> whether it was solved, in each file."""
    found: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for file in files:
        for row in jsonl.read(file):
            found[row["level"]][row["problem_id"]].append(row["verdict"] == "correct")
    return found


def costs(rows: Sequence[Row]) -> str:
    lines = [header("seed", "CPU minutes", "minutes", "peak GiB")]
    for row in rows:
        cpu = "–" if row["cpu_seconds"] is None else f"{row['cpu_seconds'] / 60:.1f}"
        lines.append(line(str(row["seed"]), cpu, f"{row['seconds'] / 60:.1f}", f"{row['peak_rss_bytes'] / 2**30:.1f}"))
    return "\n".join(lines)


def header(*cells: str) -> str:
    return f"{line(*cells)}\n|{'---|' * len(cells)}"


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def interval(a: Row) -> str:
    return f"{a['value']:.2f} [{a['low']:.2f}, {a['high']:.2f}]"


def over_seeds(values: Sequence[float], sign: str = "") -> str:
    """Mean and t interval, which ends where a share (not a gain, which has a sign) does; one seed's number alone."""
    if (found := over_runs(values)) is None:
        return f"{values[0]:{sign}.2f}"
    low, high = (found.low, found.high) if sign else (max(0.0, found.low), min(1.0, found.high))
    return f"{found.value:{sign}.2f} [{low:{sign}.2f}, {high:{sign}.2f}]"


if __name__ == "__main__":
    main()
