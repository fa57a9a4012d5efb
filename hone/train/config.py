"""Settings of the optimizer and of checkpoints."""

from __future__ import annotations

import math
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

    def schedule(self, update: int, total: int) -> float:
        """Share of the full learning rate at an update, counted from 0, of `total` ones.

        Linear warm-up, then constant, or linear/cosine decay: to zero one update after the last. Only updates count: a
        step in which there was nothing to learn from does not move it.
        """
        warmup = min(1.0, (update + 1) / (self.warmup_steps + 1))
        span = max(1, total - self.warmup_steps)
        done = min(1.0, max(0.0, (update - self.warmup_steps) / span))
        decay = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
        return warmup * decay[self.decay]


class CheckpointConfig(Section):
    every: PositiveInt = 10  # steps
    keep: PositiveInt = Field(default=2)  # newest ones kept
