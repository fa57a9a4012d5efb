"""Decoding with float32 weights, and with bfloat16 and int8 copies of them (`rollout.weights`), on one thread.

    .venv/bin/python benchmarks/rollout_weights.py     # two minutes; writes benchmarks/results/rollout_weights.json
    .venv/bin/python benchmarks/rollout_weights.py --compile    # the static decode step under torch.compile, 3 M

Random Qwen2 models, prompts of 110 tokens. A cell is prompts x answers to each, all decoded together. Times are medians
of decode steps of processor time, in turn with the others'; `copies`: seconds to make copies, once per batch (of
float32 weights too: as oneDNN reads them);
`off`: mean |difference| of the sampled tokens' log-probs from the policy's own. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from train_step import cpu_name
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from hone.model.linear import onednn
from hone.recipe.sections.rollout import RolloutConfig, SamplingConfig
from hone.rollout.native import NativeEngine
from hone.rollout.native.requests import Request

PROMPT = 110
CELLS = {"1x1": (1, 1, 48), "1x16": (1, 16, 32), "8x16": (8, 16, 10)}  # prompts, answers to each, steps
WEIGHTS = ("policy", "bfloat16", "int8")
SIZES = {
    "3M": {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 688, "vocab_size": 512},
    "30M": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1376, "vocab_size": 8192},
    "120M": {"hidden_size": 768, "num_hidden_layers": 15, "intermediate_size": 2048, "vocab_size": 32768},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="torch.compile instead")
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.compile:
        print(json.dumps({cell: compiled(cell) for cell in ("1x1", "8x16")}))
        return
    result = {size: {cell: compare(size, cell, arguments.repeats) for cell in CELLS} for size in ("30M", "120M")}
    print(f"{'':12}{'float32 tok/s':>14}{'bfloat16':>10}{'int8':>8}{'copies, s':>22}{'off':>18}")
    for size, cells in result.items():
        for cell, row in cells.items():
            ratios = "".join(f"{row[w]['tokens_per_s'] / row['policy']['tokens_per_s']:9.2f}x" for w in WEIGHTS[1:])
            copies = " / ".join(f"{row[w]['open_s']:.2f}" for w in WEIGHTS)
            off = " / ".join(f"{row[w]['off']:.4f}" for w in WEIGHTS[1:])
            print(f"{size + ' ' + cell:12}{row['policy']['tokens_per_s']:14.0f}{ratios}{copies:>22}{off:>18}")
    found = {"cells": result, "cpu": cpu_name(), "torch": torch.__version__}
    out = Path(__file__).parent / "results" / "rollout_weights.json"
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


def make(size: str) -> PreTrainedModel:
    torch.manual_seed(0)
    heads = SIZES[size]["hidden_size"] // 64
    config = Qwen2Config(
        **SIZES[size],
        num_attention_heads=heads,
        num_key_value_heads=max(2, heads // 3),
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )
    model: PreTrainedModel = Qwen2ForCausalLM(config).eval().requires_grad_(False)
    return model


def compare(size: str, cell: str, repeats: int) -> dict[str, dict[str, float]]:
    model = make(size)
    rows: dict[str, list[dict[str, float]]] = {weights: [] for weights in WEIGHTS}
    for _ in range(repeats):
        for weights in WEIGHTS:
            engine = NativeEngine(model, (), RolloutConfig(weights=weights))
            rows[weights].append(run(engine, cell) | {"off": off(model, engine)})
    return {w: {key: statistics.median(one[key] for one in found) for key in found[0]} for w, found in rows.items()}


def run(engine: NativeEngine, cell: str) -> dict[str, float]:
    prompts, samples, steps = CELLS[cell]
    start = time.process_time()
    with engine.open() as core:
        opened = time.process_time() - start
        asked = [np.arange(PROMPT) + i for i in range(prompts)]
        sampling = SamplingConfig(max_tokens=steps)
        core.submit([Request(ids, sampling, stream=i, samples=samples) for i, ids in enumerate(asked)])
        times = []
        while core.busy:
            start = time.process_time()
            core.step()
            times.append(time.process_time() - start)
    # The first step reads the prompts, the second sets up, the last are the end.
    return {"tokens_per_s": prompts * samples / statistics.median(times[2:-2]), "open_s": opened}


def off(model: PreTrainedModel, engine: NativeEngine) -> float:
    """Of 16 tokens, from the policy's log-probs of them."""
    ((turn,),) = engine.generate([np.arange(PROMPT)], SamplingConfig(max_tokens=16), samples=1, seed=0)
    ids = torch.tensor(np.concatenate([turn.prompt_ids, turn.completion_ids]))[None]
    with torch.no_grad(), onednn(model):
        logits = model(input_ids=ids, use_cache=False).logits[0, PROMPT - 1 : -1].log_softmax(-1)
    own = logits.gather(1, ids[0, PROMPT:, None])[:, 0].numpy()
    return float(np.abs(own - turn.logprobs).mean())


# --- torch.compile ----------------------------------------------------------------------------


class Compiler:
    """In the place of a GPU's recorder (`hone.rollout.native.graph`)."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def rehearse(self, step: Callable[[], torch.Tensor]) -> None:
        step()

    def record(self, step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        import torch._inductor.config as inductor

        torch._dynamo.reset()
        inductor.freezing = True  # oneDNN's products stay oneDNN's
        fast: Any = torch.compile(step, fullgraph=True)
        start = time.process_time()
        logits: torch.Tensor = fast()
        self.seconds.append(time.process_time() - start)

        def replay() -> None:
            logits.copy_(fast())

        return replay, logits


def compiled(cell: str) -> dict[str, float]:
    model = make("3M")
    CELLS[cell] = (*CELLS[cell][:2], 128)
    usual = run(NativeEngine(model, (), RolloutConfig()), cell)
    engine, compiler = NativeEngine(model, (), RolloutConfig()), Compiler()
    engine._recorder = lambda: compiler  # type: ignore[method-assign]
    fast = run(engine, cell)
    return {
        "usual_tokens_per_s": usual["tokens_per_s"],
        "compiled_tokens_per_s": fast["tokens_per_s"],
        "compilations": len(compiler.seconds),
        "seconds_each": statistics.mean(compiler.seconds),
    }


if __name__ == "__main__":
    main()
