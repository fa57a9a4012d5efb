"""The tables of a recipe's README from its results.json: by level, and by stage. Trains nothing.

    .venv/bin/python benchmarks/seed_tables.py recipes/knights-people-mini
    .venv/bin/python benchmarks/seed_tables.py recipes/distil-mini --runs runs
    .venv/bin/python benchmarks/seed_tables.py recipes/countdown-mini --runs runs --matching guess

A seed's interval is over problems (Wilson); that of "all seeds" is Student's t over the seeds' own values, so it says
what one may expect of training again, and with three seeds it is wide. `--runs`, the folder of the runs, adds what one
may expect of other problems: gains of each seed and of the mean over seeds, paired by problem, and
accuracy in training. `--matching`, a regular expression, tells the answers in which it is found from the others.
`benchmarks/recipe_seeds.py` trains.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hone.base import jsonl, stats
from hone.measure.reproduce import RESULTS
from hone.report.runs import over_runs

Row = dict[str, Any]

ENDS = 5  # steps at either end of a stage that are averaged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="the folder of the recipe")
    parser.add_argument("--runs", type=Path, help="where the run folders are, for gains paired by problem")
    parser.add_argument("--matching", help="a regular expression: which answers to tell from the others; with --runs")
    arguments = parser.parse_args()
    if arguments.matching and not arguments.runs:
        parser.error("--matching reads answers; say with --runs where the run folders are")
    rows = json.loads((arguments.recipe / RESULTS).read_text())["seeds"]
    levels = any(len(stage["after"]["by_level"]) > 1 for stage in rows[0]["stages"].values())
    print("\n\n".join((*([by_level(rows)] if levels else []), by_stage(rows), costs(rows))))
    if arguments.runs:
        folders = [arguments.runs / f"{arguments.recipe.resolve().name}-seed{row['seed']}" for row in rows]
        stages = list(rows[0]["stages"])
        print(f"\n{paired(folders, stages)}\n\n{training(folders, stages)}")
        if arguments.matching:
            print(f"\n{matching(folders, stages, arguments.matching)}")


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
        gains = [stage["after"]["accuracy"]["value"] - stage["before"]["accuracy"]["value"] for stage in stages]
        lines.append(line(f"{name}, gain", *(f"{gain:+.3f}" for gain in gains), over_seeds(gains, "+", 3), *[""] * 3))
    return "\n".join(lines)


def paired(folders: Sequence[Path], stages: Sequence[str]) -> str:
    """Gain of each stage and level, of each seed and of the mean over seeds; problems are what is resampled."""
    lines = [header("stage", "level", "seed", "gain", "p")]
    sets = {f.name.rpartition("-seed")[2]: [f] for f in folders} if len(folders) > 1 else {}
    for name in stages:
        for label, chosen in {**sets, "mean": folders}.items():
            for level, found in compared(chosen, name).items():
                d = found.difference
                gain = f"{d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"
                lines.append(line(name, level, label, gain, f"{found.p_value:.2g}"))
    return "\n".join(lines)


def compared(folders: Sequence[Path], stage: str) -> dict[str, stats.Comparison]:
    """level -> after the stage against before, where a problem counts as the mean over the folders' answers."""
    before, after = (outcomes([folder / stage / "evals" / f"{label}.jsonl" for folder in folders])
                     for label in ("before", "after"))  # fmt: skip
    found = {}
    for level in sorted(before, key=int):
        problems = sorted(before[level])
        sides = [[float(np.mean(side[level][problem])) for problem in problems] for side in (before, after)]
        found[level] = stats.compare(*sides)
    return found


def training(folders: Sequence[Path], stages: Sequence[str]) -> str:
    """Accuracy of the answers that were sampled for training, at both ends of each stage."""
    lines = [header("stage", *(f"{folder.name}, first {ENDS} steps, last {ENDS}" for folder in folders))]
    for name in stages:
        ends = []
        for folder in folders:
            rates = [row["accuracy"] for row in jsonl.read(folder / name / "metrics.jsonl") if "accuracy" in row]
            ends.append(f"{np.mean(rates[:ENDS]):.2f} {np.mean(rates[-ENDS:]):.2f}")
        lines.append(line(name, *ends))
    return "\n".join(lines)


def matching(folders: Sequence[Path], stages: Sequence[str], pattern: str) -> str:
    """Answers in which the pattern is found and the others: their shares, how many of each are right or cut off."""
    lines = [header("model", "run", f"share with {pattern!r}", "of these right", "of the others right", "cut off")]
    for name in stages:
        for label in ("before", "after"):
            for folder in folders:
                answers = list(jsonl.read(folder / name / "evals" / f"{label}.jsonl"))
                has = np.asarray([re.search(pattern, answer["text"]) is not None for answer in answers])
                verdicts = np.asarray([answer["verdict"] for answer in answers])
                right = verdicts == "correct"
                parts = (has, right[has], right[~has], verdicts == "truncated")
                shares = (f"{np.mean(part):.2f}" if part.size else "–" for part in parts)
                lines.append(line(f"{name}, {label}", folder.name, *shares))
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


def over_seeds(values: Sequence[float], sign: str = "", digits: int = 2) -> str:
    """Mean and t interval, which ends where a share (not a gain, which has a sign) does; one seed's number alone."""
    if (found := over_runs(values)) is None:
        return f"{values[0]:{sign}.{digits}f}"
    low, high = (found.low, found.high) if sign else (max(0.0, found.low), min(1.0, found.high))
    return f"{found.value:{sign}.{digits}f} [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"


if __name__ == "__main__":
    main()
