"""Settings of environments, which answer the model between the turns of a rollout. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt, field_validator, model_validator

from hone.base.settings import Section

#: Environments of hone itself; others are path/file.py:Class or package.module:Class.
BUILT_IN = ("knights_interrogation",)
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

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("name")
    @classmethod
    def _targets(cls, value: str | dict[str, str] | None) -> str | dict[str, str] | None:
        if isinstance(value, dict) and not value:
            raise ValueError("name: names no environment; give {name: path/file.py:Class}, or one class")
        for target in value.values() if isinstance(value, dict) else [value] if value else []:
            if ":" not in target and target not in BUILT_IN:
                raise ValueError(f"no environment {target!r}; give path/file.py:Class, or {', '.join(BUILT_IN)}")
        return value
