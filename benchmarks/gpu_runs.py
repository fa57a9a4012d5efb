"""Sections of `gpu.py` that run programs: tests, checkpoints, predicted memory, TRL beside it, the demo."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from gpu_sections import Bench

ROOT = Path(__file__).resolve().parent.parent

#: Of one test, as `pytest -v` prints it.
OUTCOME = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
#: With this in their environment, tests marked `gpu` that can run on a CPU do (`tests/conftest.py`).
ON_CPU = "HONE_GPU_TESTS_ON_CPU"


def tests(bench: Bench) -> None:
    """Every test marked `gpu`: what each came to, as soon as it is known."""
    marked = [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in p.read_text()]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-o", "timeout=100", *(str(p.relative_to(ROOT)) for p in marked)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **({ON_CPU: "1"} if bench.toy else {})}
    outcomes: dict[str, str] = {}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for text in child.stdout:
            print(text, end="", flush=True)
            if match := OUTCOME.match(text):
                outcomes[match[1]] = match[2].lower()
                bench.record(outcomes=outcomes, **counts(outcomes))
    if child.returncode:
        raise SystemExit(f"pytest ended with exit code {child.returncode}")


def counts(outcomes: dict[str, str]) -> dict[str, int]:
    bad = sum(outcome in ("failed", "error") for outcome in outcomes.values())
    passed = sum(outcome == "passed" for outcome in outcomes.values())
    return {"passed": passed, "failed": bad, "skipped": len(outcomes) - passed - bad}


def checkpoint(bench: Bench) -> None:
    """Seconds that a checkpoint stops the run for (copies to the host), and of writing and reading it."""
    from gpu_sections import random_policy
    from throughput import answered
    from train_step_sides import hone_update

    from hone.learn import checkpoint as checkpoints
    from hone.recipe.sections.rollout import SamplingConfig

    policy, _ = random_policy(bench, "0.5B")
    batch, sampling = answered(2, 2, 16, 16), SamplingConfig(max_tokens=16)
    hone_update(policy, batch, sampling, 1024)
    bench.wait()
    start = time.perf_counter()
    snapshot = checkpoints.take(1, policy, keep=1)
    stopped = time.perf_counter() - start
    held = sum(t.nbytes for tensors in snapshot.state.tensors.values() for t in tensors.values())
    bench.record(gib=held / 2**30, stopped_seconds=stopped, copied_bytes_per_s=held / stopped)
    saved = [master.detach().clone() for master in policy.optimizer.masters]
    hone_update(policy, batch, sampling, 1024)  # the run goes on; what is written is older
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        path = checkpoints.write(Path(folder), snapshot)
        bench.record(write_seconds=time.perf_counter() - start)
        start = time.perf_counter()
        policy.restore(path, checkpoints.read_state(path)["policy"])
        bench.wait()
        bench.record(read_seconds=time.perf_counter() - start)
    same = all(torch.equal(a, b) for a, b in zip(policy.optimizer.masters, saved, strict=True))
    bench.record(restored_to_the_bit=same)
    assert same, "a weight that was read back is not what it was when the checkpoint was taken"


def memory(bench: Bench) -> None:
    """Predicted against measured: real RL steps, each run in a process of its own (`plan.py`)."""
    from gpu_sections import TOY
    from plan import MODELS, run
    from throughput import SIZES

    large = {"prompts_per_step": 8, "samples_per_prompt": 8, "tokens_per_microbatch": 8192}
    cases: dict[str, Any] = {
        "30M float32": ({"tiny": MODELS["30M"]}, {}),
        "0.5B bfloat16": ({"tiny": SIZES["0.5B"], "dtype": "bfloat16"}, large),
        "0.5B bfloat16, LoRA": ({"tiny": SIZES["0.5B"], "dtype": "bfloat16"}, {**large, "lora": {"rank": 16}}),
    }
    if bench.toy:
        cases = {"toy": ({"tiny": {k: v for k, v in TOY.items() if k != "vocab_size"}}, {"steps": 1})}
    worst = 0.0
    for name, (model, more) in cases.items():
        row = run({}, {**more, "model": {"path": "tiny", **model}})
        bench.record(**{name: row})
        worst = max(worst, abs(row["error"]))
        bench.record(worst_error=worst)


def trl(bench: Bench) -> None:
    """One GRPO step of each, the same model, prompts, lengths: seconds of generation and of training."""
    from gpu_sections import random_policy
    from train_step_sides import hone_step, prompts, trl_trainer

    from hone.recipe.sections.rollout import RolloutConfig
    from hone.rollout.native import NativeEngine

    size = {"prompts": 2, "samples": 4, "fixed": 8, "micro": 4} if bench.toy else {
        "prompts": 8, "samples": 8, "fixed": 128, "micro": 16
    }  # fmt: skip
    policy, _ = random_policy(bench, "0.5B")
    engine = NativeEngine(policy.model, (), RolloutConfig())
    asked = [policy.tokenizer.encode(text) for text in prompts(size["prompts"])]
    ours: dict[str, float] = {}
    for step in range(3):
        bench.wait()
        ours = hone_step(policy, engine, asked, size["fixed"], size["samples"], step)
        ours.pop("flops")
        bench.record(hone=ours)
    missing = [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]
    if missing:
        bench.record(trl=f"not measured: {' and '.join(missing)} not installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        policy.model.float().save_pretrained(Path(folder) / "step")  # TRL's own mixed precision has float32 weights
        policy.tokenizer.save_pretrained(Path(folder) / "step")
        del engine, policy
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
        trainer, clock = trl_trainer("fixed", Path(folder), size, 3)
        assert clock is not None
        trainer.train()
    theirs = clock.steps[-1]
    theirs["train"] = theirs["step"] - theirs["generate"] - theirs["score"]
    bench.record(trl=theirs, step_ratio=theirs["step"] / ours["step"])


def demo(bench: Bench) -> None:
    """`make demo` as it is; where its time is over, the steps so far."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = ROOT / "recipes" / "demo" / "recipe.yaml"
        if bench.toy:
            recipe = Path(folder) / "toy.yaml"
            recipe.write_text(toy_demo())
        command = [sys.executable, "-m", "hone", "train", str(recipe), f"runs={folder}/runs", "name=demo"]
        start = time.perf_counter()
        child = subprocess.Popen(command, cwd=ROOT)
        try:
            code = child.wait(timeout=max(1.0, bench.limit - 15))
        except subprocess.TimeoutExpired:
            code = None
            child.terminate()
            child.wait()
        bench.record(seconds=time.perf_counter() - start, finished=code == 0)
        stages = {p.parent.name: stage_rows(p.parent) for p in sorted(Path(folder).rglob("metrics.jsonl"))}
        bench.record(stages=stages)
    if code:
        raise SystemExit(f"the demo ended with exit code {code}")


