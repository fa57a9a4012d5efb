"""Starts of a tiny run in processes of their own, to be interrupted: see chaos.py and full_disk.py."""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

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

PLACES = ("not begun", "starting", "between", "sampling", "updating", "copying a checkpoint")


class Attempt:
    """The processes of one start of a run."""

    def __init__(self, runs: Path, recipe: Path, steps: int, layout: dict[str, int], log: str = "log") -> None:
        self.size = layout["replicate"] * layout["shard"] * layout["tensor"]
        self.log, self._recipe = recipe.with_suffix(f".{log}"), recipe
        self._lock = runs / f".{recipe.stem}.lock"
        recipe.write_text(RECIPE.format(name=recipe.stem, runs=runs, steps=steps, **layout))
        self.log.write_bytes(b"")
        self._shared = recipe.with_suffix(f".{log}.shared")
        self._shared.unlink(missing_ok=True)  # others may still have it mapped
        self._shared.write_bytes(bytes(mmap.ALLOCATIONGRANULARITY * self.size))
        self.slots = [shared(self._shared, rank) for rank in range(self.size)]
        self._pids: dict[int, int] = {}  # rank -> pid of those that run
        self._codes: set[int] = set()  # of those that have ended

    def start(self, fresh: bool) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        several = {"WORLD_SIZE": self.size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if self.size > 1 else {}
        for rank in range(self.size):
            where = {**several, "RANK": rank, "LOCAL_RANK": rank} if several else {}
            environment = {key: str(value) for key, value in where.items()}
            arguments = [str(self._recipe), str(self.log), str(self._shared), str(rank)]
            if fresh:
                command = [sys.executable, __file__, *arguments]
                self._pids[rank] = os.posix_spawn(sys.executable, command, {**os.environ, **environment})
            elif pid := os.fork():
                self._pids[rank] = pid
            else:
                os.environ.update(environment)
                train(arguments, True)

    def wait(self, seconds: float, victim: int, kind: str) -> bool:
        """Wait for the moment to strike; returns whether all processes run still.

        A victim that is to be killed at a place is suspended there: it would leave before a busy machine kills it.
        """
        slot = self.slots[victim]
        while slot[0] == 0 and self.running():
            time.sleep(0.001)
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.running():
            time.sleep(0.001)
        wanted: dict[str, Callable[[], bool]] = {
            "kill sampling": lambda: PLACES[slot[0]] == "sampling",
            "kill writing": lambda: bool(slot[1]),
        }
        while kind in wanted and self.running():
            while self.running() and not wanted[kind]():
                time.sleep(0.0002)
            # A tiny checkpoint is written in a moment.
            time.sleep(random.uniform(0.0, 0.02 if kind == "kill sampling" else 0.005))
            self.send(signal.SIGSTOP, victim)
            time.sleep(0.001)
            if wanted[kind]():
                break
            self.send(signal.SIGCONT, victim)
        return self.running()

    def running(self) -> bool:
        """Whether none has ended yet."""
        for rank, pid in list(self._pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self._pids[rank]
                self._codes.add(os.waitstatus_to_exitcode(status))
        return len(self._pids) == self.size

    def holds_lock(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return bool(json.loads(self._lock.read_text())["pid"] == self._pids.get(0))
        return False

    def send(self, number: int, rank: int | None = None) -> None:
        """To one process, or to all. One that has ended is not told."""
        self.running()
        for one, pid in self._pids.items():
            if rank in (None, one):
                os.kill(pid, number)

    def ended(self, bound: float) -> set[int]:
        """Exit codes. Raises AssertionError for a traceback, and, after a kill, if one has not ended in time."""
        end = time.monotonic() + bound
        while self._pids and time.monotonic() < end:
            self.running()
            time.sleep(0.002)
        hung = dict(self._pids)
        for pid in hung.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        assert not hung, f"processes {sorted(hung)} had not ended after {bound:.0f} s: {self.text()}"
        assert self.size > 1 or "Traceback (most recent call last)" not in self.text(), self.text()
        return self._codes

    def text(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]


# --- in the processes of a run ----------------------------------------------------------------------------------------


def train(arguments: list[str], observed: bool) -> None:
    """`hone train --resume`, as the command line runs it, and leave this process."""
    recipe, log, slots, rank = arguments
    slot = shared(Path(slots), int(rank))
    handle = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    code = 1
    try:
        from hone.cli.app import main

        if observed:
            observe(slot)
        sys.argv = ["hone", "train", recipe, "--resume"]
        slot[0] = PLACES.index("starting")
        main()
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


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


# --- files ------------------------------------------------------------------------------------------------------------


def shared(path: Path, rank: int) -> mmap.mmap:
    """Two bytes that a process writes and the benchmark reads: its place, and whether a checkpoint is being written."""
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 2, offset=rank * mmap.ALLOCATIONGRANULARITY)


@contextlib.contextmanager
def filled(folder: Path, free: int = 0) -> Iterator[None]:
    """Fill the disk of `folder`, all but so many bytes, and free it again."""
    path = folder / ".filler"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while os.write(handle, bytes(1 << 20)):
            pass
    with contextlib.suppress(OSError):
        while os.write(handle, bytes(512)):
            pass
    with contextlib.suppress(OSError):
        os.fsync(handle)
    os.ftruncate(handle, max(0, os.fstat(handle).st_size - free))
    os.close(handle)
    try:
        yield
    finally:
        path.unlink()


def bits(run: Path) -> dict[str, bytes]:
    """Everything that must not depend on where a run was interrupted."""
    patterns = (
        "metrics.jsonl", "ledger.jsonl", "evals.jsonl", "evals/*", "rollouts/*", "tokens/*", "model/*.safetensors"
    )  # fmt: skip
    names = [p for stage in ("warmup", "rl") for pattern in patterns for p in sorted((run / stage).glob(pattern))]
    return {str(p.relative_to(run)): p.read_bytes() for p in names}


if __name__ == "__main__":
    train(sys.argv[1:], observed=False)
