"""The live page on a large run: how long until it can be read, and how much memory the server takes.

    .venv/bin/python benchmarks/view.py                       # 100,000 rollouts of 300 tokens, in a temporary folder
    .venv/bin/python benchmarks/view.py --rollouts 2000 --folder /tmp/run    # keeps the generated run
    .venv/bin/python benchmarks/view.py --scroll              # frames while the table is scrolled; needs Playwright
    .venv/bin/python benchmarks/view.py --training            # how much a page slows training; needs Playwright
    .venv/bin/python benchmarks/view.py --grow runs/demo/rl   # processor time of the server while that run grows

The run is generated: texts, rewards and tokens are made up, the files are those of a real run. Printed are the time of
the first page and of the first 100 rows with an index built from nothing and with its cache, the time of a token view
(median and slowest of 30), of a search through all texts, and the memory of the server process.

`--scroll` opens the table in a Chromium (`CHROMIUM` names it) and scrolls through it; printed are the times between
frames, and those of the same page at rest, which show what the machine itself does. `--training` trains the same small
recipe in pairs, with and without a browser that watches it, in alternating order. A pair has the same seed, so that
step k does the same work in both. Printed, each with a bootstrap interval over the pairs: the median ratio of the times
of a step, which on a busy machine says little; the ratio of the processor times of training, which other work disturbs
less; and the processor time of the server, which is all that it can take from training where no core is idle. `--grow`
gives the latter without training, for one page at a time: the steps of a finished stage appear in a copy, one every
four seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from safetensors.numpy import save_file

from hone.runs import layout

FLAGS = ["--no-sandbox", "--disable-gpu"]
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


@contextmanager
def served(run: Path, cache: Path) -> Iterator[tuple[str, psutil.Process]]:
    """`hone view` on a run: its address and its process."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "hone", "view", str(run), "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stderr is not None
        address = next(word for line in server.stderr for word in line.split() if word.startswith("http://"))
        yield address.rstrip("/"), psutil.Process(server.pid)
    finally:
        server.terminate()
        server.wait(10)


def measure(run: Path, cache: Path) -> dict[str, Any]:
    """Asks `hone view` what a browser asks."""
    with served(run, cache) as (address, server), httpx.Client(base_url=address, timeout=120) as client:
        return _measured(client, f"/api/run/{run.name}/-", server)


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


# --- scrolling ----------------------------------------------------------------------------------------------------

#: Times between the frames of `seconds`, in ms, while `move` is called in each.
FRAMES = """async ([seconds, kind]) => {
  const table = document.querySelector('.vtable');
  const moves = {rest: () => {}, steady: () => { table.scrollTop += 120; }, fast: () => { table.scrollTop += 2500; },
                 jumps: () => { if (Math.random() < 0.1) table.scrollTop = Math.random() * table.scrollHeight; }};
  const times = [];
  let before = await new Promise(requestAnimationFrame);
  const end = before + 1000 * seconds;
  while (before < end) {
    moves[kind]();
    const now = await new Promise(requestAnimationFrame);
    times.push(now - before);
    before = now;
  }
  return times;
}"""


def chromium() -> str:
    """The browser's program. Raises SystemExit if there is none."""
    program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        raise SystemExit("no chromium on the PATH; CHROMIUM names another")
    return program


