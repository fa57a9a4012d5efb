"""The lock of a run folder: who may write, what a dead, a suspended and a distant owner mean."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hone.base import owner
from hone.runs import lock
from hone.runs.listing import state
from hone.runs.lock import Held, LockLost
from hone.runs.writer import RunWriter

HOLDER = """
import sys, time
from pathlib import Path
from hone.runs import lock
with lock.held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""

#: Many processes that all want the lock at the same moment; each that has it notes when it had it, and tries again.
CONTENDER = """
import sys, time
from pathlib import Path
from hone.runs import lock
folder, notes = Path(sys.argv[1]), Path(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
end = time.monotonic() + 3
while time.monotonic() < end:
    try:
        with lock.held(folder):
            begin = time.monotonic()
            time.sleep(0.002)
            done = time.monotonic()
        with notes.open("a") as file:
            file.write(f"{begin} {done}\\n")
    except lock.Held:
        pass
"""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    begun: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        begun.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert begun[-1].stdout is not None
        assert begun[-1].stdout.readline().strip() in ("held", "ready")
        return begun[-1]

    yield start
    for process in begun:
        process.send_signal(signal.SIGKILL)
        process.communicate()


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT", 0.1)
    monkeypatch.setattr(lock, "STALE", 1.0)
    monkeypatch.setattr(lock, "SETTLE", 0.1)


def elsewhere(folder: Path) -> owner.Owner:
    """A lock of another machine, not renewed by anything."""
    far = replace(owner.myself(), host="node7", boot="another", pid=77, command="hone train far")
    lock.place(folder).write_bytes(owner.as_bytes(far))
    return far


# --- one machine ------------------------------------------------------------------------------------------------------


def test_a_second_start_is_told_who_has_the_folder(start: Any, tmp_path: Path) -> None:
    process = start(HOLDER, tmp_path / "mine")
    with (
        pytest.raises(Held, match=rf"mine: .*process {process.pid} on .*name=") as raised,
        lock.held(tmp_path / "mine"),
    ):
        pass
    assert raised.value.exit_code == 2
    with lock.held(tmp_path / "other"):  # another run of the same folder of runs
        pass
    process.communicate("\n", timeout=30)
    assert os.listdir(tmp_path) == []  # given back, and nothing left


def test_by_another_way_it_is_the_same_folder(start: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    start(HOLDER, tmp_path / "mine")
    with pytest.raises(Held), lock.held(tmp_path / "link"):
        pass


def test_a_killed_owner_is_followed_at_once(start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    process = start(HOLDER, folder)
    process.kill()
    process.wait()
    begin = time.monotonic()
    with lock.held(folder):
        assert time.monotonic() - begin < 2
        RunWriter.open(folder, {}, 1)
    assert f"process {process.pid}" in capsys.readouterr().err
    (event,) = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert event["kind"] == "lock_taken_over"
    assert f"process {process.pid}" in event["message"]


def test_a_killed_owner_that_nobody_has_reaped_is_dead(start: Any, tmp_path: Path) -> None:
    process = start(HOLDER, tmp_path / "mine")
    process.kill()  # and not waited for: a zombie
    while owner.started(process.pid) is not None:
        time.sleep(0.01)
    with lock.held(tmp_path / "mine"):
        assert json.loads(lock.place(tmp_path / "mine").read_bytes())["pid"] == os.getpid()


def test_a_suspended_owner_is_alive(start: Any, tmp_path: Path, fast: None) -> None:
    process = start(HOLDER, tmp_path / "mine")
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)  # longer than a lease
    with pytest.raises(Held), lock.held(tmp_path / "mine"):
        pass


def test_a_number_given_to_another_process_is_not_the_owner(start: Any, tmp_path: Path) -> None:
    process = start(HOLDER, tmp_path / "other")
    one = replace(owner.myself(), pid=process.pid, process="1")  # it started at another time
    lock.place(tmp_path / "mine").write_bytes(owner.as_bytes(one))
    with lock.held(tmp_path / "mine"):
        assert json.loads(lock.place(tmp_path / "mine").read_bytes())["pid"] == os.getpid()


def test_of_many_one_has_it_at_a_time(start: Any, tmp_path: Path) -> None:
    """With a dead owner's lock in the beginning, which all of them want to take over."""
    folder, notes = tmp_path / "runs" / "mine", tmp_path / "notes"
    dead = start(HOLDER, folder)
    dead.kill()
    dead.wait()
    for process in (all_ := [start(CONTENDER, folder, notes) for _ in range(4)]):
        process.stdin.write("\n")
        process.stdin.flush()
    for process in all_:
        assert process.wait(60) == 0
    times = sorted(tuple(map(float, line.split())) for line in notes.read_text().splitlines())
    assert len(times) > 10
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(times))
    assert os.listdir(tmp_path / "runs") == []


# --- several machines -------------------------------------------------------------------------------------------------


def test_a_lease_that_is_renewed_is_held(tmp_path: Path, fast: None) -> None:
    far = elsewhere(tmp_path / "mine")
    end = threading.Event()

    def renew() -> None:
        beat = 0
        while not end.wait(0.1):
            beat += 1
            lock.place(tmp_path / "mine").write_bytes(owner.as_bytes(replace(far, beat=beat)))

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(Held, match="process 77 on node7"), lock.held(tmp_path / "mine"):
            pass
    finally:
        end.set()
        thread.join()


