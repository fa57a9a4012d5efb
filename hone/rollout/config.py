"""Settings of generation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from hone.config import Section


class SamplingConfig(Section):
    temperature: NonNegativeFloat = 1.0  # 0: greedy
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: NonNegativeInt = 0  # 0: off
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)
    max_tokens: PositiveInt = 256  # completion tokens
    # The completion ends with the token that completes one of these in its text; the text keeps all of that token.
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()


class RolloutConfig(Section):
    engine: Literal["native"] = "native"
    max_sequences: PositiveInt = 512  # sequences decoded at once, at most
    kv_cache_gib: PositiveFloat | None = None  # memory of keys and values; none: a quarter of the device's memory
    compiled: bool = True  # on a CPU: decode attention in C++, if this machine has a compiler; false: PyTorch's
