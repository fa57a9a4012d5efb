"""How the work of a step grows with tokens, group size and model size: measured on this CPU, beside what is modelled.

    .venv/bin/python benchmarks/scaling.py          # writes benchmarks/results/scaling.json, prints its tables

One thread; figures are processor seconds (`time.process_time`), medians of three, which other processes on the machine
disturb less than the clock on the wall; the load average at the start is recorded. `ratio` is to the first row of its
table, `modelled` the ratio that `hone.preflight.plan.cost` gives for one speed: operations alone. Beyond one
process everything is modelled (`modelled` in the file): nothing of it was run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from hone.base.parallel import ParallelConfig
from hone.model.linear import onednn
from hone.model.load import device
from hone.preflight.plan import batch as batches
from hone.preflight.plan.calibrate import _random_model
from hone.preflight.plan.cost import (
    H100,
    Speeds,
    Work,
    forward_flops,
    generate_seconds,
    shape_of,
    step_time,
    train_flops,
)
from hone.preflight.plan.memory import batch_of
from hone.preflight.plan.shapes import config_of, published
from hone.preflight.plan.trace import forward_backward
from hone.recipe.recipe import Recipe
from hone.recipe.sections.model import ModelConfig, TinyConfig
from hone.recipe.sections.rollout import SamplingConfig
from hone.rollout.native.engine import NativeEngine
from hone.tasks.knights.task import KnightsConfig

ROOT = Path(__file__).resolve().parent.parent
MODELS = {
    "1M": TinyConfig(hidden_size=128, layers=5, mlp_size=352),
    "3M": TinyConfig(hidden_size=256, layers=4, mlp_size=688),
    "13M": TinyConfig(hidden_size=512, layers=4, heads=8, kv_heads=4, mlp_size=1408),
}
PROMPT, ANSWER = 64, 64
SIZES = {"0.5B": "Qwen/Qwen2.5-0.5B", "1.5B": "Qwen/Qwen2.5-1.5B", "7B": "Qwen/Qwen2.5-7B"}
#: Of the modelled table: 128 prompts of 300 tokens, 16 answers each, 2000 tokens on average, 4096 at most.
WORK = Work(128, 16, 300, 2000, 4096, True, 1, 0, 256, 256, False, True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "scaling.json")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    tables = {
        "tokens": [measure("3M", 8, tokens, arguments.repeats) for tokens in (256, 512, 1024, 2048)],
        "group": [measure("3M", group, 1024, arguments.repeats) for group in (1, 4, 16)],
        "model": [measure(name, 8, 1024, arguments.repeats) for name in MODELS],
    }
    for rows in tables.values():
        first = rows[0]
        for row in rows:
            for what in ("train", "generate"):
                row[f"{what}_ratio"] = round(row[f"{what}_seconds"] / first[f"{what}_seconds"], 3)
                row[f"{what}_modelled"] = round(row[f"{what}_operations"] / first[f"{what}_operations"], 3)
    found = {"load_average": round(load, 2), "measured": tables, "modelled": modelled()}
    arguments.out.write_text(json.dumps(found, indent=1))
    print(markdown(found))


def measure(name: str, group: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Processor seconds of a micro-batch there and back, and of decoding 16 rows of groups of `group`."""
    model_config = ModelConfig(tiny=MODELS[name])
    stage = Recipe(
        name="x", task=KnightsConfig(name="knights"), model=model_config, samples_per_prompt=max(2, group),
        share_prompts=group > 1, tokens_per_microbatch=tokens, prompts_per_step=64,
    )  # fmt: skip
    model = _random_model(stage, device())
    batch = batches.longest(batch_of(stage), PROMPT, ANSWER)
    shape = shape_of(config_of(model_config)[0], "float32")

    def train() -> None:
        with onednn(model):
            forward_backward(model, batch, entropy=False)
        model.zero_grad(set_to_none=True)

    rows = 16
    prompts = [np.full(PROMPT, i, np.int64) for i in range(rows // group)]
    engine = NativeEngine(model, (), stage.rollout)
    generate = SamplingConfig(max_tokens=32)
    asked = Work(rows // group, group, PROMPT, 32, 32, True, 1, 0, 1, rows, False, False)
    one = Speeds("operations", 1.0, 1.0, float("inf"))
    return {
        "model": name,
        "parameters": shape.weights,
        "group": group,
        "tokens": len(batch.inputs),
        "answer_tokens": len(batch.targets),
        "train_seconds": seconds(train, repeats),
        "train_operations": 3 * forward_flops(shape, len(batch.inputs), PROMPT + ANSWER / 2),
        "generate_seconds": seconds(lambda: engine.generate(prompts, generate, samples=group, seed=0), repeats),
        "generate_operations": generate_seconds(asked, shape, one),
    }


def seconds(what: Any, repeats: int) -> float:
    what()
    found = []
    for _ in range(repeats):
        start = time.process_time()
        what()
        found.append(time.process_time() - start)
    return round(statistics.median(found), 4)


def modelled() -> list[dict[str, Any]]:
    """Steps on 1, 8 and 64 assumed H100: sharded where one cannot hold the optimizer, else replicated."""
    rows = []
    for size, name in SIZES.items():
        config = published(name)
        assert config is not None
        shape = shape_of(config, "bfloat16")
        for ranks in (1, 8, 64):
            for split in splits(ranks):
                t = step_time(replace(WORK, rows=256), shape, H100, split)
                sent = {k: round(v, 2) for k, v in t.row().items()}
                rows.append({"model": size, "ranks": ranks, **split.model_dump(), **sent,
                             "petaflop": round(train_flops(WORK, shape) / 1e15, 1)})  # fmt: skip
    return rows


def splits(ranks: int) -> list[ParallelConfig]:
    if ranks == 1:
        return [ParallelConfig()]
    found = [ParallelConfig(shard=ranks), ParallelConfig(shard=ranks // 2, tensor=2)]
    return found if ranks == 8 else [*found, ParallelConfig(replicate=ranks // 8, shard=8)]


def markdown(found: dict[str, Any]) -> str:
    lines = []
    for what, rows in found["measured"].items():
        lines += [f"\nBy {what} (load {found['load_average']})", "",
                  "| model | group | tokens | train s | ratio | modelled | generate s | ratio | modelled |",
                  "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
        for r in rows:
            lines.append(
                f"| {r['model']} | {r['group']} | {r['tokens']} | {r['train_seconds']:.3f} | {r['train_ratio']:.2f} | "
                f"{r['train_modelled']:.2f} | {r['generate_seconds']:.3f} | {r['generate_ratio']:.2f} | "
                f"{r['generate_modelled']:.2f} |"
            )
    lines += ["\nModelled", "", "| model | H100 | replicate x shard x tensor | generate | train | send | sync | step |",
              "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for r in found["modelled"]:
        lines.append(
            f"| {r['model']} | {r['ranks']} | {r['replicate']} x {r['shard']} x {r['tensor']} | {r['generate']:.1f} | "
            f"{r['train']:.1f} | {r['send']:.2f} | {r['sync']:.2f} | {r['total']:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
