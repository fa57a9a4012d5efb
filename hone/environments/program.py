"""Agent programs: `environment: {program: [python, agent.py]}` starts one for each rollout.

A program knows nothing of hone. It calls OpenAI's chat completions at `OPENAI_BASE_URL` with the key `OPENAI_API_KEY`,
which names its rollout; `hone.environments.recorder` answers from the policy. On its standard input is the problem, as
JSON; its current folder is empty and its own. It is done when it ends.

Seen from the loop it is an environment as any other: a call is a prompt, and `step` waits for the next one.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hone.base.extras import needed
from hone.base.places import locate
from hone.base.settings import UserError
from hone.environments.base import Environment, Message, ModelCall, Observation
from hone.environments.conversation import extends
from hone.environments.process import (
    PORT,
    Contained,
    Process,
    clean_environment,
    interpreter_folders,
)
from hone.environments.recorder import Line, Recorder
from hone.environments.sandbox import has_bubblewrap
from hone.recipe.sections.environment import EnvironmentConfig
from hone.rewards.functions import columns_of
from hone.types import Problem

REWARD = "reward"  # of the numbers in the file, the reward
REWARD_FILE = "reward.json"
LARGEST_REWARD = 64 << 10  # bytes


@dataclass(frozen=True)
class Launch:
    """How a program is started. Raises UserError for what cannot be started, before the first rollout."""

    config: EnvironmentConfig
    words: tuple[str, ...]

    def __post_init__(self) -> None:
        try:
            import starlette  # noqa: F401
            import uvicorn  # noqa: F401
        except ImportError as error:
            raise UserError(f"environment.program needs {error.name}: {needed('serve')}") from error
        if self.config.contained and not has_bubblewrap():
            raise UserError(
                "environment.runtime: bwrap is not there or may not be used (install bubblewrap); with `process` the "
                "program, and all that it runs for the model, can do what you can"
            )
        self.command  # noqa: B018  # raises for a program that is not there
        for folder in self.config.readable:
            if not Path(locate(folder)).exists():
                raise UserError(f"environment.readable: {folder} does not exist; give a folder, or remove it")

    @cached_property
    def command(self) -> list[str]:
        """The words; `python` is the interpreter of `environment.python`, or hone's own, and files are absolute."""
        first, *rest = self.words
        program = self._interpreter if first == "python" else shutil.which(str(Path(locate(first)).expanduser()))
        if program is None:
            raise UserError(f"environment.program: there is no program {first!r}; give its path, or `python`")
        return [str(Path(program).absolute()), *(_absolute(word) for word in rest)]

    @property
    def _interpreter(self) -> str | None:
        own = self.config.python
        return sys.executable if own is None else shutil.which(str(Path(locate(own)).expanduser()))

    @cached_property
    def readable(self) -> tuple[Path, ...]:
        """What the program may read in bubblewrap, parents before what is in them."""
        files = [Path(word).parent for word in self.command[1:] if Path(word).is_absolute() and Path(word).is_file()]
        folders = [Path(locate(folder)).expanduser().resolve() for folder in self.config.readable]
        return tuple(sorted({*interpreter_folders(self.command[0]), *files, *folders}))


