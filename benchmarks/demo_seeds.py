"""The demo with several seeds: the table of the README.

    .venv/bin/python benchmarks/demo_seeds.py            # seeds 0, 1, 2; writes recipes/demo/results.json
    .venv/bin/python benchmarks/demo_seeds.py --seeds 3 4 --out /tmp/other.json

Each seed is a process of its own, one after the other, so that times and peak memory are its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "demo"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RECIPE / "results.json")
    arguments = parser.parse_args()
    rows = []
    for seed in arguments.seeds:
        name = f"demo-seed{seed}"
        command = [sys.executable, "-m", "hone", "train", str(RECIPE / "recipe.yaml"), f"seed={seed}", f"name={name}"]
        subprocess.run(command, cwd=ROOT, check=True)
        folder = ROOT / "runs" / name
        manifest = json.loads((folder / "rl" / "manifest.json").read_text())
        result = json.loads((folder / "results.json").read_text())
        rows.append({**result, "hardware": manifest["hardware"], "versions": manifest["versions"]})
    arguments.out.write_text(json.dumps({"seeds": rows}, indent=1) + "\n")
    print(table(rows))


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
