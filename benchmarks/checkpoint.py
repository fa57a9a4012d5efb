"""What a checkpoint costs the loop, written beside it and not: on a made-up model, with moments, on the CPU.

    .venv/bin/python benchmarks/checkpoint.py                  # 76 million weights; prints one line of JSON
    .venv/bin/python benchmarks/checkpoint.py --hidden 128     # smaller

`blocked_seconds`: how long the loop stands still for a checkpoint, while it is copied to memory. `written_seconds`: all
of it, with files, fsync, checksums, rename. The best of `--times`, since disk and processor are shared. A loop goes on
beside the writing and shares the processor with it: `work_alone` and `work_meanwhile` are seconds of the same products
of matrices.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from hone.learn import checkpoint
from hone.learn.policy import Policy
from hone.model.tiny import create
from hone.recipe.sections.model import ModelConfig, TinyConfig
from hone.recipe.sections.optim import OptimConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as place:
        print(json.dumps(measure(Path(place), given.hidden, given.times)))


def measure(folder: Path, hidden: int, times: int) -> dict[str, float]:
    size = TinyConfig(
        vocab_size=8192, hidden_size=hidden, layers=10, heads=12, kv_heads=4, mlp_size=3 * hidden, max_positions=512
    )  # fmt: skip
    create(folder / "base", size, ["Zoey is a knight."] * 3, seed=0)
    policy = Policy.load(ModelConfig(path=str(folder / "base")), OptimConfig(), 10)
    for p in policy.parameters:
        p.grad = torch.randn_like(p) * 1e-3
    policy.optimizer.step()
    whole, blocked, alone, meanwhile = [], [], [], []
    for i in range(times):
        begun = time.perf_counter()
        checkpoint.save(folder / "whole", i, policy, keep=1)
        whole.append(time.perf_counter() - begun)
        writer = checkpoint.Writer()
        alone.append(work())
        begun = time.perf_counter()
        kept = checkpoint.take(i, policy, 1)
        writer.begin(lambda kept=kept: checkpoint.write(folder / "beside", kept, policy.world))  # type: ignore[misc]
        blocked.append(time.perf_counter() - begun)
        meanwhile.append(work())
        writer.wait()
    return {
        "million_weights": round(sum(p.numel() for p in policy.parameters) / 1e6, 1),
        "megabytes": round(sum(p.stat().st_size for p in (folder / "whole").rglob("*") if p.is_file()) / 1e6),
        "written_seconds": round(min(whole), 3),
        "blocked_seconds": round(min(blocked), 3),
        "ratio": round(min(whole) / min(blocked), 1),
        "work_alone": round(min(alone), 3),
        "work_meanwhile": round(min(meanwhile), 3),
    }


def work() -> float:
    a = torch.randn(1500, 1500)
    begun = time.perf_counter()
    for _ in range(20):
        a @ a
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
