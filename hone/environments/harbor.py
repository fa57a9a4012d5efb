"""Plays Harbor tasks: in a container where the task has an image, else inside bubblewrap.

    environment: harbor:tasks/                 # tasks/NAME/task.toml; the row's column `folder` says which NAME

The model has one tool, `bash`. In a container, what a command leaves running goes on until the episode ends, as with
Harbor itself. In bubblewrap every command is a process of its own, which sees the system and three folders of the
rollout: the working folder, /logs and, for the tests alone, /tests.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hone.base.places import locate
from hone.base.settings import UserError
from hone.environments.base import Environment, Message, Observation, Schema
from hone.environments.containers import Container, Ran, Runtime
from hone.environments.harbor_task import HarborTask, read_tasks
from hone.environments.process import Bounds, Contained, Process, clean_environment
from hone.environments.program import LARGEST_REWARD, REWARD, reward_numbers
from hone.environments.sandbox import has_bubblewrap
from hone.environments.tools import LONGEST_RESULT, Tool, ToolEnvironment
from hone.types import Problem

COLUMN = "folder"  # of the row: which task
_KEPT = LONGEST_RESULT - 200  # bytes of the output of a command, and a note
_SETUP = 30.0  # seconds for a command of hone's own
_TEST_OUTPUT = "/logs/verifier/test-stdout.txt"  # Harbor's name for it


class BrokenError(Exception):
    """The model has left its container so that the tests cannot be brought in."""


class Place(Protocol):
    """Where the commands of one rollout are run."""

    def run(self, command: str, seconds: float) -> Ran:
        """Run a command of the model."""

    def test(self, seconds: float) -> Ran:
        """Bring the tests in, and run them. Raises BrokenError."""

    def read_reward(self, name: str) -> bytes | None:
        """The beginning of a file in /logs/verifier; None if it is not there."""

    def close(self) -> None:
        """Remove all of it. May be called again."""


class HarborEnvironment(Environment):
    """One rollout of a task. `runtime`: None where no task has an image."""

    def __init__(self, tasks: Mapping[str, HarborTask], seconds: float, runtime: Runtime | None = None) -> None:
        self._tasks, self._seconds, self._runtime = tasks, seconds, runtime
        self._tools = ToolEnvironment((Tool(self._tool()),))
        self._place: Place | None = None
        self._closed, self._lock = False, threading.Lock()

    @property
    def tools(self) -> Sequence[Schema]:
        return self._tools.tools

    def reset(self, problem: Problem, seed: int) -> Sequence[Message]:
        name = str(problem.extra.get(COLUMN, ""))
        if name not in self._tasks:
            raise UserError(f"{problem.id}: its column {COLUMN} is {name!r}; there are {', '.join(self._tasks)}")
        self._task = self._tasks[name]
        place = InFolders(self._task) if self._task.image is None else self._container(self._task)
        with self._lock:
            self._place = place
        if self._closed:  # too late: the episode has been given up
            self.close()
        return [*problem.messages[:-1], {"role": "user", "content": self._task.instruction}]

    def step(self, message: Message) -> Observation:
        return self._tools.step(message)

    def reward(self) -> float:
        """Run the tests; 0 in a container that the model has broken, since it is to gain nothing by that.

        Raises TimeoutError for tests that do not end, RuntimeError for tests without a reward.
        """
        assert self._place is not None
        try:
            seconds = min(self._task.test_seconds, self._seconds)
            ran = self._place.test(seconds)
            if not ran.ended:
                raise TimeoutError(f"tests/test.sh did not end within {seconds:g} s")
            for name in ("reward.json", "reward.txt"):
                text = self._place.read_reward(name)
                if text is not None:
                    return reward_numbers(text, name)[REWARD]
            raise RuntimeError(f"tests/test.sh wrote no reward; its output ends with: {ran.output[-200:]}")
        except BrokenError:
            return 0.0
        finally:
            self.close()

    def close(self) -> None:
        with self._lock:
            self._closed, place = True, self._place
        if place is not None:
            place.close()

    def _container(self, task: HarborTask) -> Place:
        assert self._runtime is not None
        return InContainer(task, self._runtime)

    def _tool(self) -> Any:
        def bash(command: str) -> str:
            """Run a command of the shell in the working folder, and return what it prints.

            Args:
                command: The command.
            """
            assert self._place is not None
            ran = self._place.run(command, self._seconds)
            if ran.note:
                return f"{ran.output}\nError: {ran.note}"
            if not ran.ended:
                return f"{ran.output}\nError: ended after {self._seconds:g} s"
            return f"{ran.output}\n[exit status {ran.status}]" if ran.status else ran.output

        return bash


class InFolders:
    """bubblewrap, and a copy of the task's files."""

    def __init__(self, task: HarborTask) -> None:
        self._task = task
        self._root = tempfile.TemporaryDirectory(prefix="hone-harbor-", ignore_cleanup_errors=True)
        root = Path(self._root.name).resolve()
        self._home, self._work, self._logs, self._tests = (root / name for name in ("home", "work", "logs", "tests"))
        for folder in (self._home, self._logs / "verifier", self._logs / "agent"):
            folder.mkdir(parents=True)
        source = task.folder / "environment"
        if source.is_dir():
            shutil.copytree(source, self._work, symlinks=True)
        else:
            self._work.mkdir()

    def run(self, command: str, seconds: float) -> Ran:
        return self._run(command, seconds, self._task.variables, ())

    def test(self, seconds: float) -> Ran:
        self._set_aside(self._logs / "verifier")
        (self._logs / "verifier").mkdir()
        shutil.copytree(self._task.folder / "tests", self._tests)
        variables = {**self._task.variables, **self._task.test_variables}
        return self._run(_test_command(), seconds, variables, ((self._tests, "/tests"),))

    def read_reward(self, name: str) -> bytes | None:
        path = self._logs / "verifier" / name
        if path.parent.is_symlink() or path.is_symlink() or not path.is_file():
            return None  # a link made inside would be followed outside
        with path.open("rb") as file:
            return file.read(LARGEST_REWARD + 1)

    def close(self) -> None:
        self._root.cleanup()

    def _set_aside(self, path: Path) -> None:
        """Rename what is there, if anything: whatever it is, and whatever the model has forbidden there."""
        self._logs.chmod(0o755)
        with contextlib.suppress(FileNotFoundError):
            path.rename(self._logs / uuid.uuid4().hex)

    def _run(
        self, command: str, seconds: float, variables: Mapping[str, str], added: tuple[tuple[Path, str], ...]
    ) -> Ran:
        workdir = str(self._task.workdir)
        places = ((self._work, workdir), (self._logs, "/logs"), *added)
        inside = Contained(self._home, writable=places).command(["bash", "-c", f"cd {workdir} && {command}"])
        environment = clean_environment({**variables, "HOME": self._home, "TMPDIR": "/tmp"})
        process = Process(inside, environment, self._home, bounds=Bounds(_KEPT))
        ended = process.wait(seconds)
        process.kill()
        return Ran.of(process, ended)


