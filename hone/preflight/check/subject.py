"""What the checks look at: one stage of a recipe, with its task, tokenizer and model, each loaded when first needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.model.limits import longest_exact
from hone.model.load import load_model, load_tokenizer
from hone.preflight.plan.shapes import config_of
from hone.recipe.recipe import Pipeline, Recipe
from hone.recipe.schedule import Phases
from hone.rewards.perplexity import Answerer
from hone.rollout.answerer import load_answerer
from hone.rollout.prompts import Renderer, made_tokenizer
from hone.tasks import make_task
from hone.tasks.base import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Subject:
    """One stage, and what checks need of it."""

    recipe: Recipe | Pipeline
    stage: Recipe
    where: str | None = None  # folder or hub id of the model that the stage starts from; None: it is not loaded
    seconds: float = float("inf")  # time limit for calls of a slow reward
    scores: list[dict[str, Any]] = field(default_factory=list)  # of the first problem's probes, for the report

    @property
    def folder(self) -> Path:
        return Path(self.recipe.runs) / self.recipe.name

    @cached_property
    def task(self) -> Task:
        return make_task(self.stage.task, self.stage.seed)

    @cached_property
    def renderer(self) -> Renderer:
        if self.where is not None:
            tokenizer = load_tokenizer(self.stage.model.at(self.where))
        elif self.stage.model.path == "tiny":
            tokenizer = made_tokenizer(self.stage)
        else:
            tokenizer = load_tokenizer(self.stage.model)
        return Renderer(tokenizer, self.stage.prompt, self.task.system)

    @cached_property
    def model(self) -> PreTrainedModel | None:
        return None if self.where is None else load_model(self.stage.model.at(self.where)).eval()

    @cached_property
    def answerer(self) -> Answerer | None:
        """The answerer of the perplexity reward; None if the reward does not use it, or no model is loaded."""
        if self.where is None:
            return None
        stage = self.stage
        return load_answerer(stage.reward, stage.model.at(self.where), stage.prompt, self.task.system, self.model)

    @cached_property
    def phases(self) -> list[Recipe]:
        """The settings of the stage in each of its phases."""
        if self.stage.stage != "rl":
            return [self.stage]
        phases = Phases(self.stage)
        return [phases.merged(lines) for lines in phases.sets()]

    @cached_property
    def context(self) -> int | None:
        """The longest sequence that the model computes exactly; None: its config does not say."""
        model = self.stage.model if self.where is None else self.stage.model.at(self.where)
        config, _ = config_of(model)
        return longest_exact(config)