class Program(Environment):
    """One rollout of a program. Ends with it, and kills it where it fails or takes too long."""

    def __init__(self, launch: Launch, recorder: Recorder) -> None:
        self._launch, self._recorder = launch, recorder
        self._seconds = launch.config.timeout
        self._cut = False  # the episode ended before the program did
        self._process: Process | None = None
        self._line: Line
        self._entered = False

    def reset(self, problem: Problem, seed: int) -> ModelCall:
        """Start the program; returns its first call. Raises TimeoutError, RuntimeError, OSError."""
        self._folder = tempfile.TemporaryDirectory(prefix="hone-program-", ignore_cleanup_errors=True)
        self._out = tempfile.TemporaryDirectory(prefix="hone-reward-", ignore_cleanup_errors=True)
        self._line, self._entered = self._recorder.enter(), True
        try:
            self._process = self._start(problem, seed)
            call = self._line.next(self._seconds)
            if call is None:
                raise RuntimeError(self._how("it ended without a call of the model"))
        except BaseException:
            self.close()
            raise
        self._call = call
        return call

    def step(self, message: Message) -> Observation:
        """Give the program its answer and wait for the next call, or for its end. Raises TimeoutError, RuntimeError."""
        try:
            self._line.answer(message)
            call = self._line.next(self._seconds)
            if call is None:
                self._check_status()
                return Observation(done=True, parts=self._parts())
        except BaseException:
            self.close()
            raise
        before, self._call = (*self._call.messages, message), call
        new = call.messages[len(before) :] if extends(call.messages, before) else call.messages
        return Observation(new, call=call)

    def reward(self) -> float | None:
        """Raises TimeoutError for a program that does not end, RuntimeError for one without a readable reward."""
        assert self._process is not None
        try:
            if self._process.status is None:
                self._cut = True
                self._line.refuse("the episode has ended: no more turns, or no more tokens", "context_length_exceeded")
                if not self._process.wait(self._seconds):
                    raise TimeoutError(f"the program did not end within {self._seconds:g} s after its last call")
            self._check_status()
            return self._reward()
        finally:
            self.close()

    def close(self) -> None:
        """Kill the program, and remove its folders. May be called again."""
        if not self._entered:
            return
        if self._process is not None:
            self._process.kill()
        self._recorder.leave(self._line)
        self._folder.cleanup()
        self._out.cleanup()

    # --- parts ---

    def _start(self, problem: Problem, seed: int) -> Process:
        config, launch = self._launch.config, self._launch
        folder, contained = Path(self._folder.name).resolve(), config.contained
        out = "/run/reward" if contained else self._out.name
        environment = {
            **config.variables,
            "OPENAI_BASE_URL": f"http://127.0.0.1:{PORT}/v1" if contained else self._line.url,
            "OPENAI_API_KEY": self._line.key,
            "HONE_REWARD": f"{out}/{REWARD_FILE}",
            "HONE_SEED": seed,
            "HOME": folder,
            "TMPDIR": folder,
            "PYTHONHASHSEED": seed % 2**32,
            "PYTHONDONTWRITEBYTECODE": 1,
        }
        command = launch.command
        if contained:
            writable = ((Path(self._out.name).resolve(), out),)
            command = Contained(folder, launch.readable, writable, self._line.socket.resolve()).command(command)
        row = {**columns_of(problem), "id": problem.id, "prompt": [dict(message) for message in problem.messages]}
        stdin = json.dumps(row, default=str).encode()
        return Process(command, clean_environment(environment), folder, stdin=stdin, ended=self._line.hang_up)

    def _check_status(self) -> None:
        """Raises RuntimeError for a program that failed, unless that is what it is scored by."""
        assert self._process is not None
        failed = self._process.status != 0 or bool(self._process.note)
        if failed and not (self._cut or self._launch.config.scored_by == "exit"):
            raise RuntimeError(self._how("it failed"))

    def _reward(self) -> float | None:
        assert self._process is not None
        kind = self._launch.config.scored_by
        if kind == "exit":
            return float(self._process.status == 0)
        return self._file_reward() if kind == "file" else None

    def _file_reward(self) -> float:
        path = Path(self._out.name, REWARD_FILE)
        if not path.exists() and self._cut:
            return 0.0
        if not path.is_file() or path.is_symlink():
            raise RuntimeError(self._how("it wrote no file HONE_REWARD"))
        return read_reward(path)[REWARD]

    def _parts(self) -> dict[str, float]:
        """The other numbers in its file."""
        path = Path(self._out.name, REWARD_FILE)
        if self._launch.config.scored_by != "file" or not path.is_file() or path.is_symlink():
            return {}
        return {name: value for name, value in read_reward(path).items() if name != REWARD}

    def _how(self, what: str) -> str:
        assert self._process is not None
        why = self._process.note or f"status {self._process.status}"
        return f"the program: {what} ({why}); its output ends with: {self._process.tail[-200:] or '(nothing)'}"


def read_reward(path: Path) -> dict[str, float]:
    """As `reward_numbers`, of a file."""
    with path.open("rb") as file:
        return reward_numbers(file.read(LARGEST_REWARD + 1), path.name)


def reward_numbers(text: bytes, name: str) -> dict[str, float]:
    """The numbers in the text of file `name`: a JSON object with `reward` and others to log, or the reward alone.

    Raises RuntimeError for anything else.
    """
    try:
        value: Any = json.loads(text)
        numbers = {str(k): float(v) for k, v in value.items()} if isinstance(value, dict) else {REWARD: float(value)}
    except (ValueError, TypeError, OverflowError, RecursionError):
        numbers = {}
    if REWARD not in numbers or not all(map(math.isfinite, numbers.values())):
        raise RuntimeError(f"{name} holds {text[:80]!r}; give a finite number, or {{'{REWARD}': number, ...}}")
    return numbers


def check_module(python: str, module: str, package: str) -> None:
    """Raises UserError unless the interpreter has the module."""
    probe = f"import importlib.util as u; raise SystemExit(u.find_spec({module!r}) is None)"
    ended = subprocess.run([python, "-c", probe], capture_output=True, timeout=120, check=False)
    if ended.returncode:
        raise UserError(
            f"environment.python: {python} has no {module}; pip install {package} there, or give an interpreter with it"
        )


def _absolute(word: str) -> str:
    place = Path(locate(word)).expanduser()
    return str(place.resolve()) if place.is_file() else word
