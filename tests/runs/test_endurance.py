"""Checkpoints beside the loop: when they become visible, what stays, what an error leaves, how a run is stopped."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hone.base import jsonl
from hone.base.settings import ConfigError, UserError
from hone.base.stop import EX_TEMPFAIL, Halted, Interrupted, Preempted
from hone.learn import checkpoint
from hone.learn.state import State
from hone.recipe.load import load
from hone.recipe.notes import notices
from hone.recipe.sections.optim import CheckpointConfig
from hone.runs.layout import at_step
from hone.runs.ledger import row_of
from hone.runs.listing import validation
from hone.runs.retention import best_validated
from hone.runs.run import Run
from hone.runs.writer import RunWriter
from hone.stages.audit import differences
from hone.types import Group, Problem, Reward, Rollout


class Counter:
    """A policy of one number."""

    lora = None

    def __init__(self, size: int = 4) -> None:
        self.size = size

    def save(self) -> State:
        return State({"model": {"w": torch.ones(self.size)}}, {"config.json": b"{}"}, {"updates": 1})


def open_run(folder: Path, **settings: Any) -> Run:
    return Run(RunWriter.open(folder, {"a": 1}, seed=5), CheckpointConfig(every=1, **settings))


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


def save(run: Run, step: int, policy: Any = None) -> None:
    run.checkpoint(step, policy or Counter())


# --- beside the loop ------------------------------------------------------------------------------------------------


def test_the_loop_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, write = threading.Event(), checkpoint.write

    def slow(*arguments: Any) -> Path:
        assert gate.wait(30)
        return write(*arguments)

    monkeypatch.setattr(checkpoint, "write", slow)
    run = open_run(tmp_path)
    save(run, 1)  # returns, though nothing is written yet
    assert not (tmp_path / "checkpoints").exists()
    assert not run.writer.rows("events.jsonl")
    threading.Timer(0.2, gate.set).start()
    save(run, 2)  # waits for the first
    assert "step_000001" in names(tmp_path)
    run.checkpoints.settle()
    assert names(tmp_path) == ["step_000001", "step_000002"]
    assert [e["step"] for e in run.writer.rows("events.jsonl")] == [1, 2]


def test_what_belongs_to_a_checkpoint_is_on_the_disk_before_it_can_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[tuple[str, str]] = []
    for module, name in ((checkpoint, "fsync"), (os, "replace"), (checkpoint.shutil, "rmtree")):
        call = getattr(module, name)

        def noted(path: Any, *rest: Any, call: Any = call, name: str = name, **more: Any) -> Any:
            happened.append((name, Path(path).name))
            return call(path, *rest, **more)

        monkeypatch.setattr(module, name, noted)
    run = open_run(tmp_path, keep=1)
    for step in (1, 2):
        run.writer.log(step - 1, {"loss": 1.0}, {"seconds": 1.0})
        save(run, step)
    run.checkpoints.settle()
    rows = [i for i, x in enumerate(happened) if x == ("fsync", "metrics.jsonl")]
    visible = [i for i, x in enumerate(happened) if x[0] == "replace" and x[1].startswith(".writing_")]
    durable = [i for i, x in enumerate(happened) if x == ("fsync", "checkpoints")]
    pruned = happened.index(("rmtree", "step_000001"))
    assert rows[0] < visible[0] < rows[1] < visible[1] < durable[-1] < pruned


@pytest.mark.parametrize("how", ["full disk", "file size limit"])
def test_a_full_disk_is_an_error_that_keeps_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    run = open_run(tmp_path)
    save(run, 1)
    run.checkpoints.settle()
    if how == "full disk":

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(checkpoint.shards, "write", full)
        save(run, 2)
        expected = errno.ENOSPC
    else:
        resource = pytest.importorskip("resource")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        try:
            save(run, 2, Counter(size=100_000))
            run.checkpoints._background.join()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        expected = errno.EFBIG
    run.checkpoints._background.join()
    with pytest.raises(OSError, match=r"step_000002 could not be written .*; earlier ones are intact") as caught:
        save(run, 3)  # it shows at the next step
    assert caught.value.errno == expected
    assert names(tmp_path) == ["step_000001"]
    assert checkpoint.fault(tmp_path / "checkpoints" / "step_000001") is None


def test_the_first_checkpoint_on_a_full_disk_names_no_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint.shards, "write", full)
    run = open_run(tmp_path)
    save(run, 1)
    with pytest.raises(OSError, match=r"step_000001 could not be written .*; there is no earlier one$"):
        run.checkpoints.settle()


def test_an_error_in_the_loop_does_not_cut_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = checkpoint.write
    monkeypatch.setattr(checkpoint, "write", lambda *a: (time.sleep(0.2), write(*a)))
    run = open_run(tmp_path)
    with pytest.raises(RuntimeError, match="mine"), run.interruptible():  # noqa: PT012
        save(run, 1)
        raise RuntimeError("mine")
    assert names(tmp_path) == ["step_000001"]


# --- retention ------------------------------------------------------------------------------------------------------


def validated(run: Run, step: int, value: float, label: str = "validation", measure: str = "accuracy") -> None:
    run.writer.log_eval(step, label, {measure: {"value": value}}, [])


def test_a_validation_without_a_measure_has_no_best(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    save(run, 1)
    run.writer.log_eval(1, "validation", {"response_tokens": 9.0}, [])
    run.checkpoints.settle()
    with pytest.raises(UserError, match=r"no validation with an accuracy or a reward; .*, or name a step: 1$"):
        at_step(f"{tmp_path}@best")
    validated(run, 1, 0.5, measure="reward")
    assert at_step(f"{tmp_path}@best").name == "step_000001"


def test_the_best_on_validation_stays(tmp_path: Path) -> None:
    run = open_run(tmp_path, keep=1, keep_best=1)
    validated(run, 0, 0.9)  # before training: no checkpoint
    for step, accuracy in enumerate((0.2, 0.5, 0.5, 0.4), start=1):
        save(run, step)
        validated(run, step, accuracy)
        validated(run, step, 1.0 - accuracy, "after")  # of the test split: does not count
    save(run, 5)
    run.checkpoints.settle()
    assert names(tmp_path) == ["step_000002", "step_000005"]
    assert at_step(f"{tmp_path}@best").name == "step_000002"
    assert at_step(f"{tmp_path}@5").name == "step_000005"
    assert at_step(str(tmp_path)) == tmp_path
    with pytest.raises(UserError, match=r"no checkpoint 3; there are 2, 5, and best"):
        at_step(f"{tmp_path}@3")
    validated(run, 6, 0.8)
    with pytest.raises(UserError, match=r"the best on validation was step 6, whose checkpoint was removed"):
        at_step(f"{tmp_path}@best")


def test_what_is_by_another_name_is_no_checkpoint(tmp_path: Path) -> None:
    for name in ("step_000002", "step_999999", "step_1000000", "step_000002_kept"):
        (tmp_path / name).mkdir()
    assert [p.name for p in checkpoint.saved_steps(tmp_path)] == ["step_000002", "step_999999", "step_1000000"]
    checkpoint.drop_newer(tmp_path, tmp_path / "step_999999")
    checkpoint.prune(tmp_path, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000002_kept", "step_999999"]


def test_best_of_equal_ones_is_the_earlier() -> None:
    rows = [
        {"label": label, "step": step, "accuracy": {"value": value}}
        for label, step, value in (("validation", 4, 0.5), ("validation", 2, 0.5), ("after", 6, 0.9))
    ]
    assert best_validated(rows, 2) == [2, 4]
    assert best_validated(rows, 0) == []
    rewards = [{"label": "validation", "step": step, "reward": {"value": step % 3}} for step in (3, 5, 6)]
    assert best_validated(rewards, 2) == [5, 3]  # a task that does not grade
    both = [row | {"accuracy": {"value": row["step"]}} for row in rewards]
    assert best_validated([*both, {"label": "validation", "step": 9}], 4) == [6, 5, 3]  # the accuracy counts


def test_the_best_needs_validation(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("name: x\ntask: knights\ncheckpoint: {keep_best: 1}\n")
    with pytest.raises(ConfigError, match=r"checkpoint\.keep_best: .*but there is none; set eval\.every"):
        load(path)
    with pytest.raises(ConfigError, match=r"eval\.every: 15 is not a multiple of checkpoint\.every \(10\).* give 20"):
        load(path, ["eval.every=15"])
    load(path, ["eval.every=20"])
    sft = load(path, ["stage=sft"])
    assert any("checkpoint.keep_best has no effect in a stage of kind sft" in line for line in notices(sft))


def test_the_list_of_runs_shows_the_latest_validation(tmp_path: Path) -> None:
    path = tmp_path / "evals.jsonl"
    assert validation(tmp_path) == ""
    interval = {"value": 0.5, "low": 0.25, "high": 0.75}
    for row, shown in [
        ({"accuracy": interval, "reward": {"value": 9.0}}, "0.500 [0.250, 0.750] at step 4"),
        ({"reward": interval}, "reward 0.500 [0.250, 0.750] at step 4"),  # a task that does not grade
        ({"accuracy": None}, ""),
        ({}, ""),
    ]:
        path.write_text(json.dumps({"label": "validation", "step": 4, **row}) + "\n" + '{"label": "after"}\n')
        assert validation(tmp_path) == shown


# --- stopping -------------------------------------------------------------------------------------------------------


def test_sigterm_while_sampling_saves_what_is_finished(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.checkpoints.config = CheckpointConfig(every=100)
    assert run.resume(Counter()) == 0  # type: ignore[arg-type]
    with pytest.raises(Preempted) as stopped, run.interruptible():  # noqa: PT012
        run.checkpoint(1, Counter())  # type: ignore[arg-type]  # not due
        run.stops.poll()
        os.kill(os.getpid(), signal.SIGTERM)
        run.stops.poll()
        pytest.fail("sampling went on")
    run.stops._stop.cancel()
    assert stopped.value.code == EX_TEMPFAIL == 75
    assert stopped.value.step == 1
    assert names(tmp_path) == ["step_000001"]


def test_sigterm_after_sampling_ends_after_the_step(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.checkpoints.config = CheckpointConfig(every=100)
    run.resume(Counter())  # type: ignore[arg-type]
    with pytest.raises(Preempted), run.interruptible():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGTERM)
        run.checkpoint(1, Counter())  # type: ignore[arg-type]
        run.stop_if_asked(1)
    run.stops._stop.cancel()
    assert names(tmp_path) == ["step_000001"]


def test_nothing_is_saved_twice_and_nothing_of_an_untrained_model(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.resume(Counter())  # type: ignore[arg-type]
    with pytest.raises(Preempted) as stopped, run.interruptible():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGTERM)
        run.stops.poll()
    run.stops._stop.cancel()
    assert stopped.value.step == 0
    assert not (tmp_path / "checkpoints").exists()


def test_an_error_before_an_update_saves_what_is_finished_and_after_it_nothing(tmp_path: Path) -> None:
    run = open_run(tmp_path / "before")
    run.checkpoints.config = CheckpointConfig(every=100)
    run.resume(Counter())  # type: ignore[arg-type]
    with pytest.raises(Halted, match=r"step 1: a reward is wrong\nstopped before step 1, saved"), run.interruptible():  # noqa: PT012
        save(run, 1)  # not due
        raise UserError("a reward is wrong")
    assert names(tmp_path / "before") == ["step_000001"]
    run = open_run(tmp_path / "after")
    run.checkpoints.config = CheckpointConfig(every=100)
    run.resume(Counter())  # type: ignore[arg-type]
    why = ZeroDivisionError("of the optimizer")
    with pytest.raises(UserError, match=r"^the loss is not finite$") as caught, run.interruptible():  # noqa: PT012
        save(run, 1)
        run.update_begins()
        raise UserError("the loss is not finite") from why
    assert caught.value.__cause__ is why
    assert not (tmp_path / "after" / "checkpoints").exists()


def test_ctrl_c_lets_the_step_end(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    with pytest.raises(Interrupted), run.interruptible():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        run.stops.poll()  # sampling goes on
        run.checkpoint(1, Counter())  # type: ignore[arg-type]
        run.stop_if_asked(1)


def test_a_step_that_does_not_end_is_left_within_the_bound() -> None:
    code = (
        "import time; from hone.base.stop import Stop; s = Stop(0.3, True)\n"
        "with s.listening():\n    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    process.stdout.readline()
    begun = time.monotonic()
    process.terminate()
    _, said = process.communicate(timeout=50)
    assert process.returncode == EX_TEMPFAIL
    assert 0.2 < time.monotonic() - begun < 30
    assert "stopped 0.3 s after SIGTERM" in said
    assert "--resume continues from the last checkpoint" in said


# --- the ledger -----------------------------------------------------------------------------------------------------


def group(name: str, *verdicts: str) -> Group:
    problem = Problem(id=name, task="t", messages=(), answer="", level="1")
    rewards = tuple(Reward(0.0, {}, verdict) for verdict in verdicts)  # type: ignore[arg-type]
    return Group(problem, tuple(Rollout(name, i, (), "") for i in range(len(verdicts))), rewards)


def test_a_row_of_the_ledger_by_hand() -> None:
    a, b = group("a", "correct", "wrong"), group("b", "correct", "verifier_error")
    assert row_of(3, 0, ["b", "a"], [a], [b]) == {
        "step": 3,
        "round": 0,
        "problems": ["b", "a"],
        "graded": [1, 2],
        "correct": [1, 1],
        "replaced": [0],
    }
    assert row_of(3, 0, ["x", "y"], [], []) == {"step": 3, "round": 0, "problems": ["x", "y"]}
    with pytest.raises(ValueError, match="step 3 drew c, but there is no group of it"):
        row_of(3, 0, ["c"], [a], [])


def test_what_was_lost_and_what_came_twice() -> None:
    ledger = [
        {"step": 0, "round": 0, "problems": ["a", "b"]},
        {"step": 1, "round": 0, "problems": ["a", "d"]},
        {"step": 1, "round": 0, "problems": ["a", "d"]},
    ]
    expected = {(0, 0): ["a", "b"], (1, 0): ["c", "d"], (2, 0): ["e"]}
    assert list(differences(ledger, expected)) == [
        "step 1, round 0: repeated in the ledger",
        "step 1, round 0: problem c is missing",
        "step 1, round 0: problem a was not drawn",
        "step 2, round 0: problem e is missing",
    ]
    assert not list(differences(ledger[:1], {(0, 0): ["b", "a"]}))


def test_the_ledger_is_cut_back_with_the_metrics(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    for step in range(3):
        run.writer.log_prompts(step, [[f"p{step}"]], ())
        run.writer.log(step, {"loss": 1.0}, {})
        if step == 1:
            save(run, 2)
    run.checkpoints.settle()

    class Restored(Counter):
        def restore(self, *_: Any) -> None: ...

    assert open_run(tmp_path).resume(Restored()) == 2  # type: ignore[arg-type]
    assert [row["problems"] for row in jsonl.read(tmp_path / "ledger.jsonl")] == [["p0"], ["p1"]]
    assert json.loads((tmp_path / "checkpoints" / "step_000002" / "state.json").read_text())["format"] == 2
