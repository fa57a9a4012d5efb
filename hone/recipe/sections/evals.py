"""The `eval:` section: what is evaluated, when, and how it is sampled. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from hone.base.settings import Section
from hone.recipe.sections.rollout import SamplingConfig
from hone.rewards.judge.config import JudgeConfig


class EvalConfig(Section):
    split: Literal["validation", "test"] = "test"
    problems: PositiveInt = 200
    samples: PositiveInt = 1  # per problem
    sampling: SamplingConfig = SamplingConfig()  # keys that are not given come from the recipe's `sampling`
    judge: JudgeConfig = JudgeConfig()  # a second opinion, if it has a url; see hone.rewards.judge.part
    every: NonNegativeInt = 0  # RL steps between evaluations on the validation split; 0: none
