"""Verifiers that hang, fork, crash, lie and eat memory: the others get their verdicts, in time, and nothing is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hone.base.settings import UserError
from hone.grade import workers as module
from hone.grade.workers import Failure, Workers

TARGETS = Path(__file__).with_name("targets.py")
CHECK = f"{TARGETS}:check"
ROOT = Path(__file__).resolve().parents[2]


#: Children that other tests of this process have left: workers that end with their object, which a cycle may hold.
OTHERS: set[psutil.Process] = set()


@pytest.fixture(autouse=True)
def others():
    OTHERS.clear()
    OTHERS.update(below(os.getpid()))


@pytest.fixture
def two():
    with Workers(CHECK, deadline=10.0, memory_mb=200) as workers:
        yield workers
    assert below(os.getpid()) == []


def below(pid: int) -> list[psutil.Process]:
    """Keepers, workers and their children, zombies too, but for those of other tests in this process."""
    script = "child.py"
    processes = []
    for process in set(psutil.Process(pid).children(recursive=True)) - OTHERS:
        try:
            if any(script in word for word in process.cmdline()) or process.status() == psutil.STATUS_ZOMBIE:
                processes.append(process)
        except psutil.Error:
            continue
    return processes


def gone(pid: int, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while psutil.pid_exists(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not psutil.pid_exists(pid)


def test_results_come_in_order(two):
    assert two.map([("double", i) for i in range(300)]) == [2 * i for i in range(300)]
    assert two.map([]) == []
    long = "x" * 3_000_000  # longer than what a socket holds, both ways
    assert two.map([("double", long)] * 3) == [2 * long] * 3
    assert two.map([("nap", 0.2), ("nap", 0.0)]) == [0.2, 0.0]


def test_a_worker_holds_nothing_but_its_target():
    with Workers(CHECK, count=1) as workers:
        (held,) = workers.map([("modules",)])
    assert "targets.py" in held
    assert not {"torch", "transformers", "numpy", "pydantic", "psutil", "hone"} & set(held)


@pytest.mark.parametrize(
    "what, kind, message",
    [
        ("error", "verifier_error", "ValueError: this one is faulty (targets.py:"),
        ("leave", "verifier_error", "SystemExit: 0"),
        ("leave_at_once", "verifier_error", "the worker ended (exit code 3) in this call"),
        ("segfault", "verifier_error", "SIGSEGV) in this call: Fatal Python error: Segmentation fault"),
        ("memory", "verifier_error", "MemoryError"),
        ("unpicklable", "verifier_error", "lambda"),
        ("huge", "verifier_error", "the result has 17 MB; at most 16 MB are allowed"),
        ("no_such_check", "verifier_error", "KeyError: 'no_such_check'"),
    ],
)
def test_a_bad_call_fails_alone(two, what, kind, message):
    results = two.map([("double", 1), (what,), ("double", 3), ("double", 4)])
    assert results[0] == 2
    assert results[2:] == [6, 8]
    assert results[1].kind == kind
    assert message in results[1].message
    assert two.map([("double", 5)]) == [10]


def test_calls_that_hang_are_killed():
    hang = ("sleep", "spin", "stubborn", "fork_and_hang")
    with Workers(CHECK, count=4, deadline=2.0) as workers:
        start = time.monotonic()
        results = workers.map([("double", 1), *((what,) for what in hang), ("double", 2), ("double", 3)])
        assert results[0] == 2
        assert results[5:] == [4, 6]
        assert results[1:5] == [Failure("verifier_timeout", "no result within 2 s")] * 4
        assert 2.0 < time.monotonic() - start < 8.0
        assert workers.map([("double", 5)]) == [10]
    assert below(os.getpid()) == []


def test_arguments_that_cannot_be_sent_fail_alone(two):
    results = two.map([("double", 1), ("double", lambda: None), ("double", 3)])
    assert isinstance(results[1], Failure)
    assert "the arguments cannot be sent" in results[1].message
    assert (results[0], results[2]) == (2, 6)


def test_output_does_not_disturb(two, capfd):
    assert two.map([("noise", i) for i in range(4)]) == [0, 1, 2, 3]
    assert capfd.readouterr() == ("", "")


def test_a_fork_that_comes_back_twice_answers_once(two):
    assert two.map([("fork_and_return",), ("double", 2), ("double", 3)]) == ["twice", 4, 6]


@pytest.mark.parametrize("what", ["start_and_return", "start_and_hang"])
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="orphans that left the group are found on Linux only")
def test_processes_that_a_call_starts_end_with_it(what, tmp_path):
    with Workers(CHECK, deadline=3.0) as workers:
        result, other = workers.map([(what, str(tmp_path)), ("double", 1)])
        assert other == 2
        assert result == "done" if what == "start_and_return" else result.kind == "verifier_timeout"
        pids = {f.name: int(f.read_text()) for f in tmp_path.iterdir()}
        assert sorted(pids) == ["group", "orphan", "session"]
        assert [name for name, pid in pids.items() if not gone(pid, 0.0)] == []


def test_memory_is_watched_where_the_limit_does_nothing(monkeypatch):
    monkeypatch.setattr(module, "WATCH_MEMORY", True)
    with Workers(CHECK, count=1, deadline=30.0, memory_mb=100) as workers:
        (result,) = workers.map([("eat_in_two_processes",)])
        assert result == Failure("verifier_error", "the worker was killed: out of memory in this call")
        assert workers.map([("double", 1)]) == [2]


def test_a_call_is_not_charged_with_the_death_of_a_worker_that_others_used():
    with Workers(CHECK, count=1, deadline=5.0) as workers:
        assert workers.map([("die_later",), ("nap", 0.5)]) == ["answer", 0.5]


def test_a_worker_that_died_between_two_maps_is_replaced():
    with Workers(CHECK, count=1) as workers:
        workers.map([("die_later",)])
        time.sleep(0.4)
        assert workers.map([("count",)]) == [1]


def test_workers_are_kept_between_maps():
    with Workers(CHECK, count=1) as workers:
        assert [workers.map([("count",)]) for _ in range(3)] == [[1], [2], [3]]
        workers.close()
        assert workers.map([("count",)]) == [1]


@pytest.mark.parametrize(
    "target, message",
    [
        ("targets.py", "'targets.py' names no function"),
        ("targets.py:", "names no function"),
        ("no/such.py:check", "no/such.py cannot be read (No such file or directory)"),
        ("no-module:check", "'no-module' is not a module"),
        ("nosuchmodule.inner:check", "no module nosuchmodule is installed"),
    ],
)
def test_a_target_that_is_not_there(target, message):
    with pytest.raises(UserError) as caught:
        Workers(target)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "source, message",
    [
        ("import nosuchpackage", "cannot be imported: ModuleNotFoundError: No module named 'nosuchpackage'"),
        ("def f(: pass", "cannot be imported: SyntaxError"),
        ("import sys; sys.exit(1)", "cannot be imported: SystemExit: 1"),
        ("import os; os._exit(5)", "the worker ended (exit code 5) while it was imported"),
        ("def g(): pass", "cannot be imported: no function 'f' in {file}; there are g"),
        ("f = 3", "is int, not a function"),
    ],
)
def test_what_cannot_be_imported_is_said_once(source, message, tmp_path):
    file = tmp_path / "faulty.py"
    file.write_text(source)
    workers = Workers(f"{file}:f")
    for attempt in (workers.start, lambda: workers.map([(1,)] * 5)):
        with pytest.raises(UserError) as caught:
            attempt()
        assert message.format(file=file) in str(caught.value)
        assert str(caught.value).startswith(f"{file}:f: ")
    assert below(os.getpid()) == []


def test_a_file_is_read_once(tmp_path):
    file = tmp_path / "edited.py"
    file.write_text(
        "import os, helper_of_edited\ndef f(x):\n    if x is None: os._exit(1)\n    return helper_of_edited.add(x, 1)\n"
    )
    (tmp_path / "helper_of_edited.py").write_text("def add(a, b): return a + b\n")  # beside it
    with Workers(f"{file}:f", count=1) as workers:
        file.write_text("def f(x): return 'changed'\n")
        first, second = workers.map([(None,), (1,)])  # a new worker answers the second
    assert first.kind == "verifier_error"
    assert second == 2


def test_an_installed_module_is_a_target():
    with Workers("fractions:Fraction.from_float", count=1) as workers:
        assert str(workers.map([(0.5,)])[0]) == "1/2"


def test_nothing_is_left_when_the_trainer_is_killed(tmp_path):
    code = (
        "import sys; from hone.grade.workers import Workers\n"
        f"Workers({CHECK!r}, count=1, deadline=100).map([('start_and_hang', sys.argv[1])])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    trainer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment)
    end = time.monotonic() + 30
    while len([f for f in tmp_path.iterdir() if f.read_text()]) < 3:
        assert time.monotonic() < end
        time.sleep(0.05)
    pids = [p.pid for p in psutil.Process(trainer.pid).children(recursive=True)]
    assert len(pids) >= 4
    trainer.send_signal(signal.SIGKILL)
    trainer.wait(10)
    assert [pid for pid in pids if not gone(pid)] == []


def test_ctrl_c_in_a_map_leaves_nothing(monkeypatch):
    workers = Workers(CHECK, count=2, deadline=30)
    monkeypatch.setattr(Workers, "_wait", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        workers.map([("sleep",)])
    assert below(os.getpid()) == []
    monkeypatch.undo()
    assert workers.map([("double", 1)]) == [2]
    workers.close()


BAD = ("sleep", "fork_and_hang", "memory", "segfault", "error")


@pytest.mark.parametrize(
    "healthy, bad", [(100, 5), pytest.param(1000, 50, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_healthy_samples_beside_bad_ones(healthy, bad):
    """Within (bad * deadline) / 2 and a small constant, on two workers."""
    deadline, constant = 2.0, 5.0
    calls = [("double", i) for i in range(healthy)]
    step = healthy // bad
    for i in range(bad):
        calls.insert(i * (step + 1), (BAD[i % len(BAD)],))
    with Workers(CHECK, count=2, deadline=deadline, memory_mb=200) as workers:
        start = time.monotonic()
        results = workers.map(calls)
        seconds = time.monotonic() - start
    for (what, *value), result in zip(calls, results, strict=True):
        if what == "double":
            assert result == 2 * value[0]
        else:
            hangs = what in ("sleep", "fork_and_hang")
            assert result.kind == ("verifier_timeout" if hangs else "verifier_error") or what == "memory"
    print(f"{healthy} healthy, {bad} bad, deadline {deadline:g} s, 2 workers: {seconds:.1f} s")
    assert seconds < bad * deadline / 2 + constant
    assert below(os.getpid()) == []
