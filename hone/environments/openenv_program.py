"""Plays one session of an OpenEnv server (PyPI `openenv-core` 0.3) as an agent program of hone.

    openenv_program.py http://127.0.0.1:8000

Runs in an interpreter that has websockets, as every one with openenv-core does, and imports nothing of hone; openenv's
own client takes several seconds to import, once for each rollout. Protocol: `/schema` and `/ws` of
openenv.core.env_server.http_server. An action with one text is what the model
writes; any other is the arguments of the tool `act`. `reset` gets HONE_SEED and those columns of the row that it takes.
The rewards of all steps are added up into the file HONE_REWARD.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any

from websockets.sync.client import ClientConnection, connect

LARGEST = 16 << 20  # bytes of a message of the server


def main() -> None:
    url, row = sys.argv[1], json.load(sys.stdin)
    with urllib.request.urlopen(f"{url}/schema", timeout=20) as response:
        fields, required = _fields(json.load(response)["action"])
    text = required[0] if len(required) == 1 and fields[required[0]].get("type") == "string" else None
    total, steps = 0.0, 0
    with connect(f"ws{url.removeprefix('http').rstrip('/')}/ws", max_size=LARGEST, proxy=None) as session:
        columns = {key: value for key, value in row.items() if key != "prompt"}
        result = _send(session, "reset", {**columns, "seed": int(os.environ["HONE_SEED"]) % 2**31})
        *before, last = row["prompt"]
        shown = _shown(result["observation"])
        messages = [*before, {**last, "content": f"{last['content']}\n\n{shown}"}]
        while not result["done"]:
            message = _ask(messages, None if text else _tool(fields, required))
            if message is None:  # no more turns, or no more tokens
                break
            messages.append(message)
            action = {text: message["content"]} if text else _arguments(message)
            if action is None:
                break
            try:
                result = _send(session, "step", action)
                reply, steps = _shown(result["observation"]), steps + 1
                total += float(result["reward"] or 0.0)
            except RefusedError as error:  # the server refuses the action
                reply = f"Error: {error}"[:1000]
            messages.append(_reply(message, reply))
        session.send(json.dumps({"type": "close"}))
    with open(os.environ["HONE_REWARD"], "w", encoding="utf-8") as file:
        json.dump({"reward": total, "steps": steps}, file)


class RefusedError(Exception):
    """What the server answers to an action that it does not take."""


def _send(session: ClientConnection, kind: str, data: dict[str, Any]) -> dict[str, Any]:
    """The observation, reward and `done` of a reset or step. Raises RefusedError."""
    session.send(json.dumps({"type": kind, "data": data}))
    answer = json.loads(session.recv())
    if answer["type"] == "error":
        raise RefusedError(str(answer["data"].get("message")))
    result: dict[str, Any] = {"reward": None, "done": False, **answer["data"]}
    return result


def _fields(schema: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields of an action, and those that must be given."""
    fields = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
    return fields, [name for name in schema.get("required", ()) if name in fields]


def _tool(fields: dict[str, Any], required: list[str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": fields, "required": required}
    return {"type": "function", "function": {"name": "act", "description": "Take a step.", "parameters": parameters}}


def _ask(messages: list[Any], tool: dict[str, Any] | None) -> dict[str, Any] | None:
    """The model's message; None if the episode has had all its turns or tokens."""
    body = {"model": "policy", "messages": messages, **({"tools": [tool]} if tool else {})}
    head = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    address = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    request = urllib.request.Request(address, json.dumps(body).encode(), head)
    try:
        with urllib.request.urlopen(request) as response:
            message: dict[str, Any] = json.load(response)["choices"][0]["message"]
            return message
    except urllib.error.HTTPError as error:
        if json.load(error)["error"]["code"] == "context_length_exceeded":
            return None
        raise


def _arguments(message: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of the first call; None where there is none, which ends the session."""
    calls = message.get("tool_calls") or ()
    arguments: dict[str, Any] | None = json.loads(calls[0]["function"]["arguments"]) if calls else None
    return arguments


def _reply(message: dict[str, Any], text: str) -> dict[str, Any]:
    calls = message.get("tool_calls") or ()
    if not calls:
        return {"role": "user", "content": text}
    return {"role": "tool", "tool_call_id": calls[0]["id"], "content": text}


def _shown(observation: dict[str, Any]) -> str:
    """The observation: its text where it has nothing else, else JSON."""
    if len(observation) == 1:
        (value,) = observation.values()
        if isinstance(value, str):
            return value
    return json.dumps(observation, ensure_ascii=False)


if __name__ == "__main__":
    main()
