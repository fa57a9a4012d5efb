"""Kill a run again and again; what is left in the end must be that of a run that nobody touched, bit for bit.

    .venv/bin/python benchmarks/chaos.py                           # 60 kills; writes benchmarks/results/chaos.json
    .venv/bin/python benchmarks/chaos.py --shard 2 --kills 30 --out -   # two processes with half the weights each

A tiny run of two stages is started in a process of its own and killed with SIGKILL (of several processes one of them,
or all) at moments of three kinds: at any time; while answers are sampled; while a checkpoint is written. It is resumed
until it is through, then a new one begins. Processes note where they are in shared memory, so each kill is counted
where it struck. They are forked from one that has imported everything. Unix only.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import mmap
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

RECIPE = """
name: {name}
runs: {runs}
parallel: {{replicate: {replicate}, shard: {shard}, tensor: {tensor}, timeout: 30}}
model: {{path: tiny, tiny: {{vocab_size: 300, hidden_size: 32, layers: 2, heads: 2, kv_heads: 2, mlp_size: 64}}}}
task: {{name: knights, people: [2], quiz: brief, names: 4, train: 40, validation: 8, test: 8, repeats: true}}
prompt: {{style: raw, system: "", template: "{{user}}\\n"}}
checkpoint: {{every: 2, keep: 2, keep_best: 1}}
tokens_per_microbatch: 2048
stages:
  - name: warmup
    stage: sft
    sft: {{examples: 48, examples_per_step: 8}}
    optim: {{lr: 5.0e-3}}
  - name: rl
    stage: rl
    steps: {steps}
    prompts_per_step: 4
    samples_per_prompt: 4
    algo: {{refill_rounds: 1}}
    sampling: {{max_tokens: 24}}
    optim: {{lr: 1.0e-3}}
    reward: {{parts: {{outcome: 1.0, overlong: 1.0}}, overlong: {{buffer: 20, max_tokens: 24}}}}
    eval: {{problems: 8, every: 2, sampling: {{max_tokens: 24}}}}