def test_an_abandoned_lease_is_taken_over_by_the_watchers_own_clock(tmp_path: Path, fast: None) -> None:
    far = elsewhere(tmp_path / "mine")
    os.utime(lock.place(tmp_path / "mine"), (4e9, 4e9))  # its clock is decades ahead
    begin = time.monotonic()
    with lock.held(tmp_path / "mine") as mine:
        assert 1.0 <= time.monotonic() - begin < 5.0
        assert mine.before == far


def test_a_lock_that_cannot_be_read_is_watched_too(tmp_path: Path, fast: None) -> None:
    lock.place(tmp_path / "mine").write_text("")  # its writer was killed on a file system without links
    begin = time.monotonic()
    with lock.held(tmp_path / "mine"):
        assert time.monotonic() - begin >= 1.0


def test_an_owner_writes_that_it_is_alive(tmp_path: Path, fast: None) -> None:
    with lock.held(tmp_path / "mine"):
        before = lock.place(tmp_path / "mine").read_bytes()
        time.sleep(0.5)
        after = lock.place(tmp_path / "mine").read_bytes()
    assert before != after
    assert len(before) == len(after)


@pytest.mark.parametrize("how", ["taken over", "removed"])
def test_who_has_lost_the_lock_writes_no_more(tmp_path: Path, fast: None, how: str) -> None:
    """As after the machine was asleep: the next write notices, with or without the thread that renews."""
    folder = tmp_path / "mine"
    with lock.held(folder):
        writer = RunWriter.open(folder, {}, 1)
        writer.log(0, {"loss": 1.0}, {})
        rows = (folder / "metrics.jsonl").read_bytes()
        if how == "removed":
            lock.place(folder).unlink()
        else:
            aside = tmp_path / "aside"
            aside.write_bytes(owner.as_bytes(replace(owner.myself(), host="node7", command="hone train far")))
            os.replace(aside, lock.place(folder))
        time.sleep(0.6)  # longer than until a write looks for itself
        with pytest.raises(LockLost, match="node7" if how == "taken over" else "gone"):
            writer.log(1, {"loss": 1.0}, {})
        with pytest.raises(LockLost):
            writer.event("kind", "message")
        assert (folder / "metrics.jsonl").read_bytes() == rows
    assert lock.place(folder).exists() == (how == "taken over")  # what is another's is not removed


def test_a_suspended_owner_looks_before_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that renews may wake up later than the one that writes."""
    with lock.held(tmp_path / "mine") as mine:
        elsewhere(tmp_path / "mine")
        lock.check(tmp_path / "mine")  # looked at a moment ago
        now = lock._clock()
        monkeypatch.setattr(lock, "_clock", lambda: now + lock.STALE)
        with pytest.raises(LockLost, match="node7"):
            lock.check(tmp_path / "mine" / "rl")
        assert mine.owner.host != "node7"


# --- launchers --------------------------------------------------------------------------------------------------------


def test_workers_share_the_lock_of_their_launcher(tmp_path: Path) -> None:
    with lock.held(tmp_path / "mine", share=True):
        worker = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path / "mine")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        out, _ = worker.communicate("\n", timeout=30)
        assert (out, worker.returncode) == ("held\n", 0)
        assert lock.place(tmp_path / "mine").exists()  # still the launcher's
    assert lock.SHARED not in os.environ
    assert not lock.place(tmp_path / "mine").exists()


def test_a_worker_of_a_launcher_that_lost_the_lock_does_not_begin(tmp_path: Path) -> None:
    with lock.held(tmp_path / "mine", share=True):
        environment = dict(os.environ)
    worker = subprocess.run(
        [sys.executable, "-c", HOLDER, str(tmp_path / "mine")],
        input="",
        capture_output=True,
        text=True,
        env=environment,
    )
    assert worker.returncode == 1
    assert "LockLost" in worker.stderr
    other = subprocess.run(  # a run of its own, which something in a run has started
        [sys.executable, "-c", HOLDER, str(tmp_path / "other")],
        input="\n",
        capture_output=True,
        text=True,
        env=environment,
    )
    assert other.returncode == 0


def test_what_the_file_holds_is_read_back() -> None:
    one = replace(owner.myself(), command="hone train " + 2000 * "x")
    content = owner.as_bytes(one)
    assert len(content) == owner.SIZE
    assert asdict(owner.parse(content)) == {**asdict(one), "command": "hone"}  # type: ignore[arg-type]
    for other in (b"", content[:100], b"[]", b"{}", b"\xff"):
        assert owner.parse(other) is None


def test_on_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(lock.os, "link", no_links)
    with lock.held(tmp_path / "mine"), pytest.raises(Held), lock.held(tmp_path / "mine"):
        pass
    assert os.listdir(tmp_path) == []
    shutil.rmtree(tmp_path)


def test_a_run_that_was_stopped_is_not_one_that_died(tmp_path: Path, start: Any) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    first = start(HOLDER, folder)
    assert state(folder) == "running"
    first.communicate("\n")  # it ends, as after a Ctrl-C
    assert state(folder) == "stopped"
    second = start(HOLDER, folder)
    second.kill()
    second.wait()
    assert state(folder) == "died"
