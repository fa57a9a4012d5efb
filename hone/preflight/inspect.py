"""`hone data`: shows, checks, compares and deduplicates the problems of a task or a file.

A source is the name of a task, a recipe, or data: a file, or a folder of files. Every function takes problems and
returns lines; the command line prints them.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

from hone.base.settings import UserError
from hone.grade.answers import Unread, read
from hone.grade.maths import TARGET
from hone.grade.notation import normalise
from hone.grade.workers import Failure, Workers
from hone.recipe.load import is_data, load_for_task
from hone.tasks import make_task
from hone.tasks.base import Task, TracedTask, grade_all
from hone.tasks.knights.task import row_of_problem
from hone.tasks.rows.corpus import ngrams, question_of, rank, words
from hone.tasks.rows.faults import NO_ANSWER, grouped, remedy
from hone.tasks.rows.files import SUFFIXES, read_rows, write_rows
from hone.tasks.rows.problems import Pairs
from hone.tasks.rows.sources import read_source
from hone.tasks.rows.store import Row
from hone.tasks.rows.task import SPLITS, RowsTask, canonical
from hone.types import Problem, Split

Measure = Callable[[str], int]

#: Answers graded in one batch.
GRADED = 4096

KNIGHTS = {"quiz", "names", "solution", "statements"}


@dataclass(frozen=True)
class DataSource:
    """A task, opened to be inspected."""

    label: str
    task: Task
    seed: int

    def rows(self) -> dict[str, Sequence[tuple[Row, Problem]]]:
        """Split -> every row with its problem; for a task without rows, its problems as rows."""
        if isinstance(self.task, RowsTask):
            return dict(self.task.read().rows)
        return {split: [(_row(p, i), p) for i, p in enumerate(self.task.problems(split))] for split in SPLITS}

    def problems(self) -> dict[str, Sequence[Problem]]:
        """Split -> its problems."""
        return {
            split: pairs.problems if isinstance(pairs, Pairs) else [problem for _, problem in pairs]
            for split, pairs in self.rows().items()
        }


def open_source(source: str, overrides: Sequence[str] = ()) -> DataSource:
    """Open the task of a source. Raises UserError, as `hone.recipe.load.load_for_task` does."""
    recipe = load_for_task(source, overrides).stages[0]
    return DataSource(source, make_task(recipe.task, recipe.seed), recipe.seed)


def fitting(sources: Sequence[str], overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each source: `task.columns.ROLE=NAME` only for sources with a column NAME, others for all.

    Sources that are compared may have different columns. A name that no source has is kept, so that it is an error.
    """
    named = {text: match[1] for text in overrides if (match := re.match(r"task\.columns\.\w+=(\w+)", text))}
    if not named or len(sources) < 2:
        return [list(overrides) for _ in sources]
    there = [_columns(source) for source in sources]
    known = {name for columns in there for name in columns}
    return [[t for t in overrides if named.get(t) not in known or named[t] in columns] for columns in there]


def _columns(source: str) -> set[str]:
    """Names of the columns of a file or folder."""
    rows = (row for of_split in read_source(source).values() for row in of_split) if is_data(source) else ()
    return {name for row in rows for name in row}


def is_knights_file(source: str) -> bool:
    """Whether the file holds public knights rows, which have checks of their own."""
    path = Path(source)
    if path.suffix.lower() not in SUFFIXES or not path.is_file():
        return False
    rows = read_rows(path)
    return bool(rows) and rows[0].keys() >= KNIGHTS


def _row(problem: Problem, index: int) -> Row:
    if problem.task == "knights":
        return row_of_problem(problem, index)
    row: Row = {"messages": [dict(m) for m in problem.messages], "answer": problem.answer}
    more = {"level": problem.level, "domain": problem.domain, "solution": problem.reference}
    return {**row, **{key: value for key, value in more.items() if value}}


# --- show ------------------------------------------------------------------------------------


