"""Problems from your own data: a hub id, a folder, or a JSONL, JSON, CSV or parquet file.

    task: {name: dataset, source: data/physics}      # train.jsonl and test.jsonl there
    task: {name: dataset, source: my/questions.csv, columns: {question: text, answer: result}}

The usual columns are recognised (`hone.tasks.rows.columns`) and printed; splits are the source's own, and missing ones
are cut from train (`hone.tasks.rows.corpus`). One row of a JSONL file:

    {"question": "How many legs do 3 cats have?", "answer": "12"}
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, model_validator

from hone.base.settings import Section, UserError
from hone.grade.extract import boxed, extract
from hone.grade.maths import Maths
from hone.grade.restated import is_restated
from hone.tasks.countdown.task import CountdownConfig, CountdownTask, numbers_of
from hone.tasks.countdown.task import canonical_form as countdown_form
from hone.tasks.knights.logic import canonical_form as knights_form
from hone.tasks.knights.logic import parse_statements
from hone.tasks.knights.rows import puzzle_of
from hone.tasks.knights.task import KnightsConfig, KnightsTask, problem_of
from hone.tasks.rows import faults
from hone.tasks.rows.columns import Columns, Role, read_messages, recognise
from hone.tasks.rows.corpus import canonical_text, divide, question_of
from hone.tasks.rows.files import open_rows, read_rows
from hone.tasks.rows.problems import Index, Pairs, Problems, code_digest, index_of
from hone.tasks.rows.sources import Rows, read_source
from hone.tasks.rows.store import Joined, MadeRows, Row, digest_of
from hone.types import Example, Grade, Problem, Split

SYSTEM = "Solve the problem step by step. Give the final answer on the last line, in the form Answer: \\boxed{...}"
SYSTEM_TEXT = "Think about the question step by step. Give the final answer on the last line, in the form Answer: ..."

SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class RowsConfig(Section):
    """Settings of every task whose problems are rows. Sizes: None means all; a split that the source lacks is cut from
    train, by default a tenth and at most 500 problems. A split given as a file consists of the file's rows."""

    source: str | None = None  # a file, a folder, or a hub id
    subset: str | None = None  # the hub's configuration, or a folder below the source
    columns: dict[Role, str] = {}  # if the columns do not have the usual names
    train: NonNegativeInt | None = None
    validation: NonNegativeInt | None = None
    test: NonNegativeInt | None = None
    train_file: str | None = None
    validation_file: str | None = None
    test_file: str | None = None
    domain_file: str | None = None  # JSONL rows of {"id" or "question", "domain"}
    extraction: Literal["flexible", "strict"] = "flexible"  # strict: only a marked answer counts

    @model_validator(mode="after")
    def _possible(self) -> RowsConfig:
        if self.source is None and not (self.train_file or self.test_file):
            raise ValueError("source: not given; name a file, a folder or a hub id, or give train_file")
        return self

    def without_effect(self) -> list[str]:
        notes = []
        if self.subset is not None and self.source is None:
            notes.append("subset has no effect without source")
        if self.train_file and self.validation_file and self.test_file and "source" in self.changed():
            notes.append("source has no effect beside the files of all three splits")
        return notes


class DatasetConfig(RowsConfig):
    """Settings of a dataset. `grading`: maths (numbers, LaTeX, words; math-verify for the rest), exact (without
    math-verify: answers that cannot be decided are wrong), text (the same words), none (only your own reward judges;
    every verdict is `ungraded`)."""

    name: Literal["dataset"] = "dataset"
    grading: Literal["maths", "exact", "text", "none"] = "maths"
    levels: tuple[str, ...] = Field(default=(), description="only these; empty: all")


@dataclass(frozen=True)
class Read:
    """The rows of a source as they were read."""

    rows: Mapping[str, Sequence[tuple[Row, Problem]]]  # by split: train, validation, test or all
    faults: Sequence[str]  # the fault of each row that cannot be used
    report: tuple[str, ...]  # how the columns were recognised
    index: Index
    solutions: str | None  # the column of worked solutions


