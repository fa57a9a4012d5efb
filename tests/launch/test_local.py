"""Workers of this machine, as real processes: what they are told, how they end, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

LAUNCHER = """
import sys
from pathlib import Path
from hone.launch import supervise
from hone.recipe.sections.launch import LaunchConfig
from hone.launch.job import Job
from hone.launch.local import LocalWorkers
from hone.grade.child import adopt_orphans
supervise.GRACE = 0.5
folder, restarts, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
adopt_orphans()
job = Job(folder, (), size, 1, LaunchConfig(restarts=restarts))
sys.exit(supervise.supervise(job, lambda job: LocalWorkers(job, [sys.executable, str(folder / "worker.py")])))
"""

WORKER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from hone.launch.job import follow_parent
follow_parent()
here, rank = Path(__file__).parent, os.environ["RANK"]
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
def note(**more):
    aside = here / f"{rank}.aside"
    aside.write_text(json.dumps({"pid": os.getpid(), **{name: os.environ[name] for name in names}, **more}))
    aside.rename(here / f"{rank}.json")
"""


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    def launch(body: str, restarts: int = 0, size: int = 2, **environment: str) -> subprocess.Popen[str]:
        (tmp_path / "logs").mkdir()
        (tmp_path / "worker.py").write_text(WORKER + body)
        command = [sys.executable, "-c", LAUNCHER, str(tmp_path), str(restarts), str(size)]
        kept = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        root = str(Path(__file__).resolve().parents[2])
        env = {**kept, "PYTHONPATH": root, **environment}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)

    return launch


def noted(folder: Path, size: int = 2) -> list[dict]:
    """What the workers have noted, when all have."""
    paths = [folder / f"{rank}.json" for rank in range(size)]
    until(lambda: all(path.exists() for path in paths))
    return [json.loads(path.read_text()) for path in paths]


def until(true: Callable[[], bool], seconds: float = 200.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_each_worker_is_told_which_one_it_is(launch: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = launch("note(); print('said by', rank); print('err', rank, file=sys.stderr)", size=3)
    out, err = process.communicate(timeout=200)
    assert (process.returncode, out, err) == (0, "said by 0\n", "err 0\n")  # the others are not heard
    assert sorted((tmp_path / "logs" / "rank_2.log").read_text().split("\n")) == ["", "err 2", "said by 2"]
    found = noted(tmp_path, 3)
    ports = {worker["MASTER_PORT"] for worker in found}
    assert len(ports) == 1
    assert 1024 < int(ports.pop()) < 65536
    assert [worker["RANK"] for worker in found] == [worker["LOCAL_RANK"] for worker in found] == ["0", "1", "2"]
    assert {worker["WORLD_SIZE"] for worker in found} == {worker["LOCAL_WORLD_SIZE"] for worker in found} == {"3"}
    assert {worker["MASTER_ADDR"] for worker in found} == {"127.0.0.1"}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert {worker["OMP_NUM_THREADS"] for worker in found} == {str(max(1, (cores or 1) // 3))}


def test_the_users_number_of_threads_holds(launch: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    launch("note()", OMP_NUM_THREADS="7").communicate(timeout=200)
    assert [worker["OMP_NUM_THREADS"] for worker in noted(tmp_path)] == ["7", "7"]


def test_the_first_failure_stops_the_others_and_is_shown(
    launch: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = launch("note()\nif rank == '1': raise ValueError('of rank 1')\ntime.sleep(600)")
    _, err = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "] ValueError: of rank 1\n" in err
    assert "] Traceback (most recent call last):\n" in err
    assert gone(noted(tmp_path)[0]["pid"])


def test_a_lost_worker_is_replaced_with_all_the_others(
    launch: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    body = """
if (here / "second").exists():
    note(); sys.exit(0)
note()
while rank == "0" and not (here / "1.json").exists(): time.sleep(0.01)
if rank == "1":
    (here / "second").touch()
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
    process = launch(body, restarts=1)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0
    assert "was killed by SIGKILL; the others were stopped; restart 1 of 1 from the last checkpoint" in err
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["rank"], row["code"]) for row in rows] == [("worker_lost", 1, 137)]


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_is_handed_on_once_and_the_workers_may_save(
    launch: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    body = f"""
came = []
signal.signal({int(number)}, lambda *_: came.append(1))
note()
while not came: time.sleep(0.01)
time.sleep(1.5 if rank == "0" else 0.1)  # longer than a failure is waited for
(here / (rank + ".saved")).write_text(str(len(came)))
sys.exit({code})
"""
    process = launch(body)
    noted(tmp_path)
    process.send_signal(number)
    process.communicate(timeout=200)
    assert process.returncode == code
    assert [(tmp_path / f"{rank}.saved").read_text() for rank in (0, 1)] == ["1", "1"]
    assert not (tmp_path / "events.jsonl").exists()


def test_a_killed_launcher_leaves_no_worker(launch: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = launch("note()\ntime.sleep(600)")
    pids = [worker["pid"] for worker in noted(tmp_path)]
    process.kill()
    process.wait(timeout=200)
    until(lambda: all(map(gone, pids)))


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are left to the launcher on Linux only")
def test_what_a_killed_worker_had_started_is_stopped_too(
    launch: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Such as a generation server, in a session of its own."""
    body = """
server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
note(server=server.pid)
if rank == "0": os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
    process = launch(body)
    process.communicate(timeout=200)
    assert process.returncode == 137
    assert all(gone(worker["server"]) for worker in noted(tmp_path))


def test_a_worker_hears_signals_that_its_starter_had_blocked() -> None:
    """As Ray's workers do."""
    worker = """
import signal
from hone.launch.job import follow_parent
follow_parent()
print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""
    starter = f"""
import os, signal, subprocess, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGINT}})
subprocess.run([sys.executable, "-c", {worker!r}], env={{**os.environ, "HONE_PARENT": str(os.getpid())}}, check=True)
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run([sys.executable, "-c", starter], env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
