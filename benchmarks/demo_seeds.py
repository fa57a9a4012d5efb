"""The demo with several seeds: the table of the README.

    .venv/bin/python benchmarks/demo_seeds.py            # seeds 0, 1, 2; writes recipes/demo/results.json
    .venv/bin/python benchmarks/demo_seeds.py --seeds 3 4 --out /tmp/other.json
    .venv/bin/python benchmarks/demo_seeds.py --collect  # from the runs that are there, without training

Each seed is a process of its own, one after the other, so that times and peak memory are its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from hone.measure.reproduce import SCHEMA, bands

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "demo"
#: What `hone verify demo` compares.
MEASURES = [
    *("before.accuracy", "after.accuracy", "after.accuracy - before.accuracy"),
    *("after.response_tokens", "after.reflection_rate"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RECIPE / "results.json")
    parser.add_argument("--collect", action="store_true", help="train nothing, read the runs that are there")
    arguments = parser.parse_args()
    rows = []
    for seed in arguments.seeds:
        name = f"demo-seed{seed}"
        command = [sys.executable, "-m", "hone", "train", str(RECIPE / "recipe.yaml"), f"seed={seed}", f"name={name}"]
        if not arguments.collect:
            subprocess.run(command, cwd=ROOT, check=True)
        folder = ROOT / "runs" / name
        manifest = json.loads((folder / "rl" / "manifest.json").read_text())
        result = json.loads((folder / "results.json").read_text())
        for label in ("before", "after"):
            result[label]["careful"] = careful_answers(folder / "rl" / "evals" / f"{label}.jsonl")
        rows.append({**result, "hardware": manifest["hardware"], "versions": manifest["versions"]})
    runs = {"main": {"recipe": "recipe.yaml", "overrides": []}}
    recorded = {"schema": SCHEMA, "runs": runs, "bands": bands(rows, MEASURES), "seeds": rows}
    arguments.out.write_text(json.dumps(recorded, indent=1) + "\n")
    print(table(rows))
    print()
    print(careful_table(rows))


def careful_answers(path: Path) -> dict[str, float]:
    """How many answers suppose and check, and how often these and the others are right."""
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    careful = [a["verdict"] == "correct" for a in answers if "Suppose" in a["text"]]
    others = [a["verdict"] == "correct" for a in answers if "Suppose" not in a["text"]]
    return {
        "share": len(careful) / len(answers),
        "accuracy": sum(careful) / max(1, len(careful)),
        "accuracy_of_others": sum(others) / max(1, len(others)),
    }


def careful_table(rows: list[dict]) -> str:
    """Markdown: what the rise is made of."""
    lines = [
        "| seed | careful answers before | after | right, if careful, before | after | right, if not, before |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        b, a = row["before"]["careful"], row["after"]["careful"]
        values = (b["share"], a["share"], b["accuracy"], a["accuracy"], b["accuracy_of_others"])
        lines.append(f"| {row['seed']} | " + " | ".join(f"{value:.2f}" for value in values) + " |")
    return "\n".join(lines)


def table(rows: list[dict]) -> str:
    """Markdown, one row per seed."""
    lines = [
        "| seed | accuracy before | after | tokens before | after | reflection before | after | minutes | peak GiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        b, a = row["before"], row["after"]
        cells = [
            str(row["seed"]),
            interval(b["accuracy"]),
            interval(a["accuracy"]),
            f"{b['response_tokens']:.0f}",
            f"{a['response_tokens']:.0f}",
            f"{b['reflection_rate']:.2f}",
            f"{a['reflection_rate']:.2f}",
            f"{row['seconds'] / 60:.1f}",
            f"{row['peak_rss_bytes'] / 2**30:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def interval(a: dict) -> str:
    return f"{a['value']:.3f} [{a['low']:.3f}, {a['high']:.3f}]"


if __name__ == "__main__":
    main()
