"""Interrogation of knights and knaves: the model learns a person's statement only by asking for it.

The environment `knights_interrogation`, for the task knights with `quiz: hidden`::

    People: Zoey and Oliver.
                                    Ask Zoey.
    Zoey says: Oliver is a knave.
                                    Ask Oliver.
    Oliver says: Zoey is a knight and Oliver is a knight.
                                    <think>...</think> <answer>(1) Zoey is a knight ...</answer>

A message of one question is answered; any other is the answer, and the episode ends. `environment.max_turns` limits the
questions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hone.base.settings import UserError
from hone.environments.base import Environment, Message, Observation
from hone.tasks.knights.task import puzzle_of_problem
from hone.tasks.knights.text import BRIEF_SAYING, telling
from hone.types import Problem

_QUESTION = re.compile(r"\s*Ask (\w[\w -]{0,60}?)\.?\s*")


class KnightsInterrogation(Environment):
    instant = True

    def reset(self, problem: Problem, seed: int) -> Sequence[Message] | None:
        if "statements" not in problem.extra:
            raise UserError(f"{problem.id}: knights_interrogation needs problems of the task knights")
        self._puzzle = puzzle_of_problem(problem)
        self._heard: set[int] = set()
        return None

    def step(self, message: Message) -> Observation:
        question = _QUESTION.fullmatch(message["content"])
        if question is None:
            return Observation(done=True)
        names = self._puzzle.names
        if question[1] not in names:
            return _reply(f"There is no {question[1]} here.", useful=False)
        person = names.index(question[1])
        useful = person not in self._heard
        self._heard.add(person)
        return _reply(telling(BRIEF_SAYING, self._puzzle, person), useful)


def _reply(text: str, useful: bool) -> Observation:
    return Observation(
        ({"role": "user", "content": text},), parts={"questions": 1.0, "useful_questions": float(useful)}
    )
