"""A small run folder with made-up answers, complete with tokens, as the live page reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from hone.runs import layout

GROUP = 4


def answer(step: int, place: int, text: str = "", **more: Any) -> dict[str, Any]:
    """Every third answer is right; the groups of step 2 have no difference."""
    right = place % 3 == 0 and step != 2
    body = text or f"<think>step {step} answer {place} so then so then so then so</think><answer>{place}</answer>"
    return {
        "problem_id": f"problem-{place // GROUP}", "index": place % GROUP, "level": str(1 + place // GROUP),
        "prompt": f"Puzzle {place // GROUP}: how many?", "text": body, "parts": {"outcome": float(right)},
        "total": float(right), "verdict": "correct" if right else "wrong", "extracted": str(place),
        "gold": str(place if right else place + 1),
        "advantage": 0.0 if step == 2 else float(right) - 0.25, "tokens": 10 + place, "finish": "stop",
        "policy_version": step, **more,
    }  # fmt: skip


def write_step(stage: Path, step: int, rows: Sequence[dict[str, Any]], piece: str = "w") -> None:
    """Rollouts and tokens of a step: token t of sample i has entropy (i + t) / 10, log-probs -0.5 and -0.5 - i/100."""
    for name in ("rollouts", "tokens"):
        (stage / name).mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (stage / layout.rollouts_name(step)).write_text(text, encoding="utf-8")
    lengths = [row["tokens"] for row in rows]
    entropies = [(i + t) / 10 for i, n in enumerate(lengths) for t in range(n)]
    trainer = [-0.5 - i / 100 for i, n in enumerate(lengths) for _ in range(n)]
    total = sum(lengths)
    arrays = {
        "lengths": np.asarray(lengths, np.int32), "ids": (np.arange(total) % 3).astype(np.int32),
        "sampled_logprobs": np.full(total, -0.5, np.float32), "trainer_logprobs": np.asarray(trainer, np.float32),
        "entropies": np.asarray(entropies, np.float32), "advantages": np.full(total, 0.25, np.float32),
    }  # fmt: skip
    pieces = json.dumps({str(i): f"{piece}{i} " for i in range(3)})
    save_file(arrays, stage / layout.tokens_name(step), metadata={"pieces": pieces})


def append(path: Path, *rows: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_metrics(stage: Path, step: int, reward: float | None = None) -> None:
    """A row of metrics, and one of timings like that of episodes of two turns."""
    mean = 0.3 + step / 10 if reward is None else reward
    row = {"step": step, "phase": "rl", "reward/mean": mean, "reward/std": 0.4, "reward/outcome": 0.3,
           "length/mean": 16.0 + step, "length/min": 10, "length/max": 21 + step, "length/truncated": 0.0,
           "entropy": 1.0 - step / 20, "zero_variance": float(step == 2), "verdict/correct": 0.33,
           "verdict/wrong": 0.67, "loss": 0.1, "grad_norm": 0.5, "trained_tokens": 200, "kl": 0.01}  # fmt: skip
    append(stage / "metrics.jsonl", row)
    turns = [{"rollouts": 12, "generation": 0.5, "environment": 0.2, "slowest": 0.6},
             {"rollouts": 5, "generation": 0.25, "environment": 0.1, "slowest": 0.3}]  # fmt: skip
    append(stage / "timings.jsonl", {"step": step, "seconds": 2.0, "generate": 1.2, "train": 0.7, "turns": turns})


def evaluation(stage: Path, label: str, step: int, right: Sequence[bool], text: str = "an answer") -> None:
    name = f"evals/{label}_{step:06d}.jsonl"
    (stage / "evals").mkdir(exist_ok=True)
    (stage / name).unlink(missing_ok=True)
    for i, one in enumerate(right):
        append(stage / name, {"problem_id": f"held-{i}", "level": "1", "index": 0, "prompt": "How many?", "text": text,
                              "verdict": "correct" if one else "wrong", "tokens": 9, "finish": "stop"})  # fmt: skip
    share = sum(right) / len(right)
    accuracy = {"value": share, "low": max(0.0, share - 0.2), "high": min(1.0, share + 0.2), "n": len(right)}
    about = {"response_tokens": 9.0, "truncation_rate": 0.0, "by_level": {"1": accuracy}, "samples_file": name}
    append(stage / "evals.jsonl", {"step": step, "label": label, "accuracy": accuracy, **about})


def make_run(folder: Path, steps: int = 4, answers: int = 3 * GROUP) -> Path:
    """A run of one stage, which was stopped: three groups of four answers in every step."""
    folder.mkdir(parents=True)
    config = {
        "name": folder.name, "stage": "rl", "steps": 10, "task": {"name": "knights", "people": [2]},
        "optim": {"lr": 0.0003}, "reward": {"parts": {"outcome": 1.0}},
    }  # fmt: skip
    (folder / "config.resolved.json").write_text(json.dumps(config))
    (folder / "manifest.json").write_text(json.dumps({"code_version": "0.1", "versions": {"python": "3.11"}}))
    for step in range(steps):
        write_step(folder, step, [answer(step, place) for place in range(answers)])
        write_metrics(folder, step)
    evaluation(folder, "validation", 0, [True, False, False, False])
    evaluation(folder, "validation", 3, [False, True, True, False])
    append(
        folder / "events.jsonl",
        {"step": 1, "kind": "checkpoint", "message": "saved before step 1"},
        {"step": 2, "kind": "no_signal", "message": "no group of step 2 has a reward difference"},
        {"step": 3, "kind": "reset", "message": "a hard reset: the reference is new"},
    )
    return folder
