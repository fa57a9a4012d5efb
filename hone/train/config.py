"""Settings of the optimizer and of checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from hone.config import Section


class OptimConfig(Section):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101)."""

    lr: PositiveFloat = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    grad_clip: PositiveFloat = 1.0  # norm over all parameters of the model
    warmup_steps: NonNegativeInt = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"


class CheckpointConfig(Section):
    every: PositiveInt = 10  # steps
    keep: PositiveInt = Field(default=2)  # newest ones kept
