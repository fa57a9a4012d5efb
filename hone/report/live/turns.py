"""The turns of an episode as the page shows them: what was said, which tools were called, what came back.

    turns_of(row)         # [] for an answer in one turn
    tool_errors(row)      # calls that could not be read, and results that are errors

A row is one of rollouts/step_N.jsonl; `hone.environments.record` writes its `steps`. Rows are untrusted: what has
another form than expected is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

Row = Mapping[str, Any]

#: How the results of failed tools begin or what they contain: `hone.environments.tools`, the calculator, Python.
_BEGINS = ("Error:", '{"error":')
_TRACE = "Traceback (most recent call last)"


def turns_of(row: Row) -> list[dict[str, Any]]:
    """Each turn: its text, `calls` (name, arguments), `replies` (role, name, text, failed), reward, error, seconds."""
    return [_turn(step) for step in _steps(row)]


def tool_errors(row: Row) -> int:
    """How many calls of an episode could not be read or gave an error."""
    return sum(
        ("error" in step) + sum(reply.get("role") == "tool" and _failed(reply) for reply in _objects(step, "replies"))
        for step in _steps(row)
    )


def _turn(step: Row) -> dict[str, Any]:
    message = step.get("message")
    message = message if isinstance(message, Mapping) else {}
    functions = [call["function"] for call in _objects(message, "tool_calls") if isinstance(call.get("function"), dict)]
    return {
        "text": _text(message.get("content")),
        "calls": [{"name": _text(f.get("name")), "arguments": _arguments(f.get("arguments"))} for f in functions],
        "replies": [
            {
                "role": _text(reply.get("role")),
                "name": _text(reply.get("name")),
                "text": _text(reply.get("content")),
                "failed": _failed(reply),
            }
            for reply in _objects(step, "replies")
        ],
        **{name: step[name] for name in ("reward", "error", "seconds", "parts") if name in step},
    }


def _arguments(value: Any) -> str:
    """The arguments of a call as text: a single one as it is, so that code keeps its lines; of several, one a line."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):  # not JSON: the text that the model wrote
            return str(value)
    if not isinstance(value, Mapping):
        return _text(value)
    texts = {str(key): one if isinstance(one, str) else json.dumps(one, ensure_ascii=False, default=str)
             for key, one in value.items()}  # fmt: skip
    return "\n".join(texts.values() if len(texts) == 1 else [f"{key}: {text}" for key, text in texts.items()])


def _steps(row: Row) -> Iterator[Row]:
    return _objects(row, "steps")


def _objects(row: Row, name: str) -> Iterator[Row]:
    values = row.get(name)
    return (value for value in (values if isinstance(values, list) else ()) if isinstance(value, Mapping))


def _failed(reply: Row) -> bool:
    text = _text(reply.get("content"))
    return text.startswith(_BEGINS) or _TRACE in text


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else str(value)