def counts(problems: Sequence[Problem], measure: Measure, unit: str) -> list[str]:
    """Lines with the lengths, levels and domains of problems."""
    lines = [f"{len(problems)} problems"]
    texts = {"question": map(question_of, problems), "solution": (p.reference for p in problems if p.reference)}
    for name, values in texts.items():
        lengths = sorted(map(measure, values))
        if lengths:
            high = lengths[min(len(lengths) - 1, round(0.95 * len(lengths)))]
            lines.append(
                f"{name}: median {statistics.median(lengths):g}, 95% {high}, most {lengths[-1]} {unit}"
                + (f", in {len(lengths)} of them" if len(lengths) < len(problems) else "")
            )
    for name in ("level", "domain"):
        table = Counter(getattr(p, name) for p in problems if getattr(p, name))
        if table:
            most = ", ".join(f"{key} {n}" for key, n in sorted(table.items(), key=lambda kv: _natural(kv[0]))[:30])
            lines.append(f"{name}s: {most}" + (f" and {len(table) - 30} more" if len(table) > 30 else ""))
    return lines


def _natural(key: str) -> tuple[float, str]:
    return (float(key) if key.replace(".", "", 1).isdigit() else float("inf"), key)


def measure_of(model: str | None) -> tuple[Measure, str]:
    """Tokens of a model's tokenizer (a hub id or a folder), or words."""
    if model is None:
        return lambda text: len(text.split()), "words"
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {model}: no tokenizer there: {str(error).splitlines()[0]}") from error
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False)), "tokens"


# --- check -----------------------------------------------------------------------------------


def check(source: DataSource) -> tuple[list[str], int]:
    """Lines to print, and the number of faults: invalid rows, and recorded answers that are unreadable or graded wrong.

    Duplicates and overlaps are reported but are not faults: they are left out when a task is loaded.
    """
    lines: list[str] = []
    faults: list[str] = []
    if isinstance(source.task, RowsTask):
        table = source.task.read()
        lines += [*table.report]
        faults += [*table.faults, *_unreadable(source.task, table.rows)]
    rows = source.problems()
    for split, problems in rows.items():
        copies = len(problems) - len(_forms(problems))
        lines.append(f"{split}: {len(problems)} problems, {copies} of them duplicates")
    for a, b in (("train", "test"), ("validation", "test"), ("train", "validation")):
        if rows.get(a) and rows.get(b):
            lines.append(f"{a} in {b}: {shared(rows[a], rows[b])} of {len(rows[a])}")
    faults += _not_correct(source, rows)
    shown = grouped(faults)
    if any(NO_ANSWER in line for line in shown) and isinstance(source.task, RowsTask):
        shown.append(remedy(source.task.read().solutions))
    return [*lines, f"{len(faults)} faults", *(f"  {line}" for line in shown)], len(faults)


def _unreadable(task: RowsTask, rows: Mapping[str, Sequence[tuple[Row, Problem]]]) -> list[str]:
    """Recorded answers that neither the exact comparison nor math-verify can read."""
    if task.grading not in ("maths", "exact"):
        return []
    problems = ((split, i, p) for split, pairs in rows.items() for i, (_, p) in enumerate(pairs, start=1))
    unread = [
        (place, p.answer)
        for *place, p in problems
        if isinstance(p.answer, str) and isinstance(read(normalise(p.answer)), Unread)
    ]
    results: Sequence[Any] = [Failure("verifier_error", "no number")] * len(unread)
    if task.grading == "maths" and unread:
        with Workers(TARGET) as workers:
            results = workers.map([(answer, answer) for _, answer in unread])
    return [
        f"{split} row {i}: the answer {answer!r} cannot be read: {result.message}"
        for ((split, i), answer), result in zip(unread, results)
        if isinstance(result, Failure)
    ]


def _not_correct(source: DataSource, rows: Mapping[str, Sequence[Problem]]) -> list[str]:
    """Problems whose own worked answer is not graded correct."""
    task = source.task
    if isinstance(task, RowsTask):  # first, because the test below would load its rows, including faulty ones
        style = "answer" if task.grading != "none" else None
    else:
        style = task.trace_styles[0] if isinstance(task, TracedTask) else None
    if style is None:
        return []
    untraced, faults = [], []
    remaining = (p for problems in rows.values() for p in problems)
    while chunk := list(islice(remaining, GRADED)):
        traced = []
        for p in chunk:
            try:
                traced.append((p, cast("TracedTask", task).trace(p, style, source.seed).text))
            except UserError as error:  # a countdown row without a solution
                untraced.append(str(error))
        grades = task.grade_all(traced) if isinstance(task, RowsTask) else grade_all(task, traced)
        faults += [
            f"{p.id}: its own answer {p.answer!r} is {g.verdict}" + (f" ({g.note})" if g.note else "")
            for (p, _), g in zip(traced, grades)
            if g.verdict != "correct"
        ]
    return untraced + faults


