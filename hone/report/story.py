"""The results of a run in words: the evaluations before and after training, compared.

The words follow the numbers: a fall is called a fall, and a difference whose interval contains zero is not called a
rise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hone.base import stats
from hone.measure.stats import reflection
from hone.report.read import Row, RunRecord, StageRecord, rows
from hone.report.tables import to_interval
from hone.report.text import p_value, percent, tokens
from hone.types import Interval


@dataclass(frozen=True)
class Side:
    """One evaluation: its row, and its samples."""

    label: str  # "before" | "after"
    row: Row
    stage: StageRecord | None
    accuracy: Interval | None
    reward: Interval | None  # the mean of the training reward; None if it is the accuracy, or was not computed
    tokens: Interval | None
    reflects: Interval | None
    outcomes: Mapping[str, list[float]]  # problem id -> 1/0 per sample
    shown: Mapping[str, Row]  # problem id -> its first sample, with its text

    @property
    def step(self) -> int:
        return int(self.row.get("step", 0))

    @property
    def sampling(self) -> str:
        """The settings in words: temperature 1, top-p 1, ..., one sample per problem."""
        settings = self.row.get("sampling")
        settings = settings if isinstance(settings, dict) else {}
        written = {key: value for key, value in settings.items() if value or key == "temperature"}  # 0, []: not used
        parts = [f"{key.replace('_', ' ')} {_plain(value)}" for key, value in written.items()]
        counts = {len(v) for v in self.outcomes.values()}
        if counts and max(counts) > 1:
            parts.append(f"{max(counts)} samples per problem")
        return ", ".join(parts)


def _plain(value: object) -> str:
    return " ".join(map(repr, value)) if isinstance(value, (list, tuple)) else str(value)


@dataclass(frozen=True)
class Story:
    before: Side | None
    after: Side | None
    comparison: stats.Comparison | None


def tell(run: RunRecord) -> Story:
    """The story of a run: its first evaluation called `before` and its last called `after`, of RL stages if there are
    any."""
    before, after = _find(run, "before"), _find(run, "after")
    comparison = None
    if before and after:
        shared = sorted(before.outcomes.keys() & after.outcomes.keys())
        if shared:
            first, second = ([sum(s.outcomes[i]) / len(s.outcomes[i]) for i in shared] for s in (before, after))
            comparison = stats.compare(first, second)
    return Story(before, after, comparison)


def without_reflection(story: Story) -> Story:
    """For a task that gives no occasion to reflect."""
    before, after = (side and replace(side, reflects=None) for side in (story.before, story.after))
    return replace(story, before=before, after=after)


def _find(run: RunRecord, label: str) -> Side | None:
    for stages in ([s for s in run.line() if s.kind in ("rl", "distil")], run.stages):
        rows_labelled = [(stage, row) for stage in stages for row in stage.evals if row.get("label") == label]
        if rows_labelled:
            stage, row = rows_labelled[0] if label == "before" else rows_labelled[-1]
            return _side(label, row, stage)
    summary = run.results.get(label)
    return _side(label, summary, None) if isinstance(summary, dict) else None


def _side(label: str, row: Row, stage: StageRecord | None) -> Side:
    verdicts: list[Row] = []
    by_problem: dict[str, list[tuple[float, float]]] = {}  # (tokens, reflects) of each sample
    shown: dict[str, Row] = {}
    path = stage.samples_file(row) if stage else None
    for record in rows(path, stage.notes if stage else None) if path else ():
        if not isinstance(record.get("text"), str) or "problem_id" not in record or "verdict" not in record:
            continue
        key = str(record["problem_id"])
        verdicts.append({"problem_id": key, "verdict": str(record["verdict"])})
        measured = float(record.get("tokens") or 0), float(reflection.is_reflective(record["text"]))
        by_problem.setdefault(key, []).append(measured)
        shown.setdefault(key, record)
    return Side(
        label,
        row,
        stage,
        to_interval(row.get("accuracy")),
        to_interval(row.get("reward")),
        _mean(row.get("response_tokens"), [[t for t, _ in v] for v in by_problem.values()], 0.01),
        _mean(row.get("reflection_rate"), [[r for _, r in v] for v in by_problem.values()], 1e-6),
        stats.outcomes(verdicts),
        shown,
    )


def _mean(recorded: Any, groups: list[list[float]], tolerance: float) -> Interval | None:
    """The recorded mean; with an interval if the samples exist and have the same mean."""
    if not isinstance(recorded, (int, float)):
        return stats.accuracy(groups) if groups else None
    if groups:
        computed = stats.accuracy(groups)
        if abs(computed.value - recorded) <= tolerance * max(1.0, abs(recorded)):
            return computed
    return Interval(float(recorded), float("nan"), float("nan"), 0)


def verb(comparison: stats.Comparison | None, before: float, after: float) -> str:
    """rose | fell | did not measurably change: by the interval of the difference, if there is one."""
    if comparison and comparison.difference.low <= 0 <= comparison.difference.high:
        return "did not measurably change"
    return "rose" if after > before else "fell" if after < before else "did not change"


def headline(run: RunRecord, story: Story) -> str:
    """The accuracy before and after, and the mean reward, if that is something else."""
    accuracy, reward = _accuracy_headline(story), _reward_headline(story)
    if accuracy and reward:
        return f"{accuracy}; {reward}"
    return accuracy or reward[:1].upper() + reward[1:] or f"Run {run.name}"


def _reward_headline(story: Story) -> str:
    known = [(side.label, side.reward) for side in (story.before, story.after) if side and side.reward]
    return f"mean reward {', '.join(f'{mean.value:.3f} {label}' for label, mean in known)}" if known else ""


def _accuracy_headline(story: Story) -> str:
    before, after = story.before, story.after
    if before and after and before.accuracy and after.accuracy:
        a, b = before.accuracy.value, after.accuracy.value
        word = verb(story.comparison, a, b)
        if word in ("rose", "fell"):
            return f"Accuracy {word} from {percent(a, 0)} to {percent(b, 0)}"
        return f"Accuracy {word}: {percent(a, 0)} before, {percent(b, 0)} after"
    only = after or before
    if only and only.accuracy:
        return f"Accuracy {percent(only.accuracy.value, 0)} {only.label} training"
    return ""


def sentences(run: RunRecord, story: Story) -> Iterator[str]:
    """The lead paragraph, sentence by sentence."""
    before, after = story.before, story.after
    side = after or before
    if side is not None and side.accuracy is None and "reward/mean" in side.row:
        yield from _by_reward(before, after)
        return
    if side is None or side.accuracy is None:
        yield "No evaluation before or after training has been recorded yet."
        return
    yield _opening(run, side)
    if before and after and before.accuracy and after.accuracy:
        yield f"Before, it was {_with_range(before.accuracy)}."
        yield _difference(story.comparison)
        yield from _by_reward(before, after)
        yield from _changes(before, after)
    else:
        yield from _by_reward(before, after)


def _by_reward(before: Side | None, after: Side | None) -> Iterator[str]:
    """Sentences on the training reward of the held-out answers."""
    for side in (before, after):
        if side is not None and "reward/mean" in side.row:
            split = str(side.row.get("split", "held-out"))
            yield f"The mean reward on the {split} split is {side.row['reward/mean']:.3f} {side.label} training."


def _opening(run: RunRecord, side: Side) -> str:
    assert side.accuracy is not None
    split = side.row.get("split")
    kind = {"test": "held-out problems", "validation": "validation problems"}.get(str(split), "problems")
    problems = len(side.outcomes) or side.accuracy.n
    steps = sum(stage.steps_done for stage in run.reinforced())
    when = (
        "Before training" if side.label == "before" else f"After {steps:,} steps of RL" if steps else "After training"
    )
    counted = "1 problem" if problems == 1 else f"{problems:,} {kind}"
    return f"{when}, the model solves {_with_range(side.accuracy)} of {counted}."


def _with_range(interval: Interval) -> str:
    return f"{percent(interval.value)} (95% interval {percent(interval.low)} to {percent(interval.high)})"


def _difference(comparison: stats.Comparison | None) -> str:
    if comparison is None:
        return "The two evaluations share no problem, so no paired test was made."
    d = comparison.difference
    points = f"{100 * d.value:+.1f} percentage points ({100 * d.low:+.1f} to {100 * d.high:+.1f})".replace(
        "-", "\N{MINUS SIGN}"
    )
    same = f"{d.n:,} problems of both evaluations" if d.n > 1 else "one problem of both evaluations"
    return f"The difference is {points}; {p_value(comparison.p_value)}, {comparison.method}, paired on the {same}."


def _changes(before: Side, after: Side) -> Iterator[str]:
    if before.tokens and after.tokens:
        word = _moved(before.tokens, after.tokens, "grew", "shrank", "stayed close")
        was, now = (tokens(side.value) for side in (before.tokens, after.tokens))
        yield f"Responses {word} from {was} to {now} tokens on average."
    if before.reflects and after.reflects:
        word = _moved(before.reflects, after.reflects, "rose", "fell", "stayed close")
        yield (
            f"The share of responses that reflect (they go back, check, or name a contradiction) {word} "
            f"from {percent(before.reflects.value)} to {percent(after.reflects.value)}."
        )


def _moved(a: Interval, b: Interval, up: str, down: str, same: str) -> str:
    """ "rose" or "fell" if the intervals do not overlap, else "stayed close"; without intervals, by the values."""
    if b.value == a.value or (b.low <= a.high and a.low <= b.high):
        return same + ("," if same else "")
    return up if b.value > a.value else down


def sample_problems(story: Story, limit: int = 5) -> list[tuple[str, str]]:
    """(problem id, why it is shown): newly solved ones first, but also failures, to avoid showing only the best."""
    before, after = story.before, story.after
    if not before or not after:
        side = before or after
        return [(key, "") for key in sorted(side.shown)[:limit]] if side else []
    shared = sorted(before.shown.keys() & after.shown.keys())

    def right(side: Side, key: str) -> bool:
        return side.shown[key]["verdict"] == "correct"

    groups: dict[str, list[str]] = {
        "wrong before, right after": [],
        "still wrong": [],
        "right before, wrong after": [],
        "right both times": [],
    }
    for key in shared:
        was, now = right(before, key), right(after, key)
        why = "right both times" if was and now else "still wrong" if not now and not was else ""
        groups[why or ("right before, wrong after" if was else "wrong before, right after")].append(key)
    mended = groups["wrong before, right after"]
    mended.sort(key=lambda key: (not reflection.is_reflective(after.shown[key]["text"]), key))
    quota = {
        "wrong before, right after": limit - 2,
        "still wrong": 1,
        "right before, wrong after": 1,
        "right both times": 1,
    }
    return [(key, why) for why, keys in groups.items() for key in keys[: quota[why]]]
