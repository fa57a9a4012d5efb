"""How long the comparison of several long runs takes, on made-up runs.

    .venv/bin/python benchmarks/report.py                 # 3 runs x 2 000 steps; prints seconds as JSON last
    .venv/bin/python benchmarks/report.py --keep /tmp/x   # keep the runs and the page there, to look at

Every number and text in these runs is made up. They have what real runs of this length have: metrics of every step,
128 rollouts of every tenth, validations, an evaluation before and after with 200 problems, two models in `evaluations`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from pathlib import Path
from typing import Any

Row = dict[str, Any]
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 512}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--keep", type=Path, help="where to make the runs; default: a folder that is removed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = arguments.keep or Path(temporary)
        # two seeds of one setting, then others: both ways in which runs come together
        folders = [make_run(root / name(i), i, arguments.steps) for i in range(arguments.runs)]
        seconds = {"comparison": timed(folders, root / "comparison"), "one_run": timed(folders[:1], root / "one")}
    print(json.dumps({"runs": arguments.runs, "steps": arguments.steps, **seconds}))


def timed(folders: list[Path], out: Path) -> dict[str, float]:
    """With everything that a first call pays: matplotlib is imported in here."""
    started, cpu = time.perf_counter(), time.process_time()
    from hone.report.build import build

    print(build(folders, out))
    return {"seconds": round(time.perf_counter() - started, 2), "cpu_seconds": round(time.process_time() - cpu, 2)}


def name(i: int) -> str:
    return f"grpo-seed{i}" if i < 2 else f"setting-{i}"


def make_run(folder: Path, i: int, steps: int) -> Path:
    rng = random.Random(i)
    config = {
        "name": folder.name, "stage": "rl", "seed": i, "steps": steps, "task": {"name": "knights"},
        "model": {"path": "tiny"}, "optim": {"lr": 1e-4 if i < 2 else 1e-4 * i},
        "algo": {"advantage": "grpo" if i < 2 else "rloo", "kl": {"coef": 0.001}}, "prompts_per_step": 16,
        "samples_per_prompt": 8, "sampling": SAMPLING,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.resolved.json").write_text(json.dumps(config))
    (folder / "manifest.json").write_text(json.dumps({"seed": i, "code_version": "made up", "versions": {}}))
    dump(folder / "metrics.jsonl", [metrics(rng, step, steps, 0.85 + 0.04 * (i > 1)) for step in range(steps)])
    dump(folder / "timings.jsonl", [{"step": step, "seconds": 2.0, "generate": 1.2} for step in range(steps)])
    dump(
        folder / "events.jsonl", [{"step": s * steps // 4, "kind": "reset", "message": "hard reset"} for s in (1, 2, 3)]
    )
    for step in range(0, steps, 10):
        careful = 0.3 + 0.5 * step / steps
        dump(folder / f"rollouts/step_{step:06d}.jsonl", [sample(rng, j // 8, j % 8, careful) for j in range(128)])
    rows = [evaluation(folder, rng, "before", 0, 0.35, 200)]
    rows += [
        evaluation(folder, rng, "validation", s, 0.35 + 0.5 * s / steps, 100) for s in range(0, steps, steps // 20)
    ]
    rows.append(evaluation(folder, rng, "after", steps, 0.85 + 0.04 * (i > 1), 200))
    dump(folder / "evals.jsonl", rows)
    if i == 0:
        for label, seed, skill in (("base", 0, 0.25), ("base seed 1", 1, 0.25), ("a model with a long name", 0, 0.7)):
            stored(folder / "evaluations", label, seed, skill, problems=300, samples=32)
    return folder


def metrics(rng: random.Random, step: int, steps: int, top: float) -> Row:
    rise = 1 / (1 + math.exp(-9 * (step / steps - 0.3)))
    accuracy = 0.35 + (top - 0.35) * rise + rng.gauss(0, 0.03)
    return {
        "step": step, "phase": "rl", "loss": rng.gauss(0, 0.01), "grad_norm": 0.3 + 0.2 * rng.random(), "lr": 1e-4,
        "reward/mean": 2 * accuracy - 1, "reward/std": 0.4, "accuracy": accuracy, "verdict/correct": accuracy,
        "verdict/wrong": 0.9 * (1 - accuracy), "verdict/malformed": 0.1 * (1 - accuracy),
        "length/min": 30 + 20 * rise + rng.gauss(0, 2), "length/mean": 80 + 90 * rise + rng.gauss(0, 4),
        "length/max": 250 + 200 * rise + rng.gauss(0, 20), "length/truncated": max(0.0, rng.gauss(0.01, 0.005)),
        "entropy": 0.5 - 0.3 * rise + rng.gauss(0, 0.01), "clip_fraction": abs(rng.gauss(0.01, 0.004)),
        "zero_variance": min(1.0, max(0.0, 0.1 + 0.4 * rise + rng.gauss(0, 0.05))),
        "kl": 0.05 * rise + 0.001 * rng.random(),
        "reflection_rate": 0.3 + 0.5 * rise + rng.gauss(0, 0.02), "mismatch/mean_abs": 2e-7,
        "duplicate_thinking": 0.02 * rng.random(),
    }  # fmt: skip


def sample(rng: random.Random, problem: int, index: int, skill: float) -> Row:
    level = 2 + problem % 4
    right = rng.random() < skill ** (1 + 0.25 * (level - 2))
    lines = [f"Suppose Zoey is a knight. Claim {k}: true, so Mia is a knave." for k in range(level)]
    if rng.random() < skill:
        lines.append("Wait, that is a contradiction. Go back: Zoey is a knave instead.")
    text = "<think>\n" + "\n".join(lines) + "\n</think>\n<answer>\n(1) Zoey is a knave\n</answer>"
    return {
        "problem_id": f"knights-test-{problem:05d}", "level": str(level), "domain": "", "index": index,
        "prompt": "A very special island is inhabited only by knights and knaves. Zoey says: Mia is a knave.",
        "text": text, "verdict": "correct" if right else rng.choice(("wrong", "wrong", "malformed")),
        "extracted": "…", "answer": [True, False], "tokens": len(text) // 3, "finish": "stop",
    }  # fmt: skip


def evaluation(folder: Path, rng: random.Random, label: str, step: int, skill: float, n: int) -> Row:
    records = [sample(rng, i, 0, skill) for i in range(n)]
    file = f"evals/{label}.jsonl" if label != "validation" else f"evals/validation_{step:06d}.jsonl"
    dump(folder / file, records)
    right = sum(r["verdict"] == "correct" for r in records) / n
    half = 1.96 * math.sqrt(right * (1 - right) / n)
    return {
        "step": step, "label": label, "split": "test", "samples": 1, "sampling": SAMPLING, "samples_file": file,
        "accuracy": {"value": right, "low": right - half, "high": right + half, "n": n}, "by_level": {}, "verdicts": {},
        "response_tokens": sum(r["tokens"] for r in records) / n, "reflection_rate": 0.5,
    }  # fmt: skip


def stored(out: Path, label: str, seed: int, skill: float, problems: int, samples: int) -> None:
    """What `hone eval` leaves behind."""
    rng = random.Random(f"{label} {seed}")
    difficulty = [random.Random(i).betavariate(0.6, 0.8) for i in range(problems)]
    folder = out / f"{label.replace(' ', '-')}-00000000"
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"label": label, "model": label, "weights": label.split(" seed")[0], "hosted": False, "split": "test",
                "task": {"name": "knights"}, "sampling": SAMPLING, "seed": seed}  # fmt: skip
    (folder / "settings.json").write_text(json.dumps(settings))
    rows, asked = [], []
    for i in range(problems):
        first = sample(rng, i, 0, skill)
        domain = ("Algebra", "Geometry", "Number Theory")[i % 3]
        answer = str(i) if i % 3 else f"\\frac{{{i}}}{{7}}"
        asked.append(
            {"id": first["problem_id"], "level": first["level"], "domain": domain, "answer": answer, "prompt": "?"}
        )
        for g in range(samples):
            right = rng.random() < difficulty[i] ** (2 * (1 - skill) * (0.6 + 0.2 * (i % 4)))
            verdict = "correct" if right else "wrong"
            row = {"problem_id": first["problem_id"], "index": g, "seed": seed, "text": first["text"], "tokens": 90}
            rows.append({**row, "verdict": verdict, "finish": "stop", "extracted": ""})
    dump(folder / "problems.jsonl", asked)
    dump(folder / "samples.jsonl", rows)


def dump(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
