"""The longest micro-batch that a stage can have: full, with every answer of maximal length.

batch = longest(batch_of(stage), prompt=300, answer=500)      # MicroBatch, on the CPU; its values are arbitrary
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
TOKENISED = 8

#: Problems that are measured to estimate the memory of all.
SAMPLED = 64

#: Characters per token if no tokenizer is available: low, so that prompts are not underestimated (English prose has
#: about 4.5 with the tokenizers of Qwen and Llama, and 2 to 2.5 with the small tokenizer of `tiny`).
CHARACTERS_PER_TOKEN = {"tiny": 2.0, "other": 3.0}


def longest_prompt(problems: Sequence[Problem], renderer: Renderer) -> int:
    """Tokens of the longest prompt, among the `TOKENISED` with the most characters."""
    most = np.argsort(characters_of(problems), kind="stable")[-TOKENISED:]
    return max(len(renderer.prompt_ids(problems[int(i)])) for i in most)


def data_bytes(problems: Sequence[Problem]) -> int:
    """Bytes of the problems and their curriculum in each process; estimated from a sample if they are Python
    objects."""
    if isinstance(problems, Problems):
        return problems.nbytes
    sample = problems[:: max(1, len(problems) // SAMPLED)]
    return sum(map(_size, sample)) * len(problems) // max(1, len(sample))


def _size(value: Any) -> int:
    """Bytes of a record, including its contents."""
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
    """The properties of a step's batch that determine lengths. SFT has one sample per prompt, and one update."""

    prompts: int  # per step
    samples: int  # per prompt
    updates: int  # the prompts are divided among them
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
    """The micro-batch as `hone.learn.pack` lays it out, with weights that average over the trained tokens."""
    groups = lengths(shape, prompt, answer)
    samples = [_sample(i, prompt, length) for i, group in enumerate(groups) for length in group]
    tokens = sum(map(sum, groups))
    budget = tokens + prompt * (len(groups) if shape.shared else len(samples))
    reference = [np.zeros(int(s.trained.sum()), np.float32) for s in samples] if shape.kl else None
    weights = [1.0 / tokens] * len(samples)
    (batch,) = Packer(budget, shape.shared)(samples, weights, ref_logprobs=reference)
    return batch


def _sample(number: int, prompt: int, answer: int) -> Sample:
    """A sample. Prompts with different `number` differ: equal prompts would be computed only once."""
    size = prompt + answer
    ids, zeros = np.zeros(size, np.int64), np.zeros(size, np.float32)
    ids[0], ids[min(1, prompt - 1)] = number % 97, number // 97 % 97
    return Sample(ids, np.arange(size) >= prompt, zeros, zeros, prompt, f"p{number}", 0)


def micro_batches(shape: BatchShape, prompt: int, answer: int) -> int:
    """Number of micro-batches of one update, if every answer has the maximal length."""
    prompts = -(-shape.rows // shape.samples) if shape.shared else shape.rows
    return max(1, -(-(shape.rows * answer + prompts * prompt) // shape.tokens))


def assumed_prompt(stage: StageSettings, problems: Sequence[Problem], system: str) -> int:
    """Estimated tokens of the longest prompt if no tokenizer is available. `system`: the task's own system prompt."""
    per = CHARACTERS_PER_TOKEN["tiny" if stage.model.path == "tiny" else "other"]
    system = stage.prompt.system_prompt(system)
    most = int(characters_of(problems).max()) + len(system) + len(stage.prompt.template)
    return max(1, round(most / per))