"""

PLACES = ("starting", "between", "sampling", "updating", "copying a checkpoint")
KINDS = ("any time", "sampling", "writing")

#: Seconds after which a process must have ended: of a whole run, and of the others when one was killed.
BOUND = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--steps", type=int, default=6, help="of reinforcement learning")
    parser.add_argument("--seed", type=int, default=0)
    for dim in ("replicate", "shard", "tensor"):
        parser.add_argument(f"--{dim}", type=int, default=1)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "chaos.json"), help="- for none")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        layout = {"replicate": given.replicate, "shard": given.shard, "tensor": given.tensor}
        found = chaos(Path(folder), given.kills, given.steps, given.seed, layout)
    text = json.dumps({"command": " ".join(["benchmarks/chaos.py", *sys.argv[1:]]), **found}, indent=1)
    if given.out != "-":
        Path(given.out).write_text(text + "\n")
    print(text)


def chaos(folder: Path, kills: int, steps: int, seed: int, layout: dict[str, int]) -> dict[str, Any]:
    """Counts of kills by where they struck. Raises AssertionError for a run that is not the same, or hangs."""
    import hone.stages.pipeline  # noqa: F401  # here, so that the processes need not
    from hone.stages import audit as runs

    luck = random.Random(seed)
    begun = time.monotonic()
    whole = Attempt(folder, "whole", steps, layout)
    whole.start()
    assert whole.ended(BOUND) == {0}, f"the run that nobody touches failed: {whole.log.read_text()[-2000:]}"
    seconds = time.monotonic() - begun
    expected = bits(folder / "whole")
    places: Counter[str] = Counter()
    writes, count, finished, slowest = 0, 0, 0, 0.0
    one = len(whole.slots) == 1
    while count < kills or finished == 0:
        name = f"run{finished}"
        shutil.copytree(folder / "whole" / "base", folder / name / "base")
        while True:
            attempt = Attempt(folder, name, steps, layout)
            attempt.start()
            struck = attempt.strike(luck, KINDS[count % 3], seconds) if count < kills else None
            at = time.monotonic()
            codes = attempt.ended(BOUND)
            if struck is None:
                assert codes == {0}, f"{name} failed: {attempt.log.read_text()[-2000:]}"
                break
            slowest = max(slowest, time.monotonic() - at)
            count += 1
            place, writing = struck
            places[place] += 1
            writes += writing
        same = bits(folder / name)
        wrong = sorted(k for k in expected.keys() | same.keys() if expected.get(k) != same.get(k))
        assert not wrong, f"{name}: other than the run that nobody touched: {', '.join(wrong)}"
        lines, faults = runs.check(folder / name)
        assert not faults, "\n".join(lines)
        shutil.rmtree(folder / name)
        finished += 1
    return {
        "kills": count,
        "runs_finished_the_same": finished,
        "kills_by_place": {place: places[place] for place in PLACES if places[place]},
        "kills_while_a_checkpoint_was_written": writes,
        "killed": "the process" if one else "one of the processes, or all",
        "layout": layout,
        "longest_seconds_until_all_had_ended": round(slowest, 1),
        "seconds_of_a_whole_run": round(seconds, 1),
    }


class Attempt:
    """The processes of one start of a run."""

    def __init__(self, folder: Path, name: str, steps: int, layout: dict[str, int]) -> None:
        self.size = layout["replicate"] * layout["shard"] * layout["tensor"]
        self.log = folder / f"{name}.log"
        self._recipe = folder / f"{name}.yaml"
        self._recipe.write_text(RECIPE.format(name=name, runs=folder, steps=steps, **layout))
        self.slots = [mmap.mmap(-1, 2) for _ in range(self.size)]  # place, whether a checkpoint is being written
        self._pids: dict[int, int] = {}  # rank -> pid of those that run
        self._codes: set[int] = set()  # of those that have ended

    def start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(self.size):
            pid = os.fork()
            if pid == 0:
                self._be(rank, port)
            self._pids[rank] = pid

    def _be(self, rank: int, port: int) -> None:
        """In the child: train, and leave."""
        code = 1
        try:
            where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.size, "MASTER_PORT": port}
            os.environ.update({"MASTER_ADDR": "127.0.0.1", **{k: str(v) for k, v in where.items()}})
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC if rank == 0 else os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            observe(self.slots[rank])
            from hone.recipe.load import load
            from hone.stages import pipeline

            pipeline.run(load(self._recipe), resume=True)
            code = 0
        except SystemExit as left:
            code = int(left.code or 0)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stderr.flush()
            os._exit(code)

    def strike(self, luck: random.Random, kind: str, seconds: float) -> tuple[str, bool] | None:
        """Kill at a moment of this kind; where it struck, and whether into the writing of a checkpoint. None: all had
        ended before."""
        victim = luck.randrange(self.size)
        slot = self.slots[victim]
        deadline = time.monotonic() + luck.uniform(0.0, seconds if kind == "any time" else 0.6 * seconds)
        while time.monotonic() < deadline and self._running():
            time.sleep(0.001)
        if kind != "any time":
            wanted: Callable[[], bool] = {
                "sampling": lambda: PLACES[slot[0]] == "sampling",
                "writing": lambda: bool(slot[1]),
            }[kind]
            while self._running() and not wanted():
                time.sleep(0.0002)
            time.sleep(luck.uniform(0.0, 0.02 if kind == "sampling" else 0.005))  # a tiny checkpoint is soon written
        if not self._running():
            return None
        struck = PLACES[slot[0]], bool(slot[1])
        everyone = luck.random() < 0.5
        for rank, pid in list(self._pids.items()):
            if everyone or rank == victim:
                os.kill(pid, signal.SIGKILL)
        return struck

    def _running(self) -> bool:
        """Whether none has ended yet."""
        for rank, pid in list(self._pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self._pids[rank]
                self._codes.add(os.waitstatus_to_exitcode(status))
        return len(self._pids) == self.size

    def ended(self, bound: float) -> set[int]:
        """Exit codes. Raises AssertionError, after a kill, if one has not ended within the bound."""
        deadline = time.monotonic() + bound
        while self._pids and time.monotonic() < deadline:
            self._running()
            time.sleep(0.002)
        hung = dict(self._pids)
        for pid in hung.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        assert not hung, f"processes {sorted(hung)} had not ended after {bound:.0f} s: {self.log.read_text()[-2000:]}"
        return self._codes


def observe(slot: mmap.mmap) -> None:
    """Make this process note where it is."""
    from hone.learn import checkpoint
    from hone.learn.policy import Policy
    from hone.rollout.native import NativeEngine

    def noted(owner: Any, name: str, place: str) -> None:
        call = getattr(owner, name)

        @functools.wraps(call)
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            slot[0] = PLACES.index(place)
            try:
                return call(*arguments, **keywords)
            finally:
                slot[0] = PLACES.index("between")

        setattr(owner, name, wrapped)

    noted(NativeEngine, "generate", "sampling")
    noted(Policy, "update", "updating")
    noted(Policy, "imitate", "updating")
    noted(Policy, "save", "copying a checkpoint")
    write = checkpoint.write

    def writing(*arguments: Any, **keywords: Any) -> Any:
        slot[1] = 1
        try:
            return write(*arguments, **keywords)
        finally:
            slot[1] = 0

    checkpoint.write = writing


def bits(run: Path) -> dict[str, bytes]:
    """Everything that must not depend on where a run was cut."""
    patterns = (
        "metrics.jsonl", "ledger.jsonl", "evals.jsonl", "evals/*", "rollouts/*", "tokens/*", "model/*.safetensors"
    )  # fmt: skip
    names = [p for stage in ("warmup", "rl") for pattern in patterns for p in sorted((run / stage).glob(pattern))]
    return {str(p.relative_to(run)): p.read_bytes() for p in names}


if __name__ == "__main__":
    main()
