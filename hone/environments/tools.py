"""Tools: functions that a model can call between its turns.

    tools: [lookup.py:price, python, calculator]

A function has type hints and a docstring with an `Args:` section, from which `transformers.utils.get_json_schema` makes
the schema that is shown to the model. It may be async. What it returns is shown to the model as text; an exception is
shown as `{"error": ...}`, as in TRL.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hone.base.settings import UserError
from hone.environments.base import Environment, Message, Observation, Schema
from hone.types import Problem

#: Characters of a tool's result that are shown to the model.
LONGEST_RESULT = 8192


@dataclass(frozen=True)
class Tool:
    """A function with its schema."""

    function: Callable[..., Any]

    @property
    def name(self) -> str:
        return str(self.function.__name__)

    @cached_property
    def schema(self) -> Schema:
        """The JSON schema of the function. Raises UserError if its hints or docstring are incomplete."""
        from transformers.utils.chat_template_utils import get_json_schema

        try:
            return dict(get_json_schema(self.function))
        except Exception as error:  # transformers raises several types for incomplete functions
            raise UserError(
                f"tool {self.name}: {' '.join(str(error).split())[:300]}; give each parameter a type hint and a line "
                "in the docstring's Args: section"
            ) from error

    def call(self, arguments: Mapping[str, Any]) -> str:
        """The result as text; exceptions are results too."""
        try:
            result = self.function(**arguments)
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
        except Exception as error:  # the user's function, with arguments of the model
            result = {"error": str(error)}
        text = result if isinstance(result, str) else _text(result)
        cut = len(text) - LONGEST_RESULT
        return text if cut <= 0 else f"{text[:LONGEST_RESULT]}... ({cut} more characters)"


async def _awaited(result: Any) -> Any:
    return await result


def _text(result: Any) -> str:
    if isinstance(result, dict):
        try:
            return json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError):
            return str(result)
    return str(result)


@dataclass
class ToolEnvironment(Environment):
    """Answers tool calls; a message without any is the answer, which ends the episode."""

    functions: Sequence[Tool] = ()
    _by_name: dict[str, Tool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._by_name = {tool.name: tool for tool in self.functions}

    @property
    def tools(self) -> Sequence[Schema]:
        return [tool.schema for tool in self._by_name.values()]

    def reset(self, problem: Problem, seed: int) -> Sequence[Message] | None:
        return None

    def step(self, message: Message) -> Observation:
        calls = message.get("tool_calls") or ()
        return Observation(tuple(self._result(call) for call in calls), done=not calls)

    def _result(self, call: Mapping[str, Any]) -> Message:
        function = call["function"]
        arguments = function["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        text = self._by_name[function["name"]].call(arguments)
        return {"role": "tool", "name": function["name"], "tool_call_id": call["id"], "content": text}
