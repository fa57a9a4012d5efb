"""Settings of environments, which answer the model between the turns of a rollout. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt, field_validator, model_validator

from hone.base.settings import Section

#: Environments of hone itself; others are path/file.py:Class or package.module:Class.
BUILT_IN = ("knights_interrogation",)
#: Environments that programs of hone play: verifiers:TASKSET, openenv:URL.
ADAPTED = ("verifiers:", "openenv:")
HARBOR = "harbor:"  # a folder of Harbor tasks
#: Tools of hone itself; others are path/file.py:function or package.module:function.
BUILT_IN_TOOLS = ("calculator", "python")


class EnvironmentConfig(Section):
    """`environment: file.py:Class` is short for `environment: {name: file.py:Class}`. Without a name and without
    `tools`, a problem is answered in one turn."""

    name: str | dict[str, str] | None = None  # for several classes: {value of the row's column `environment`: class}
    max_turns: PositiveInt = 8
    max_tokens: PositiveInt | None = None  # of a conversation, prompt and replies included; null: the model's context
    timeout: PositiveFloat = 30.0  # seconds for one step of one episode
    workers: PositiveInt = 16  # steps at the same time
    malformed: Literal["reply", "end"] = "reply"  # a call that cannot be read: tell the model, or end the episode
    program: tuple[str, ...] = ()  # [python, agent.py]: an agent program, started once for each rollout
    python: str | None = None  # the interpreter that `python` is in program; null: hone's own
    runtime: Literal["bwrap", "process"] = "bwrap"  # of programs: inside bubblewrap, or with your rights
    reward: Literal["file", "exit"] | None = None  # a program writes it, or its exit status 0 is 1; null: neither
    variables: dict[str, str] = {}  # environment variables of the program
    readable: tuple[str, ...] = ()  # folders that a program in bubblewrap may read, beside its own

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("program", "readable", mode="before")
    @classmethod
    def _tuples(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value  # after `_short`, lists are not read from JSON

    @property
    def adapter(self) -> tuple[str, str] | None:
        """("verifiers", NAME) or ("openenv", URL): hone has the program for it."""
        if not isinstance(self.name, str) or not self.name.startswith(ADAPTED):
            return None
        kind, _, target = self.name.partition(":")
        return kind, target

    @property
    def is_program(self) -> bool:
        """Whether a program of its own plays the episodes."""
        return bool(self.program) or self.adapter is not None

    @property
    def is_outside(self) -> bool:
        """Whether episodes hold processes, which bound their own time, and are ended after a failure too."""
        return self.is_program or (isinstance(self.name, str) and self.name.startswith(HARBOR))

    @property
    def scored_by(self) -> Literal["file", "exit"] | None:
        """What gives the reward of a program."""
        return self.reward if self.adapter is None else "file"

    @property
    def contained(self) -> bool:
        """Whether the program runs in bubblewrap. That of OpenEnv does not: it needs the network, and runs nothing."""
        return self.runtime == "bwrap" and (self.adapter is None or self.adapter[0] != "openenv")

    @model_validator(mode="after")
    def _one(self) -> EnvironmentConfig:
        if self.program and self.name is not None:
            raise ValueError("program: there is a name too; a program is an environment by itself, so remove one")
        programs_only: dict[str, Any] = {
            "python": None,
            "runtime": "bwrap",
            "reward": None,
            "variables": {},
            "readable": (),
        }
        for key, unused in programs_only.items():
            if not self.is_program and getattr(self, key) != unused:
                raise ValueError(f"{key}: is for programs, and there is none; give program: [...], or remove it")
        if self.adapter is not None and self.reward is not None:
            raise ValueError(f"reward: {self.name} gives its own; remove this")
        if self.adapter is not None and self.adapter[0] == "openenv" and "://" not in self.adapter[1]:
            raise ValueError(f"name: {self.name} names no server; give openenv:http://127.0.0.1:8000")
        return self

    @field_validator("name")
    @classmethod
    def _targets(cls, value: str | dict[str, str] | None) -> str | dict[str, str] | None:
        if isinstance(value, dict) and not value:
            raise ValueError("name: names no environment; give {name: path/file.py:Class}, or one class")
        for target in value.values() if isinstance(value, dict) else [value] if value else []:
            if ":" not in target and target not in BUILT_IN:
                raise ValueError(f"no environment {target!r}; give path/file.py:Class, or {', '.join(BUILT_IN)}")
        return value