class InContainer:
    """A container of the task's image."""

    def __init__(self, task: HarborTask, runtime: Runtime) -> None:
        assert task.image is not None
        self._task, self._runtime = task, runtime
        self._container: Container = runtime.start(task.image, task.limits)
        try:
            self._prepare("mkdir -p /logs/agent /logs/verifier && chmod 777 /logs/agent /logs/verifier")
        except BaseException:
            self.close()
            raise

    def run(self, command: str, seconds: float) -> Ran:
        task = self._task
        return self._container.run(
            command, seconds, variables=task.variables, user=task.user, workdir=task.workdir, kept=_KEPT
        )

    def test(self, seconds: float) -> Ran:
        task = self._task
        try:
            self._prepare("rm -rf /tests /logs/verifier && mkdir -p /logs/verifier && chmod 777 /logs/verifier")
            self._container.copy_in(task.folder / "tests", "/tests")
        except RuntimeError as error:  # when the episode began, the container worked
            self._runtime.check()
            raise BrokenError(str(error)) from error
        variables = {**task.variables, **task.test_variables}
        return self._container.run(
            _test_command(), seconds, variables=variables, user=task.test_user, workdir=task.workdir
        )

    def read_reward(self, name: str) -> bytes | None:
        most, mark = LARGEST_REWARD + 1, uuid.uuid4().hex  # docker and podman may write warnings around the text
        command = f"echo {mark}; head -c {most} /logs/verifier/{name} && echo {mark}"
        ran = self._container.run(command, _SETUP, user="0", kept=most + 8192)
        _, *text = ran.output.split(mark)
        return text[0].strip().encode() if ran.ended and ran.status == 0 and len(text) == 2 else None

    def close(self) -> None:
        try:
            self._container.remove()
        except RuntimeError as error:  # the reward stands; when hone ends, the container is removed again
            print(f"{self._task.folder}: its container stays for now: {error}", file=sys.stderr)

    def _prepare(self, command: str) -> None:
        """Raises RuntimeError: the image lacks bash, or the model has broken the container."""
        ran = self._container.run(command, _SETUP, user="0", workdir="/")
        if not ran.ended or ran.status != 0:
            raise RuntimeError(f"the container cannot run `{command}`: {ran.note or ran.output[-300:] or 'no answer'}")


def harbor_tasks(target: str) -> tuple[dict[str, HarborTask], Runtime | None]:
    """The tasks of `harbor:FOLDER`, and what runs their containers; their images are built or pulled where missing.

    Raises UserError for what cannot be played here.
    """
    tasks = read_tasks(Path(locate(target)).expanduser().resolve())
    if any(task.image is None for task in tasks.values()) and not has_bubblewrap():
        raise UserError(f"environment harbor:{target}: bubblewrap is not there or may not be used; install it")
    with_image = [task for task in tasks.values() if task.image is not None]
    if not with_image:
        return tasks, None
    try:
        runtime = Runtime.find()
    except UserError as error:
        raise UserError(f"environment harbor:{target}: {with_image[0].folder} needs an image, and {error}") from error
    for task in with_image:
        _provide(task, runtime)
    return tasks, runtime


def _provide(task: HarborTask, runtime: Runtime) -> None:
    assert task.image is not None
    if runtime.has(task.image):
        return
    print(f"{'building' if task.is_built else 'pulling'} the image of {task.folder}", file=sys.stderr)
    try:
        if task.is_built:
            runtime.build(task.folder / "environment", task.build_seconds)
        else:
            runtime.pull(task.image, task.build_seconds)
    except RuntimeError as error:
        raise UserError(f"{task.folder}: its image could not be built or pulled: {error}") from error


def _test_command() -> str:
    """The command of the tests: their output may be long, and its end is shown."""
    return f"bash /tests/test.sh > {_TEST_OUTPUT} 2>&1; tail -c 300 {_TEST_OUTPUT}"
