"""One side of `rollout.py`: its own process, which prints what it measured as one line of JSON.

vLLM's side runs under another interpreter, without hone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Run = Callable[[int], int]  # seed -> tokens that were said

FOLDER = Path()  # of the models; set by `main`


def write_prompts(folder: Path, cells: Iterable[dict[str, Any]]) -> None:
    """Puzzles in the public wording, cut or repeated to about the tokens asked for, each by up to a tenth shorter."""
    from train_step_sides import prompts
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "step")
    made = {}
    for count, length in {(cell["prompts"], cell["prompt"]) for cell in cells}:
        whole = [tokenizer.encode(text) * (1 + length // 50) for text in prompts(64)[:count]]
        made[f"{count} {length}"] = [ids[: length - (i * length // 80) % (length // 10)] for i, ids in enumerate(whole)]
    (folder / "prompts.json").write_text(json.dumps(made))


def prompt_ids(cell: dict[str, Any]) -> list[list[int]]:
    found: list[list[int]] = json.loads((FOLDER / "prompts.json").read_text())[f"{cell['prompts']} {cell['prompt']}"]
    return found


def hone(compiled: bool) -> Callable[[dict[str, Any]], Run]:
    import numpy as np
    from train_step_sides import stop_ids
    from transformers import AutoModelForCausalLM

    from hone.recipe.sections.rollout import RolloutConfig, SamplingConfig
    from hone.rollout.native import NativeEngine

    model = AutoModelForCausalLM.from_pretrained(FOLDER / "step")

    def prepare(cell: dict[str, Any]) -> Run:
        stops = stop_ids("varied", model.config.eos_token_id) if cell["setting"] == "varied" else ()
        engine = NativeEngine(model, stops, RolloutConfig(compiled=compiled))
        asked = [np.asarray(ids) for ids in prompt_ids(cell)]

        def run(seed: int) -> int:
            sampling = SamplingConfig(max_tokens=cell["longest"])
            turns = engine.generate(asked, sampling, samples=cell["samples"], seed=seed)
            return sum(len(turn.completion_ids) for group in turns for turn in group)

        return run

    return prepare


def generate(cache: str | None) -> Callable[[dict[str, Any]], Run]:
    import torch
    from train_step_sides import stop_ids
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(FOLDER / "step").eval()
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "step", padding_side="left")

    def prepare(cell: dict[str, Any]) -> Run:
        varied = cell["setting"] == "varied"
        stops = stop_ids("varied", model.config.eos_token_id) if varied else [model.config.eos_token_id]
        asked = [ids for ids in prompt_ids(cell) for _ in range(cell["samples"])]
        batch = tokenizer.pad({"input_ids": asked}, return_tensors="pt")
        width = batch["input_ids"].shape[1]
        settings = {"max_new_tokens": cell["longest"], "eos_token_id": stops, "pad_token_id": tokenizer.pad_token_id}
        settings |= {} if varied else {"min_new_tokens": cell["longest"]}
        settings |= {"cache_implementation": cache} if cache else {}

        def run(seed: int) -> int:
            torch.manual_seed(seed)
            with torch.inference_mode():
                out = model.generate(**batch, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, **settings)
            answers = out[:, width:]
            if not varied:
                return answers.numel()
            ended = torch.isin(answers, torch.tensor(stops)).int()
            before = ended.cumsum(1) - ended == 0  # up to the stop token, with it
            return int(before.sum())

        return run

    return prepare


def batching() -> Callable[[dict[str, Any]], Run]:
    import torch
    from train_step_sides import stop_ids
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(FOLDER / "step", attn_implementation="sdpa").eval()

    def prepare(cell: dict[str, Any]) -> Run:
        varied = cell["setting"] == "varied"
        asked = [ids for ids in prompt_ids(cell) for _ in range(cell["samples"])]
        stops = stop_ids("varied", model.config.eos_token_id) if varied else [-1]
        config = GenerationConfig(
            max_new_tokens=cell["longest"], do_sample=True, top_k=0, eos_token_id=stops, pad_token_id=0
        )

        def run(seed: int) -> int:
            torch.manual_seed(seed)
            out = model.generate_batch(inputs=asked, generation_config=config, progress_bar=False)
            return sum(len(one.generated_tokens) for one in out.values())

        return run

    return prepare


def vllm() -> Callable[[dict[str, Any]], Run]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    import vllm._custom_ops as ops  # type: ignore[import-not-found]
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    ops._supports_onednn = False  # its fastest here
    engine = LLM(str(FOLDER / "step"), dtype="float32", max_model_len=1024, max_num_seqs=128, seed=0)

    def prepare(cell: dict[str, Any]) -> Run:
        varied = cell["setting"] == "varied"
        asked = [{"prompt_token_ids": ids} for ids in prompt_ids(cell)]
        stops = [300 + i for i in range(4)] if varied else []

        def run(seed: int) -> int:  # 0.32 on a CPU fails with a seed per request when it reads a prompt in parts
            sampling = SamplingParams(
                n=cell["samples"],
                max_tokens=cell["longest"],
                temperature=1.0,
                logprobs=0,
                ignore_eos=not varied,
                stop_token_ids=stops,
                detokenize=False,
            )
            out = engine.generate(asked, sampling, use_tqdm=False)
            return sum(len(one.token_ids) for request in out for one in request.outputs)

        return run

    return prepare


def floor_seconds(cell: dict[str, Any], tokens: int) -> float:
    """Products at the speed of the fastest one, keys and values read once for every token at the speed of memory."""
    import torch
    from train_step_sides import ceiling
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FOLDER / "step")
    config = model.config
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2)  # the head counts, the look-up is free
    length = tokens / (cell["prompts"] * cell["samples"])
    seen = cell["prompt"] + length / 2  # keys, on average
    attention = 4 * config.num_hidden_layers * config.hidden_size * seen
    operations = tokens * (2 * weights + attention) + 2 * weights * cell["prompts"] * cell["prompt"]
    kv_row = 2 * config.num_hidden_layers * config.hidden_size * config.num_key_value_heads
    kv_row = kv_row // config.num_attention_heads * 4  # bytes of keys and values of one token
    steps = tokens / (cell["prompts"] * cell["samples"])
    read = tokens * length / 2 * kv_row + steps * cell["prompts"] * cell["prompt"] * kv_row
    block = torch.ones(1 << 25)
    best = 0.0
    for _ in range(20):
        start = time.perf_counter()
        block.sum()
        best = max(best, block.nbytes / (time.perf_counter() - start))
    return operations / ceiling() + read / best


def peak_rss_bytes() -> int:
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


SIDES: dict[str, Callable[[], Callable[[dict[str, Any]], Run]]] = {
    "hone": lambda: hone(compiled=True),
    "hone eager": lambda: hone(compiled=False),
    "generate": lambda: generate(None),
    "static": lambda: generate("static"),
    "batching": batching,
    "vllm": vllm,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cells", type=json.loads, help="see `rollout.cells`")
    parser.add_argument("--repeats", type=int)
    arguments = parser.parse_args()
    global FOLDER
    FOLDER = arguments.folder
    import torch

    torch.set_num_threads(1)
    prepare = SIDES[arguments.side]()
    found = {}
    for name, cell in arguments.cells.items():
        run = prepare(cell)
        run(0)
        rates, floors = [], []
        for seed in range(1, 1 + arguments.repeats):
            start = time.perf_counter()
            tokens = run(seed)
            seconds = time.perf_counter() - start
            rates.append(tokens / seconds)
            if arguments.side == "hone":
                floors.append(floor_seconds(cell, tokens) / seconds)
        found[name] = {"tokens_per_s": statistics.median(rates), "peak_rss_bytes": peak_rss_bytes()}
        if floors:
            found[name]["floor_share"] = statistics.median(floors)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
