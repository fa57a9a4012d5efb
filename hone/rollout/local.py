"""Models that answer in this process: the one place that loads, checks and assembles them.

local = load_local(stage.model, stage.rollout, stage.prompt, task.system)
local.engine.generate([local.renderer.prompt_ids(problem)], stage.sampling, samples=8, seed=0)
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hone.model.load import load_model, load_tokenizer, stop_token_ids
from hone.recipe.sections.model import ModelConfig
from hone.recipe.sections.prompt import PromptConfig
from hone.recipe.sections.rollout import RolloutConfig
from hone.rollout import dates
from hone.rollout.engine import Event, print_event
from hone.rollout.exactness import check_model
from hone.rollout.native.engine import NativeEngine
from hone.rollout.prompts import Renderer
from hone.rollout.text import decoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class LocalModel:
    """A frozen model, its engine, and the renderer of its prompts."""

    model: PreTrainedModel
    renderer: Renderer
    engine: NativeEngine


def load_local(
    model: ModelConfig,
    rollout: RolloutConfig,
    prompt: PromptConfig,
    system: str,
    date: datetime.date | None = None,
    event: Event = print_event,
) -> LocalModel:
    """Load a model to sample from. `system`: the task's system prompt; `date`: for templates, by default today's;
    `event`: see `NativeEngine`.

    Raises UserError if hone does not compute the model exactly.
    """
    loaded, tokenizer = load_frozen(model), load_tokenizer(model)
    renderer = Renderer(tokenizer, prompt, system, date or dates.now())
    return LocalModel(loaded, renderer, native_engine(loaded, tokenizer, rollout, event))


def load_frozen(model: ModelConfig, on: torch.device | None = None) -> PreTrainedModel:
    """Load a model that is not trained. Raises UserError if hone does not compute it exactly."""
    loaded = load_model(model, on).eval()
    check_model(loaded)  # before it is frozen: the check runs the code of an update, with gradients
    return loaded.requires_grad_(False)


def native_engine(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: RolloutConfig, event: Event = print_event
) -> NativeEngine:
    """The engine of a model: ends at its stop tokens, and decodes text to find stop strings."""
    stops = stop_token_ids(model, tokenizer)
    return NativeEngine(model, stops, config, decode=decoder(tokenizer), event=event)