class RowsTask:
    """A `TracedTask` and a `BatchTask` over rows; tasks of known data sets derive from it."""

    name = "dataset"
    trace_styles: tuple[str, ...] = ("worked", "answer")
    grading: Literal["maths", "exact", "text", "none"] = "maths"

    def __init__(self, config: RowsConfig, seed: int = 0) -> None:
        self.config = config
        self._other: KnightsTask | CountdownTask | None = None
        self._system = ""
        if self.grading in ("maths", "exact"):
            self._maths = Maths(library=self.grading == "maths")

    @property
    def system(self) -> str:
        """The default system prompt; empty if the data has messages, which include their own instructions."""
        self.splits  # noqa: B018
        return self._system

    def problems(self, split: Split) -> Sequence[Problem]:
        """Read once; the recognised columns and the counts are printed then. Raises UserError for unsuitable rows."""
        return self.splits[split]

    def grade(self, problem: Problem, text: str) -> Grade:
        return self.grade_all([(problem, text)])[0]

    def grade_all(self, items: Sequence[tuple[Problem, str]]) -> list[Grade]:
        """Grades of many answers at once, so that the verifier's workers are all busy."""
        if self._other is not None:
            return [self._other.grade(problem, text) for problem, text in items]
        strict = self.config.extraction == "strict"
        if self.grading in ("maths", "exact"):
            grades = self._maths.grades([(problem.answer, text) for problem, text in items], strict)
            return [_worked_out(problem, grade) for (problem, _), grade in zip(items, grades)]
        answers = [extract(text, strict) for _, text in items]
        if self.grading == "none":
            return [Grade("ungraded", answer) for answer in answers]
        return [_same_words(problem, answer) for (problem, _), answer in zip(items, answers)]

    def trace(self, problem: Problem, style: str, seed: int) -> Example:
        """A worked answer. Style `worked`: the solution and the answer; `answer`: the answer alone. Raises UserError
        for a row without a solution."""
        if style not in RowsTask.trace_styles:
            raise UserError(f"{self.name}: no trace style {style!r}; there are {', '.join(RowsTask.trace_styles)}")
        if self._other is not None:
            return self._other.trace(problem, self._other.trace_styles[0], seed)
        answer = f"\\boxed{{{problem.answer}}}" if self.grading in ("maths", "exact") else str(problem.answer)
        if style == "answer":
            return Example(problem, f"Answer: {answer}", style)
        if problem.reference is None:
            raise UserError(
                f"{self.name}: {problem.id} has no worked solution to learn from; name its column with "
                "task.columns.solution=NAME, or take style answer"
            )
        return Example(problem, f"{problem.reference}\nAnswer: {answer}", style)

    # --- from rows to problems ---------------------------------------------------------------

    @cached_property
    def splits(self) -> Mapping[Split, Problems]:
        """The problems of each split. Raises UserError, with the number of faulty rows, if there are any."""
        read = self.read()
        if read.faults:
            why = faults.summary(read.faults, len(read.faults) + len(read.index.rows), read.solutions)
            raise UserError(f"{self.name}: {self.config.source or ''} {why}")
        config, index = self.config, read.index
        ranks = {split: index.ranks[slice(at.start, at.stop)] for split in read.rows for at in [index.places(split)]}
        places, report = divide(self.name, ranks, train=config.train, validation=config.validation, test=config.test)
        if not len(places["train"]) and read.rows.keys() == {"test"} and config.train != 0:
            remedy = "rename it, or give task.train_file"
            report = (*report, f"{self.name}: by its name, everything is test and nothing is train; {remedy}")
        splits = {split: Problems(self._rows, self._made, index, these) for split, these in places.items()}
        if not splits["train"].worked.all():
            self.trace_styles = ("answer",)
        print("\n".join([*read.report, *report]), file=sys.stderr)
        return splits

    def read(self) -> Read:
        """Every row with its problem, duplicates included. Raises UserError if the columns are not recognised."""
        return self._read

    @cached_property
    def _read(self) -> Read:
        rows = {split: _joined(these) for split, these in self.rows().items() if len(these)}
        if not rows:
            raise UserError(f"{self._where}: no rows; write one JSON object on each line, or name another file")
        try:
            columns = recognise(Joined(list(rows.values())), self.config.columns, self.grading != "none")
        except UserError as error:
            raise UserError(f"{self._where}: {error}") from None
        self._rows, self.columns = rows, columns
        self._other = _task_of(columns)
        self._system = self._system_of(columns)
        self._domains = _domains(self.config.domain_file)
        index = index_of(rows, self._made, self._key(rows))
        lines = [f"{self.name}: columns: {columns.describe()}"]
        if self._domains and index.without_domain:
            lines.append(f"{self.name}: {index.without_domain} problems have no label in {self.config.domain_file}")
        pairs = {split: Pairs(Problems(rows, self._made, index, index.places(split))) for split in rows}
        return Read(pairs, index.faults, tuple(lines), index, columns.of.get("solution"))

    @property
    def _where(self) -> str:
        return f"{self.name}: {self.config.source}" if self.config.source is not None else self.name

    def _key(self, rows: Mapping[str, Joined]) -> str | None:
        """A key of the rows, the settings and the code that determine the problems."""
        code = code_digest(*type(self).__mro__)
        if code is None or any(these.key is None for these in rows.values()):
            return None
        elsewhere = {"source", "subset", "train", "validation", "test", *(f"{split}_file" for split in SPLITS)}
        settings = self.config.model_dump(mode="json", exclude=elsewhere | {"domain_file"})
        labels = digest_of(Path(self.config.domain_file)) if self.config.domain_file else None
        parts = [code, type(self).__qualname__, self.grading, settings, labels, {k: v.key for k, v in rows.items()}]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def rows(self) -> Rows:
        """Split -> its rows: from the files given, else from the source."""
        files = self.files()
        if self.config.source is None or len(files) == len(SPLITS):
            return files
        return {**read_source(self.config.source, self.config.subset), **files}

    def files(self) -> Rows:
        """Rows of the splits that are given as files."""
        paths = {split: getattr(self.config, f"{split}_file") for split in SPLITS}
        return {split: Joined([open_rows(path)]) for split, path in paths.items() if path}

    def wanted(self, problem: Problem) -> bool:
        """Whether a problem has one of the wanted levels or subjects."""
        return True

    def _system_of(self, columns: Columns) -> str:
        if self._other is not None:
            return self._other.system
        if "messages" in columns.of:
            return ""
        return SYSTEM_TEXT if self.grading == "text" else "" if self.grading == "none" else SYSTEM

    def _made(self, row: Row) -> tuple[Problem, str] | None:
        """The problem of a row and its canonical form; None if it is not wanted."""
        problem, form = self._problem(row, self.columns)
        if self._domains:
            question = form if self._other is None else canonical_text(question_of(problem))
            label = self._domains.get(problem.id) or self._domains.get(question)
            problem = replace(problem, domain=label) if label else problem
        return (problem, form) if self.wanted(problem) else None

    def _problem(self, row: Row, columns: Columns) -> tuple[Problem, str]:
        if columns.kind == "knights":
            problem = problem_of(puzzle_of(row), str(row["quiz"]))
            return problem, canonical(problem)
        if isinstance(self._other, CountdownTask):
            problem = self._other.problem_of(*numbers_of(row), messages=row.get("messages"))
            extra = {key: cell for key, cell in row.items() if key != "messages" and _is_json(cell)}
            return replace(problem, extra=extra), canonical(problem)
        return self._text_problem(row, columns)

    def _text_problem(self, row: Row, columns: Columns) -> tuple[Problem, str]:
        messages, reply = _messages(row, columns)
        solution = columns.get(row, "solution") or reply
        recorded = columns.get(row, "answer")
        if self.grading == "none":
            answer: Any = recorded
        else:
            answer, worked = answer_of(recorded, solution)
            solution = solution or worked
        level, domain = (columns.get(row, role) for role in ("level", "domain"))
        form = canonical_text("\n".join(m["content"] for m in messages if m["role"] == "user"))
        used = {column.split(".")[0] for column in columns.of.values()}
        problem = Problem(
            id=f"{self.name}-{hashlib.sha256(form.encode()).hexdigest()[:12]}",
            task=self.name,
            messages=messages,
            answer=answer,
            level=re.sub(r"(?i)^level\s*(?=\d)", "", str(level)).strip() if level is not None else "",
            domain=str(domain) if domain is not None else "",
            reference=_plain_solution(str(solution)) if solution else None,
            extra={key: cell for key, cell in row.items() if key not in used and _is_json(cell)},
        )
        return problem, form


