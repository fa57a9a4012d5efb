"""The longest micro-batch that a stage can come to: full, every answer as long as it may be.

batch = longest(stage, prompt_tokens=300)      # MicroBatch, on the CPU; its numbers mean nothing
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import numpy as np

from hone.learn.pack import Packer
from hone.recipe.recipe import Recipe
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


def rows_of(stage: Recipe) -> int:
    """Samples of one update; of SFT examples."""
    if stage.stage == "sft":
        return stage.sft.examples_per_step
    return -(-stage.prompts_per_step // stage.algo.updates_per_rollout) * stage.samples_per_prompt


def lengths(stage: Recipe, prompt: int, answer: int) -> list[list[int]]:
    """Lengths of answers, one list per prompt, that fill one micro-batch: the last may be shorter than `answer`.

    Worked example: 1000 tokens, prompts of 100 and answers of 200, groups of 3: [[200, 200, 200], [200]], since
    100 + 600 + 100 + 200 = 1000.
    """
    group = stage.samples_per_prompt if stage.stage != "sft" and stage.share_prompts else 1
    left, rows = max(stage.tokens_per_microbatch, prompt + answer), rows_of(stage)
    found: list[list[int]] = []
    while rows and left > prompt:
        left -= prompt
        found.append([])
        while rows and left and len(found[-1]) < group:
            found[-1].append(min(answer, left))
            left -= found[-1][-1]
            rows -= 1
    return found


def longest(stage: Recipe, prompt: int, answer: int) -> MicroBatch:
    """As `hone.learn.pack` would lay it out, with weights that make a mean of it."""
    groups = lengths(stage, prompt, answer)
    samples = [_sample(i, prompt, length) for i, group in enumerate(groups) for length in group]
    tokens = sum(map(sum, groups))
    budget = tokens + prompt * (len(groups) if stage.share_prompts else len(samples))
    given: dict[str, Any] = {}
    if stage.stage != "sft" and stage.algo.kl.coef:
        given["ref_logprobs"] = [np.zeros(int(s.trained.sum()), np.float32) for s in samples]
    (batch,) = Packer(budget, stage.share_prompts)(samples, [1.0 / tokens] * len(samples), **given)
    return batch


def _sample(number: int, prompt: int, answer: int) -> Sample:
    """`number` tells prompts apart: those that are alike are computed once."""
    size = prompt + answer
    ids, zeros = np.zeros(size, np.int64), np.zeros(size, np.float32)
    ids[0], ids[min(1, prompt - 1)] = number % 97, number // 97 % 97
    return Sample(ids, np.arange(size) >= prompt, zeros, zeros, prompt, f"p{number}", 0)


def micro_batches(stage: Recipe, prompt: int, answer: int) -> int:
    """Micro-batches of one update, if every answer is as long as it may be."""
    rows = rows_of(stage)
    prompts = -(-rows // stage.samples_per_prompt) if stage.stage != "sft" and stage.share_prompts else rows
    return max(1, -(-(rows * answer + prompts * prompt) // stage.tokens_per_microbatch))


def assumed_prompt(stage: Recipe, problems: Sequence[Problem], system: str) -> int:
    """Tokens of the longest prompt where no tokenizer is at hand. `system`: the task's own prompt."""
    per = CHARACTERS_PER_TOKEN["tiny" if stage.model.path == "tiny" else "other"]
    system = stage.prompt.system_prompt(system)
    most = int(characters_of(problems).max()) + len(system) + len(stage.prompt.template)
    return max(1, round(most / per))
