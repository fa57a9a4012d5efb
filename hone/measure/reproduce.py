"""`hone verify RECIPE`: measure a recipe again, and check whether the results lie in the recorded bands.

A recipe's folder holds results.json:

    {
     "schema": 1,
     "runs": {"main": {"recipe": "recipe.yaml", "overrides": []}},    the trainings of one measurement, by name
     "bands": {"after.accuracy": {"mean": 0.95, "low": 0.87, "high": 1.0, "seeds": 3}, ...},
     "seeds": [{"seed": 0, "after": {...}, ...}, ...]                 the result of each seed
    }

With one run, a row of `seeds` is that run's results.json; with several, `runs` has one for each by name. The key of a
band is a path into a row, `after.accuracy` or `prolonged.after.pass_at_k.8`, or the difference of two,
`after.accuracy - before.accuracy`. A recipe with several runs compares conditions: its claim is a band of a difference.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hone.base import jsonl
from hone.base.settings import UserError
from hone.recipe.load import find, load

SCHEMA = 1
RESULTS = "results.json"
_ONE_RUN = {"main": {"recipe": "recipe.yaml", "overrides": []}}


@dataclass(frozen=True, slots=True)
class Band:
    """The 95 % prediction interval for one more seed."""

    mean: float
    low: float
    high: float
    seeds: int


@dataclass(frozen=True, slots=True)
class FigureCheck:
    measure: str
    band: Band
    value: float

    @property
    def inside(self) -> bool:
        return self.band.low <= self.value <= self.band.high


def verify(target: str, seed: int | None = None, resume: bool = False) -> list[FigureCheck]:
    """Train and measure the recipe with the given seed, by default one that was not recorded.

    Writes verify.json into the run folder. Raises UserError, before anything is trained, if no results are recorded.
    """
    file = find(target)
    recorded = read_results(file.parent)
    known = [int(row["seed"]) for row in recorded["seeds"]]
    chosen = max(known) + 1 if seed is None else seed
    folder = file.parent.resolve()
    row, place = measure(folder, recorded["runs"], chosen, f"{folder.name}-verify-{chosen}", resume)
    checks = [FigureCheck(key, Band(**band), value_of(row, key)[0]) for key, band in recorded["bands"].items()]
    record = {"seed": chosen, "checks": [{**asdict(check), "inside": check.inside} for check in checks], "row": row}
    jsonl.replace(place / "verify.json", json.dumps(record, indent=1))
    print(report(target, checks, chosen, known, recorded["seeds"], row))
    return checks


def read_results(folder: Path) -> dict[str, Any]:
    """Read and check results.json of a recipe's folder. Raises UserError if it is missing or has no bands."""
    path = folder / RESULTS
    how = f"record it with `python benchmarks/recipe_seeds.py {folder}`"
    if not path.is_file():
        raise UserError(f"{path}: this recipe has no recorded results; {how}")
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON ({error}); restore it, or {how}") from error
    if not isinstance(recorded, dict) or not recorded.get("bands") or not recorded.get("seeds"):
        raise UserError(f"{path}: holds no `bands` and `seeds` to compare with; {how}")
    if recorded.get("schema") != SCHEMA:
        raise UserError(f"{path}: schema {recorded.get('schema')}, but this version of hone reads {SCHEMA}; {how}")
    return {"runs": _ONE_RUN, **recorded}


def measure(
    folder: Path, runs: Mapping[str, Mapping[str, Any]], seed: int, name: str, resume: bool = False
) -> tuple[dict[str, Any], Path]:
    """The row of one seed, and the folder of its first run. Each training runs in its own process."""
    rows: dict[str, dict[str, Any]] = {}
    places: list[Path] = []
    for key, run in runs.items():
        run_name = name if len(runs) == 1 else f"{name}-{key}"
        overrides = [*run.get("overrides", ()), f"seed={seed}", f"name={run_name}"]
        recipe = folder / str(run["recipe"])
        loaded = load(recipe, overrides)
        arguments = ["train", str(recipe), *overrides, *(["--resume"] if resume else [])]
        done = subprocess.run([sys.executable, "-m", "hone", *arguments])
        if done.returncode == 130:
            raise KeyboardInterrupt
        if done.returncode:
            raise UserError(f"`hone {' '.join(arguments)}` ended with exit code {done.returncode}; see above")
        places.append(Path(loaded.runs) / loaded.name)
        rows[key] = json.loads((places[-1] / RESULTS).read_text())
    row = next(iter(rows.values())) if len(rows) == 1 else {"runs": rows}
    return {**row, "seed": seed}, places[0]


