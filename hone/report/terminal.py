"""`hone runs show RUN --step N`: the answers of a step as text, safe for a terminal.

for line in show(Path("runs/demo"), step=20, group=3, answer=None):
    print(line)
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hone.base import checksums, jsonl
from hone.base.settings import UserError
from hone.base.visible import visible
from hone.environments.record import transcript
from hone.report.text import minus
from hone.report.why import PartScore, groups_of, weights_of, why_of
from hone.runs import layout, seal

#: Characters of a problem's id and of an answer in the list of groups.
WIDTH = 28


def show(run: Path, step: int | None, group: int | None, answer: int | None) -> Iterator[str]:
    """Lines to print. Raises UserError if the run has no such step, group or answer."""
    if answer is not None and group is None:
        raise UserError(f"--answer {answer}: give the group too, as in --group 0")
    stage, steps = _stage(run)
    chosen = max(steps) if step is None else step
    if chosen not in steps:
        raise UserError(f"{stage}: no answers of step {chosen}; there are steps {min(steps)} to {max(steps)}")
    groups = groups_of(jsonl.read(stage / layout.rollouts_name(chosen)))
    if group is None:
        yield from _overview(stage, chosen, groups)
        return
    if group >= len(groups):
        raise UserError(f"--group {group}: step {chosen} has groups 0 to {len(groups) - 1}")
    rows = groups[group]
    if answer is not None:
        rows = [row for row in rows if row.get("index") == answer]
        if not rows:
            raise UserError(f"--answer {answer}: the group has answers 0 to {len(groups[group]) - 1}")
    yield from _group(stage, chosen, group, rows)


def _stage(run: Path) -> tuple[Path, list[int]]:
    """The last stage that has answers, and its steps."""
    if not run.is_dir():
        raise UserError(f"{run}: no such folder; give the folder of a run, such as runs/demo")
    for stage in reversed(seal.stage_folders(run)):
        if steps := [step for step, _ in layout.rollout_files(stage)]:
            return stage, steps
    raise UserError(f"{run}: no answers yet; a run of reinforcement learning writes them at the end of each step")


def _overview(stage: Path, step: int, groups: list[list[dict[str, Any]]]) -> Iterator[str]:
    answers = sum(map(len, groups))
    yield visible(f"{layout.label_of(stage)}, step {step}: {len(groups)} groups, {answers} answers")
    yield f"{'group':>5}  {'problem':{WIDTH}}  {'reward':>13}  {'correct':>7}  {'tokens':>9}"
    for number, rows in enumerate(groups):
        totals = [float(row["total"]) for row in rows if isinstance(row.get("total"), (int, float))]
        span = f"{min(totals):.3g} to {max(totals):.3g}" if totals else "-"
        right = sum(row.get("verdict") == "correct" for row in rows)
        lengths = [int(row.get("tokens") or 0) for row in rows]
        problem = visible(rows[0].get("problem_id"))[:WIDTH]
        yield f"{number:>5}  {problem:{WIDTH}}  {span:>13}  {f'{right}/{len(rows)}':>7}  {min(lengths)}-{max(lengths)}"
    yield from _turn_times(stage, step)
    yield visible(f"one group in full: hone runs show {stage} --step {step} --group 0")


def _turn_times(stage: Path, step: int) -> Iterator[str]:
    """The seconds of each turn of the step's episodes; empty for answers in one turn."""
    rows = [row for row in jsonl.read(stage / "timings.jsonl") if row.get("step") == step]
    turns = rows[-1].get("turns", []) if rows else []
    if turns:
        yield f"{'turn':>5}  {'episodes':>8}  {'generation':>10}  {'environment':>11}  {'slowest':>8}   seconds, means"
    for number, turn in enumerate(turns):
        seconds = f"{turn['generation']:>10.3f}  {turn['environment']:>11.4f}  {turn['slowest']:>8.3f}"
        yield f"{number + 1:>5}  {turn['rollouts']:>8.0f}  {seconds}"


def _group(stage: Path, step: int, number: int, rows: list[dict[str, Any]]) -> Iterator[str]:
    weights = _weights(stage)
    yield visible(f"{layout.label_of(stage)}, step {step}, group {number}, problem {rows[0].get('problem_id')}")
    yield "--- prompt"
    yield visible(rows[0].get("prompt", ""))
    for row in rows:
        why = why_of(row, weights)
        yield visible(f"--- answer {row.get('index')}: {row.get('verdict')}, {row.get('tokens')} tokens")
        yield visible(transcript({"text": "", **row}))
        yield "why this reward:"
        for sentence in (*why.sentences, *map(_part, why.parts)):
            yield textwrap.fill(visible(sentence), 100, initial_indent="  ", subsequent_indent="    ")
        for name, value in (("read as the answer", row.get("extracted")), ("right answer", why.gold)):
            if value is not None:
                yield textwrap.indent(f"{name}: {visible(value)}", "  ")


def _part(part: PartScore) -> str:
    value = "did not apply" if part.value is None else minus(f"{part.value:.4g}")
    return f"{part.name}: {value}" + (
        f" × {minus(f'{part.weight:.4g}')}" if part.weight is not None else " (recorded only)"
    )


def _weights(stage: Path) -> dict[str, float]:
    path = stage / "config.resolved.json"
    config = checksums.read_json(path, dict, "restore it from a copy") if path.is_file() else {}
    return weights_of(config)
