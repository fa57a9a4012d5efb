"""Settings of the optimizer, of checkpoints, and of the stages other than reinforcement learning."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from hone.base.settings import Section


class OptimConfig(Section):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101)."""

    lr: PositiveFloat = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    grad_clip: PositiveFloat = 1.0  # norm over all parameters of the model
    warmup_steps: NonNegativeInt = 0  # optimizer updates; repeated after each hard reset
    decay: Literal["constant", "linear", "cosine"] = "constant"

    def schedule(self, update: int, total: int, since: int = 0) -> float:
        """Share of the full learning rate at `update`, counted from 0, of `total` updates.

        Linear warm-up, then constant, or linear/cosine decay to zero at one update after the last. Only updates count:
        a step without a gradient does not advance the schedule. Update `since` was the first of a fresh optimizer,
        whose moments need a new warm-up; the decay runs over the whole stage.
        """
        warmup = min(1.0, (update - since + 1) / (self.warmup_steps + 1))
        span = max(1, total - self.warmup_steps)
        done = min(1.0, max(0.0, (update - self.warmup_steps) / span))
        decay = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
        return warmup * decay[self.decay]


class LayersConfig(Section):
    """Which layers are trained. The others are frozen, and need no backward pass if no layer below them is trained.

    `first`: the embeddings and the first `count` layers. `last`: the last `count` layers, the final norm and the output
    head, unless that is also the embedding. With an adapter, only its part in these layers is trained.
    """

    train: Literal["all", "first", "last"] = "all"
    count: PositiveInt | None = None  # number of layers, with first and last
    lr_decay: float = Field(default=1.0, gt=0.0, le=1.0)  # the learning rate of a layer, relative to the layer above it

    @model_validator(mode="after")
    def _counted(self) -> LayersConfig:
        if self.count is None and self.train != "all":
            raise ValueError(f"count: needed with train: {self.train}; give the number of layers")
        return self


class CheckpointConfig(Section):
    every: PositiveInt = 10  # steps
    keep: PositiveInt = Field(default=2)  # newest checkpoints to keep
    keep_best: NonNegativeInt = 0  # in addition, those that are best on the validation split
    stop_within_seconds: PositiveFloat = 60.0  # from SIGTERM to the end of the process


class SFTConfig(Section):
    """Supervised training on worked answers written by the task, or on `data`."""

    data: str | None = None  # stages.NAME (its kept answers), a file, a folder, a hub id; null: the task's answers
    styles: dict[str, PositiveFloat] = {"careful": 1.0}  # trace style of the task's answers -> share
    examples: PositiveInt = 10_000  # distinct examples, written for training problems
    examples_per_step: PositiveInt = 64
    epochs: PositiveInt = 1
    validation: float = Field(default=0.1, gt=0.0, le=0.5)  # share of the problems in `data` that is held out
    validate_every: NonNegativeInt | None = None  # steps; 0: never; null: after each epoch with `data`, else never

    @property
    def num_steps(self) -> int | None:
        """Whole steps only: the examples left over at the end of the last epoch are not used. None with `data`, whose
        number of examples is not known yet."""
        return None if self.data is not None else self.epochs * self.examples // self.examples_per_step


class GenerateConfig(Section):
    """Which problems a teacher answers, and which answers are kept: see `hone.stages.generate`."""

    problems: PositiveInt | None = None  # the first ones of the train split; null: all
    keep: Literal["first", "random", "shortest", "all"] = (
        "first"  # which right answers to a problem to keep; all: all distinct ones
    )
    problems_per_shard: PositiveInt = 256
    concurrency: PositiveInt = 8  # concurrent requests, if the teacher is an endpoint
