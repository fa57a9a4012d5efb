"""The longest micro-batch that a stage can come to: full, every answer as long as it may be.

batch = longest(batch_of(stage), prompt=300, answer=500)      # MicroBatch, on the CPU; its numbers mean nothing
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import chain
from typing import Any

import numpy as np

from hone.learn.pack import Packer
from hone.recipe.recipe import StageSettings
from hone.rollout.prompts import Renderer
from hone.tasks.rows.problems import Problems, characters_of
from hone.types import MicroBatch, Problem, Sample

#: Prompts that are tokenised to find the longest: those with the most characters.
LOOKED_AT = 8

#: Problems that are measured to know what all of them take.
SAMPLED = 64

#: Characters per token where there is no tokenizer at hand: few, so that prompts are not taken for shorter than they
#: are (English prose has about 4.5 with the tokenizers of Qwen and Llama, and 2 to 2.5 with the small one of `tiny`).
CHARACTERS_PER_TOKEN = {"tiny": 2.0, "other": 3.0}


def longest_prompt(problems: Sequence[Problem], renderer: Renderer) -> int:
    """Tokens of the longest prompt, of those that have the most characters."""
    most = np.argsort(characters_of(problems), kind="stable")[-LOOKED_AT:]
    return max(len(renderer.prompt_ids(problems[int(i)])) for i in most)


def data_bytes(problems: Sequence[Problem]) -> int:
    """What the problems and their curriculum take in each process; of those that are Python objects, by a sample."""
    if isinstance(problems, Problems):
        return problems.nbytes
    sample = problems[:: max(1, len(problems) // SAMPLED)]
    return sum(map(_size, sample)) * len(problems) // max(1, len(sample))


def _size(value: Any) -> int:
    """Bytes of a record and of all in it."""
    inside: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inside = chain(value.keys(), value.values())
    elif isinstance(value, tuple | list):
        inside = value
    elif is_dataclass(value):
        inside = (getattr(value, one.name) for one in fields(value))
    return sys.getsizeof(value) + sum(map(_size, inside))


@dataclass(frozen=True)
class BatchShape:
    """What one step trains on, as far as it decides lengths; of SFT one sample to each prompt, and one update."""

    prompts: int  # of a step
    samples: int  # to each prompt
    updates: int  # among which the prompts are divided
    shared: bool  # whether a prompt is computed once for all its samples
    tokens: int  # of a micro-batch
    kl: bool  # whether reference log-probs come with the samples

    @property
    def rows(self) -> int:
        """Samples of one update."""
        return -(-self.prompts // self.updates) * self.samples


def lengths(shape: BatchShape, prompt: int, answer: int) -> list[list[int]]:
    """Lengths of answers, one list per prompt, that fill one micro-batch: the last may be shorter than `answer`.

    Worked example: 1000 tokens, prompts of 100 and answers of 200, groups of 3: [[200, 200, 200], [200]], since
    100 + 600 + 100 + 200 = 1000.
    """
    group = shape.samples if shape.shared else 1
    room, rows = max(shape.tokens, prompt + answer), shape.rows
    groups: list[list[int]] = []
    while rows and room > prompt:
        room -= prompt
        groups.append([])
        while rows and room and len(groups[-1]) < group:
            groups[-1].append(min(answer, room))
            room -= groups[-1][-1]
            rows -= 1
    return groups


def longest(shape: BatchShape, prompt: int, answer: int) -> MicroBatch:
    """As `hone.learn.pack` would lay it out, with weights that make a mean of it."""
    groups = lengths(shape, prompt, answer)
    samples = [_sample(i, prompt, length) for i, group in enumerate(groups) for length in group]
    tokens = sum(map(sum, groups))
    budget = tokens + prompt * (len(groups) if shape.shared else len(samples))
    reference = [np.zeros(int(s.trained.sum()), np.float32) for s in samples] if shape.kl else None
    weights = [1.0 / tokens] * len(samples)
    (batch,) = Packer(budget, shape.shared)(samples, weights, ref_logprobs=reference)
    return batch


def _sample(number: int, prompt: int, answer: int) -> Sample:
    """`number` tells prompts apart: those that are alike are computed once."""
    size = prompt + answer
    ids, zeros = np.zeros(size, np.int64), np.zeros(size, np.float32)
    ids[0], ids[min(1, prompt - 1)] = number % 97, number // 97 % 97
    return Sample(ids, np.arange(size) >= prompt, zeros, zeros, prompt, f"p{number}", 0)


def micro_batches(shape: BatchShape, prompt: int, answer: int) -> int:
    """Micro-batches of one update, if every answer is as long as it may be."""
    prompts = -(-shape.rows // shape.samples) if shape.shared else shape.rows
    return max(1, -(-(shape.rows * answer + prompts * prompt) // shape.tokens))


def assumed_prompt(stage: StageSettings, problems: Sequence[Problem], system: str) -> int:
    """Tokens of the longest prompt where no tokenizer is at hand. `system`: the task's own prompt."""
    per = CHARACTERS_PER_TOKEN["tiny" if stage.model.path == "tiny" else "other"]
    system = stage.prompt.system_prompt(system)
    most = int(characters_of(problems).max()) + len(system) + len(stage.prompt.template)
    return max(1, round(most / per))