class DatasetTask(RowsTask):
    """Problems from your own rows."""

    config: DatasetConfig

    def __init__(self, config: DatasetConfig, seed: int = 0) -> None:
        self.grading = config.grading
        super().__init__(config, seed)

    def wanted(self, problem: Problem) -> bool:
        return not self.config.levels or problem.level in self.config.levels


def _worked_out(problem: Problem, grade: Grade) -> Grade:
    """The grade, but wrong if the answer only repeats an expression of the question."""
    if grade.verdict != "correct" or grade.extracted is None:
        return grade
    restated = is_restated(question_of(problem), str(problem.answer), grade.extracted)
    return replace(grade, verdict="wrong") if restated else grade


def canonical(problem: Problem) -> str:
    """The form by which problems are compared: of puzzles their meaning, else the words of the question."""
    if problem.task == "knights":
        return knights_form(parse_statements(problem.extra["statements"]))
    if problem.task == "countdown":
        return countdown_form(**problem.answer)
    return canonical_text(question_of(problem))


def _task_of(columns: Columns) -> KnightsTask | CountdownTask | None:
    """The known task that these rows belong to, if any."""
    if columns.kind == "knights":
        return KnightsTask(KnightsConfig())
    return CountdownTask(CountdownConfig()) if columns.kind == "countdown" else None


