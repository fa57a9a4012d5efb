"""An agent with the plain `openai` client and a tool; the second call is a stream."""

import json
import os
import sys

from openai import OpenAI

row = json.load(sys.stdin)
client = OpenAI()  # OPENAI_BASE_URL, OPENAI_API_KEY
tool = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
messages = list(row["prompt"])
first = client.chat.completions.create(model="policy", messages=messages, tools=[tool]).choices[0].message
messages.append(first.model_dump(exclude_none=True))
for call in first.tool_calls or ():
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
if not first.tool_calls:
    messages.append({"role": "user", "content": "Use the tool."})
second = ""
for piece in client.chat.completions.create(model="policy", messages=messages, tools=[tool], stream=True):
    second += "".join(choice.delta.content or "" for choice in piece.choices)
with open(os.environ["HONE_REWARD"], "w") as file:
    json.dump({"reward": (first.content or "").count("e") + second.count("e")}, file)
