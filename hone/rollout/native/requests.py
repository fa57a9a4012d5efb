"""What the engine is asked for, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass

from hone.rollout.config import SamplingConfig
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

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples is {self.samples}: ask for at least one completion per prompt")


@dataclass(frozen=True, slots=True)
class Output:
    """News of one sample: its last when `turn` is there."""

    request: int
    sample: int
    tokens: IntArray  # [n] those since the last news; the turn has all of them
    logprobs: FloatArray  # [n]
    turn: Turn | None = None
