"""Training and decoding of one device: tokens a second, and the share of what the device could do.

    .venv/bin/python benchmarks/throughput.py                        # on a GPU: Qwen2.5's shapes of 0.5B and 1.5B
    .venv/bin/python benchmarks/throughput.py --sizes 3M             # on a CPU; the default there
    .venv/bin/python benchmarks/throughput.py --sizes 3M --compile   # training through torch.compile beside it

Random weights; bfloat16 on a GPU, float32 on a CPU. Writes benchmarks/results/throughput-DEVICE.json.

`train`: the update of one step of GRPO, without generation: log-probs and entropy of 4 prompts of 256 tokens with 8
answers of 768 each (a CPU: 64 tokens and 4 answers of 64), AdamW. Its floating-point operations are those of
`hone.preflight.plan.cost`, a prompt counted once per group, what is computed again not at all; `mfu` is their
rate over that of the fastest large product, measured in the same process.

`decode`: prompts of 128 tokens, one answer each (above 16 rows: 8 answers to each prompt), 128 and 32 tokens long; the
difference of the two is 96 steps without prompts. The limit of a step is the larger of two times: reading weights, keys
and values at the speed of memory, and computing at the speed of the fastest product, both measured here. `generate` is
that of transformers with its default cache, for the same rows.

Figures are medians of `--repeats`, after one that does not count. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from hone.learn.policy import Policy
    from hone.preflight.plan.cost import Shape

ROOT = Path(__file__).resolve().parent.parent
SIZES: dict[str, dict[str, int]] = {
    "3M": {"hidden_size": 256, "layers": 4, "heads": 4, "kv_heads": 2, "mlp_size": 688, "vocab_size": 512},
    "0.5B": {"hidden_size": 896, "layers": 24, "heads": 14, "kv_heads": 2, "mlp_size": 4864, "vocab_size": 151_936},
    "1.5B": {"hidden_size": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "mlp_size": 8960, "vocab_size": 151_936},
}
ROWS = {"cuda": (1, 16, 128, 1024), "cpu": (1, 16, 128)}
PROMPT, SHORT, LONG = 128, 32, 128  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="default: 0.5B and 1.5B on a GPU, 3M on a CPU")
    parser.add_argument("--parts", nargs="+", choices=("train", "decode"), default=["train", "decode"])
    parser.add_argument("--compile", action="store_true", help="training with model.compile too")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of a CPU")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/throughput-DEVICE.json")
    arguments = parser.parse_args()
    import torch

    from hone.model.load import device

    torch.set_num_threads(arguments.threads)
    here = device()
    sizes = arguments.sizes or (["0.5B", "1.5B"] if here.type == "cuda" else ["3M"])
    limits = {"flops_per_s": fastest_product(here), "bytes_per_s": memory_speed(here)}
    found: dict[str, Any] = {}
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder), size)
            found[size] = measure(Path(folder), limits, arguments)
            print(f"{size}: {json.dumps(found[size])}", file=sys.stderr, flush=True)
    result = {
        "sizes": found,
        "limits": limits,
        "device": torch.cuda.get_device_name() if here.type == "cuda" else cpu_name(),
        "threads": arguments.threads if here.type == "cpu" else None,
        "versions": {p: version(p) for p in ("torch", "transformers")} | {"python": platform.python_version()},
    }
    out = arguments.out or ROOT / "benchmarks" / "results" / f"throughput-{here.type}.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    print(json.dumps(found))


def measure(folder: Path, limits: dict[str, float], arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "train" in arguments.parts:
        for compiled in (False, True) if arguments.compile else (False,):
            found["train compiled" if compiled else "train"] = train(folder, compiled, limits, arguments.repeats)
    if "decode" in arguments.parts:
        found["decode"] = decode(folder, limits, arguments.repeats)
    return found


def train(folder: Path, compiled: bool, limits: dict[str, float], repeats: int) -> dict[str, float]:
    import torch
    from train_step_sides import hone_update

    from hone.preflight.plan.cost import forward_flops
    from hone.recipe.sections.rollout import SamplingConfig

    policy, shape = load(folder, compiled)
    gpu = policy.device.type == "cuda"
    groups, samples, prompt, answer = (4, 8, 256, 768) if gpu else (4, 4, 64, 64)
    sampling = SamplingConfig(max_tokens=answer)
    batch = answered(groups, samples, prompt, answer)
    budget = 16384 if gpu else 1024

    def update() -> None:
        _, stats = hone_update(policy, batch, sampling, budget)
        assert stats.num_tokens == groups * samples * answer

    start = time.perf_counter()
    update()
    first = time.perf_counter() - start
    seconds = median_seconds(update, repeats, policy.device)
    forward = forward_flops(shape, groups * prompt, prompt / 2)
    forward += forward_flops(shape, groups * samples * answer, prompt + answer / 2)
    tokens = groups * (prompt + samples * answer)
    found = {
        "tokens_per_s": tokens / seconds,
        "seconds": seconds,
        "first_seconds": first,
        "mfu": 3 * forward / seconds / limits["flops_per_s"],
    }
    if gpu:
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
    return found


def decode(folder: Path, limits: dict[str, float], repeats: int) -> dict[str, dict[str, float]]:
    from hone.preflight.plan.cost import forward_flops
    from hone.recipe.sections.rollout import RolloutConfig
    from hone.rollout.native import NativeEngine

    policy, shape = load(folder, compiled=False)
    engine = NativeEngine(policy.model, (), RolloutConfig(max_sequences=1024))
    found = {}
    for rows in ROWS[policy.device.type]:
        samples = 8 if rows > 16 else 1
        seconds = per_step(lambda tokens, g=samples, n=rows: ours(engine, n // g, g, tokens), policy, repeats)
        own, seen = (SHORT + LONG) / 2, PROMPT + (SHORT + LONG) / 2
        read = shape.weights * shape.item + rows * (own + PROMPT / samples) * shape.kv_bytes
        limit = max(read / limits["bytes_per_s"], forward_flops(shape, rows, seen) / limits["flops_per_s"])
        theirs = per_step(lambda tokens, n=rows: transformers_generate(policy, n, tokens), policy, repeats)
        found[str(rows)] = {
            "tokens_per_s": rows / seconds,
            "generate_tokens_per_s": rows / theirs,
            "share_of_limit": limit / seconds,
        }
    return found


# --- what is run ----------------------------------------------------------------------------------------------------


def make_model(folder: Path, size: str) -> None:
    from train_step_sides import prompts

    from hone.model.tiny import create
    from hone.recipe.sections.model import TinyConfig

    create(folder, TinyConfig(**SIZES[size], max_positions=4096, init_std=0.02), prompts(64), seed=0)


def load(folder: Path, compiled: bool) -> tuple[Policy, Shape]:
    from hone.learn.policy import Policy
    from hone.model.load import device
    from hone.preflight.plan.cost import shape_of
    from hone.recipe.sections.model import ModelConfig
    from hone.recipe.sections.optim import OptimConfig

    dtype = "bfloat16" if device().type == "cuda" else "float32"
    policy = Policy.load(ModelConfig(path=str(folder), dtype=dtype, compile=compiled), OptimConfig(lr=1e-6), 100)
    return policy, shape_of(policy.model.config, dtype)


def answered(groups: int, samples: int, prompt: int, answer: int) -> list[Any]:
    """Groups of random tokens with rewards that differ."""
    import numpy as np
    from train_step_sides import groups_of

    from hone.types import Turn

    rng = np.random.default_rng(0)
    said = np.full(answer, -6.0, np.float32)
    turns = []
    for _ in range(groups):
        asked = rng.integers(260, 500, prompt)
        turns.append([Turn(asked, rng.integers(260, 500, answer), said, "length", 0) for _ in range(samples)])
    return groups_of(turns)


def ours(engine: Any, prompts: int, samples: int, tokens: int) -> None:
    import numpy as np

    from hone.recipe.sections.rollout import SamplingConfig

    asked = [np.random.default_rng(i).integers(260, 500, PROMPT) for i in range(prompts)]
    turns = engine.generate(asked, SamplingConfig(max_tokens=tokens), samples=samples, seed=0)
    assert all(len(turn.completion_ids) == tokens for group in turns for turn in group)


def transformers_generate(policy: Policy, rows: int, tokens: int) -> None:
    import torch

    model = policy.model
    ids = torch.randint(260, 500, (rows, PROMPT), generator=torch.Generator().manual_seed(0)).to(policy.device)
    settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": True, "top_k": 0, "top_p": 1.0}
    before, model.config._attn_implementation = model.config._attn_implementation, "sdpa"
    try:
        with torch.inference_mode():
            out = model.eval().generate(ids, attention_mask=torch.ones_like(ids), temperature=1.0, **settings)
    finally:
        model.config._attn_implementation = before
    assert out.shape == (rows, PROMPT + tokens)


# --- clocks and limits ----------------------------------------------------------------------------------------------


def per_step(run: Callable[[int], None], policy: Policy, repeats: int) -> float:
    """Seconds of one token of all rows: a long answer less a short one."""
    run(SHORT)
    long, short = (median_seconds(lambda n=n: run(n), repeats, policy.device) for n in (LONG, SHORT))
    return (long - short) / (LONG - SHORT)


def median_seconds(what: Callable[[], None], repeats: int, device: torch.device) -> float:
    import torch

    found = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        what()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def fastest_product(device: torch.device) -> float:
    """Floating-point operations a second of a large product, at its best of 20."""
    if device.type == "cpu":
        from train_step_sides import ceiling

        return ceiling()
    import torch

    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = [median_seconds(lambda: _discard(a @ b), 1, device) for _ in range(20)]
    return 2 * 8192**3 / min(times)


def memory_speed(device: torch.device) -> float:
    """Bytes a second that are read, at the best of 20."""
    import torch

    block = torch.ones(1 << (30 if device.type == "cuda" else 25), device=device)
    times = [median_seconds(lambda: _discard(block.sum()), 1, device) for _ in range(20)]
    return block.nbytes / min(times)


def _discard(_: Any) -> None:
    """A result that nobody wants."""


def cpu_name() -> str:
    from train_step import cpu_name as name

    return f"{name()}, {os.cpu_count()} CPUs"


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['device']}: {result['limits']['flops_per_s'] / 1e12:.2f} TFLOP/s, "
        f"{result['limits']['bytes_per_s'] / 1e9:.0f} GB/s"
    ]
    for size, parts in result["sizes"].items():
        for name in ("train", "train compiled"):
            if row := parts.get(name):
                lines.append(
                    f"{size} {name}: {row['tokens_per_s']:.0f} tokens/s, mfu {row['mfu']:.2f}, "
                    f"first update {row['first_seconds']:.1f} s"
                )
        for rows, row in parts.get("decode", {}).items():
            lines.append(
                f"{size} decode, {rows} rows: {row['tokens_per_s']:.0f} tokens/s "
                f"(generate {row['generate_tokens_per_s']:.0f}), {row['share_of_limit']:.2f} of the limit"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
