"""The parts of the page, as HTML strings. All text of a model or of a file goes through `escape`."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from hone.environments.record import transcript
from hone.measure.stats import reflection
from hone.report.read import ROUTINE, WARNINGS, Row, RunRecord, StageRecord
from hone.report.story import Side, Story, sample_problems
from hone.report.style import CSS
from hone.report.tables import Cell, Table
from hone.report.text import duration, escape, marked, percent, size, tokens
from hone.types import Interval

LEVEL_UNITS = {"knights": "number of people", "countdown": "count of numbers"}
EVENTS_SHOWN = 60  # events that are listed; the rest is counted


def document(title: str, body: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n"
        f'<main class="page">\n{body}\n</main>\n</body>\n</html>\n'
    )


def section(key: str, title: str, inside: str) -> str:
    heading = f'<h2 id="{key}-h">{escape(title)}</h2>'
    return f'<section id="{key}" aria-labelledby="{key}-h">\n{heading}\n{inside}\n</section>'


def paragraph(text: str, kind: str = "") -> str:
    opening = f'<p class="{kind}">' if kind else "<p>"
    return f"{opening}{escape(text)}</p>" if text else ""


def figure(inline_svg: str, note: str = "") -> str:
    caption = f"<figcaption>{escape(note)}</figcaption>" if note else ""
    return f"<figure>{inline_svg}{caption}</figure>"


def tiles(story: Story) -> str:
    """Large tiles with accuracy, reward, length and reflection, before and after."""
    sides = [side for side in (story.before, story.after) if side]
    cards = [
        _tile("Accuracy", [(s.label, s.accuracy) for s in sides], percent, ""),
        _tile("Mean reward", [(s.label, s.reward) for s in sides], "{:.3f}".format, ""),
        _tile("Response length", [(s.label, s.tokens) for s in sides], tokens, "tokens"),
        _tile("Responses that reflect", [(s.label, s.reflects) for s in sides], percent, ""),
    ]
    return f'<div class="tiles">{"".join(cards)}</div>' if any(cards) else ""


def _tile(title: str, values: list[tuple[str, Interval | None]], show: Any, unit: str) -> str:
    lines = []
    for label, interval in values:
        if interval is not None:
            known = interval.n > 0 and not math.isnan(interval.low)
            span = f"{show(interval.low)}–{show(interval.high)}" if known else unit
            span += f" {unit}" if known and unit else ""
            kind = "was" if label == "before" else "now"
            lines.append(
                f'<div class="{kind}"><dt>{escape(label)}</dt><dd><b>{show(interval.value)}</b>'
                f'<span class="range">{escape(span)}</span></dd></div>'
            )
    return f'<div class="tile"><h2>{escape(title)}</h2><dl>{"".join(lines)}</dl></div>' if lines else ""


def samples(story: Story) -> str:
    """Before and after on the same problem, side by side."""
    sides = [side for side in (story.before, story.after) if side and side.shown]
    parts = []
    for i, (key, why) in enumerate(sample_problems(story)):
        chosen = [side for side in sides if key in side.shown]
        first = chosen[0].shown[key]
        about = f", level {first['level']}" if first.get("level") not in (None, "") else ""
        about += f" – {why}" if why else ""
        columns = "".join(_sample(side, side.shown[key]) for side in chosen)
        summary = f'Problem {escape(key)}<span class="quiet">{escape(about)}</span>'
        prompt_text = str(first.get("prompt") or "")
        prompt = f"<h4>Prompt</h4><pre>{marked(prompt_text, ())}</pre>" if prompt_text else ""
        opened = " open" if i < 2 else ""
        parts.append(
            f'<details{opened}><summary>{summary}</summary><div class="inside">{prompt}'
            f'<div class="pair">{columns}</div></div></details>'
        )
    return "\n".join(parts)


def _sample(side: Side, record: Row) -> str:
    text = transcript(record)
    verdict = f"{record.get('verdict', '?')}, {record.get('tokens', '?')} tokens"
    source = side.row.get("samples_file") or f"evals/{side.label}.jsonl"
    where = f"{side.stage.name}/{source}" if side.stage else str(source)
    where = f"{where}, sample {record.get('index', 0)}"
    return (
        f'<div><h4>{escape(side.label.capitalize())} <span class="verdict">– {escape(verdict)}</span></h4>'
        f"<pre>{marked(text, reflection.spans(text))}</pre>"
        f'<p class="quiet">{escape(where)}</p></div>'
    )


def first_seen(occurrences: Iterable[reflection.Occurrence], looked_at: str) -> Table | None:
    """A table of the first occurrence of each kind of reflection in training."""
    rows, values = [], []
    for o in occurrences:
        before = f"… {o.before}"
        span = (len(before), len(before) + len(o.phrase))
        quote = Cell(f"{before}{o.phrase}{o.after} …", marked=span)
        rows.append((Cell(o.kind), Cell(str(o.step)), Cell(f"{o.problem_id} #{o.index}"), quote))
        values.append((o.kind, o.step, o.problem_id, o.index, o.phrase))
    if not rows:
        return None
    columns, names = ("Kind", "Step", "Sample", "In its words"), ("kind", "step", "problem_id", "index", "phrase")
    return Table("first-seen", looked_at, columns, tuple(rows), tuple(values), names, prose=(3,))


def made(run: RunRecord) -> str:
    """Settings, seeds, versions, hardware and time: what is needed to reproduce the run."""
    facts: list[tuple[str, str]] = []
    results = run.results
    if isinstance(results.get("seconds"), (int, float)):
        facts.append(("Time, all stages", duration(results["seconds"])))
    if isinstance(results.get("peak_rss_bytes"), (int, float)):
        facts.append(("Peak memory", size(results["peak_rss_bytes"])))
    if isinstance(best := results.get("best"), dict) and best.get("steps"):
        steps = ", ".join(map(str, best["steps"]))
        where = f"step {steps} of {best.get('stage')}, chosen on the {best.get('split')} split"
        facts.append(("Best checkpoint", where))
    parts = [_facts(facts)]
    for stage in run.stages:
        if stage.started:
            title = f"Stage {stage.name} ({stage.kind})" if run.pipeline else f"Stage: {stage.kind}"
            parts.append(f"<h3>{escape(title)}</h3>")
            parts.append(_facts(_stage_facts(stage)))
            if stage.config:
                whole = escape(json.dumps(stage.config, indent=1, ensure_ascii=False, sort_keys=True))
                parts.append(
                    '<details class="bulk"><summary>Every setting</summary>'
                    f'<div class="inside"><pre>{whole}</pre></div></details>'
                )
    return "\n".join(part for part in parts if part)


def _stage_facts(stage: StageRecord) -> list[tuple[str, str]]:
    c, m = stage.config, stage.manifest
    wanted = {
        "Task": _first(c, "task.name"), "Model": _first(c, "model.path"),
        "Batch": _batch(stage), "Learning rate": _first(c, "optim.lr"),
        "Advantage, loss": " + ".join(str(v) for v in (_first(c, "algo.advantage"), _first(c, "algo.loss")) if v),
        "Reward": _pairs(_first(c, "reward.parts")), "Sampling": _pairs(_first(c, "sampling")),
        "Trace styles": _pairs(_first(c, "sft.styles")) if stage.kind == "sft" else None,
        "Seed": m.get("seed", c.get("seed")), "Command": m.get("command"),
        "Started": m.get("started"), "Time": _time(stage), "Code": m.get("code_version"),
        "Versions": _pairs(m.get("versions")), "Hardware": _pairs(m.get("hardware")),
    }  # fmt: skip
    if stage.kind == "sft":
        wanted = {k: v for k, v in wanted.items() if k not in ("Advantage, loss", "Reward", "Sampling")}
    return [(name, str(value)) for name, value in wanted.items() if value not in (None, "", {}, [])]


def _batch(stage: StageRecord) -> str:
    c, done = stage.config, f"{stage.steps_done:,} steps"
    if stage.kind == "rl" and c.get("prompts_per_step"):
        return f"{done} of {c['prompts_per_step']} prompts × {c.get('samples_per_prompt', '?')} samples"
    per_step = _first(c, "sft.examples_per_step")
    return f"{done} of {per_step} examples" if per_step else done


def _time(stage: StageRecord) -> str:
    whole = stage.seconds.get("seconds")
    if not whole:
        return ""
    parts = [
        f"{name} {duration(s)}"
        for name, s in sorted(stage.seconds.items(), key=lambda kv: -kv[1])
        if name != "seconds" and s >= 0.5
    ]
    return duration(whole) + (f" ({', '.join(parts)})" if parts else "")


def _first(tree: Row, path: str) -> Any:
    node: Any = tree
    for name in path.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _pairs(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{str(k).replace('_', ' ')} {v}" for k, v in value.items() if v not in (None, "", {}, []))
    return "" if value is None else str(value)


def _facts(facts: list[tuple[str, str]]) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    return f'<dl class="facts">{rows}</dl>' if rows else ""


def events(run: RunRecord) -> str:
    """Warnings, other events, counts of routine events, and unreadable files; each list with a title."""
    rows = [(str(event.get("kind", "?")), _event(run, stage, event)) for stage in run.stages for event in stage.events]
    counted = Counter(kind for kind, _ in rows if kind in ROUTINE)
    warnings = [line for kind, line in rows if kind in WARNINGS]
    others = [line for kind, line in rows if kind not in WARNINGS | ROUTINE]
    unread = []
    for stage in run.stages:
        unread += [f"{stage.name}: {note}" for note in dict.fromkeys(stage.notes)]
        if bad := stage.metrics.non_finite:
            unread.append(f"{stage.name}: a value that is not finite at {len(bad)} step(s), first at step {bad[0]}")
    routine = [f"{n:,} × {kind.replace('_', ' ')}" for kind, n in sorted(counted.items())]
    lists = (("Warnings", warnings), ("Also happened", others), ("Routine", routine), ("Problems", unread))
    return "\n".join(_event_list(title, lines) for title, lines in lists if lines)


def _event_list(title: str, lines: list[str]) -> str:
    more = [f"{len(lines) - EVENTS_SHOWN:,} more are in events.jsonl."] if len(lines) > EVENTS_SHOWN else []
    items = "".join(f"<li>{escape(line)}</li>" for line in (*lines[:EVENTS_SHOWN], *more))
    return f'<h3>{escape(title)}</h3><ul class="events">{items}</ul>'


def _event(run: RunRecord, stage: StageRecord, event: Row) -> str:
    step = event.get("step")
    where = [stage.name] * run.pipeline + ([] if step is None else [f"step {step}"])
    message = str(event.get("message") or "")[:500]
    kind = str(event.get("kind", "?")).replace("_", " ")
    return kind + (f" ({', '.join(where)})" if where else "") + (f": {message}" if message else "")


def unfinished(run: RunRecord) -> str:
    """A banner if the run is not finished."""
    if run.finished:
        return ""
    states = []
    for stage in run.stages:
        planned = stage.steps_planned
        if not stage.started:
            states.append(f"{stage.name} has not started")
        elif not stage.finished:
            states.append(f"{stage.name} is at {stage.steps_done:,}{f' of {planned:,}' if planned else ''} steps")
    state = "; ".join(states) or "its results have not been written"
    return (
        '<div class="banner" role="note"><p><strong>This run is not finished:</strong> '
        f"{escape(state)}. This report shows its results so far.</p></div>"
    )
