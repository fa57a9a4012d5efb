"""Train on a disk that is full at first, for many amounts of free space, and resume when space has been freed.

    mount -t tmpfs -o size=48m none /mnt/small
    .venv/bin/python benchmarks/full_disk.py /mnt/small --sizes 24      # prints JSON

The amounts are between nothing and what a whole run takes. A start on a full disk must end with exit code 2 and say
that the disk is full, without a traceback; the resumed run must equal one that had space all along, bit for bit. The
whole disk is filled, so it must be a small one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from attempts import Attempt, bits, filled
from chaos import BOUND, SMALL_DISK

ALONE = {"replicate": 1, "shard": 1, "tensor": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("disk", type=Path, help="a folder on a disk of at most 1 GiB")
    parser.add_argument("--sizes", type=int, default=24, help="amounts of free space")
    parser.add_argument("--steps", type=int, default=4, help="of reinforcement learning")
    given = parser.parse_args()
    if shutil.disk_usage(given.disk).total > SMALL_DISK:
        sys.exit(f"{given.disk} is on a disk of more than 1 GiB, which would be filled")
    with tempfile.TemporaryDirectory() as home:
        result = sweep(given.disk, Path(home), given.sizes, given.steps)
    print(json.dumps({"command": " ".join(["benchmarks/full_disk.py", *sys.argv[1:]]), **result}, indent=1))


def sweep(disk: Path, home: Path, sizes: int, steps: int) -> dict[str, Any]:
    """Counts of exit codes on the full disk. Raises AssertionError for a traceback, or a run that is not the same."""
    import hone.stages.pipeline  # noqa: F401  # here, so that the processes need not

    before = shutil.disk_usage(disk).used
    whole = begin(disk, home, "whole", steps)
    assert whole.ended(BOUND) == {0}, f"the run with enough space failed: {whole.text()}"
    needed = shutil.disk_usage(disk).used - before
    expected = bits(disk / "whole")
    shutil.rmtree(disk / "whole")
    codes: Counter[int] = Counter()
    for i in range(sizes):
        free, name = needed * i // sizes, f"run{i}"
        with filled(disk, free):
            first = begin(disk, home, name, steps)
            (code,) = first.ended(BOUND)
        codes[code] += 1
        said = first.text()
        assert (code, "the disk is full" in said) in ((2, True), (0, False)), f"{free} bytes free: {code}: {said}"
        again = begin(disk, home, name, steps)
        assert again.ended(BOUND) == {0}, f"{free} bytes free, resumed: {again.text()}"
        now = bits(disk / name)
        wrong = sorted(k for k in expected.keys() | now.keys() if expected.get(k) != now.get(k))
        assert not wrong, f"{free} bytes free: other than the run with enough space: {', '.join(wrong)}"
        shutil.rmtree(disk / name)
    return {"bytes_of_a_run": needed, "sizes": sizes, "exit_codes": dict(codes), "resumed_the_same": sizes}


def begin(disk: Path, home: Path, name: str, steps: int) -> Attempt:
    attempt = Attempt(disk, home / f"{name}.yaml", steps, ALONE)
    attempt.start(fresh=False)
    return attempt


if __name__ == "__main__":
    main()
