"""Memory and time of many rows: what a process holds that reads them, draws from them, and walks over all of them.

    .venv/bin/python benchmarks/data_rows.py                     # 1 M rows of 230 bytes; writes results/data_rows.json
    .venv/bin/python benchmarks/data_rows.py --rows 100000 --no-file

Rows are written to a JSONL file (with --format to parquet or CSV), and the cache folder is empty. Two processes come at
once, of which one reads the file and leaves the table for all; a later one finds it; of the next `train` is 5000. Each
makes the train split, a curriculum of levels, and draws 20 steps of 64 problems; with --walk one more makes every
problem once. Measured is the peak of the resident memory of the process (`ru_maxrss`), in MB of
10^6 bytes, of which `libraries` was there before the first row.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BYTES = 230

CHILD = """
import json, resource, sys, time
from hone.tasks.rows.task import DatasetConfig, DatasetTask
from hone.tasks.curriculum import Curriculum
from hone.tasks.curriculum import CurriculumConfig
import pyarrow.parquet

def peak():
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6)

libraries, start = peak(), time.perf_counter()
settings = json.loads(sys.argv[1])
walk = settings.pop("walk", False)
problems = DatasetTask(DatasetConfig(**settings)).problems("train")
read = time.perf_counter() - start
course = Curriculum(problems, 0, CurriculumConfig(kind="adaptive"))
for step in range(20):
    course.draw(step, 64)
    course.draw_others(step, 1, 8, set())
if walk:
    assert sum(1 for _ in problems) == len(problems)
print(json.dumps({"problems": len(problems), "libraries": libraries, "peak_mb": peak(), "read_s": round(read, 1),
                  "all_s": round(time.perf_counter() - start, 1)}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--format", choices=("jsonl", "csv", "parquet"), default="jsonl")
    parser.add_argument("--walk", action="store_true", help="one more process, which makes every problem")
    parser.add_argument("--no-file", action="store_true", help="print only")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "data_rows.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / f"train.{arguments.format}"
        write(source, arguments.rows)
        settings: dict[str, Any] = {"source": str(source), "validation": 500, "test": 500}
        cache = str(Path(folder) / "cache")
        both = [begin(settings, cache), begin(settings, cache)]
        rows = [{"name": "two at once", **finish(one)} for one in both]
        rows.append({"name": "later", **finish(begin(settings, cache))})
        rows.append({"name": "train: 5000", **finish(begin({**settings, "train": 5000}, cache))})
        if arguments.walk:
            rows.append({"name": "walk", **finish(begin({**settings, "walk": True}, cache))})
        size = source.stat().st_size
    for row in rows:
        print(f"{row['name']:12} {row['peak_mb']:5} MB ({row['libraries']} before), read in {row['read_s']:6.1f} s")
    result = {"rows": arguments.rows, "format": arguments.format, "source_mb": round(size / 1e6), "processes": rows}
    if not arguments.no_file:
        arguments.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result))


def write(path: Path, count: int) -> None:
    """Sums in words, of `BYTES` bytes a row of JSON; a few are asked twice."""
    rng = random.Random(0)

    def row(n: int) -> dict[str, str]:
        a, b = rng.randrange(10**6), n if n % 100 else n // 2
        made = {
            "question": f"Ann has {a} clips and gets {b} more from her aunt. How many has she?",
            "answer": str(a + b),
        }
        made["level"] = str(1 + n % 5)
        return {**made, "solution": "step by step " * 20}

    def cut(made: dict[str, str]) -> dict[str, str]:
        return {**made, "solution": made["solution"][: BYTES - len(json.dumps({**made, "solution": ""})) - 1]}

    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([cut(row(n)) for n in range(count)]), path)
        return
    with path.open("w") as file:
        if path.suffix == ".csv":
            file.write("question,answer,level,solution\n")
        for n in range(count):
            made = cut(row(n))
            file.write((",".join(made.values()) if path.suffix == ".csv" else json.dumps(made)) + "\n")


def begin(settings: dict[str, Any], cache: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": cache}
    command = [sys.executable, "-c", CHILD, json.dumps(settings)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate()
    if process.returncode:
        raise SystemExit(err[-3000:])
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
