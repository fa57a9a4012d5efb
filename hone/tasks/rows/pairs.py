"""Prompts with the answers to imitate, from a hub id, a folder, or a JSONL, JSON, CSV or parquet file.

    pairs = read_pairs("data/answers.jsonl")        # {"train": [Example, ...]}; also "all", "validation"
    train, held_out = split(pairs["train"], 0.1)

Usual columns are recognised: `prompt` and `completion` (text, or lists of messages), `messages` that end with the
assistant's (ShareGPT's `conversations` too), `question`, `instruction` or `problem` with `response`, `answer`, `output`
or `solution`. One row: {"prompt": "How many legs do 3 cats have?", "completion": "Four each, so 12."}
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from hone.base.settings import UserError
from hone.tasks.rows.columns import is_messages, read_messages
from hone.tasks.rows.corpus import canonical_text, question_of, rank
from hone.tasks.rows.sources import read_source
from hone.tasks.rows.store import Row
from hone.types import Example, Problem

PROMPTS = ("prompt", "question", "instruction", "problem", "query", "input")
COMPLETIONS = ("completion", "response", "output", "answer", "solution", "chosen")
CONVERSATIONS = ("messages", "conversations", "conversation")


def read_pairs(source: str) -> dict[str, list[Example]]:
    """Split (train, validation, test or all) -> its pairs. Raises UserError naming the first row that is not a pair."""
    by_split: dict[str, list[Example]] = {}
    for split, rows in read_source(source).items():
        made = []
        for number, row in enumerate(rows, start=1):
            try:
                made.append(pair(row))
            except ValueError as error:
                raise UserError(f"{source}: {split} row {number}: {error}") from error
        by_split[split] = made
    return by_split


def pair(row: Row) -> Example:
    """The pair of a row. Raises ValueError if the row has no prompt or no completion."""
    for name in CONVERSATIONS:
        if is_messages(row.get(name)) and not _first(row, COMPLETIONS[:2]):
            return _example(row, read_messages(row[name]))
    prompt, completion = _first(row, PROMPTS) or _first(row, CONVERSATIONS), _first(row, COMPLETIONS)
    if not prompt or not completion:
        what = "prompt" if not prompt else "completion"
        names = (*PROMPTS, *CONVERSATIONS) if not prompt else COMPLETIONS
        raise ValueError(f"no {what}: none of {', '.join(names)} among its columns {', '.join(row)}")
    answer = (
        read_messages(completion) if is_messages(completion) else [{"role": "assistant", "content": str(completion)}]
    )
    question = read_messages(prompt) if is_messages(prompt) else [{"role": "user", "content": str(prompt)}]
    return _example(row, [*question, *answer])


def _first(row: Row, names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name)), None)


def _example(row: Row, messages: Sequence[Mapping[str, str]]) -> Example:
    *conversation, answer = messages
    if answer["role"] != "assistant" or not answer["content"].strip():
        raise ValueError("the last message is not the assistant's, or is empty")
    if not conversation or conversation[-1]["role"] != "user":
        raise ValueError("no message of the user precedes the answer")
    if sum(message["role"] == "user" for message in conversation) > 1:
        raise ValueError("a conversation of several turns; give one question with its answer")
    digest = hashlib.sha256(canonical_text(conversation[-1]["content"]).encode()).hexdigest()[:12]
    level = row.get("level")
    form = row.get("canonical")
    problem = Problem(
        str(row.get("problem_id") or digest),
        "pairs",
        tuple(conversation),
        None,
        "" if level is None else str(level),
        extra={"canonical": form} if isinstance(form, str) else {},
    )
    return Example(problem, answer["content"], "data")


def key_of(problem: Problem) -> str:
    """The form by which prompts are compared: the column `canonical` if there is one, else the words of the
    question."""
    return problem.extra.get("canonical") or canonical_text(question_of(problem))


def split(pairs: Sequence[Example], share: float) -> tuple[list[Example], list[Example]]:
    """(training pairs, held-out pairs): all answers to a problem are on one side; which problems are held out depends
    only on the problems.

    At least one problem is on each side. Raises UserError if there are fewer than two.
    """
    keys = sorted({key_of(pair.problem) for pair in pairs}, key=rank)
    if len(keys) < 2:
        raise UserError(f"{len(keys)} problem(s) cannot be divided into training and held-out problems; give more")
    held = set(keys[: min(max(1, round(share * len(keys))), len(keys) - 1)])
    return [p for p in pairs if key_of(p.problem) not in held], [p for p in pairs if key_of(p.problem) in held]
