"""Chat completions of OpenAI's API: a request becomes a `ModelCall`, and a sampled turn the answer.

https://platform.openai.com/docs/api-reference/chat/create. What changes the shape of an answer and is not there (`n`,
`response_format`, `logprobs`) is refused. `stop` and `max_tokens` end the turn; `temperature` and `top_p` are noted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hone.base.web import ApiError
from hone.environments.base import Message, ModelCall, Schema
from hone.environments.formats import Reading
from hone.types import Turn

MOST_STOPS = 16
#: Parameter -> the values that change nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logprobs": (None, False),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
}
#: Parameters that are not followed: log-probs are those of the distribution that the recipe samples from.
_OTHER = ("temperature", "top_p")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read_call(body: bytes) -> tuple[ModelCall, str, bool]:
    """(the call, the model's name, whether to stream). Raises ApiError for what is no request, or is not supported."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError("the body is not JSON") from None
    if not isinstance(request, dict):
        raise ApiError("the body is not an object")
    for name, harmless in _UNSUPPORTED.items():
        if request.get(name) not in harmless:
            raise ApiError(f"{name} is not supported here: leave it out", param=name, code="unsupported_parameter")
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages: give a list of at least one", param="messages")
    read = tuple(_message(one) for one in messages)
    if read[-1]["role"] == "assistant":
        raise ApiError("messages: the last one is the assistant's; it must ask for an answer", param="messages")
    tools = request.get("tools") if request.get("tool_choice") != "none" else None
    if not isinstance(tools, list | None):
        raise ApiError("tools: give a list", param="tools")
    call = ModelCall(
        read,
        tuple(_tool(one) for one in tools or ()),
        stop=_stops(request.get("stop")),
        max_tokens=_most_tokens(request),
        other={name: _number(request, name) for name in _OTHER if request.get(name) is not None},
    )
    return call, str(request.get("model", ""))[:200], bool(request.get("stream"))


def _message(message: Any) -> Message:
    role = _ROLES.get(str(message.get("role"))) if isinstance(message, dict) else None
    if role is None:
        raise ApiError(f"messages: each has a role: {', '.join(_ROLES)}", param="messages")
    read: dict[str, Any] = {"role": role, "content": _text(message.get("content"))}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(key), str):
            read[key] = message[key]
    if calls := message.get("tool_calls"):
        read["tool_calls"] = [_tool_call(call) for call in calls]
    return read


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if any(not isinstance(part, dict) or not isinstance(part.get("text"), str) for part in parts):
        raise ApiError("messages: content may hold text only", param="messages")
    return "".join(part["text"] for part in parts)


def _tool_call(call: Any) -> dict[str, Any]:
    """With arguments as an object, where they are one: chat templates write them as JSON themselves."""
    try:
        name, arguments = str(call["function"]["name"]), call["function"]["arguments"]
    except (KeyError, TypeError):
        raise ApiError("messages: a tool call has a function with name and arguments", param="messages") from None
    return {
        "type": "function",
        "id": str(call.get("id", "")),
        "function": {"name": name, "arguments": _object(arguments)},
    }


def _object(arguments: Any) -> Any:
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments


def _tool(tool: Any) -> Schema:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ApiError("tools: each is {'type': 'function', 'function': {'name': ..., ...}}", param="tools")
    if not isinstance(function.get("parameters") or {}, dict):
        raise ApiError("tools: parameters is a JSON schema", param="tools")
    properties = (function.get("parameters") or {}).get("properties") or {}
    if not isinstance(properties, dict) or not all(isinstance(one, dict) for one in properties.values()):
        raise ApiError("tools: properties are JSON schemas by name", param="tools")
    shown = {"name": function["name"], "description": str(function.get("description") or "")}
    parameters = {"type": "object", **(function.get("parameters") or {}), "properties": properties}
    return {"type": "function", "function": {**shown, "parameters": parameters}}


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ApiError(f"stop: give at most {MOST_STOPS} texts", param="stop")
    return tuple(stops)


def _most_tokens(request: Mapping[str, Any]) -> int | None:
    """The smaller of the parameter's new name and its old one."""
    names = ("max_completion_tokens", "max_tokens")
    limits = {name: request[name] for name in names if request.get(name) is not None}
    for name, value in limits.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ApiError(f"{name}: give a whole number of at least 1", param=name)
    return min(limits.values(), default=None)


def _number(request: Mapping[str, Any], name: str) -> float:
    value = request[name]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ApiError(f"{name}: give a number", param=name)
    return float(value)


# --- from turns to answers --------------------------------------------------------------------------------------------


def answer_message(text: str, reading: Reading, call: ModelCall, number: int) -> Message:
    """Turn `number` of a rollout, as the message that its program receives.

    Without the text that stopped the turn, as OpenAI's API does it; a call that cannot be read stays text. Calls are
    numbered through the episode: programs tell results apart by the id. Nine characters, which Mistral's template
    demands.
    """
    if reading.error is not None or not reading.calls:
        ends = [place for stop in call.stop if (place := text.find(stop)) >= 0]
        return {"role": "assistant", "content": text[: min(ends, default=len(text))]}
    calls = [{**one, "id": f"call{number:03d}{i:02d}"} for i, one in enumerate(reading.message["tool_calls"])]
    return {**reading.message, "tool_calls": calls}


def told(message: Message, turn: Turn) -> Message:
    """The message, and what else an answer says: how the turn ended, and its numbers of tokens."""
    finish = "tool_calls" if message.get("tool_calls") else turn.finish
    return {**message, "finish": finish, "tokens": (len(turn.prompt_ids), len(turn.completion_ids))}


def completion(head: Mapping[str, Any], message: Message) -> dict[str, Any]:
    """The body of an answer to a message of `told`."""
    sent = {"refusal": None, **_sent(message)}
    choice = {"index": 0, "message": sent, "logprobs": None, "finish_reason": message["finish"]}
    return {**head, "object": "chat.completion", "choices": [choice], "usage": _usage(message)}


def events(head: Mapping[str, Any], message: Message) -> str:
    """The answer as a stream of three pieces: the message, how it ended, and the numbers of tokens."""
    delta = _sent(message)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    first: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None}]
    last: list[dict[str, Any]] = [{"index": 0, "delta": {}, "finish_reason": message["finish"]}]
    pieces: list[dict[str, Any]] = [{"choices": first}, {"choices": last}, {"choices": [], "usage": _usage(message)}]
    whole = [json.dumps({**head, "object": "chat.completion.chunk", **piece}) for piece in pieces]
    return "".join(f"data: {piece}\n\n" for piece in (*whole, "[DONE]"))


def _sent(message: Message) -> dict[str, Any]:
    """The message as OpenAI's API gives it: arguments are JSON text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    content = message["content"] or None if calls else message["content"]
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _usage(message: Message) -> dict[str, int]:
    prompt, answer = message["tokens"]
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