def answer_of(recorded: Any, solution: Any = None) -> tuple[str, str | None]:
    """The answer in the cells of a row, and the worked solution that leads to it.

    The answer is the text after `####` (GSM8K), else the last box (MATH), else the whole cell. Raises ValueError if
    there is no answer.
    """
    if isinstance(recorded, list) and len(recorded) == 1:
        recorded = recorded[0]
    if recorded is None:
        recorded = solution
        if isinstance(recorded, str) and "####" not in recorded and boxed(recorded) is None:
            raise ValueError(faults.NO_ANSWER)
    if isinstance(recorded, bool) or not isinstance(recorded, str | int | float):
        raise ValueError(f"the answer is {repr(recorded)[:80]}, but must be text or a number")
    if isinstance(recorded, float) and not math.isfinite(recorded):
        raise ValueError(f"the answer is {recorded}, which is not a number")
    text = str(recorded).strip()
    worked, mark, last = text.rpartition("####")
    inside = boxed(text)
    answer = last.strip() if mark else inside.strip() if inside is not None else text
    if not answer:
        raise ValueError(f"the answer is empty: {text[-80:]!r}")
    return answer, (worked.strip() or None) if mark else text if inside is not None and text != answer else None


def _messages(row: Row, columns: Columns) -> tuple[tuple[Mapping[str, str], ...], str | None]:
    """The prompt, and the assistant's last message if the row's messages end with one."""
    if "messages" not in columns.of:
        question = columns.get(row, "question")
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"column {columns.of['question']}: {question!r} is not a question")
        return ({"role": "user", "content": question.strip()},), None
    made = read_messages(columns.get(row, "messages") or ())
    reply = made.pop()["content"] if made and made[-1]["role"] == "assistant" else None
    if not any(m["role"] == "user" and m["content"].strip() for m in made):
        raise ValueError(f"column {columns.of['messages']}: no message of the user")
    return tuple(made), reply


def _plain_solution(text: str) -> str:
    """A GSM8K solution without calculator annotations (<<48/2=24>>) and without its last line."""
    text = re.sub(r"<<[^<>\n]*>>", "", text)
    return (text.rpartition("####")[0] if "####" in text else text).strip()


def _same_words(problem: Problem, answer: str | None) -> Grade:
    if answer is None:
        return Grade("malformed")
    same = canonical_text(answer) == canonical_text(str(problem.answer))
    return Grade("correct" if same else "wrong", answer)


def _domains(path: str | None) -> dict[str, str]:
    """Labels of domains, by problem id or by the canonical form of the question."""
    labels: dict[str, str] = {}
    for number, row in enumerate(read_rows(path) if path else (), start=1):
        key = row.get("id") or row.get("question") or row.get("problem")
        if not isinstance(key, str) or not row.get("domain"):
            raise UserError(f"{path}: row {number}: expected domain, and id or question; found {', '.join(row)}")
        labels[key if row.get("id") else canonical_text(key)] = str(row["domain"])
    return labels


def _joined(rows: Joined | Sequence[Row]) -> Joined:
    return rows if isinstance(rows, Joined) else Joined([MadeRows(rows)])  # users' tasks may return lists


def _is_json(cell: Any) -> bool:
    try:
        json.dumps(cell)
    except (TypeError, ValueError):
        return False
    return True
