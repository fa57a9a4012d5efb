"""A disk that is really full: a small one is mounted and filled. Needs Linux and the right to mount."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A disk of 48 MiB: in memory, or a file with a file system of its own, which allocates late."""
    place = tmp_path / "disk"
    place.mkdir()
    how = ["-t", "tmpfs", "-o", "size=48m", "tmpfs"]
    if request.param == "ext4":
        image = tmp_path / "image"
        image.write_bytes(b"")
        os.truncate(image, 48 << 20)
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("there is no mkfs.ext4")
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
        how = ["-o", "loop", str(image)]
    if shutil.which("mount") is None or sys.platform != "linux":
        pytest.skip("only Linux mounts a disk like this")
    mounted = subprocess.run(["mount", *how, str(place)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no right to mount: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_full_disk_is_said_and_a_resumed_run_is_the_same(disk: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "full_disk.py"), str(disk)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert result["resumed_the_same"] == 24
    assert result["exit_codes"]["2"] >= 17