def scroll(run: Path, cache: Path, seconds: float = 6.0) -> list[dict[str, Any]]:
    """Times between frames, at rest and scrolled in three ways."""
    from playwright.sync_api import sync_playwright

    with served(run, cache) as (address, _), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(f"{address}/#/{run.name}/-/rollouts")
        page.wait_for_selector(".vrow")
        page.locator(".title p", has_text="Reading").wait_for(state="detached", timeout=180_000)
        rows = int(page.locator(".vtable").get_attribute("aria-rowcount") or 0) - 1
        results = []
        for kind in ("rest", "steady", "fast", "jumps"):
            times = sorted(page.evaluate(FRAMES, [seconds, kind]))
            shares = {f"p{p}": round(times[min(len(times) - 1, p * len(times) // 100)], 1) for p in (50, 99)}
            slow = sum(one > 50 for one in times)
            results.append({"scroll": kind, "rows": rows, "frames": len(times), **shares,
                            "slowest ms": round(times[-1], 1), "above 50 ms": slow})  # fmt: skip
        browser.close()
    return results


# --- training while a page watches --------------------------------------------------------------------------------

RECIPE = """
name: {name}
runs: {runs}
seed: {seed}
model: {{path: tiny, tiny: {{phrases: 24}}}}
task: {{name: knights, people: [2], quiz: brief, names: 2, train: 400, validation: 10, test: 10, repeats: true}}
prompt: {{style: raw, system: "", template: "Puzzle: {{user}}\\n"}}
tokens_per_microbatch: 4096
steps: {steps}
prompts_per_step: 16
samples_per_prompt: 8
sampling: {{max_tokens: 96}}
"""
PAGES = ("overview", "rollouts")
FIRST = 3  # steps that are left out: the first ones compile and allocate


@dataclass(frozen=True)
class Trained:
    """One training run."""

    steps: list[float]  # seconds of each
    own: float  # processor seconds of the training process and its workers
    server: float = 0.0  # of the page's server during the run
    browser: float = 0.0  # of the browser


def training(folder: Path, pairs: int, steps: int) -> dict[str, Any]:
    """Watched runs against unwatched ones: times of steps, processor time of training, and that of the server."""
    both = [_pair(folder, pair, steps) for pair in range(pairs)]
    return {
        "pairs": pairs,
        "steps compared": pairs * (steps - FIRST),
        "times of steps, % more": _percent(both, lambda chosen: statistics.median(_ratios(chosen)) - 1),
        "processor time of training, % more": _percent(
            both, lambda chosen: statistics.fmean(watched.own / alone.own - 1 for watched, alone in chosen)
        ),
        "server, % of the processor time of training": _percent(
            both, lambda chosen: sum(w.server for w, _ in chosen) / sum(w.own for w, _ in chosen)
        ),
        "server, % of one core": _percent(
            both, lambda chosen: sum(w.server for w, _ in chosen) / sum(sum(w.steps) for w, _ in chosen)
        ),
        "browser, % of one core": _percent(
            both, lambda chosen: sum(w.browser for w, _ in chosen) / sum(sum(w.steps) for w, _ in chosen)
        ),
    }


Pairs = Sequence[tuple[Trained, Trained]]  # (watched, alone)


def _pair(folder: Path, pair: int, steps: int) -> tuple[Trained, Trained]:
    """Both runs of a pair, in alternating order."""
    done = {}
    for watched in (True, False) if pair % 2 else (False, True):
        name = f"pair{pair}-{'with' if watched else 'without'}"
        done[watched] = (_watched if watched else _train)(folder, name, pair, steps)
        print(name, done[watched], file=sys.stderr, flush=True)
    return done[True], done[False]


def _ratios(pairs: Pairs) -> list[float]:
    return [a / b for watched, alone in pairs for a, b in zip(watched.steps[FIRST:], alone.steps[FIRST:], strict=True)]


def _percent(pairs: Pairs, value: Callable[[Pairs], float]) -> dict[str, float]:
    """The value in percent, with the 95% interval of a bootstrap over pairs: steps of a run are not independent."""
    rng = random.Random(0)
    drawn = sorted(value(rng.choices(pairs, k=len(pairs))) for _ in range(1000))
    return {name: round(100 * one, 2) for name, one in
            (("value", value(pairs)), ("low", drawn[25]), ("high", drawn[-26]))}  # fmt: skip


def _train(folder: Path, name: str, seed: int, steps: int) -> Trained:
    recipe = folder / f"{name}.yaml"
    recipe.write_text(RECIPE.format(name=name, runs=folder / "runs", seed=seed, steps=steps))
    with (folder / f"{name}.txt").open("w") as log:
        process = subprocess.Popen([sys.executable, "-m", "hone", "train", str(recipe)], stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)  # with the processor time of its workers
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"training failed:\n{(folder / f'{name}.txt').read_text()[-2000:]}")
    rows = (folder / "runs" / name / "timings.jsonl").read_text().splitlines()
    return Trained([json.loads(row)["seconds"] for row in rows], usage.ru_utime + usage.ru_stime)


def _watched(folder: Path, name: str, seed: int, steps: int) -> Trained:
    """Training while a browser watches it."""
    with (
        served(folder / "runs" / name, folder / "cache") as (address, server),
        watched_by_a_browser(address, name, folder),
    ):
        before, drawn = _processor(server), _browser_time()
        trained = _train(folder, name, seed, steps)
        return replace(trained, server=_processor(server) - before, browser=_browser_time() - drawn)


def _processor(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


def _browser_time() -> float:
    """Processor seconds of the browser's processes that this one has started."""
    children = psutil.Process().children(recursive=True)
    return sum(_processor(one) for one in children if "chrom" in one.name())


@contextmanager
def watched_by_a_browser(address: str, run: str, folder: Path, pages: Sequence[str] = PAGES) -> Iterator[None]:
    """A Chromium with these pages of a run in tabs, all counted as visible.

    Its priority is low: what is measured is the server, not the drawing.
    """
    from playwright.sync_api import sync_playwright

    polite = folder / "chromium"
    polite.write_text(f'#!/bin/sh\nexec nice -n 19 "{chromium()}" "$@"\n')
    polite.chmod(0o755)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=polite, args=FLAGS)
        for page in pages:
            browser.new_page().goto(f"{address}/#/{run}/-/{page}")
        yield
        browser.close()


def grow(source: Path, folder: Path, steps: int, page: str, seconds: float = 4.0) -> dict[str, Any]:
    """The processor time of a server with one page while the last `steps` of a finished stage appear one by one."""
    copy = folder / "one"
    rows = {name: (source / f"{name}.jsonl").read_text().splitlines(True) for name in ("metrics", "timings")}
    for name in ("rollouts", "tokens"):
        (copy / name).mkdir(parents=True)
    for name in ("config.resolved.json", "manifest.json"):
        shutil.copy(source / name, copy / name)

    def appear(step: int) -> None:
        for name in (layout.rollouts_name(step), layout.tokens_name(step)):
            shutil.copy(source / name, copy / name)
        for name, lines in rows.items():
            with (copy / f"{name}.jsonl").open("a") as file:
                file.write(lines[step])

    first = len(rows["metrics"]) - steps
    for step in range(first):
        appear(step)
    with served(copy, folder / "cache") as (address, server), watched_by_a_browser(address, "one", folder, [page]):
        time.sleep(2 * seconds)  # until the steps that were there are indexed
        used, began = _processor(server), time.perf_counter()
        for step in range(first, first + steps):
            appear(step)
            time.sleep(seconds)
        used, wall = _processor(server) - used, time.perf_counter() - began
    answers = len((source / layout.rollouts_name(first)).read_text().splitlines())
    return {"page": page, "steps": steps, "answers a step": answers, "seconds a step": seconds,
            "server, % of one core": round(100 * used / wall, 2)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--folder", type=Path, help="keep the generated run here, or use the one that is there")
    parser.add_argument("--scroll", action="store_true", help="only the frames while the table is scrolled")
    parser.add_argument("--training", action="store_true", help="only how much a page slows training")
    parser.add_argument("--grow", type=Path, metavar="STAGE", help="only the server's processor time while it grows")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        if arguments.grow:
            for page in PAGES:
                print(json.dumps(grow(arguments.grow, Path(temporary) / page, arguments.steps, page)))
            return
        if arguments.training:
            print(json.dumps(training(Path(temporary), arguments.pairs, arguments.steps)))
            return
        run = arguments.folder or Path(temporary) / "large"
        if not (run / "manifest.json").exists():
            write_run(run, arguments.rollouts, arguments.tokens)
        if arguments.scroll:
            for result in scroll(run, Path(temporary) / "cache"):
                print(json.dumps(result))
            return
        for start in ("without a cache", "with a cache"):
            print(json.dumps({"start": start, **measure(run, Path(temporary) / "cache")}))


if __name__ == "__main__":
    main()
