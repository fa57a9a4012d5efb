"""The recipe: every setting of one stage (supervised, RL, distillation), or of a pipeline of several stages.

Each kind of stage has a class with its settings (`KINDS`). Rules between settings: `hone.recipe.rules`.

A recipe is read and validated once; `hone config show RECIPE` prints the result. Nothing here imports torch.

    json.dump(resolved(recipe), file)       # every value; `hone.recipe.load.load` reads it back
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import (
    Discriminator,
    Field,
    PositiveInt,
    Tag,
    model_validator,
)

from hone.base import streams
from hone.base.device import Device
from hone.base.parallel import ParallelConfig
from hone.base.settings import Section
from hone.base.validate import with_defaults, without_defaults
from hone.recipe import rules
from hone.recipe.names import OTHER_NAMES, OTHER_VALUES
from hone.recipe.sections.algo import AlgoConfig, ResetConfig, WatchConfig
from hone.recipe.sections.environment import EnvironmentConfig
from hone.recipe.sections.evals import EvalConfig
from hone.recipe.sections.launch import LaunchConfig
from hone.recipe.sections.model import LoraConfig, ModelConfig
from hone.recipe.sections.optim import CheckpointConfig, GenerateConfig, LayersConfig, OptimConfig, SFTConfig
from hone.recipe.sections.prompt import PromptConfig
from hone.recipe.sections.rollout import RolloutConfig, SamplingConfig
from hone.rewards.config import RewardConfig
from hone.tasks import TASKS, kind_of
from hone.tasks.curriculum import CurriculumConfig
from hone.tasks.registered import RegisteredConfig, registered

Name = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]  # names folders, so no slashes


def _task_kind(section: Any) -> str | None:
    name = section.get("name") if isinstance(section, dict) else getattr(section, "name", None)
    if isinstance(name, str) and kind_of(name) not in TASKS and name in registered():
        return INSTALLED
    return kind_of(name) if isinstance(name, str) else None


#: The union member for tasks of other installed packages; error messages leave it out.
INSTALLED = "(installed)"


if TYPE_CHECKING:
    TaskConfig = Any
else:
    _kinds = tuple(Annotated[kind.settings, Tag(name)] for name, kind in TASKS.items())
    _kinds = (*_kinds, Annotated[RegisteredConfig, Tag(INSTALLED)])
    TaskConfig = Annotated[Union[_kinds], Discriminator(_task_kind)]  # noqa: UP007


class StageSettings(Section):
    """The settings of stages of every kind."""

    name: Name
    stage: Literal["sft", "rl", "generate", "distil"] = "rl"
    seed: Annotated[int, Field(ge=0, lt=streams.SEEDS)] = 0
    runs: str = "runs"  # the run folder is runs/name
    device: Device = "auto"  # cpu, cuda; auto: a GPU if there is one
    task: TaskConfig
    prompt: PromptConfig = PromptConfig()
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    sampling: SamplingConfig = SamplingConfig()  # of training, and of evaluation unless eval.sampling says otherwise
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    launch: LaunchConfig = LaunchConfig()  # where processes are started
    sinks: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()  # further copies of the metrics


class SampledStage(StageSettings):
    """A stage that samples answers."""

    rollout: RolloutConfig = RolloutConfig()
    samples_per_prompt: PositiveInt = 8

    @property
    def starts_server(self) -> bool:
        """Whether hone starts a rollout server for the stage."""
        return self.stage in ("rl", "distil") and self.rollout.starts_server


class TrainedStage(StageSettings):
    """A stage that trains the model."""

    lora: LoraConfig | None = None  # null: all weights are trained
    layers: LayersConfig = LayersConfig()
    optim: OptimConfig = OptimConfig()
    watch: WatchConfig = WatchConfig()
    tokens_per_microbatch: PositiveInt = 8192
    share_prompts: bool = True  # in training, compute the prompt of a group once for all its samples
    environment: EnvironmentConfig = EnvironmentConfig()
    tools: tuple[str, ...] = ()  # functions that the model can call: path/file.py:function, or calculator

    @property
    def has_turns(self) -> bool:
        """Whether a rollout may have several turns."""
        return self.environment.name is not None or self.environment.is_program or bool(self.tools)

    @property
    def rollout_sampling(self) -> SamplingConfig:
        """`sampling` with the token limit of a whole rollout, over all its turns."""
        turns = self.environment.max_turns if self.has_turns else 1
        return self.sampling.model_copy(update={"max_tokens": turns * self.sampling.max_tokens})


class LoopStage(TrainedStage, SampledStage):
    """A stage of the training loop: each step samples answers and learns from them."""

    prompts_per_step: PositiveInt = 16
    steps: PositiveInt = 100
    algo: AlgoConfig = AlgoConfig()
    curriculum: CurriculumConfig = CurriculumConfig()


class RLStage(LoopStage):
    reward: RewardConfig = RewardConfig()
    reset: ResetConfig = ResetConfig()
    schedule: tuple[dict[str, Any], ...] = ()  # see hone.recipe.schedule


class DistilStage(LoopStage):
    """On-policy distillation."""

    teacher: str | None = None  # a path, a hub id or stages.NAME


class SFTStage(TrainedStage):
    sft: SFTConfig = SFTConfig()


class GenerateStage(SampledStage):
    teacher: str | None = None  # a path, a hub id, stages.NAME or URL#model; null: the stage's own model
    generate: GenerateConfig = GenerateConfig()


#: The value of `stage` -> the settings of such a stage.
KINDS: dict[str, type[StageSettings]] = {
    "sft": SFTStage,
    "rl": RLStage,
    "generate": GenerateStage,
    "distil": DistilStage,
}


def kinds_with(key: str) -> list[str]:
    """The kinds of stages that have a setting of the top level."""
    return [kind for kind, settings in KINDS.items() if key in settings.model_fields]


class Recipe(RLStage, SFTStage, DistilStage, GenerateStage):
    """One stage of any kind. Settings of the other kinds are ignored; `hone.recipe.load` accepts them only if they are
    inherited from the top level of a pipeline."""

    follows = {("eval", "sampling"): ("sampling",)}
    other_names = OTHER_NAMES
    other_values = OTHER_VALUES

    @property
    def stages(self) -> tuple[Recipe, ...]:
        """The recipe itself: a pipeline of one."""
        return (self,)

    @property
    def updates(self) -> int | None:
        """Optimizer updates of the stage, at most: RL skips updates without a gradient. None if the number depends on
        the data, or if the stage trains nothing."""
        if self.stage in ("sft", "generate"):
            return self.sft.num_steps if self.stage == "sft" else None
        return self.steps * self.algo.updates_per_rollout

    @model_validator(mode="after")
    def _evaluate_as_trained(self) -> Recipe:
        """Fill in `eval.sampling` from `sampling`, except for the keys that it sets itself.

        `model_fields_set` still lists only the keys that were written.
        """
        own = self.eval.sampling if "sampling" in self.eval.model_fields_set else SamplingConfig()
        sampling = self.sampling.model_copy(update={key: getattr(own, key) for key in own.model_fields_set})
        sampling.__pydantic_fields_set__ = set(own.model_fields_set)
        evaluation, written = self.eval.model_copy(update={"sampling": sampling}), set(self.eval.model_fields_set)
        evaluation.__pydantic_fields_set__ = written
        self.__dict__["eval"] = evaluation  # the recipe is frozen, but still under construction here
        return self

    @model_validator(mode="after")
    def _possible(self) -> Recipe:
        rules.check_stage(self)
        if self.stage == "sft":
            rules.check_sft(self)
        elif self.stage == "rl":
            rules.check_rl(self)
        elif self.stage == "generate":
            rules.check_generate(self)
        else:
            rules.check_distil(self)
        return self


class Pipeline(Section):
    """Several stages; each starts from the model of the one before unless it names another (`hone.recipe.stages`)."""

    name: Name
    runs: str = "runs"
    stages: tuple[Recipe, ...] = Field(min_length=1)  # their run folders are runs/name/<name of the stage>

    @model_validator(mode="after")
    def _possible(self) -> Pipeline:
        rules.check_pipeline(self.stages)
        return self


def resolved(recipe: Recipe | Pipeline) -> dict[str, Any]:
    """Every value, ready for JSON (`config.resolved.json`). Loading that file gives an equal recipe."""
    values = recipe.model_dump(mode="json")
    for stage in values.get("stages", ()):
        del stage["runs"]  # follows from the pipeline's
    return values


def chosen(stage: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a resolved stage that differ from their defaults."""
    return without_defaults(stage, Recipe)


def completed(stage: dict[str, Any]) -> dict[str, Any]:
    """Returns a resolved stage with settings that did not exist when it was written, at their defaults."""
    return with_defaults(stage, Recipe)


def stages_of(recipe: Recipe | Pipeline) -> list[tuple[Recipe, Path]]:
    """The stages and their folders, relative to the run folder."""
    if isinstance(recipe, Pipeline):
        return [(stage, Path(stage.name)) for stage in recipe.stages]
    return [(recipe, Path())]
