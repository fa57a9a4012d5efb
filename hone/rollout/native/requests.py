"""What the engine is asked for, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass

from hone.recipe.sections.rollout import SamplingConfig
from hone.rollout.native.score import PromptScores
from hone.types import FloatArray, IntArray, Turn

Work = tuple[int, int]  # (request, sample of it)


@dataclass(frozen=True, slots=True)
class Request:
    """Samples of one prompt. Sample g draws from the random numbers of (seed, stream, g, token position)."""

    prompt_ids: IntArray  # [Lp]
    sampling: SamplingConfig
    seed: int = 0
    stream: int = 0  # tells requests of one seed apart; `generate` numbers its prompts with it
    samples: int = 1
    streamed: bool = False  # report tokens as they come, not only the finished turn
    top_logprobs: int = 0  # K: report the likeliest tokens at every place too; such a request is always streamed
    echo: bool = False  # report the log-probs of the prompt's tokens

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples is {self.samples}: ask for at least one completion per prompt")


@dataclass(frozen=True, slots=True)
class Top:
    """The likeliest tokens of the distribution that each token was drawn from, the likeliest first.

    One that the filters left out has -inf.
    """

    ids: IntArray  # [n, K]
    logprobs: FloatArray  # [n, K]


@dataclass(frozen=True, slots=True)
class Output:
    """News of one sample: its last when `turn` is there."""

    request: int
    sample: int
    tokens: IntArray  # [n] those since the last news; the turn has all of them
    logprobs: FloatArray  # [n]
    top: Top | None = None  # of these tokens, if asked for
    turn: Turn | None = None
    prompt: PromptScores | None = None  # comes once, with sample 0 and no tokens, before anything else
