"""What `gpu.py` measures: one section per process, each value written when it is known.

    python benchmarks/gpu_sections.py [--toy] NAME ROWS.jsonl RESULTS.json SECONDS

`--toy`: at toy sizes, on whatever is there. RESULTS.json holds the ceilings, if they have been measured.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hone.learn.policy import Policy
    from hone.preflight.plan.cost import Shape

TOY = {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_size": 96, "vocab_size": 512}
#: Of one update: groups, answers to each prompt, tokens of a prompt and of an answer, and of a micro-batch.
UPDATE = {True: (2, 2, 16, 24, 256), False: (4, 8, 256, 768, 16384)}
#: Rows decoded at once, and for which of them transformers' `generate` is timed beside it.
ROWS = {True: (1, 16), False: (1, 16, 128, 1024)}
THEIRS = {True: (1,), False: (1, 128)}
#: Tokens of the prompt, of a short answer and of a long one: the difference of the two is decoding alone.
LENGTHS = {True: (8, 4, 40), False: (128, 32, 128)}


@dataclass(frozen=True)
class Bench:
    """Where a section runs, how large, and where its values go."""

    toy: bool
    device: torch.device
    rows: Path
    results: Path
    limit: float  # seconds

    def record(self, **values: Any) -> None:
        """Known from now on, whatever becomes of this process."""
        with self.rows.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def ceiling(self, name: str) -> float | None:
        """What the section `ceilings` of this run measured."""
        section = json.loads(self.results.read_text())["sections"].get("ceilings", {})
        return section.get("values", {}).get(name)

    def share(self, value: float, ceiling: str) -> float | None:
        most = self.ceiling(ceiling)
        return None if most is None else value / most

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def best(self, call: Callable[[], object], repeats: int = 5, inner: int = 1) -> float:
        """Seconds of one call: the shortest of `repeats`, each the mean of `inner` calls, after one that warms up."""
        call()
        times = []
        for _ in range(repeats):
            self.wait()
            start = time.perf_counter()
            for _ in range(inner):
                call()
            self.wait()
            times.append((time.perf_counter() - start) / inner)
        return min(times)


# --- ceilings ---------------------------------------------------------------------------------------------------------


def ceilings(bench: Bench) -> None:
    """The fastest product and the fastest copy: what everything else is a share of."""
    cuda = bench.device.type == "cuda"
    bench.record(device=torch.cuda.get_device_name() if cuda else "CPU", cuda=torch.version.cuda)
    if cuda:
        there = torch.cuda.get_device_properties(0)
        bench.record(memory_gib=there.total_memory / 2**30, capability=list(torch.cuda.get_device_capability()))
    n, size = (128, 1 << 16) if bench.toy else (8192, 1 << 30)
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        a, b = (torch.randn(n, n, device=bench.device, dtype=dtype) for _ in range(2))
        seconds = bench.best(lambda a=a, b=b: a @ b, repeats=10, inner=1 if dtype == torch.float32 else 5)
        bench.record(**{f"{name}_flops_per_s": 2 * n**3 / seconds})
    block = torch.randn(size, device=bench.device)
    other = torch.empty_like(block)
    bench.record(copy_bytes_per_s=2 * block.nbytes / bench.best(lambda: other.copy_(block), repeats=10))  # both ways
    bench.record(read_bytes_per_s=block.nbytes / bench.best(block.sum, repeats=10))
    part = block[: size // 8]
    for name, pinned in (("pageable", False), ("pinned", True)):
        host = torch.empty(part.shape, pin_memory=pinned and cuda)
        bench.record(**{f"to_host_{name}_bytes_per_s": part.nbytes / bench.best(lambda h=host: h.copy_(part))})
        bench.record(**{f"to_device_{name}_bytes_per_s": part.nbytes / bench.best(lambda h=host: part.copy_(h))})
    few = torch.zeros(8, device=bench.device)
    bench.record(launch_seconds=bench.best(lambda: few.add_(1), inner=200))


# --- kernels ----------------------------------------------------------------------------------------------------------


def kernels(bench: Bench) -> None:
    """What recording a decode step brings; then packed attention by every way, forward and backward, and its error."""
    from hone.types import Block

    policy, _ = random_policy(bench, "0.5B")
    for rows in ROWS[bench.toy][:2]:
        for graphs in (True, False):
            found = decoded(bench, policy, rows, graphs)
            bench.record(**{f"decode_{rows}_rows_{'graphs' if graphs else 'eager'}_tokens_per_s": found})
    size = 16 if bench.toy else 768
    layout = (Block(256 if not bench.toy else 16, (size,) * 4), Block(0, (size, size // 2)))
    spare = -sum(block.num_tokens for block in layout) % 128
    layout = (*layout, Block(0, (spare,))) if spare else layout
    for heads, width in ((14, 64), (12, 128)):
        attention_ways(bench, layout, heads, 2, 16 if bench.toy else width)


def attention_ways(bench: Bench, layout: Any, heads: int, few: int, width: int) -> None:
    """Error of bfloat16 against float32 computed block by block, and seconds there and back."""
    from hone.model import attention_gpu
    from hone.model.attention import packed_attention
    from hone.model.scoring import Scoring

    scoring = Scoring(width**-0.5)
    tokens = sum(block.num_tokens for block in layout)
    draw = torch.Generator(device=bench.device).manual_seed(0)
    exact = [torch.randn(1, h, tokens, width, device=bench.device, generator=draw) for h in (heads, few, few)]
    exact = [x.requires_grad_() for x in exact]
    expected = gradients(packed_attention(*exact, layout, scoring), exact)
    given = [x.detach().bfloat16().requires_grad_() for x in exact]
    ways: dict[str, Callable[[], Any]] = {"blocks": lambda: packed_attention(*exact, layout, scoring)}
    chosen = attention_gpu.kind(given[0], given[2], scoring)
    bench.record(**{f"attention_{width}_chosen": chosen})
    if chosen is not None:
        for how in ("flash", "flex"):
            ways[how] = lambda how=how: attention_gpu.attention(*given, layout, scoring, how)
    for name, call in ways.items():
        inputs = exact if name == "blocks" else given
        got = gradients(call(), inputs)
        error = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(got, expected, strict=True))
        seconds = bench.best(lambda c=call, i=inputs: gradients(c(), i), repeats=3)
        bench.record(**{f"attention_{width}_{name}_error": error, f"attention_{width}_{name}_seconds": seconds})


def gradients(out: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)]


# --- models of Qwen2.5's shapes ---------------------------------------------------------------------------------------


def random_policy(bench: Bench, size: str, compiled: bool = False) -> tuple[Policy, Shape]:
    """In bfloat16 with float32 masters; made on the device, so that nothing is written or read."""
    from throughput import SIZES
    from train_step_sides import prompts
    from transformers import AutoModelForCausalLM, Qwen2Config

    from hone.learn.network import LoadedModel
    from hone.learn.policy import Policy
    from hone.model import attention
    from hone.model import compiled as compiling
    from hone.model.tiny import train_tokenizer
    from hone.preflight.plan.cost import shape_of
    from hone.recipe.sections.optim import OptimConfig

    attention.register()
    shape = TOY if bench.toy else SIZES[size]
    config = Qwen2Config(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["mlp_size"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with bench.device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention.NAME)
    if compiled:
        compiling.request(model)
    tokenizer = train_tokenizer(prompts(16), 512)
    loaded = LoadedModel(model.to(bench.device), tokenizer)
    return Policy(loaded, OptimConfig(lr=1e-6), 100), shape_of(config, "bfloat16")


def train(bench: Bench, size: str, compiled: bool = False) -> None:
    """The update of one step, without generation; its share of the fastest product (MFU)."""
    from throughput import answered
    from train_step_sides import hone_update

    from hone.preflight.plan.cost import forward_flops
    from hone.recipe.sections.rollout import SamplingConfig

    policy, shape = random_policy(bench, size, compiled)
    groups, samples, prompt, answer, budget = UPDATE[bench.toy]
    batch = answered(groups, samples, prompt, answer)
    sampling = SamplingConfig(max_tokens=answer)
    before = [master.detach().clone() for master in policy.optimizer.masters[:2]]

    def update() -> Any:
        _, stats = hone_update(policy, batch, sampling, budget)
        assert stats.num_tokens == groups * samples * answer
        assert stats.metrics["skipped"] == 0
        return stats

    bench.wait()
    start = time.perf_counter()
    stats = update()
    bench.record(first_seconds=time.perf_counter() - start, grad_norm=stats.grad_norm, loss=stats.loss)
    moved = [float((a.detach() - b).abs().max()) for a, b in zip(policy.optimizer.masters, before)]
    bench.record(dtype=str(policy.model.dtype), masters=str(policy.optimizer.masters[0].dtype), largest_step=max(moved))
    seconds = bench.best(update, repeats=3)
    forward = forward_flops(shape, groups * prompt, prompt / 2)
    forward += forward_flops(shape, groups * samples * answer, prompt + answer / 2)
    rate = 3 * forward / seconds
    bench.record(seconds=seconds, tokens_per_s=groups * (prompt + samples * answer) / seconds, flops_per_s=rate)
    bench.record(mfu=bench.share(rate, "bf16_flops_per_s"))
    if bench.device.type == "cuda":
        bench.record(peak_gib=torch.cuda.max_memory_allocated() / 2**30)


def compile_(bench: Bench) -> None:
    """As `train` of 0.5B, through torch.compile; `first_seconds` is mostly compiling."""
    if bench.toy:  # the compiler of a CPU takes minutes: graphs are captured, and run as they are
        torch.compile = functools.partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    train(bench, "0.5B", compiled=True)


def decode(bench: Bench, size: str) -> None:
    """Tokens a second, and the share of the floor: weights, keys and values read once per step, or computing."""
    from throughput import transformers_generate

    from hone.preflight.plan.cost import forward_flops

    policy, shape = random_policy(bench, size)
    prompt, short, long = LENGTHS[bench.toy]
    for rows in ROWS[bench.toy]:
        rate = decoded(bench, policy, rows, graphs=True)
        bench.record(**{f"rows_{rows}_tokens_per_s": rate})
        own, seen = (short + long) / 2, prompt + (short + long) / 2
        read = shape.weights * shape.item + rows * (own + prompt / samples_of(rows)) * shape.kv_bytes
        bandwidth, product = bench.ceiling("read_bytes_per_s"), bench.ceiling("bf16_flops_per_s")
        if bandwidth and product:
            floor = max(read / bandwidth, forward_flops(shape, rows, seen) / product)
            bench.record(**{f"rows_{rows}_share_of_floor": floor * rate / rows})
    for rows in THEIRS[bench.toy]:
        seconds = per_token(bench, lambda tokens, n=rows: transformers_generate(policy, n, tokens), repeats=1)
        bench.record(**{f"rows_{rows}_generate_tokens_per_s": rows / seconds})


def decoded(bench: Bench, policy: Policy, rows: int, graphs: bool) -> float:
    """Tokens a second of all rows. Raises AssertionError if the step could not be recorded."""
    import numpy as np

    from hone.recipe.sections.rollout import RolloutConfig, SamplingConfig
    from hone.rollout.native import NativeEngine

    said: list[str] = []
    config = RolloutConfig(max_sequences=1024, compiled=graphs)
    engine = NativeEngine(policy.model, (), config, event=lambda kind, text: said.append(f"{kind}: {text}"))
    prompt, samples = LENGTHS[bench.toy][0], samples_of(rows)
    asked = [np.random.default_rng(i).integers(260, 500, prompt) for i in range(rows // samples)]

    def answers(tokens: int) -> None:
        turns = engine.generate(asked, SamplingConfig(max_tokens=tokens), samples=samples, seed=0)
        assert all(len(turn.completion_ids) == tokens for group in turns for turn in group)

    rate = rows / per_token(bench, answers, repeats=2)
    assert not said, said
    return rate


def samples_of(rows: int) -> int:
    return 8 if rows > 16 else 1


def per_token(bench: Bench, answers: Callable[[int], None], repeats: int) -> float:
    """Seconds of one token of all rows: a long answer less a short one."""
    _, short, long = LENGTHS[bench.toy]
    times = [bench.best(lambda n=n: answers(n), repeats=repeats) for n in (long, short)]
    between = (times[0] - times[1]) / (long - short)
    return between if between > 0 else times[0] / long  # at toy sizes noise hides the difference


# --- the rest ---------------------------------------------------------------------------------------------------------


def sections() -> dict[str, Callable[[Bench], None]]:
    import gpu_runs

    return {
        "ceilings": ceilings,
        "kernels": kernels,
        "compile": compile_,
        **{f"train-{size}": lambda bench, size=size: train(bench, size) for size in ("0.5B", "1.5B")},
        **{f"decode-{size}": lambda bench, size=size: decode(bench, size) for size in ("0.5B", "1.5B")},
        "tests": gpu_runs.tests,
        "checkpoint": gpu_runs.checkpoint,
        "memory": gpu_runs.memory,
        "trl": gpu_runs.trl,
        "demo": gpu_runs.demo,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("name")
    parser.add_argument("rows", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("limit", type=float)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.toy:
        torch.set_num_threads(1)
    bench = Bench(arguments.toy, device, arguments.rows, arguments.results, arguments.limit)
    sections()[arguments.name](bench)
    print(f"{arguments.name}: done", file=sys.stderr)


if __name__ == "__main__":
    main()
