"""Grading of mathematical answers: hone beside math-verify alone, on pairs of answers that were labelled by hand.

    .venv/bin/python benchmarks/maths_grading.py       # writes benchmarks/results/maths_grading.json

Each line of tests/grade/maths_pairs.tsv is a recorded answer, a given one, and whether a careful grader takes them for
the same. Both sides get the bare answers; math-verify gets them between dollars, as its documentation asks for. A
verifier that fails on a pair is wrong on it. Times are of one core: of hone's comparisons in process and of its pairs
that go to math-verify in a worker, and of math-verify in this process, each after a first call that loads the library.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hone.grade.answers import equivalent
from hone.grade.maths import Maths

ROOT = Path(__file__).resolve().parent.parent
PAIRS = ROOT / "tests" / "grade" / "maths_pairs.tsv"

Row = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, default=PAIRS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "maths_grading.json")
    parser.add_argument("--failures", action="store_true", help="list the pairs that each side gets wrong")
    arguments = parser.parse_args()
    rows = read_pairs(arguments.pairs)
    sides = {"hone": ours(rows), "math_verify": theirs(rows)}
    for name, side in sides.items():
        print(f"{name:12} {side['right']} of {len(rows)} right, median {side['median_ms']:.3f} ms, "
              f"mean {side['mean_ms']:.2f} ms, most {side['max_ms']:.0f} ms")  # fmt: skip
        if arguments.failures:
            print("\n".join(f"    {label}: {line}" for label, line in side["failures"]))
    result = {
        "pairs": len(rows),
        "kinds": dict(Counter(row["kind"] for row in rows)),
        **sides,
        "versions": {"math-verify": version("math-verify"), "python": platform.python_version()},
        "machine": platform.processor() or platform.machine(),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps({name: side["accuracy"] for name, side in sides.items()}))


def read_pairs(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def ours(rows: Sequence[Row]) -> dict[str, Any]:
    with Maths(count=1) as maths:
        maths.verdicts([("1", "\\sin^2 x + \\cos^2 x")])  # starts the worker
        verdicts, times = timed(rows, lambda row: maths.verdicts([(row["recorded"], row["given"])])[0])
    exact = [equivalent(row["recorded"], row["given"]) for row in rows]
    side = summary(rows, verdicts, times)
    return {**side, "decided_in_process": sum(known is not None for known in exact)}


def theirs(rows: Sequence[Row]) -> dict[str, Any]:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def judge(row: Row) -> str:
        gold, given = (math_verify.parse(f"${row[key]}$") for key in ("recorded", "given"))
        return "correct" if math_verify.verify(gold, given) else "wrong"

    judge(rows[0])
    return summary(rows, *timed(rows, judge))


def timed(rows: Sequence[Row], judge: Callable[[Row], str]) -> tuple[list[str], list[float]]:
    verdicts, times = [], []
    for row in rows:
        start = time.perf_counter()
        verdicts.append(judge(row))
        times.append(1000 * (time.perf_counter() - start))
    return verdicts, times


def summary(rows: Sequence[Row], verdicts: Sequence[str], times: Sequence[float]) -> dict[str, Any]:
    wanted = {"same": "correct", "different": "wrong"}
    failures = [
        (row["label"], f"{row['recorded']}  and  {row['given']}: {verdict}")
        for row, verdict in zip(rows, verdicts)
        if verdict != wanted[row["label"]]
    ]
    return {
        "right": len(rows) - len(failures),
        "accuracy": round(1 - len(failures) / len(rows), 4),
        "median_ms": round(statistics.median(times), 4),
        "mean_ms": round(statistics.fmean(times), 4),
        "max_ms": round(max(times), 2),
        "failures": failures,
    }


if __name__ == "__main__":
    main()
