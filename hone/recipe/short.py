"""Short forms of settings in recipes and overrides.

model: Qwen/Qwen3-0.6B          -> {path: Qwen/Qwen3-0.6B}
launch: ray                     -> {kind: ray}
task: countdown                 -> {name: countdown}
task: my/rows.jsonl             -> {name: dataset, source: my/rows.jsonl}; so is a folder, or a hub id with a slash
reward: my/reward.py:right      -> {parts: {my/reward.py:right: 1.0}}
reward: [a, b]                  -> {parts: {a: 1.0, b: 1.0}}; so is `parts: [a, b]`
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hone.base.settings import Exactly
from hone.tasks.rows.files import SUFFIXES

#: The setting that a text sets.
KEYS = {"model": "path", "launch": "kind", "task": "name"}


def long_form(key: str, value: Any) -> Any:
    """The mapping that a short form of the top-level setting `key` stands for; other values are returned unchanged."""
    if key == "reward":
        if isinstance(value, (str, list)):
            value = {"parts": [value] if isinstance(value, str) else value}
        if isinstance(value, dict) and _are_names(value.get("parts")):
            value = {**value, "parts": Exactly.fromkeys(value["parts"], 1.0)}
        return value
    if not isinstance(value, str) or key not in KEYS:
        return value
    if key == "task" and ("/" in value or Path(value).suffix.lower() in SUFFIXES):
        return {"name": "dataset", "source": value}
    return {KEYS[key]: value}


def _are_names(parts: Any) -> bool:
    """Whether `parts` is a list of distinct names, rather than a mapping from names to weights."""
    return isinstance(parts, list) and all(isinstance(name, str) for name in parts) and len(set(parts)) == len(parts)