# --- overlap and dedup -----------------------------------------------------------------------


def shared(a: Iterable[Problem], b: Iterable[Problem]) -> int:
    """How many of `a` are in `b` by canonical form."""
    forms = _forms(b)
    return sum(rank(canonical(problem)) in forms for problem in a)


def _forms(problems: Iterable[Problem]) -> set[bytes]:
    """Hashes of the canonical forms, which take less memory than the forms."""
    return {rank(canonical(problem)) for problem in problems}


def sharing_ngram(a: Iterable[Problem], b: Iterable[Problem], n: int) -> int:
    """How many of `a` share n consecutive words with one of `b`."""
    runs = _runs(b, n)
    return sum(not runs.isdisjoint(ngrams(question_of(problem), n)) for problem in a)


def _runs(problems: Iterable[Problem], n: int) -> set[tuple[str, ...]]:
    return {run for problem in problems for run in ngrams(question_of(problem), n)}


def split_pairs(
    label: str, splits: Mapping[str, Sequence[Problem]]
) -> list[tuple[str, Sequence[Problem], Sequence[Problem]]]:
    """The pairs of splits to compare within one source. Raises UserError if there is only one split."""
    held = [("train", "test"), ("validation", "test"), ("train", "validation")]
    pairs = [(f"{a} in {b}", splits[a], splits[b]) for a, b in held if splits.get(a) and splits.get(b)]
    if not pairs:
        raise UserError(f"{label}: holds only {' and '.join(splits)}; give a second source to compare it with")
    return pairs


def overlap(pairs: Sequence[tuple[str, Sequence[Problem], Sequence[Problem]]], n: int) -> list[str]:
    """A table of (what, A, B): how much of A is in B."""
    lines = [f"{'A in B':24} {'of A':>7} {'of B':>7} {'the same':>9} {f'{n} words':>9}"]
    for label, a, b in pairs:
        lines.append(f"{label:24} {len(a):7} {len(b):7} {shared(a, b):9} {sharing_ngram(a, b, n):9}")
    short = sum(len(words(question_of(p))) < n for _, a, _ in pairs for p in a)
    return [*lines, f"({short} of A have fewer than {n} words, so they cannot match)"] if short else lines


def dedup(
    rows: Iterable[tuple[Row, Problem]], against: Sequence[Problem], n: int | None, out: Path
) -> tuple[int, int, int]:
    """Write the first row of each canonical form that is not in `against` and shares no n consecutive words with it.

    Returns (rows before, duplicates, rows that are in `against`). Raises UserError if the output file exists.
    """
    if out.exists():
        raise UserError(f"--out {out} exists already; give another name, or remove it")
    theirs, runs = _forms(against), _runs(against, n) if n else set()
    seen: set[bytes] = set()
    total = copies = leaked = 0

    def kept() -> Iterator[Row]:
        nonlocal total, copies, leaked
        for row, problem in rows:
            total += 1
            form = rank(canonical(problem))
            if form in seen:
                copies += 1
            elif form in theirs or (n and not runs.isdisjoint(ngrams(question_of(problem), n))):
                leaked += 1
            else:
                yield row
            seen.add(form)

    out.parent.mkdir(parents=True, exist_ok=True)
    write_rows(out, kept())
    return total, copies, leaked


def problems_of(source: DataSource, split: Split | None = None) -> list[Problem]:
    """All problems of a source as they are, or those of one split (rows of no split count as train)."""
    return [problem for _, problem in rows_of(source, split)]


def rows_of(source: DataSource, split: Split | None = None) -> Iterable[tuple[Row, Problem]]:
    """As `problems_of`, with the rows. Raises UserError if there is no such split."""
    rows = source.rows()
    if split == "train" and "train" not in rows:
        split = None if set(rows) == {"all"} else split
    chosen = [pairs for name, pairs in rows.items() if split in (None, name) and len(pairs)]
    if not chosen:
        raise UserError(
            f"{source.label}: no rows in split {split}; there are {', '.join(k for k, v in rows.items() if len(v))}"
        )
    return chain.from_iterable(chosen)
