"""Recognises the columns of rows: question, answer, worked solution, level, domain.

    recognise(rows).describe()        # 'question = problem, answer = answer, solution = solution, level = level'

Usual names are tried in order; columns with equal content in every row count as one. A column inside another is written
with a dot, as in `reward_model.ground_truth`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from hone.base.settings import UserError
from hone.tasks.rows.store import Row

Role = Literal["question", "messages", "answer", "solution", "level", "domain"]
ROLES: tuple[Role, ...] = get_args(Role)
PROMPT: frozenset[Role] = frozenset(("question", "messages"))  # a row has one of the two

#: Usual names. `prompt` may hold a question or messages; its content decides.
NAMES: Mapping[Role, tuple[str, ...]] = {
    "question": ("question", "problem", "prompt", "query", "instruction", "input"),
    "messages": ("messages", "prompt", "conversations", "conversation"),
    "answer": (
        *("answer", "final_answer", "ground_truth", "expected_answer", "gold_answer", "gold", "target", "label"),
        *("reward_model.ground_truth", "output", "response"),
    ),
    "solution": ("solution", "worked_solution", "rationale", "reasoning", "cot", "explanation", "extra_info.answer"),
    "level": ("level", "difficulty", "extra_info.level"),
    "domain": ("subject", "domain", "category", "type", "topic", "extra_info.subject"),
}

SAMPLE = 200  # rows that are inspected


@dataclass(frozen=True)
class Columns:
    """The column of each role, if it has one. `kind`: knights or countdown, if the rows are of that task."""

    kind: Literal["text", "knights", "countdown"]
    of: Mapping[Role, str] = field(default_factory=dict)

    def describe(self) -> str:
        if self.kind != "text":
            return f"rows of the task {self.kind}"
        return ", ".join(f"{role} = {column}" for role, column in self.of.items())

    def get(self, row: Mapping[str, Any], role: Role) -> Any:
        """The value of a role in a row, or None."""
        return value(row, self.of[role]) if role in self.of else None


def value(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column, with dots for one inside another; None if it is missing."""
    if column in row:
        return row[column]
    inner: Any = row
    for part in column.split("."):
        if not isinstance(inner, Mapping) or part not in inner:
            return None
        inner = inner[part]
    return inner


