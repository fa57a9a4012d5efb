"""Requests to the engine, and its outputs."""

from __future__ import annotations

from dataclasses import dataclass

from hone.recipe.sections.rollout import SamplingConfig
from hone.rollout.native.score import PromptScores
from hone.types import FloatArray, IntArray, Turn

Work = tuple[int, int]  # (number of the request, index of the sample)


@dataclass(frozen=True, slots=True)
class Request:
    """Samples of one prompt. Sample g uses the random numbers of (seed, stream, g, token position)."""

    prompt_ids: IntArray  # [Lp]
    sampling: SamplingConfig
    seed: int = 0
    stream: int = 0  # distinguishes requests with the same seed; in `generate`, the index of the prompt
    samples: int = 1
    streamed: bool = False  # report tokens as they are sampled, not only the finished turn
    top_logprobs: int = 0  # K: also report the K likeliest tokens at each position; implies `streamed`
    echo: bool = False  # report the log-probs of the prompt's tokens
    keep: bool = False  # keep what was read when a sample ends with "stop", for a later request
    after: Work | None = None  # the kept sample whose prompt and tokens this prompt begins with

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples is {self.samples}: ask for at least one completion per prompt")

    @property
    def is_watched(self) -> bool:
        """Whether tokens are read while they are sampled."""
        return self.streamed or self.top_logprobs > 0 or bool(self.sampling.stop)


@dataclass(frozen=True, slots=True)
class Top:
    """The likeliest tokens of the distribution that each token was drawn from, likeliest first.

    Tokens removed by the filters have -inf.
    """

    ids: IntArray  # [n, K]
    logprobs: FloatArray  # [n, K]


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of one sample; the last output has its `turn`."""

    request: int
    sample: int
    tokens: IntArray  # [n] since the previous output; the turn has all of them
    logprobs: FloatArray  # [n]
    top: Top | None = None  # for these tokens, if requested
    turn: Turn | None = None
    prompt: PromptScores | None = None  # once, with sample 0 and no tokens, before any other output
