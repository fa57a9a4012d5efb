"""Measure a recipe with several seeds and record what came out: results.json in its folder, with bands.

    .venv/bin/python benchmarks/recipe_seeds.py recipes/demo --seeds 0 1 2
    .venv/bin/python benchmarks/recipe_seeds.py recipes/demo --measures "after.accuracy - before.accuracy"

Which trainings belong to one measurement is read from the `runs` of a results.json that is there already; else it is
recipe.yaml alone. Write {"runs": {...}} there first for a recipe that compares several. See hone/measure/reproduce.py.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hone.measure.reproduce import RESULTS, SCHEMA, bands, measure

MEASURES = ["before.accuracy", "after.accuracy", "after.accuracy - before.accuracy", "after.response_tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="the folder of the recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--measures", nargs="+", help="default: those that are recorded already, or accuracy and length"
    )
    parser.add_argument("--resume", action="store_true", help="go on with runs that were cut")
    arguments = parser.parse_args()
    path = arguments.recipe / RESULTS
    before = json.loads(path.read_text()) if path.exists() else {}
    runs = before.get("runs") or {"main": {"recipe": "recipe.yaml", "overrides": []}}
    measures = arguments.measures or list(before.get("bands") or MEASURES)
    rows = []
    for seed in arguments.seeds:
        row, _ = measure(
            arguments.recipe, runs, seed, f"{arguments.recipe.resolve().name}-seed{seed}", arguments.resume
        )
        rows.append(row)
    recorded = {"schema": SCHEMA, "runs": runs, "bands": bands(rows, measures), "seeds": rows}
    path.write_text(json.dumps(recorded, indent=1) + "\n")
    for key, band in recorded["bands"].items():
        print(f"{key}: {band['mean']:.3f}, one more seed [{band['low']:.3f}, {band['high']:.3f}]")


if __name__ == "__main__":
    main()
