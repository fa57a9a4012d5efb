"""The live page on a large run: how long until it can be read, and how much memory the server takes.

    .venv/bin/python benchmarks/view.py                       # 100,000 rollouts of 300 tokens, in a temporary folder
    .venv/bin/python benchmarks/view.py --rollouts 2000 --folder /tmp/run    # keeps the generated run

The run is generated: texts, rewards and tokens are made up, the files are those of a real run. Printed are the time of
the first page and of the first 100 rows with an index built from nothing and with its cache, the time of a token view
(median and slowest of 30), of a search through all texts, and the memory of the server process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from safetensors.numpy import save_file

from hone.runs import layout

WORDS = ("so", "then", "we", "assume", "that", "one", "of", "them", "lies", "and", "check", "it", "again", "cannot")
PROMPTS, GROUP = 128, 8


def write_run(folder: Path, rollouts: int, tokens: int) -> None:
    """A stage folder with as many rollouts, 1024 a step."""
    rng = np.random.default_rng(0)
    for name in ("rollouts", "tokens"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    config = {"name": folder.name, "stage": "rl", "steps": -(-rollouts // 1024), "reward": {"parts": {"outcome": 1.0}}}
    (folder / "config.resolved.json").write_text(json.dumps(config))
    (folder / "manifest.json").write_text("{}")
    per_step = PROMPTS * GROUP
    with (folder / "metrics.jsonl").open("w") as metrics, (folder / "timings.jsonl").open("w") as timings:
        for step in range(-(-rollouts // per_step)):
            count = min(per_step, rollouts - step * per_step)
            write_step(folder, step, count, tokens, rng)
            metrics.write(json.dumps({"step": step, "reward/mean": step / 100, "length/mean": tokens}) + "\n")
            timings.write(json.dumps({"step": step, "seconds": 1.5, "generate": 1.0, "train": 0.5}) + "\n")


def write_step(folder: Path, step: int, count: int, tokens: int, rng: np.random.Generator) -> None:
    words = np.array(WORDS)[rng.integers(0, len(WORDS), (count, tokens))]
    right = rng.random(count) < 0.4
    rows = []
    for i in range(count):
        text = f"<think>{' '.join(words[i])}</think>\n<answer>{i % 7}</answer>"
        rows.append(json.dumps({
            "problem_id": f"problem-{step * PROMPTS + i // GROUP:06d}", "index": i % GROUP, "level": "3",
            "prompt": f"Puzzle {step}/{i // GROUP}: who of the three tells the truth?", "text": text,
            "parts": {"outcome": float(right[i])}, "total": float(right[i]), "advantage": float(right[i]) - 0.4,
            "verdict": "correct" if right[i] else "wrong", "extracted": str(i % 7), "tokens": tokens, "finish": "stop",
            "policy_version": step,
        }))  # fmt: skip
    (folder / layout.rollouts_name(step)).write_text("\n".join(rows) + "\n")
    total = count * tokens
    arrays = {
        "lengths": np.full(count, tokens, np.int32), "ids": rng.integers(0, 5000, total).astype(np.int32),
        "sampled_logprobs": -rng.random(total).astype(np.float32),
        "trainer_logprobs": -rng.random(total).astype(np.float32),
        "entropies": rng.random(total).astype(np.float32), "advantages": rng.random(total).astype(np.float32),
    }  # fmt: skip
    pieces = json.dumps({str(i): f" w{i}" for i in range(5000)})
    save_file(arrays, folder / layout.tokens_name(step), metadata={"pieces": pieces})


def measure(run: Path, cache: Path) -> dict[str, Any]:
    """Starts `hone view` and asks it what a browser asks."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "hone", "view", str(run), "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stderr is not None
        address = next(word for line in server.stderr for word in line.split() if word.startswith("http://"))
        with httpx.Client(base_url=address.rstrip("/"), timeout=120) as client:
            return _measured(client, f"/api/run/{run.name}/-", psutil.Process(server.pid))
    finally:
        server.terminate()
        server.wait(10)


def _measured(client: httpx.Client, stage: str, server: psutil.Process) -> dict[str, Any]:
    begin = time.perf_counter()
    for path in ("/", "/static/app.js", "/api/runs", f"{stage}/rows/metrics"):
        client.get(path).raise_for_status()
    seconds = {"first page": time.perf_counter() - begin}
    begin = time.perf_counter()
    while not (rows := client.get(f"{stage}/rollouts?count=100").json()["rows"]):
        time.sleep(0.02)
    seconds["first rows"] = time.perf_counter() - begin
    while not (state := client.get(f"{stage}/rollouts?count=1").json())["whole"]:
        time.sleep(0.05)
    seconds["all rows"] = time.perf_counter() - begin
    views = []
    for place in range(30):
        begin = time.perf_counter()
        client.get(f"{stage}/sample/{rows[0]['step']}/{place}").raise_for_status()
        views.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    client.get(f"{stage}/rollouts?count=100&sort=-tokens&verdict=wrong").raise_for_status()
    seconds["sorted and filtered"] = time.perf_counter() - begin
    begin = time.perf_counter()
    client.get(f"{stage}/rollouts?count=100&text=lies+and+check").raise_for_status()
    seconds["search"] = time.perf_counter() - begin
    seconds |= {"token view": statistics.median(views), "slowest token view": max(views)}
    memory = server.memory_info().rss / 2**20
    rounded = {name: round(value, 3) for name, value in seconds.items()}
    return {"rollouts": state["total"], "seconds": rounded, "server MiB": round(memory)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--folder", type=Path, help="keep the generated run here, or use the one that is there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run = arguments.folder or Path(temporary) / "large"
        if not (run / "manifest.json").exists():
            write_run(run, arguments.rollouts, arguments.tokens)
        for start in ("without a cache", "with a cache"):
            print(json.dumps({"start": start, **measure(run, Path(temporary) / "cache")}))


if __name__ == "__main__":
    main()
