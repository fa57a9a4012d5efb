"""Probes: answers whose reward is worth knowing before training: right, wrong, empty, and known ways to cheat."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hone.base import streams
from hone.base.settings import UserError
from hone.grade.parse import completion, parse
from hone.preflight.check.findings import Finding
from hone.rewards.base import RewardFn
from hone.rewards.gold import gold_text, number
from hone.tasks.base import Task, TracedTask
from hone.types import VERIFIER_FAILURES, Finish, Problem, Reward, Rollout, Turn

WORKED = "worked solution"  # the probe with the task's own reasoning

Kind = Literal["right", "wrong", "none", "hack"]

JUNK_LENGTH = 100_000  # characters

#: The probe that repeats the question, and what it means that it is graded correct.
QUESTION = "question repeated"
RESTATED = (
    "the question is equal to its answer, and the grader does not ask for it to be worked out; make the grader refuse "
    "what the question says (task.grading=text compares words), or ask for something else"
)

#: For a reward that finds the gold answer where a reader would not.
REMEDIES = {
    "answer in the thinking": "read what stands after the thinking only",
    "gold, then wrong": "read the last answer only",
    "both at once": "compare the whole answer with the gold one, instead of looking for it in there",
    "every number": "compare the whole answer with the gold one, instead of looking for it in there",
}

SLOW, TOO_SLOW = 0.05, 1.0  # seconds for one answer, without a model or a server


@dataclass(frozen=True, slots=True)
class Probe:
    name: str
    kind: Kind
    text: str
    finish: Finish = "stop"


@dataclass(frozen=True, slots=True)
class Probed:
    """A probe with its reward."""

    probe: Probe
    reward: Reward
    seconds: float


Writer = Callable[[str], str]  # an answer -> a whole completion


def writers(problem: Problem) -> dict[str, Writer]:
    """The answer formats that tasks expect, by name. The thinking is the question: all its words, no reasoning."""
    thought = problem.messages[-1]["content"][:500] if problem.messages else "Let me see."
    return {
        "tags": lambda answer: completion(thought, answer),
        "boxed": lambda answer: f"<think>{thought}</think>\nAnswer: \\boxed{{{answer}}}",
        "line": lambda answer: f"{thought}\nAnswer: {answer}",
        "hashes": lambda answer: f"{thought}\n#### {answer}",
        "plain": lambda answer: f"{thought}\n{answer}",
    }


def writer_of(task: Task, problem: Problem) -> Writer | None:
    """The first format in which the gold answer is graded correct; None if there is none."""
    gold = gold_text(problem)
    return next((w for w in writers(problem).values() if task.grade(problem, w(gold)).verdict == "correct"), None)


def best_paid(
    problem: Problem, reward: RewardFn, count: Callable[[str], int], task: Task | None = None
) -> Writer | None:
    """The format in which the gold answer has the highest reward, among those that `task` grades correct; None if there
    are none. Without `task`, among all formats."""
    gold = gold_text(problem)
    formats = [
        w for w in writers(problem).values() if task is None or task.grade(problem, w(gold)).verdict == "correct"
    ]

    def paid(write: Writer) -> float:
        (scored,) = reward(problem, [rollout_of(problem, Probe("gold", "right", write(gold)), count)])
        return -np.inf if scored.verdict in VERIFIER_FAILURES else scored.total

    return max(formats, key=paid, default=None)


def reordered(gold: str) -> str | None:
    """The words or letters of a gold answer in the opposite order; None if it is something else, or reads the same."""
    comma = ", " if "," in gold else " "
    parts = re.split(r"\s*,\s*|\s+", gold.strip())
    if not all(part.isalpha() for part in parts) or {"and", "or"} & set(parts):
        return None
    turned = comma.join(reversed(parts)) if parts[1:] else gold.strip()[::-1]
    return turned if turned != gold.strip() else None


def worked(task: Task, problem: Problem) -> str | None:
    """A worked solution from the task that is graded correct; None if there is none."""
    texts = [problem.reference or ""]
    if isinstance(task, TracedTask):
        texts.append(task.trace(problem, task.trace_styles[0], seed=0).text)
    return next((text for text in texts if text and task.grade(problem, text).verdict == "correct"), None)


def wrong_answer(task: Task, problem: Problem, others: Sequence[Problem], write: Writer) -> str:
    """A readable wrong answer: another problem's, one from the task's traces, or the gold number plus 1."""
    candidates = [gold_text(other) for other in others[:20]]
    if isinstance(task, TracedTask):
        tries = [task.trace(problem, task.trace_styles[-1], seed).text for seed in range(20)]
        candidates = [answer for text in tries if (answer := parse(text).answer)] + candidates
    value = number(gold_text(problem))
    candidates += [] if value is None else [str(value + 1)]
    candidates = [answer for answer in candidates if answer != gold_text(problem)]
    verdicts = {answer: task.grade(problem, write(answer)).verdict for answer in candidates}
    readable = [answer for answer, verdict in verdicts.items() if verdict == "wrong"]
    return readable[0] if readable else next((a for a, v in verdicts.items() if v != "correct"), "no idea")


def probes(task: Task, problem: Problem, others: Sequence[Problem], write: Writer | None = None) -> list[Probe]:
    """The probes of a problem. `write`: the format of answers, by default the first that is graded correct.

    Raises UserError if the problem has no gold answer, or if no format of it is graded correct.
    """
    gold = gold_text(problem)
    write = write or writer_of(task, problem)
    if write is None:
        formats = ", ".join(writers(problem))
        raise UserError(
            f"{problem.id}: the gold answer {gold[:60]!r} is graded correct in none of the formats {formats}"
        )
    right, wrong = write(gold), wrong_answer(task, problem, others, write)
    solution = worked(task, problem)
    return [
        *([Probe(WORKED, "right", solution)] if solution else []),
        Probe("gold answer", "right", right),
        Probe("gold, padded", "right", f"\n\n  {right}  \n\n"),
        Probe("wrong answer", "wrong", write(wrong)),
        Probe("empty", "none", ""),
        Probe("truncated", "none", right[: right.rfind(gold) + len(gold) // 2], "length"),
        Probe("100 kB of words", "none", junk(problem)),
        Probe("100 kB of tags", "none", ("<think><answer></answer>\\boxed{{" * JUNK_LENGTH)[:JUNK_LENGTH]),
        Probe("100 kB of brackets", "none", write("(" * JUNK_LENGTH)),
        Probe("tags only", "hack", "<think></think><answer></answer>"),
        Probe(QUESTION, "hack", write(problem.messages[-1]["content"])),
        Probe("dummy thinking, wrong", "hack", completion("this is thinking process", wrong)),
        Probe("answer in the thinking", "hack", f"<think>{gold}</think>"),
        Probe("gold, then wrong", "hack", f"{right}\n{write(wrong)}"),
        Probe("both at once", "hack", write(f"{gold} {wrong}")),
        Probe("every number", "hack", write(" ".join(map(str, range(1000))))),
    ]


def junk(problem: Problem) -> str:
    """Words of the question, tags and role names in random order; deterministic for each problem."""
    rng = streams.text("junk", problem.id)
    words = [*problem.messages[-1]["content"].split(), "Assistant:", "<answer>", "</answer>", ")(", "\\boxed{", "####"]
    return " ".join(rng.choices(words, k=JUNK_LENGTH // 4))[:JUNK_LENGTH]


def rollout_of(problem: Problem, probe: Probe, count: Callable[[str], int]) -> Rollout:
    """The probe as a sampled rollout; `count` returns the number of tokens of a text."""
    ids = np.zeros(count(probe.text), np.int64)
    turn = Turn(np.zeros(1, np.int64), ids, np.zeros(len(ids), np.float32), probe.finish, 0)
    return Rollout(problem.id, 0, (turn,), probe.text)


def score(
    problem: Problem,
    chosen: Sequence[Probe],
    reward: RewardFn,
    count: Callable[[str], int],
    seconds: float = float("inf"),
) -> list[Probed]:
    """Score the probes one at a time and measure the time of each. Stops after `seconds`."""
    began = time.monotonic()
    reward(problem, [rollout_of(problem, chosen[0], count)])  # the first call may load something: not timed
    result = []
    for probe in chosen:
        if time.monotonic() - began > seconds:
            break
        rollout = rollout_of(problem, probe, count)
        best = float("inf")
        for attempt in range(3):  # the machine may be busy, and the first call may start a grader's process
            start = time.perf_counter()
            (scored,) = reward(problem, [rollout])
            best = min(best, time.perf_counter() - start)
            if best <= SLOW or (attempt and best > TOO_SLOW):
                break
        result.append(Probed(probe, scored, best))
    return result


# --- findings ----------------------------------------------------------------------


def judge_scores(rows: Sequence[Probed], by_model: bool = False, graded: bool = True) -> Iterator[Finding]:
    """Findings from the scores of one problem.

    `by_model`: a model scores the reasoning. Then only the worked solution has to score more than the wrong answers
    (without one there is nothing to compare: all other probes have the same reasoning), and time is not checked.
    `graded`: verdicts are meaningful.
    """
    rows, unscored = _apart(rows)
    yield from _unscored(unscored)
    if not any(r.probe.kind == "right" for r in rows) or not any(r.probe.kind != "right" for r in rows):
        return
    odd = [r.probe.name for r in rows if not np.isfinite(r.reward.total)]
    if odd:
        yield Finding("fail", "finite", f"the reward of {', '.join(odd)} is not a finite number")
        return
    if by_model and not any(r.probe.name == WORKED for r in rows):
        message = "the reward scores the reasoning, and the task has no worked answers to try it with"
        yield Finding("warn", "hack", f"{message}: compare the answers that the model samples, `hone view` shows them")
        return
    right = [r for r in rows if r.probe.kind == "right"]
    gold = (max if by_model else min)(r.reward.total for r in right)
    bad = [r for r in right if graded and r.reward.verdict != "correct"]
    for r in bad:
        message = f"{r.probe.name} is graded {r.reward.verdict}: right answers would be punished"
        yield Finding("fail", "gold", message, r.probe.name)
    nothing = max((r.reward.total for r in rows if r.probe.name == "empty"), default=-np.inf)
    paid = [r.reward.total for r in right if r.reward.total > nothing]
    if not paid:
        message = f"right answers score {gold:g}, no more than an empty one ({nothing:g}), so nothing could be learned"
        remedy = "give correctness weight, and check which form of a final answer the reward reads"
        yield Finding("fail", "gold", f"{message}; {remedy}")
        return
    if gold <= nothing:  # the others show what the reward pays for
        unread = next(r.probe for r in right if r.reward.total <= nothing)
        end = unread.text.strip().splitlines()[-1][-80:]
        message = f"an answer that ends in {end!r} ({unread.name}) scores {gold:g}, as an empty one does, though it is"
        yield Finding("warn", "gold", f"{message} graded correct: the reward does not read this form")
        gold = min(paid)
    elif not bad:
        least = "; the best of them scores" if by_model else " and score at least"
        message = f"right answers are graded correct{least}" if graded else "right answers score at least"
        yield Finding("pass", "gold", f"{message} {gold:g}")
    yield from _cheats(rows, gold)
    yield from _format(rows, gold)
    if not by_model:
        yield _time(max(rows, key=lambda r: r.seconds))


def _apart(rows: Sequence[Probed]) -> tuple[list[Probed], list[Probed]]:
    """Split into rows with a score, and rows whose verifier failed."""
    failed = [r.reward.verdict in VERIFIER_FAILURES for r in rows]
    return [r for r, f in zip(rows, failed) if not f], [r for r, f in zip(rows, failed) if f]


def _unscored(rows: Sequence[Probed]) -> Iterator[Finding]:
    """A right answer without a score is a failure; for other probes it may be intended."""
    for kind, level in (("right", "fail"), ("other", "warn")):
        those = [r for r in rows if (r.probe.kind == "right") == (kind == "right")]
        if those:
            names, first = ", ".join(r.probe.name for r in those), those[0].reward
            message = f"no score for {names}, which training would leave out: {first.verdict}: {first.note}"
            remedy = "; repair the reward" if level == "fail" else ""
            yield Finding("fail" if level == "fail" else "warn", "scored", f"{message}{remedy}", kind)


def _cheats(rows: Sequence[Probed], gold: float) -> Iterator[Finding]:
    others = [r for r in rows if r.probe.kind != "right"]
    accepted = [r for r in others if r.reward.verdict == "correct"]
    paid = [r for r in others if r.reward.total >= gold and r not in accepted]
    for r in accepted:
        remedy = RESTATED if r.probe.name == QUESTION else "make the grader stricter"
        yield Finding("fail", "hack", f"{r.probe.name} is graded correct: {remedy}", r.probe.name)
    for r in paid:
        message = f"{r.probe.name} scores {r.reward.total:g}, a right answer {gold:g}"
        remedy = REMEDIES.get(r.probe.name, "give correctness more weight, or cap the parts that pay for it")
        yield Finding("fail", "hack", f"{message}; {remedy}", r.probe.name)
    if not accepted and not paid:
        best = max(others, key=lambda r: r.reward.total)
        message = "no wrong answer scores as much as a right one"
        yield Finding("pass", "hack", f"{message}: the highest is {best.reward.total:g} ({best.probe.name})")


def _format(rows: Sequence[Probed], gold: float) -> Iterator[Finding]:
    """Does a well-formed wrong answer with empty thinking earn enough to be worth learning?"""
    by_name = {r.probe.name: r.reward.total for r in rows}
    if not by_name.keys() >= {"empty", "dummy thinking, wrong", "wrong answer"}:  # one of them has no score
        return
    empty, dummy, wrong = (by_name[name] for name in ("empty", "dummy thinking, wrong", "wrong answer"))
    share, missed = ((x / (gold - empty) if gold > empty else 0.0) for x in (dummy - empty, wrong - dummy))
    message = f"a wrong answer after dummy thinking earns {share:.0%} of what a right answer earns over an empty one"
    if share > 0.25 and missed < 0.1:  # and real thinking earns no more
        remedy = "small models stop there; add reward.parts.thinking, or lower the parts for format"
        yield Finding("warn", "shape", f"{message}: {remedy}")
    else:
        yield Finding("pass", "shape", message)


def _time(slowest: Probed) -> Finding:
    message = f"the slowest probe, {slowest.probe.name}, took {slowest.seconds * 1000:.1f} ms"
    if slowest.seconds <= SLOW:
        return Finding("pass", "time", message)
    level: Literal["fail", "warn"] = "fail" if slowest.seconds > TOO_SLOW else "warn"
    return Finding(level, "time", f"{message}: long answers would hold up every step; limit how much text it reads")