def recognise(rows: Sequence[Row], configured: Mapping[Role, str] | None = None, need_answer: bool = True) -> Columns:
    """The mapping of columns: those in `given` are used as they are, the others are recognised.

    Raises UserError, which lists the candidates and says how to choose, if a role has several candidates or none.
    """
    configured = configured or {}
    sample = list(rows[:: max(1, len(rows) // SAMPLE)])
    if not sample:
        raise UserError("there are no rows, so no columns")
    present = _present(sample)
    for role, column in configured.items():
        if column not in present:
            raise UserError(f"task.columns.{role}: no column {column!r}; there are {', '.join(sorted(present))}")
    if not configured:
        if {"quiz", "names", "solution", "statements"} <= present:
            return Columns("knights")
        if {"nums", "target"} <= present and isinstance(value(sample[0], "nums"), list):
            return Columns("countdown")
    columns: dict[Role, str] = {}
    for role in ROLES:
        if role in configured:
            columns[role] = configured[role]
        elif role not in PROMPT or not PROMPT & configured.keys():
            chosen = _choose(role, sample, present - set(configured.values()))
            if chosen is not None:
                columns[role] = chosen
    if columns.keys() - configured.keys() >= PROMPT:
        _same_prompt(columns, sample)
        del columns["messages"]
    lacking: list[Role] = [] if PROMPT & columns.keys() else ["question"]
    if need_answer and not columns.keys() & {"answer", "solution", "messages"}:
        lacking.append("answer")
    if lacking:
        raise _missing(lacking, present, sample)
    return Columns("text", columns)


def _present(rows: Sequence[Row]) -> set[str]:
    """Columns, and those one level below, that are not empty in every row."""
    names: set[str] = set()
    for row in rows:
        for key, inner in row.items():
            if inner is not None:
                names.add(str(key))
            if isinstance(inner, Mapping):
                names.update(f"{key}.{k}" for k, v in inner.items() if v is not None)
    return names


def is_messages(cell: Any) -> bool:
    """Whether the value is a list of {"role", "content"} (or ShareGPT's {"from", "value"})."""
    return isinstance(cell, list) and all(isinstance(m, Mapping) and ({"role", "from"} & m.keys()) for m in cell)


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Messages as {"role", "content"}. Raises ValueError for one that holds anything but text."""
    roles = {"human": "user", "gpt": "assistant"}
    made = []
    for message in messages:
        role = str(message.get("role") or message.get("from"))
        content = message.get("content") if "content" in message else message.get("value")
        made.append({"role": roles.get(role, role), "content": _content_text(content)})
    return made


def _content_text(content: Any) -> str:
    """The text of a message, whose content is text or a list of parts such as {"type": "text", "text": ...}."""
    parts = content if isinstance(content, list) else [content or ""]
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise ValueError(f"a message holds {repr(part)[:80]}; only text can be read")
        texts.append(text)
    return "".join(texts)


def _fits(role: Role, cell: Any) -> bool:
    if role == "messages":
        return is_messages(cell)
    if role == "question":
        return isinstance(cell, str)
    if role == "answer":
        return isinstance(cell, str | int | float) or (isinstance(cell, list) and len(cell) == 1)
    return isinstance(cell, str | int | float) and not isinstance(cell, bool)


def _choose(role: Role, rows: Sequence[Row], present: set[str]) -> str | None:
    """The only candidate; the first of several that are equal in every row."""
    candidates = []
    for name in NAMES[role]:
        cells = [value(row, name) for row in rows] if name in present else []
        if any(cell is not None for cell in cells) and all(cell is None or _fits(role, cell) for cell in cells):
            candidates.append((name, [_plain(cell) for cell in cells]))
    if role in ("question", "answer") and candidates:
        others = [name for name, cells in candidates[1:] if not _agree(candidates[0][1], cells)]
        others = [name for name in others if "." not in name]  # a column inside is a copy, or of another kind
        if others:
            names = ", ".join([candidates[0][0], *others])
            raise UserError(
                f"which column is the {role}? It may be {names}; choose with task.columns.{role}={candidates[0][0]}"
            )
    return candidates[0][0] if candidates else None


def _plain(cell: Any) -> str:
    """Normalises for comparison: the text after ####, or in a box, is the answer of a longer text."""
    text = str(cell[0] if isinstance(cell, list) and len(cell) == 1 else cell)
    return re.sub(r"[\s,$]+", "", text.rsplit("####", 1)[-1])


def _agree(a: Sequence[str], b: Sequence[str]) -> bool:
    return all(x == y or x == "None" or y == "None" for x, y in zip(a, b))


def _same_prompt(columns: Mapping[Role, str], rows: Sequence[Row]) -> None:
    """Raises UserError if the question and the messages of a row differ."""
    for row in rows:
        question, messages = (value(row, columns[role]) for role in ("question", "messages"))
        texts = " ".join(str(m.get("content") or m.get("value") or "") for m in messages or ())
        if question and messages and question.strip() not in texts:
            raise UserError(
                f"which column is the prompt? {columns['question']} and {columns['messages']} differ; choose with "
                f"task.columns.question={columns['question']} or task.columns.messages={columns['messages']}"
            )


def _missing(roles: Sequence[Role], present: set[str], rows: Sequence[Row]) -> UserError:
    """An error that lists the known names and the columns, and says why a column with a known name is unsuitable."""
    lines = []
    for role in roles:
        lines.append(f"no column is known to be the {role} (known: {', '.join(NAMES[role])})")
        for name in (name for name in NAMES[role] if name in present):
            cell = next(cell for row in rows if (cell := value(row, name)) is not None and not _fits(role, cell))
            lines.append(f"  {name} is there, but {_WANTED[role]}; it holds {repr(cell)[:80]}")
    lines.append(f"there are {', '.join(sorted(present)) or 'no columns that hold anything'}")
    lines.append("say which with " + " ".join(f"task.columns.{role}=NAME" for role in roles))
    if "answer" in roles:
        lines.append("or give task.grading=none if only your own reward needs the answer")
    return UserError("\n".join(lines))


_WANTED: Mapping[Role, str] = {
    "question": "a question is text, or a list of messages",
    "answer": "an answer is text, a number or a list of one of them",
}
