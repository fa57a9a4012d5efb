"""Closed streams, terminals of few characters, disks that refuse, SIGTERM before anything runs."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hone.base import terminal

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
MAIN = "import sys; import hone.cli.app as cli; sys.argv = ['hone', '{verb}']; cli.app = lambda **_: {what}; cli.main()"


def shell(command: str, **more: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["bash", "-c", command], capture_output=True, timeout=60, env={**ENVIRONMENT, **more})


def python(verb: str, what: str) -> str:
    return f'{shlex.quote(sys.executable)} -c "{MAIN.format(verb=verb, what=what)}"'


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", "> /dev/full", "2> /dev/full"])
def test_a_run_whose_streams_are_closed_ends_well(closed: str) -> None:
    say = "[print('x' * 99, file=f, flush=True) for f in (sys.stdout, sys.stderr) for _ in range(2000)]"
    assert shell(f"{python('train', say)} {closed}").returncode == 0


def test_a_run_whose_reader_has_gone_ends_well() -> None:
    say = "[print('x' * 99, flush=True) for _ in range(5000)]"
    assert shell(f"set -o pipefail; {python('train', say)} | head -1").returncode == 0
    assert shell(f"set -o pipefail; {python('train', say.replace(chr(41) + ' for', ', file=sys.stderr) for'))} 2>&1 "
                 "| head -1").returncode == 0  # fmt: skip


def test_a_file_does_not_get_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    what = f"(open('{tmp_path}/row', 'w'), print('said', flush=True))"
    assert shell(f"{python('train', what)} >&-").returncode == 0
    assert (tmp_path / "row").read_text() == ""


def test_what_a_terminal_cannot_show_is_escaped() -> None:
    done = shell(python("data", "print(chr(233), chr(8712), chr(0xd800))"), PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 0
    assert done.stdout == b"\\xe9 \\u2208 \\ud800\n"


@pytest.mark.parametrize("number", ["ENOSPC", "EFBIG", "EROFS", "ENOTDIR", "EMFILE", "EDQUOT", "EACCES"])
def test_a_disk_that_refuses_is_said_in_words(number: str) -> None:
    done = shell(
        python("train", f"open('/').read() if 0 else exec('raise OSError({getattr(errno, number)}, chr(120))')")
    )
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert b"--resume" in done.stderr


def test_the_remedy_fits_the_verb() -> None:
    error = PermissionError(errno.EACCES, "Permission denied", "runs")
    for verb, remedy in [("train", "runs=PATH; with --resume"), ("report", "--out"), ("init", "NAME")]:
        said = terminal.disk_problem(error, verb)
        assert said is not None
        assert remedy in said
        assert ("--resume" in said) == (verb == "train")


def test_an_error_of_safetensors_is_one_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Exception, match="os error") as caught:
        save_file({"a": np.zeros(9)}, tmp_path / "file" / "x.safetensors")
    assert not isinstance(caught.value, OSError)
    problem = terminal.disk_problem(caught.value)
    assert problem is not None
    assert problem.startswith("a file is where a folder is needed")
    assert terminal.disk_problem(ValueError("os error 28")) is None
    assert terminal.disk_problem(FileNotFoundError(errno.ENOENT, "x")) is None


def test_sigterm_before_anything_runs_is_75(tmp_path: Path) -> None:
    # In small pieces: Python does not wake from a sleep for a signal that came just before the sleep began.
    sleep = "[__import__('time').sleep(0.1) for _ in range(600)]"
    code = MAIN.format(verb="train", what=f"(print('here', flush=True), {sleep})")
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=ENVIRONMENT)  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=50)
    assert process.returncode == 75
    assert time.monotonic() - begun < 20
    assert b"SIGTERM: stopped" in said


INTERRUPTED = """
import os, signal, sys

class Finder:  # presses Ctrl-C while a module is imported, as part of an import that swallows exceptions
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            try: os.kill(os.getpid(), signal.SIGINT)
            except BaseException: pass

sys.meta_path.insert(0, Finder())
signal.signal(signal.SIGINT, signal.{handler})  # a job in the background begins with SIG_IGN
from hone.__main__ import main
sys.argv = ["hone", "config", "presets"]
main()
"""


@pytest.mark.parametrize("module", ["typer", "hone.cli.app", "hone.recipe.recipe"])  # the last: in the verb
def test_ctrl_c_while_hone_is_imported_is_130_and_one_line(module: str) -> None:
    code = INTERRUPTED.format(module=module, handler="default_int_handler")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "Ctrl-C: stopped while hone was being loaded\n"


def test_where_ctrl_c_is_ignored_it_stays_ignored() -> None:
    code = INTERRUPTED.format(module="typer", handler="SIG_IGN")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_before_a_verb_runs_is_130_without_a_traceback(times: int) -> None:
    code = (
        "import os, signal, sys, hone.cli.app as cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background ignores it
        "def app(**_): os.kill(os.getpid(), signal.SIGINT)\n"
        "cli.app = app\n"
        f"try: cli.main()\nfinally: [os.kill(os.getpid(), signal.SIGINT) for _ in range({times - 1})]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == ((130, -signal.SIGINT)[times - 1], "")
