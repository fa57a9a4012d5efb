"""The settings of a stage and where each comes from, and the differences between two stages."""

from __future__ import annotations

from typing import Any

from hone.recipe.recipe import chosen
from hone.report.live.library import StageFolder, flat, read_object
from hone.report.live.tail import read_rows
from hone.runs.changes import changes

#: The folder and the name of a run do not affect what it computes.
NAMES = ("name", "runs")


def of_stage(stage: StageFolder) -> dict[str, Any]:
    """Every setting with its origin: `default`, `recipe`, or `resumed` (changed when the run was resumed)."""
    config = stage.config
    written = flat(chosen(config)) if config else {}
    resumed = _resumed(stage)
    rows = []
    for key, value in flat(config).items():
        origin = "resumed" if key in resumed else "recipe" if key in written else "default"
        rows.append({"key": key, "value": value, "origin": origin, "before": resumed.get(key)})
    return {"settings": rows, "manifest": flat(read_object(stage.folder, "manifest.json"))}


def differences(first: StageFolder, second: StageFolder) -> dict[str, Any]:
    """Settings in which two stages differ, compared in both directions, since either may lack a setting."""
    a, b = first.config, second.config
    there = {change.key: [change.old, change.new] for change in changes(a, b, NAMES)}
    back = {change.key: [change.new, change.old] for change in changes(b, a, NAMES)}
    merged = {**back, **there}
    return {"differences": [{"key": key, "a": values[0], "b": values[1]} for key, values in sorted(merged.items())]}


def _resumed(stage: StageFolder) -> dict[str, Any]:
    """Setting -> its value before it was changed."""
    before: dict[str, Any] = {}
    for event in read_rows(stage.folder, "events.jsonl"):
        for change in event.get("settings") or () if event.get("kind") == "config_changed" else ():
            if isinstance(change, dict):
                before.setdefault(str(change.get("key")), change.get("old"))
    return before
