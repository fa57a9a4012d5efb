"""Interrupt a run again and again: in the end it must equal an uninterrupted run, bit for bit.

    .venv/bin/python benchmarks/chaos.py                               # 60; writes benchmarks/results/chaos.json
    .venv/bin/python benchmarks/chaos.py --times 30 --shard 2 --out -  # two processes, half the weights in each

`hone train --resume` trains a tiny model in two stages and is interrupted until it is through; then a new run begins.
The interruptions come in turn, each at a random moment:

    kill                SIGKILL at any time; of several processes, to one of them or to all
    kill sampling       while answers are sampled
    kill writing        while a checkpoint is written
    SIGTERM, SIGINT     saves and stops; `SIGINT twice`: stops at once
    suspended           SIGSTOP, a second start, which must be refused, SIGCONT, and a kill
    second start        refused while the first runs on; then a kill
    damage              a kill; then a byte flipped, a file cut in half or removed: resuming must lead to the same
                        results, or be refused with a message that names the file
    full disk           the disk fills up, and space is freed again; only with --folder on a disk of at most 1 GiB

Exit codes must be those of docs/endurance.md, and no process may print a traceback. Several processes are only killed.
Most processes are forked from one that has imported everything, and note in shared memory where they are, so that each
kill is counted where it struck. One in ten is a fresh interpreter. Unix only.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from attempts import PLACES, Attempt, bits, filled

KILLS = ("kill", "kill sampling", "kill writing")
KINDS = (*KILLS, "damage", "suspended", "SIGTERM", "SIGINT", "second start", "SIGINT twice", "full disk")

#: Exit codes of a process that was sent the signal of a kind. 0: it had just ended.
CODES = {"SIGTERM": {75, 0}, "SIGINT": {130, 0}, "SIGINT twice": {130, -signal.SIGINT, 0}, "full disk": {2, 0}}

#: Seconds after which a process must have ended: of a whole run, and of the others when one was killed.
BOUND = 240.0
#: A disk up to this size is filled.
SMALL_DISK = 1 << 30
#: One start in so many is a fresh interpreter.
FRESH = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=60, help="interruptions")
    parser.add_argument("--steps", type=int, default=6, help="of reinforcement learning")
    parser.add_argument("--seed", type=int, default=0)
    for dim in ("replicate", "shard", "tensor"):
        parser.add_argument(f"--{dim}", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="for the runs; default: a temporary one")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "chaos.json"), help="- for none")
    given = parser.parse_args()
    layout = {"replicate": given.replicate, "shard": given.shard, "tensor": given.tensor}
    with tempfile.TemporaryDirectory() as home:
        runs = given.folder or Path(home) / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        result = Chaos(runs, Path(home), given.steps, layout).interrupt(given.times, given.seed)
    text = json.dumps({"command": " ".join(["benchmarks/chaos.py", *sys.argv[1:]]), **result}, indent=1)
    if given.out != "-":
        Path(given.out).write_text(text + "\n")
    print(text)


class Chaos:
    """Interrupts runs, and compares them with one that is not interrupted."""

    def __init__(self, runs: Path, home: Path, steps: int, layout: dict[str, int]) -> None:
        """`home`: for recipes and logs, on another disk than `runs` if that is filled."""
        self.runs, self.home, self.steps, self.layout = runs, home, steps, layout
        self.several = layout["replicate"] * layout["shard"] * layout["tensor"] > 1
        self.counts: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self.writes = self.refused = self.starts = 0
        self.slowest = 0.0  # seconds from an interruption until all processes had ended
        self.luck = random.Random()
        self.expected: dict[str, bytes] = {}
        self.seconds = 0.0  # of an uninterrupted run
        self.latest = 0.0  # seconds from a start to an interruption, at most

    def interrupt(self, times: int, seed: int) -> dict[str, Any]:
        """Returns counts. Raises AssertionError for a run that is not the same, hangs, or ends in another way."""
        import hone.stages.pipeline  # noqa: F401  # here, so that the processes need not
        from hone.stages import audit

        self.luck = random.Random(seed)
        begun = time.monotonic()
        whole = self.start("whole", fresh=False)
        assert whole.ended(BOUND) == {0}, f"the uninterrupted run failed: {whole.text()}"
        self.seconds, self.expected = time.monotonic() - begun, bits(self.runs / "whole")
        shutil.copytree(self.runs / "whole" / "base", self.home / "base")
        self.latest = self.seconds
        kinds = KILLS if self.several else KINDS if shutil.disk_usage(self.runs).total <= SMALL_DISK else KINDS[:-1]
        finished = 0
        while sum(self.counts.values()) < times or not finished:
            name = f"run{finished}"
            shutil.copytree(self.home / "base", self.runs / name / "base")
            while sum(self.counts.values()) < times:
                if self.strike(name, kinds[sum(self.counts.values()) % len(kinds)]):
                    break
            last = self.start(name)
            assert last.ended(BOUND) == {0}, f"{name} failed: {last.text()}"
            self.compare(name)
            lines, faults = audit.check(self.runs / name)
            assert not faults, "\n".join(lines)
            shutil.rmtree(self.runs / name)
            finished += 1
        return {
            "interruptions": sum(self.counts.values()),
            "by_kind": dict(self.counts),
            "runs_finished_the_same": finished,
            "damage_refused": self.refused,
            "kills_by_place": {place: self.places[place] for place in PLACES if self.places[place]},
            "kills_while_a_checkpoint_was_written": self.writes,
            "fresh_interpreters": 0 if self.several else self.starts // FRESH,
            "layout": self.layout,
            "longest_seconds_until_all_had_ended": round(self.slowest, 1),
            "seconds_of_a_whole_run": round(self.seconds, 1),
            "minutes": round((time.monotonic() - begun) / 60, 1),
        }

    def start(self, name: str, fresh: bool | None = None) -> Attempt:
        self.starts += 1
        attempt = Attempt(self.runs, self.home / f"{name}.yaml", self.steps, self.layout)
        attempt.start(self.starts % FRESH == 0 and not self.several if fresh is None else fresh)
        return attempt

    def compare(self, name: str) -> None:
        now = bits(self.runs / name)
        wrong = sorted(k for k in self.expected.keys() | now.keys() if self.expected.get(k) != now.get(k))
        assert not wrong, f"{name}: other than the uninterrupted run: {', '.join(wrong)}"

    def strike(self, name: str, kind: str) -> bool:
        """Start the run, or go on with it, and interrupt it; returns whether it had ended before."""
        attempt = self.start(name)
        victim = self.luck.randrange(len(attempt.slots))
        if not attempt.wait(self.moment(kind), victim, kind):
            self.latest *= 0.9  # the uninterrupted run was slower, on a busier machine
            assert attempt.ended(BOUND) == {0}, f"{name}: {attempt.text()}"
            return True
        place, writing = PLACES[attempt.slots[victim][0]], bool(attempt.slots[victim][1])
        at = time.monotonic()
        codes = self.act(attempt, name, kind, victim)
        self.slowest = max(self.slowest, time.monotonic() - at)
        self.counts[kind] += 1
        if kind in KILLS:
            self.places[place] += 1
            self.writes += writing
        else:
            assert codes <= CODES.get(kind, {-signal.SIGKILL, 0}), f"{kind}, {place}: {codes}: {attempt.text()}"
        if kind == "damage":
            self.damage(name)
        return False

    def moment(self, kind: str) -> float:
        """Seconds from the start to the interruption, at least."""
        return self.luck.uniform(0.0, self.latest * (0.6 if kind in KILLS[1:] else 1.0))

    def act(self, attempt: Attempt, name: str, kind: str, victim: int) -> set[int]:
        """Interrupt; returns the exit codes."""
        if kind in ("SIGTERM", "SIGINT", "SIGINT twice"):
            attempt.send(signal.SIGTERM if kind == "SIGTERM" else signal.SIGINT)
            if kind == "SIGINT twice":
                time.sleep(self.luck.uniform(0.0, 0.3))
                attempt.send(signal.SIGINT)
        elif kind == "full disk":
            with filled(self.runs):
                return attempt.ended(BOUND)
        else:
            if kind in ("suspended", "second start"):
                self.second_start(attempt, name, suspend=kind == "suspended")
                time.sleep(self.luck.uniform(0.0, 0.3))
            attempt.send(signal.SIGKILL, None if self.luck.random() < 0.5 else victim)
        return attempt.ended(BOUND)

    def second_start(self, attempt: Attempt, name: str, suspend: bool) -> None:
        """Start the same run again beside one that runs, or is suspended, and holds the lock."""
        while attempt.running() and not attempt.holds_lock():
            time.sleep(0.002)
        if suspend:
            attempt.send(signal.SIGSTOP)
        second = Attempt(self.runs, self.home / f"{name}.yaml", self.steps, self.layout, log="second")
        second.start(fresh=False)
        codes = second.ended(BOUND)
        if suspend:
            attempt.send(signal.SIGCONT)
        refused = codes == {2} and "is writing this run folder" in second.text()
        ended = codes == {0} and "is finished" in second.text()  # the first had just released the lock
        assert refused or ended, f"a second start: {codes}: {second.text()}"

    def damage(self, name: str) -> None:
        """Damage one file, and resume to the end; then restore the run as it was."""
        run, copy = self.runs / name, self.home / "copy"
        files = sorted(p for p in run.rglob("*") if p.is_file() and p.stat().st_size)
        if not files:
            return
        shutil.copytree(run, copy, symlinks=True)
        path, how = self.luck.choice(files), self.luck.choice(("flipped", "flipped", "cut", "removed"))
        break_file(path, how, self.luck)
        attempt = self.start(name)
        codes, text = attempt.ended(BOUND), attempt.text()
        what = f"{path.relative_to(run)} {how}"
        assert codes in ({0}, {2}), f"{what}: {codes}: {text}"
        if codes == {2}:
            assert path.name in text or path.parent.name in text, f"{what}: refused without a name: {text}"
            self.refused += 1
        elif path.name not in text:
            self.compare(name)
        shutil.rmtree(run)
        shutil.move(copy, run)


def break_file(path: Path, how: str, luck: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if how == "removed":
        path.unlink()
    elif how == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[luck.randrange(len(data))] ^= 1 << luck.randrange(8)
        path.write_bytes(data)


if __name__ == "__main__":
    main()
