"""Worked answers of several turns, for supervised training: the turns are given, the environment replies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hone.base.settings import UserError
from hone.environments.base import ModelCall
from hone.environments.conversation import Conversation
from hone.environments.formats import reader_of
from hone.environments.play import Episodes
from hone.learn.samples import to_samples
from hone.types import Example, Group, Reward, Rollout, Sample, Turn


def demonstrated(example: Example, episodes: Episodes) -> list[Sample]:
    """The samples to imitate: every turn of the example is trained, the replies are not.

    Tokens are those that an episode with the same turns would have. Raises ValueError for a turn that cannot follow its
    prompt, UserError if the episode ends before the last turn.
    """
    environment, problem = episodes.make(), example.problem
    opening = environment.reset(problem, seed=0) or problem.messages
    if isinstance(opening, ModelCall):
        raise UserError("environment.program: a program has no worked answers; use stage: rl")
    conversation = Conversation(episodes.renderer, opening, environment.tools)
    renderer = episodes.renderer
    read = reader_of(renderer.tokenizer, environment.tools, renderer.is_raw)
    texts = (*example.turns, example.text)
    turns: list[Turn] = []
    for number, text in enumerate(texts):
        ids = renderer.completion_ids(text)
        turns.append(Turn(conversation.ids, ids, np.zeros(len(ids), np.float32), "stop", 0))
        if number + 1 == len(texts):
            break
        message = read(text).message
        observation = environment.step(message)
        if observation.done:
            raise UserError(f"{problem.id}: the environment ends the worked answer after {text[:60]!r}")
        conversation.append(turns[-1], message, observation.messages)
    group = Group(problem, (Rollout(problem.id, 0, tuple(turns), example.text),), (Reward(0.0, {}, "ungraded"),))
    return [replace(s, advantages=s.trained.astype(np.float32)) for s in to_samples(group)]
