"""A few groups from training for the report: a prompt, its best and its worst answer, and the reasons for their
rewards.

They are chosen by rule: in the last step, and in the first, the group whose rewards differ most; also the first group
of the last step in which every answer is wrong. `hone view` shows all groups.
"""

from __future__ import annotations

from collections.abc import Mapping

from hone.report.read import Row, StageRecord, rows
from hone.report.text import escape, number
from hone.report.why import Why, groups_of, weights_of, why_of

#: Characters of an answer that are shown.
MOST = 3000


def chosen(stage: StageRecord) -> list[tuple[int, str, list[Row]]]:
    """(step, why it was chosen, rows of the group); empty if the run has no rollouts."""
    files = stage.rollout_files()
    picks: list[tuple[int, str, list[Row]]] = []
    for (step, path), name in zip((files[-1:] + files[:1]) if len(files) > 1 else files, ("last", "first")):
        groups = groups_of([row for row in rows(path) if isinstance(row.get("text"), str)])
        mixed = max(groups, key=_spread, default=None)
        if mixed is not None and _spread(mixed) > 0:
            picks.append((step, f"of the {name} step, the group whose rewards differ most", mixed))
        wrong = next((group for group in groups if all(row.get("verdict") == "wrong" for row in group)), None)
        if name == "last" and wrong is not None:
            picks.append((step, "of the last step, the first group without a right answer", wrong))
    return picks


def html(stage: StageRecord) -> str:
    """The chosen groups, collapsed except for the first."""
    weights = weights_of(stage.config)
    parts = []
    for i, (step, reason, group) in enumerate(chosen(stage)):
        ordered = sorted(group, key=lambda row: -_total(row))
        shown = ordered[:1] if _spread(group) == 0 else [ordered[0], ordered[-1]]
        answers = "".join(_answer(row, why_of(row, weights)) for row in shown)
        summary = f"Step {step}, problem {group[0].get('problem_id')}"
        about = (
            f" – {reason}; {len(group)} answers, rewards {number(_total(ordered[-1]))} to {number(_total(ordered[0]))}"
        )
        parts.append(
            f'<details{" open" if i == 0 else ""}><summary>{escape(summary)}<span class="quiet">{escape(about)}</span>'
            f'</summary><div class="inside"><h4>Prompt</h4><pre>{escape(str(group[0].get("prompt", ""))[:MOST])}</pre>'
            f'<div class="pair">{answers}</div></div></details>'
        )
    return "\n".join(parts)


def _answer(row: Row, why: Why) -> str:
    title = f"Answer {row.get('index')}"
    verdict = f"– {row.get('verdict')}, reward {number(_total(row))}, {row.get('tokens')} tokens"
    right = [f"The right answer: {why.gold}"] if why.gold is not None else []
    reasons = "".join(f"<li>{escape(sentence)}</li>" for sentence in (*why.sentences, *right))
    return (
        f'<div><h4>{escape(title)} <span class="verdict">{escape(verdict)}</span></h4>'
        f'<pre>{_text(why)}</pre><ul class="events">{reasons}</ul></div>'
    )


def _text(why: Why) -> str:
    """The text with the parsed answer marked; the middle of a long text is left out."""
    length = sum(len(text) for text, _ in why.pieces)
    if length > MOST:
        whole = "".join(text for text, _ in why.pieces)
        cut = f"\n\n[… {length - MOST:,} characters left out …]\n\n"
        return f'{escape(whole[: MOST // 2])}<span class="cut">{escape(cut)}</span>{escape(whole[-MOST // 2 :])}'
    marked = (f"<mark>{escape(t)}</mark>" if kind == "answer" else escape(t) for t, kind in why.pieces)
    return "".join(marked)


def _total(row: Mapping[str, object]) -> float:
    total = row.get("total")
    return float(total) if isinstance(total, (int, float)) else 0.0


def _spread(group: list[Row]) -> float:
    totals = [_total(row) for row in group]
    return max(totals) - min(totals)
