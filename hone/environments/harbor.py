"""Harbor task folders (https://www.harborframework.com/docs/tasks), played inside bubblewrap.

    environment: harbor:tasks/                 # tasks/NAME/task.toml; the row's column `folder` says which NAME

    instruction.md       what the model is asked, instead of the problem's prompt
    environment/         files of the working folder, copied for each rollout
    tests/test.sh        run after the episode; writes /logs/verifier/reward.txt or reward.json
    task.toml            [environment] workdir; [verifier] timeout_sec, env

The model has one tool, `bash`. Every command is a process of its own in a sandbox without network, which sees the
system and three folders of the rollout: the working folder, /logs and, for the tests alone, /tests. What needs an
image, a network, a GPU or several steps is refused before the run: there is no runtime for it here.
"""

from __future__ import annotations

import importlib
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.base.places import locate
from hone.base.settings import UserError
from hone.environments.base import Environment, Message, Observation, Schema
from hone.environments.process import Contained, Process, clean_environment
from hone.environments.program import read_reward
from hone.environments.sandbox import has_bubblewrap
from hone.environments.tools import LONGEST_RESULT, Tool, ToolEnvironment
from hone.types import Problem

COLUMN = "folder"  # of the row: which task
#: What task.toml may hold of [environment] without changing anything here.
_HARMLESS = {"workdir", "build_timeout_sec", "cpus", "memory", "memory_mb", "storage", "storage_mb", "gpus"}
_OFF: tuple[Any, ...] = (None, False, 0, "", [], {})


@dataclass(frozen=True)
class HarborTask:
    """One folder."""

    folder: Path
    instruction: str
    workdir: str
    test_seconds: float
    test_variables: Mapping[str, str]


def read_tasks(folder: Path) -> dict[str, HarborTask]:
    """The tasks of a folder by name; a folder that is a task itself is the only one, by the name "".

    Raises UserError for a folder without tasks, and for a task that cannot be played here.
    """
    if (folder / "task.toml").is_file():
        return {"": read_task(folder)}
    tasks = {file.parent.name: read_task(file.parent) for file in sorted(folder.glob("*/task.toml"))}
    if not tasks:
        raise UserError(f"environment harbor:{folder}: no task.toml in it or in its folders")
    return tasks


def read_task(folder: Path) -> HarborTask:
    """Raises UserError for a task that cannot be played here."""
    settings = _toml(folder / "task.toml")
    environment, verifier = settings.get("environment") or {}, settings.get("verifier") or {}
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: {name} is missing")
    for name in ("Dockerfile", "docker-compose.yaml", "docker-compose.yml"):
        if (folder / "environment" / name).exists():
            raise UserError(f"{folder}: environment/{name} needs a container; only tasks without an image are played")
    if settings.get("steps"):
        raise UserError(f"{folder}: a task of several steps is not played; give one with a single instruction")
    public = environment.get("allow_internet") is True or environment.get("network_mode") == "public"
    if public or verifier.get("network_mode") == "public":
        raise UserError(f"{folder}: task.toml demands a network, and bubblewrap gives none; remove that from it")
    off = {"allow_internet", "network_mode"}
    for key, value in environment.items():
        if key not in _HARMLESS | off and value not in _OFF:
            raise UserError(f"{folder}: task.toml has [environment] {key}, which bubblewrap cannot do; remove it")
    if environment.get("gpus"):
        raise UserError(f"{folder}: task.toml demands {environment['gpus']} GPUs, and the sandbox has none")
    workdir = str(environment.get("workdir") or "/app")
    if not re.fullmatch(r"/(?!tests\b|logs\b|usr\b|proc\b|dev\b|run\b|tmp\b)[\w./-]*\w", workdir) or ".." in workdir:
        raise UserError(f"{folder}: [environment] workdir is {workdir}; give a folder of its own, such as /app")
    instruction = (folder / "instruction.md").read_text(encoding="utf-8").strip()
    seconds = float(verifier.get("timeout_sec") or 600.0)
    return HarborTask(folder, instruction, workdir, seconds, dict(verifier.get("env") or {}))


