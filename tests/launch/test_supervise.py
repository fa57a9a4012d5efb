"""Who is to blame, who is stopped, and when a run begins again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hone.base import jsonl
from hone.launch import supervise as module
from hone.launch.job import Job
from hone.launch.supervise import Exit, supervise, watch
from hone.recipe.sections.launch import LaunchConfig


class Script:
    """Workers whose ends are told: {rank: (look at which it has ended, code as of `subprocess`)}."""

    def __init__(self, ends: dict[int, tuple[int, int]]) -> None:
        self.ends, self.looks = ends, 0
        self.signals: list[int] = []
        self.closed = False

    def ended(self) -> dict[int, Exit]:
        self.looks += 1
        return {rank: Exit.of(code) for rank, (look, code) in self.ends.items() if look <= self.looks}

    def signal(self, number: int) -> None:
        self.signals.append(number)

    def where(self, rank: int) -> str:
        return f"place {rank}"

    def close(self) -> None:
        self.closed = True


class Clock:
    """Seconds that pass in `sleep` alone, so that no result depends on the speed of the machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time", Clock())
    for name, seconds in (("LOOK", 0.001), ("GRACE", 0.1), ("SAVING", 0.2)):
        monkeypatch.setattr(module, name, seconds)


@pytest.mark.parametrize(
    "ends, culprit",
    [
        ({0: (1, 0), 1: (5, 0)}, None),
        ({0: (1, 1), 1: (2, 0)}, 0),
        ({0: (2, 1), 1: (1, 3)}, 1),  # the first to be seen
        ({0: (1, 1), 1: (2, -9)}, 1),  # the error is the loss of the peer that was killed
        ({0: (1, 76), 1: (9, 1)}, 1),  # it says so itself
        ({0: (1, 76), 1: (2, 76)}, 0),  # a network that broke
        ({0: (1, 1)}, 0),  # the other hangs, and is not waited for
        ({0: (1, 130), 1: (9, 130)}, None),  # asked to stop
        ({0: (1, 75), 1: (9, 1)}, 1),
        ({1: (1, 75)}, 0),  # asked to stop, and one does not
    ],
)
def test_the_cause_of_an_end(ends: dict[int, tuple[int, int]], culprit: int | None) -> None:
    assert watch(Script(ends), 2, [])[0] == culprit


def test_a_worker_that_the_signal_ended_has_not_failed() -> None:
    ends = {0: (1, -signal.SIGTERM), 1: (3, 75)}
    assert watch(Script(ends), 2, [signal.SIGTERM])[0] is None
    assert watch(Script(ends), 2, [])[0] == 0  # somebody else's


def test_each_signal_is_handed_on_once() -> None:
    workers = Script({0: (20, 130), 1: (20, 130)})
    watch(workers, 2, [signal.SIGINT, signal.SIGTERM])
    assert workers.signals == [signal.SIGINT, signal.SIGTERM]


def run(folder: Path, restarts: int, *attempts: dict[int, tuple[int, int]], stages: tuple[str, ...] = ()) -> int:
    """With the workers of each attempt; all of them are begun and closed."""
    job = Job(folder, ("train", "x"), 2, 1, LaunchConfig(kind="ray", restarts=restarts), stages)
    begun: list[Script] = []

    def begin(job: Job) -> Script:
        begun.append(Script(attempts[len(begun)]))
        return begun[-1]

    code = supervise(job, begin)
    assert len(begun) == len(attempts)
    assert all(workers.closed for workers in begun)
    return code


KILLED = {0: (2, 1), 1: (1, -9)}


def test_a_run_begins_again_as_often_as_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_1.log").write_text("in the middle of something\n")
    assert run(tmp_path, 2, KILLED, KILLED, {0: (1, 0), 1: (1, 0)}) == 0
    rows = jsonl.read(tmp_path / "events.jsonl")
    assert [(row["kind"], row["rank"], row["code"], row["restart"]) for row in rows] == [
        ("worker_lost", 1, 137, 1),
        ("worker_lost", 1, 137, 2),
    ]
    assert "rank 1 (place 1) was killed by SIGKILL; the others were stopped; restart 1 of 2" in rows[0]["message"]
    assert "in the middle" not in capsys.readouterr().err  # said before this attempt


def test_the_exit_code_is_that_of_the_first_to_fail(tmp_path: Path) -> None:
    assert run(tmp_path, 1, KILLED, KILLED) == 137
    assert "restarted 1 times already" in jsonl.read(tmp_path / "events.jsonl")[-1]["message"]
    assert run(tmp_path, 0, {0: (1, 5), 1: (2, 6)}) == 5
    assert run(tmp_path, 3, {0: (1, 75), 1: (1, 75)}) == 75
    assert run(tmp_path, 3, {0: (1, 0), 1: (1, 130)}) == 130


def test_what_the_user_has_to_put_right_is_not_tried_again(tmp_path: Path) -> None:
    assert run(tmp_path, 3, {0: (1, 2), 1: (1, 2)}) == 2


def test_a_loss_is_an_event_of_the_stage_that_was_running(tmp_path: Path) -> None:
    for stage in ("warmup", "rl"):
        (tmp_path / stage).mkdir()
    (tmp_path / "rl" / "events.jsonl").write_text('{"kind": "checkpoint"}\n{"kind": "che')  # torn by the kill
    run(tmp_path, 0, KILLED, stages=("warmup", "rl", "later"))
    assert [row["kind"] for row in jsonl.read(tmp_path / "rl" / "events.jsonl")] == ["checkpoint", "worker_lost"]
    assert not (tmp_path / "events.jsonl").exists()