# --- bands -----------------------------------------------------------------------------------------


def bands(rows: Sequence[Mapping[str, Any]], measures: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The band of each measure, from the rows of all seeds; ready for results.json."""
    result = {}
    for key in measures:
        values, errors = zip(*(value_of(row, key) for row in rows), strict=True)
        shares = " - " not in key and all(error is not None for error in errors)
        result[key] = asdict(band(values, [error or 0.0 for error in errors], limits=(0.0, 1.0) if shares else None))
    return result


def band(
    values: Sequence[float],
    errors: Sequence[float],
    limits: tuple[float, float] | None = None,
    confidence: float = 0.95,
) -> Band:
    """Prediction interval for one more seed: mean ± t_{n-1} s sqrt(1 + 1/n).

    s is the standard deviation over seeds, but at least the standard error of one evaluation (`errors`), because a few
    seeds may agree by chance. Raises ValueError for fewer than two seeds.
    """
    from scipy.stats import t

    n = len(values)
    if n < 2:
        raise ValueError(f"band: a band needs at least two seeds, got {n}")
    mean = float(np.mean(values))
    spread = max(float(np.std(values, ddof=1)), float(np.mean(errors)))
    half = float(t.ppf((1 + confidence) / 2, n - 1)) * spread * float(np.sqrt(1 + 1 / n))
    low, high = limits or (-np.inf, np.inf)
    return Band(mean, max(low, mean - half), min(high, mean + half), n)


def value_of(row: Mapping[str, Any], key: str) -> tuple[float, float | None]:
    """The number at a path, or the difference of two, and its standard error if the row has an interval for it.

    Raises UserError for a path that does not exist.
    """
    if " - " in key:
        (a, se_a), (b, se_b) = (value_of(row, part.strip()) for part in key.split(" - ", 1))
        return a - b, None if se_a is None or se_b is None else float(np.hypot(se_a, se_b))
    node: Any = {**row, **row.get("runs", {})}
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            there = ", ".join(map(str, node)) if isinstance(node, Mapping) else "a number"
            raise UserError(f"results: no {part!r} in {key!r}; there are {there}")
        node = node[part]
    if isinstance(node, Mapping) and "value" in node:
        return float(node["value"]), (float(node["high"]) - float(node["low"])) / (2 * 1.96)
    if isinstance(node, bool) or not isinstance(node, (int, float)):
        raise UserError(f"results: {key!r} is not a number")
    return float(node), None


def report(
    target: str,
    checks: Sequence[FigureCheck],
    seed: int,
    known: Sequence[int],
    recorded: Sequence[Mapping[str, Any]],
    row: Mapping[str, Any],
) -> str:
    """The verdict as text."""
    new = "a recorded seed" if seed in known else "a new seed"
    lines = [f"{target}, seed {seed} ({new}); recorded seeds {', '.join(map(str, known))}"]
    width = max(len(check.measure) for check in checks)
    for check in checks:
        b = check.band
        word = "inside" if check.inside else "OUTSIDE"
        lines.append(
            f"  {check.measure:{width}}  {check.value:.3f}  {word} [{b.low:.3f}, {b.high:.3f}], mean {b.mean:.3f}"
        )
    seconds = [(np.mean([_seconds(r) for r in recorded]), _seconds(row))]
    lines += [
        f"  time: {now / 60:.1f} min, recorded {before / 60:.1f} min" for before, now in seconds if before and now
    ]
    outside = sum(not check.inside for check in checks)
    lines.append(f"{outside} of {len(checks)} outside the recorded band" if outside else "inside the recorded band")
    if outside:
        lines.append(
            f"(each band holds 95 % of seeds: of {len(checks)}, {0.05 * len(checks):.1f} are outside by chance)"
        )
    return "\n".join(lines)


def _seconds(row: Mapping[str, Any]) -> float:
    runs = row.get("runs")
    return sum(float(r.get("seconds", 0)) for r in (runs.values() if isinstance(runs, Mapping) else [row]))
