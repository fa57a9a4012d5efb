"""An agent without any library: asks, says what it thinks of the answer, and asks again. Reads orders from its row."""

import json
import os
import sys
import urllib.request

row = json.load(sys.stdin)
orders = row.get("orders") or os.environ.get("ORDERS", "").split()


def ask(messages, **more):
    body = json.dumps({"model": "policy", "messages": messages, **more}).encode()
    head = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, head)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


if "crash" in orders:
    sys.exit("no such thing")
messages = list(row["prompt"])
first = ask(messages)
if "hang" in orders:
    import time

    time.sleep(600)
if "flood" in orders:
    while True:
        print("x" * 10_000)
messages += [first, {"role": "user", "content": f"You wrote {len(first['content'])} characters. Again."}]
second = ask(messages)
third = ask([{"role": "user", "content": "Something else."}]) if "forget" in orders else None
score = sum(text.count("e") for text in (first["content"], second["content"]))
if "file" in orders:
    with open(os.environ["HONE_REWARD"], "w") as file:
        json.dump({"reward": score, "letters": len(second["content"])}, file)
sys.exit(3 if "fail" in orders else 0)
