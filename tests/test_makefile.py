"""What `make` says on a machine where it cannot set up, and that it then changes nothing."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("sh", "cat", "awk", "df", "cksum", "cmp", "grep", "tail", "rm", "echo", "mkdir", "make")

pytestmark = pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason="needs make and the usual tools")

TOO_OLD = '#!/bin/sh\ncase "$*" in *"%d.%d"*) echo 3.8;; *) exit 1;; esac\n'
WITHOUT_VENV = '#!/bin/sh\ncase "$*" in *"%d.%d"*) echo 3.12;; *ensurepip*) exit 1;; esac\n'


@pytest.fixture
def make(tmp_path):
    """Runs make in a folder with a blank in its name, where the only Python is the given script."""
    folder, tools = tmp_path / "a b", tmp_path / "bin"
    folder.mkdir()
    tools.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    for tool in TOOLS:
        (tools / tool).symlink_to(shutil.which(tool))

    def make(python: str | None, *arguments: str) -> tuple[int, str]:
        if python:
            (tools / "python3").write_text(python)
            (tools / "python3").chmod(0o755)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "PYTHON", "TORCH"))}
        done = subprocess.run(
            ["make", "-C", str(folder), *arguments],
            env={**environment, "PATH": str(tools)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert not (folder / ".venv").exists()
        return done.returncode, done.stderr

    return make


@pytest.mark.parametrize(
    "python, message",
    [
        (None, "make: no Python found. Install 3.10 or newer"),
        (TOO_OLD, "make: hone needs Python 3.10 or newer; the newest found is python3 (3.8)."),
        (WITHOUT_VENV, "without its venv module. On Debian or Ubuntu: sudo apt install python3.12-venv"),
    ],
)
@pytest.mark.parametrize("target", ["demo", "test"])
def test_what_to_do_about_python(make, target, python, message):
    code, said = make(python, target, "NEED_GB=0")
    assert code == 2
    assert message in said


def test_what_to_do_about_the_disk(make):
    code, said = make(None, "demo", "NEED_GB=999999")
    assert code == 2
    assert "make: the environment needs about 999999 GB of free disk here" in said


def test_gpu_takes_the_python_that_is_there_and_the_wheels_beside_it(make):
    code, said = make('#!/bin/sh\necho "[$PYTHONPATH] $*" >&2\n', "gpu", "ARGS=--only ceilings")
    assert code == 0
    install, run = said.splitlines()
    assert install == "[] benchmarks/gpu_install.py build/gpu-wheels build/gpu-packages"
    assert run.startswith("[/")
    assert run.endswith("/a b/build/gpu-packages] benchmarks/gpu.py --only ceilings")


def test_help_starts_nothing(make):
    assert make(None) == (0, "")
