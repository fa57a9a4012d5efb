"""The record of an episode: a row's `turns`, `end` and `steps`, in rollouts/ and evals/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hone.learn.samples import chains
from hone.types import Rollout, Step

Row = Mapping[str, Any]


def episode_row(rollout: Rollout) -> dict[str, Any]:
    """The course of an episode of several turns, with its messages and replies; empty for an answer in one turn."""
    episode = rollout.episode
    plain = episode.end in ("done", "max_tokens") and not any(step.replies or step.parts for step in episode.steps)
    if len(rollout.turns) == 1 and plain:
        return {}
    steps = [_step_row(step) for step in episode.steps]
    return {"turns": len(rollout.turns), "chains": len(chains(rollout)), "end": episode.end, "steps": steps}


def _step_row(step: Step) -> dict[str, Any]:
    row: dict[str, Any] = {"message": dict(step.message), "replies": [dict(reply) for reply in step.replies]}
    optional = {"reward": step.reward, "error": step.error, "parts": dict(step.parts) or None}
    return row | {key: value for key, value in optional.items() if value is not None}


def episode_means(rows: Sequence[Row]) -> dict[str, float]:
    """Means over all rows: turns, tool calls, and what environments logged; empty if all were answered in one turn."""
    if not any("turns" in row for row in rows):
        return {}
    steps = [row.get("steps", ()) for row in rows]
    names = sorted({name for of_row in steps for step in of_row for name in step.get("parts", {})})
    calls = sum(len(step["message"].get("tool_calls") or ()) for of_row in steps for step in of_row)
    logged = {n: sum(step.get("parts", {}).get(n, 0.0) for s in steps for step in s) / len(rows) for n in names}
    turns = sum(row.get("turns", 1) for row in rows) / len(rows)
    return {"turns": turns, "tool_calls": calls / len(rows), **logged}


def turn_seconds(rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
    """Seconds of each turn, means over the rollouts that have it; empty if all were answered in one turn.

    `generation` includes the wait for a place in the batch; `slowest` is the longest step of an environment.
    """
    steps = [rollout.episode.steps for rollout in rollouts]
    longest = max((len(rollout.turns) for rollout in rollouts), default=0)
    if longest < 2:
        return []
    rows = []
    for turn in range(longest):
        saying, answering = zip(*(of[turn].seconds for of in steps if len(of) > turn), strict=True)
        means = {"generation": sum(saying) / len(saying), "environment": sum(answering) / len(answering)}
        rows.append({"rollouts": len(saying), **means, "slowest": max(answering)})
    return rows


def transcript(row: Row) -> str:
    """The conversation of a row after its prompt, as text; of an answer in one turn, the answer."""
    parts = []
    for step in row.get("steps", ()):
        message = step["message"]
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        calls = [f"[calls {function['name']} {function['arguments']}]" for function in functions]
        parts.append("\n".join([*([message["content"]] if message["content"] or not calls else []), *calls]))
        parts += [f"  <{reply['role']}> {reply['content']}" for reply in step["replies"]]
    return "\n".join(parts) if parts else str(row["text"])