def toy_demo() -> str:
    """A few steps of each stage."""
    small = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1, "mlp_size": 48}
    task = {"name": "knights", "people": [2], "names": 2, "quiz": "brief", "train": 40, "validation": 4, "test": 4}
    return json.dumps(
        {
            "name": "demo",
            "model": {"path": "tiny", "tiny": small},
            "task": {**task, "repeats": True},
            "prompt": {"style": "raw", "system": "", "template": "Puzzle: {user}\n"},
            "stages": [
                {"name": "warmup", "stage": "sft", "sft": {"examples": 50, "examples_per_step": 25}},
                {
                    "name": "rl", "stage": "rl", "steps": 2, "prompts_per_step": 2, "samples_per_prompt": 2,
                    "sampling": {"max_tokens": 16}, "eval": {"problems": 2, "sampling": {"max_tokens": 16}},
                },
            ],
        }
    )  # fmt: skip


def stage_rows(folder: Path) -> dict[str, Any]:
    """Steps, seconds of a step, and the evaluations."""
    rows = {}
    for name in ("metrics", "timings", "evals"):
        path = folder / f"{name}.jsonl"
        texts = path.read_text().splitlines() if path.exists() else []
        rows[name] = [json.loads(text) for text in texts if text.endswith("}")]
    seconds = [{key: value for key, value in row.items() if key != "step"} for row in rows["timings"]]
    return {
        "steps": len(rows["metrics"]),
        "last": rows["metrics"][-1] if rows["metrics"] else None,
        "last_timing": seconds[-1] if seconds else None,
        "evals": rows["evals"],
    }
