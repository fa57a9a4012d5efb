"""Plays a task of a `verifiers` taskset (PyPI `verifiers` 0.4, `verifiers.v1`) as an agent program of hone.

    verifiers_program.py TASKSET              plays the task whose number is the column `idx` of the row on stdin
    verifiers_program.py TASKSET --rows 100   prints rows of 100 tasks, for `task: {name: dataset, grading: none, ...}`

TASKSET is a name, or a name with settings of the taskset: `textarena?game=Hangman-v0`.

Runs in the interpreter that has verifiers and the taskset, and imports nothing of hone. The model's answers come from
OPENAI_BASE_URL, as those of any program; the taskset's rewards and metrics go into the file HONE_REWARD.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import os
import sys
from typing import Any
from urllib.parse import parse_qsl

from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.env import RunSlot
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("taskset")
    parser.add_argument("--rows", type=int)
    options = parser.parse_args()
    env = load_environment(resolve_env_config(_config(options.taskset)))
    if options.rows is not None:
        for task in itertools.islice(env.taskset, options.rows):
            row = {"prompt": task.data.prompt_text, "idx": task.data.idx}
            print(json.dumps(row, ensure_ascii=False))
        return
    asyncio.run(_play(env, json.load(sys.stdin)))


def _config(target: str) -> dict[str, Any]:
    """Agents that chat and call the taskset's tools, in processes of this machine. The policy plays all of them."""
    name, _, query = target.partition("?")
    settings = {key: _value(text) for key, text in parse_qsl(query)}
    agent = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}
    fields = env_config_type(name).model_fields.items()
    seats = {seat: agent for seat, field in fields if _is_kind(field.annotation, AgentConfig)}
    return {"taskset": {"id": name, **settings}, **seats, "interception": {"type": "server"}}


def _is_kind(kind: Any, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)


def _value(text: str) -> Any:
    """A number or another JSON value, else text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


async def _play(env: Any, row: dict[str, Any]) -> None:
    if "idx" not in row:
        sys.exit("the row has no column idx, the number of the task: make rows with --rows")
    task = next(itertools.islice(iter(env.taskset), int(row["idx"]), None), None)
    if task is None:
        sys.exit(f"the taskset has no task {row['idx']}")
    client = EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        episode = await env.run_slot(RunSlot(task), ModelContext(model="policy", client=client))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors:
        sys.exit(f"verifiers: {errors[0].type}: {errors[0].message}"[:1000])
    numbers: dict[str, float] = {}
    for trace in episode.traces:
        numbers |= {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        numbers |= {name: value for name, value in trace.metrics.items() if value is not None}
    numbers["reward"] = sum(trace.reward for trace in episode.traces)
    with open(os.environ["HONE_REWARD"], "w", encoding="utf-8") as file:
        json.dump(numbers, file)


async def _with_this_interpreter(runtime: Any, script: str | bytes, *_: Any, **__: Any) -> list[str]:
    """Instead of an environment that uv would download: what verifiers' own programs import, verifiers needs itself."""
    data = script.encode() if isinstance(script, str) else script
    path = f"{os.getcwd()}/{hashlib.sha256(data).hexdigest()[:16]}.py"
    await runtime.write(path, data)
    return [sys.executable, path]


if __name__ == "__main__":
    SubprocessRuntime.prepare_uv_script = _with_this_interpreter
    main()