def _toml(file: Path) -> dict[str, Any]:
    if sys.version_info < (3, 11):
        raise UserError("environment harbor: task.toml is read by Python 3.11 or later; use a newer one")
    tomllib: Any = importlib.import_module("tomllib")
    try:
        settings: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # of both: TOML, and UTF-8
        raise UserError(f"{file}: {error}") from error
    return settings


class HarborEnvironment(Environment):
    """One rollout of a task."""

    def __init__(self, tasks: Mapping[str, HarborTask], seconds: float) -> None:
        self._tasks, self._seconds = tasks, 0.8 * seconds  # of a command: it ends before the step is given up
        self._tools = ToolEnvironment((Tool(self._tool()),))

    @property
    def tools(self) -> Sequence[Schema]:
        return self._tools.tools

    def reset(self, problem: Problem, seed: int) -> Sequence[Message]:
        name = str(problem.extra.get(COLUMN, ""))
        if name not in self._tasks:
            raise UserError(f"{problem.id}: its column {COLUMN} is {name!r}; there are {', '.join(self._tasks)}")
        self._task = self._tasks[name]
        self._root = tempfile.TemporaryDirectory(prefix="hone-harbor-", ignore_cleanup_errors=True)
        root = Path(self._root.name).resolve()
        self._home, self._work, self._logs = root / "home", root / "work", root / "logs"
        for folder in (self._home, self._logs / "verifier", self._logs / "agent"):
            folder.mkdir(parents=True)
        source = self._task.folder / "environment"
        if source.is_dir():
            shutil.copytree(source, self._work, symlinks=True)
        else:
            self._work.mkdir()
        return [*problem.messages[:-1], {"role": "user", "content": self._task.instruction}]

    def step(self, message: Message) -> Observation:
        return self._tools.step(message)

    def reward(self) -> float:
        """Run the tests. Raises TimeoutError for tests that do not end, RuntimeError for tests without a reward."""
        try:
            shutil.rmtree(self._logs / "verifier")
            (self._logs / "verifier").mkdir()
            tests = Path(self._root.name).resolve() / "tests"
            shutil.copytree(self._task.folder / "tests", tests)
            command = f"cd {self._task.workdir} && bash /tests/test.sh"
            seconds = min(self._task.test_seconds, self._seconds)
            ended, output = self._run(command, seconds, self._task.test_variables, tests)
            if not ended:
                raise TimeoutError(f"tests/test.sh did not end within {seconds:g} s")
            for name in ("reward.json", "reward.txt"):
                path = self._logs / "verifier" / name
                if path.is_file() and not path.is_symlink():
                    return read_reward(path)["reward"]
            raise RuntimeError(f"tests/test.sh wrote no reward; its output ends with: {output[-200:]}")
        finally:
            self.close()

    def close(self) -> None:
        self._root.cleanup()

    def _tool(self) -> Any:
        def bash(command: str) -> str:
            """Run a command of the shell in the working folder, and return what it prints.

            Args:
                command: The command.
            """
            ended, output = self._run(f"cd {self._task.workdir} && {command}", self._seconds, {})
            return output if ended else f"{output}\nError: ended after {self._seconds:g} s"

        return bash

    def _run(
        self, command: str, seconds: float, variables: Mapping[str, str], tests: Path | None = None
    ) -> tuple[bool, str]:
        """(whether it ended by itself, its output) of a command in the sandbox."""
        places = [(self._work, self._task.workdir), (self._logs, "/logs"), *([(tests, "/tests")] if tests else [])]
        inside = Contained(self._home, writable=tuple(places)).command(["bash", "-c", command])
        environment = clean_environment({**variables, "HOME": self._home, "TMPDIR": "/tmp"})
        process = Process(inside, environment, self._home, kept=LONGEST_RESULT - 200)  # and a note
        ended = process.wait(seconds)
        process.kill()
        note = f"\nError: {process.note}" if process.note else ""
        status = f"\n[exit status {process.status}]" if ended and process.status else ""
        return ended, f"{process.tail}{note}{status}"


def harbor_tasks(target: str) -> dict[str, HarborTask]:
    """The tasks of `harbor:FOLDER`. Raises UserError for what cannot be played here."""
    if not has_bubblewrap():
        raise UserError(f"environment harbor:{target}: bubblewrap is not there or may not be used; install it")
    return read_tasks(Path(locate(target)).expanduser().resolve())
