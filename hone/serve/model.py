"""Load the model that a user names: a recipe, a run, a checkpoint, a plain checkpoint folder or a hub id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.base import device
from hone.base.settings import UserError
from hone.model.limits import longest_exact
from hone.recipe.load import load, load_for_model
from hone.recipe.recipe import LoopStage, stages_of
from hone.recipe.sections.rollout import SamplingConfig
from hone.rollout.dates import date_for
from hone.rollout.local import load_local
from hone.rollout.native.engine import NativeEngine
from hone.rollout.prompts import Renderer
from hone.rollout.text import Decode, decoder
from hone.runs.layout import at_step, is_hub_id, which_model
from hone.tasks import make_task
from hone.tasks.base import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Settings for a model without a recipe; chats are longer than the answers that recipes train.
PLAIN: dict[str, Any] = {
    "eval": {"sampling": {"max_tokens": 1024}},
    "prompt": {"system": "", "template": "{user}"},  # without a chat template, the model continues the text
}


@dataclass(frozen=True)
class ServedModel:
    name: str  # for clients
    path: str
    stage: LoopStage  # its settings
    task: Task | None  # None: a model without a recipe
    engine: NativeEngine
    renderer: Renderer
    vocabulary: int  # number of token ids

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.renderer.tokenizer

    @property
    def decode(self) -> Decode:
        return decoder(self.tokenizer)

    @property
    def sampling(self) -> SamplingConfig:
        """The default sampling settings of requests."""
        return self.stage.eval.sampling

    @property
    def context(self) -> int | None:
        """The most tokens of prompt and completion together; None: no limit known."""
        return longest_exact(self.engine.model.config)

    @cached_property
    def most_characters(self) -> int | None:
        """An upper bound of the characters that fit the context (all tokens the longest); None: no limit known."""
        longest = max(map(len, self.tokenizer.get_vocab()))
        return None if self.context is None else self.context * longest

    def room(self, length: int) -> int:
        """The token limit after a prompt of this length: `sampling.max_tokens`, cut to the context; at least 1."""
        most = self.sampling.max_tokens
        return most if self.context is None else max(1, min(most, self.context - length))


def load_served(target: str, overrides: Sequence[str] = (), checkpoint: Path | None = None) -> ServedModel:
    """Load a model. Raises UserError (or ConfigError) if it does not exist or has no trained model yet."""
    stage, path, recipe = resolve(target, overrides, checkpoint)
    task = make_task(stage.task, stage.seed) if recipe else None
    date = date_for(Path(stage.runs) / stage.name)
    local = load_local(stage.model.at(path), stage.rollout, stage.prompt, task.system if task else "", date)
    name = recipe or target.rstrip("/")
    vocabulary: int = local.model.get_input_embeddings().num_embeddings  # type: ignore[assignment]
    return ServedModel(name, path, stage, task, local.engine, local.renderer, vocabulary)


def resolve(target: str, overrides: Sequence[str], checkpoint: Path | None) -> tuple[LoopStage, str, str | None]:
    """The settings, the model's path, and the name of the recipe, if there is one."""
    folder = at_step(target)
    if (folder / "model" / "config.json").is_file() and folder.parent.name == "checkpoints":
        folder, checkpoint = folder.parent.parent, checkpoint or folder  # a checkpoint of a run: use the run's settings
    elif (folder / "config.json").is_file() and folder.name == "model":  # the model inside a run or a checkpoint
        owner = folder.parent.parent.parent if folder.parent.parent.name == "checkpoints" else folder.parent
        if (owner / "config.resolved.json").is_file():
            folder, checkpoint = owner, checkpoint or folder
    if not (folder / "config.json").is_file() and not is_hub_id(target):
        recipe = load(str(folder), overrides)
        stage, path = which_model(stages_of(recipe), Path(recipe.runs) / recipe.name, checkpoint)
        device.select(stage.device)
        return stage, str(path), recipe.name
    if checkpoint is not None:
        raise UserError(f"--checkpoint belongs to a recipe or a run; {target} is a model itself: leave it out")
    return load_for_model(str(folder), PLAIN, overrides), str(folder), None
