"""A synthetic pipeline run: every number and text in it is made up, to have something to draw."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hone.base import stats
from hone.measure.stats import reflection

NAMES = ("Zoey", "Oliver", "Mia", "Noah")
Row = dict[str, Any]


def _dump(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _text(rng: random.Random, careful: bool, people: int) -> str:
    lines = []
    for name in NAMES[:people] if careful else ():
        lines.append(f"Assume {name} is a knight.")
        if rng.random() < 0.6:
            lines += [f"{name} says {rng.choice(NAMES)} is a knave: false, but {name} is a knight. Contradiction.",
                      f"Wait, go back. {name} is a knave instead."]  # fmt: skip
    thinking = "\n".join([*lines, "Everything fits."]) if careful else "I will just guess."
    roles = "\n".join(f"({i + 1}) {n} is a {rng.choice(('knight', 'knave'))}" for i, n in enumerate(NAMES[:people]))
    return f"<think>\n{thinking}\n</think>\n<answer>\n{roles}\n</answer>"


def _sample(rng: random.Random, i: int, careful: float, skill: float) -> Row:
    people = 2 + i % 3
    thought = rng.random() < careful
    right = rng.random() < (skill if thought else 0.5**people)
    text = _text(rng, thought, people)
    return {
        "problem_id": f"knights-test-{i:04d}", "level": str(people), "domain": "", "index": 0,
        "prompt": f"A very special island is inhabited only by knights and knaves. You meet {people} inhabitants: "
        f"{', '.join(NAMES[:people])}. Zoey says: Oliver is a knave. Oliver says: Zoey is a knight if and only if …",
        "text": text, "verdict": "correct" if right else rng.choice(("wrong", "wrong", "malformed")),
        "extracted": "…", "answer": "…", "tokens": len(text) // 3, "finish": "stop",
    }  # fmt: skip


def _evaluate(folder: Path, label: str, step: int, careful: float, skill: float, n: int = 200) -> Row:
    rng = random.Random(f"{label}{step}")
    records = [_sample(rng, i, careful, skill) for i in range(n)]
    name = label if label != "validation" else f"validation_{step:06d}"
    _dump(folder / f"evals/{name}.jsonl", records)
    shares = {v: sum(r["verdict"] == v for r in records) / n for v in ("correct", "wrong", "malformed")}
    by_level = {
        level: vars_of(stats.accuracy([[float(r["verdict"] == "correct")] for r in records if r["level"] == level]))
        for level in ("2", "3", "4")
    }
    return {
        "step": step, "label": label, "split": "validation" if label == "validation" else "test",
        "accuracy": vars_of(stats.accuracy([[float(r["verdict"] == "correct")] for r in records])),
        "response_tokens": sum(r["tokens"] for r in records) / n,
        "reflection_rate": reflection.rate([r["text"] for r in records]),
        "verdicts": shares, "by_level": by_level,
        "sampling": {"temperature": 1.0, "top_p": 1.0, "max_tokens": 320}, "samples_file": f"evals/{name}.jsonl",
    }  # fmt: skip


def vars_of(interval: Any) -> Row:
    return {key: getattr(interval, key) for key in ("value", "low", "high", "n")}


def _config(name: str, stage: str, steps: int) -> Row:
    return {
        "name": name, "stage": stage, "seed": 0, "runs": "runs", "steps": steps, "prompts_per_step": 24,
        "samples_per_prompt": 16, "task": {"name": "knights", "people": [2, 3, 4]}, "model": {"path": "tiny"},
        "optim": {"lr": 0.0003}, "algo": {"advantage": "grpo", "loss": "clipped"},
        "reward": {"parts": {"outcome": 1.0}}, "sampling": {"temperature": 1.0, "top_p": 1.0, "max_tokens": 320},
        "sft": {"styles": {"careful": 0.4, "hasty": 0.6}, "examples": 64 * steps, "examples_per_step": 64, "epochs": 1},
    }  # fmt: skip


def _stage(folder: Path, stage: str, steps: int) -> None:
    folder.mkdir(parents=True)
    (folder / "config.resolved.json").write_text(json.dumps(_config(folder.name, stage, steps)))
    manifest = {
        "code_version": "0.1.0", "seed": 0, "versions": {"python": "3.11", "torch": "2.13", "transformers": "5.2"},
        "hardware": {"cpu": "2 cores", "memory": "8 GiB", "gpu": None}, "started": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    timings = [{"step": i, "seconds": 1.2, "generate": 0.7, "reward": 0.05, "train": 0.4} for i in range(steps)]
    _dump(folder / "timings.jsonl", timings)


def make_sft(folder: Path, steps: int = 150) -> Path:
    rng = random.Random(1)
    _stage(folder, "sft", steps)
    rows = [
        {"step": i, "phase": "sft", "loss": 5.5 * math.exp(-i / 12) + 0.42 + rng.gauss(0, 0.02), "lr": 3e-3,
         "grad_norm": 4 * math.exp(-i / 9) + 0.3 + rng.random() * 0.1}
        for i in range(steps)
    ]  # fmt: skip
    _dump(folder / "metrics.jsonl", rows)
    return folder


def _rl_row(rng: random.Random, i: int, steps: int) -> Row:
    rise = 1 / (1 + math.exp(-9 * (i / steps - 0.4)))
    accuracy = 0.42 + 0.48 * rise + rng.gauss(0, 0.03)
    mean = 77 + 48 * rise + rng.gauss(0, 3)
    return {
        "step": i, "phase": "rl", "loss": rng.gauss(0, 0.01), "grad_norm": 0.3 + 0.2 * rng.random(), "lr": 3e-4,
        "reward/mean": accuracy, "reward/std": 0.4, "reward/outcome": accuracy, "accuracy": accuracy,
        "verdict/correct": accuracy, "verdict/wrong": 0.9 * (1 - accuracy), "verdict/malformed": 0.1 * (1 - accuracy),
        "length/min": 30 + rng.gauss(0, 1), "length/mean": mean, "length/max": mean * 1.8 + rng.gauss(0, 9),
        "length/truncated": max(0.0, 0.02 * (1 - rise) + rng.gauss(0, 0.003)),
        "entropy": 0.32 - 0.2 * rise + rng.gauss(0, 0.008), "clip_fraction": abs(rng.gauss(0.012, 0.004)),
        "zero_variance": min(1, max(0, 0.1 + 0.45 * rise + rng.gauss(0, 0.05))), "kl": 0.0,
        "reflection_rate": min(1.0, max(0.0, 0.36 + 0.52 * rise + rng.gauss(0, 0.02))),
        "mismatch/mean_abs": 2e-7,
    }  # fmt: skip


def make_rl(folder: Path, steps: int = 120, done: int | None = None, rollouts: int = 12) -> Path:
    """`done` steps of `steps`; unfinished (no evaluation after) if fewer."""
    rng = random.Random(2)
    _stage(folder, "rl", steps)
    count = steps if done is None else done
    _dump(folder / "metrics.jsonl", [_rl_row(rng, i, steps) for i in range(count)])
    evals = [_evaluate(folder, "before", 0, 0.36, 0.93)]
    evals += [_evaluate(folder, "validation", i, 0.36 + 0.5 * i / steps, 0.94, 100) for i in range(20, count, 20)]
    if count == steps:
        evals.append(_evaluate(folder, "after", steps, 0.97, 0.95))
    _dump(folder / "evals.jsonl", evals)
    events = [
        {"step": 40, "kind": "resumed", "message": "from checkpoint 40"},
        {"step": 60, "kind": "reset", "message": "reference and optimizer are new"},
        {"step": 63, "kind": "warning", "message": "entropy fell below 0.15: see rollouts/step_000063.jsonl"},
        *({"step": i, "kind": "checkpoint", "message": "saved"} for i in range(10, count, 10)),
    ]
    _dump(folder / "events.jsonl", events)
    for i in range(0, count, max(1, count // rollouts)):
        careful = 0.36 + 0.5 * i / steps
        records = [_sample(rng, j, careful, 0.9) | {"index": j % 16, "total": 1.0, "advantage": 0.5} for j in range(48)]
        _dump(folder / f"rollouts/step_{i:06d}.jsonl", records)
    return folder


def make_pipeline(folder: Path, steps: int = 120) -> Path:
    make_sft(folder / "warmup")
    make_rl(folder / "elicit", steps)
    stages = [
        {"name": "warmup", "kind": "sft", "folder": "warmup"},
        {"name": "elicit", "kind": "rl", "folder": "elicit"},
    ]
    (folder / "stages.json").write_text(json.dumps(stages))
    rows = {row["label"]: row for row in map(json.loads, (folder / "elicit/evals.jsonl").read_text().splitlines())}
    keep = ("accuracy", "response_tokens", "reflection_rate")
    results = {label: {key: rows[label][key] for key in keep} for label in ("before", "after")}
    (folder / "results.json").write_text(json.dumps({"seconds": 284.0, "peak_rss_bytes": 1_630_000_000, **results}))
    return folder


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pipeline(tmp_path_factory.mktemp("runs") / "demo")


@pytest.fixture
def sft_run() -> Callable[..., Path]:
    return make_sft


@pytest.fixture
def rl_run() -> Callable[..., Path]:
    return make_rl
