"""The recipe: every setting of one stage (supervised, RL, distillation), or of a pipeline of several stages.

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
from hone.base.validate import impossible
from hone.recipe import schedule as schedules
from hone.recipe import stages as chain
from hone.recipe.sections.algo import NEEDS_GROUP, AlgoConfig, ResetConfig, WatchConfig
from hone.recipe.sections.environment import BUILT_IN_TOOLS, EnvironmentConfig
from hone.recipe.sections.evals import EvalConfig
from hone.recipe.sections.launch import LaunchConfig
from hone.recipe.sections.model import LoraConfig, ModelConfig
from hone.recipe.sections.optim import CheckpointConfig, GenerateConfig, LayersConfig, OptimConfig, SFTConfig
from hone.recipe.sections.prompt import PromptConfig
from hone.recipe.sections.rollout import VLLM_RANKS, RolloutConfig, SamplingConfig
from hone.rewards import tasks_of
from hone.rewards.config import RewardConfig
from hone.tasks import TASKS, kind_of
from hone.tasks.curriculum import CurriculumConfig
from hone.tasks.registered import RegisteredConfig, registered
from hone.tasks.registered import load as registered_task

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


class Recipe(Section):
    """One stage."""

    follows = {("eval", "sampling"): ("sampling",)}

    name: Name
    stage: Literal["sft", "rl", "generate", "distil"] = "rl"
    seed: Annotated[int, Field(ge=0, lt=streams.SEEDS)] = 0
    runs: str = "runs"  # the run folder is runs/name
    device: Device = "auto"  # cpu, cuda; auto: a GPU if there is one
    task: TaskConfig
    prompt: PromptConfig = PromptConfig()
    model: ModelConfig = ModelConfig()
    lora: LoraConfig | None = None  # null: all weights are trained
    layers: LayersConfig = LayersConfig()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    tools: tuple[str, ...] = ()  # functions that the model can call: path/file.py:function, or calculator
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    parallel: ParallelConfig = ParallelConfig()
    algo: AlgoConfig = AlgoConfig()
    watch: WatchConfig = WatchConfig()
    optim: OptimConfig = OptimConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    reset: ResetConfig = ResetConfig()
    schedule: tuple[dict[str, Any], ...] = ()  # see hone.recipe.schedule
    sft: SFTConfig = SFTConfig()
    teacher: str | None = None  # a path, a hub id, stages.NAME or URL#model; null (generate): the stage's own model
    generate: GenerateConfig = GenerateConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    prompts_per_step: PositiveInt = 16
    samples_per_prompt: PositiveInt = 8
    tokens_per_microbatch: PositiveInt = 8192
    share_prompts: bool = True  # in training, compute the prompt of a group once for all its samples
    steps: PositiveInt = 100  # of stages rl and distil
    launch: LaunchConfig = LaunchConfig()  # where processes are started
    sinks: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()  # further copies of the metrics

    @property
    def updates(self) -> int | None:
        """Optimizer updates of the stage, at most: RL skips updates without a gradient. None if the number depends on
        the data, or if the stage trains nothing."""
        if self.stage in ("sft", "generate"):
            return self.sft.num_steps if self.stage == "sft" else None
        return self.steps * self.algo.updates_per_rollout

    @property
    def has_turns(self) -> bool:
        """Whether a rollout may have several turns."""
        return self.environment.name is not None or bool(self.tools)

    @property
    def rollout_sampling(self) -> SamplingConfig:
        """`sampling` with the token limit of a whole rollout, over all its turns."""
        turns = self.environment.max_turns if self.has_turns else 1
        return self.sampling.model_copy(update={"max_tokens": turns * self.sampling.max_tokens})

    @property
    def starts_server(self) -> bool:
        """Whether hone starts a rollout server for the stage."""
        return self.stage in ("rl", "distil") and self.rollout.starts_server

    def _possible_tools(self) -> None:
        for number, tool in enumerate(self.tools):
            if ":" not in tool and tool not in BUILT_IN_TOOLS:
                message = f"no tool {tool!r}; give path/file.py:function, search:FOLDER, {' or '.join(BUILT_IN_TOOLS)}"
                raise impossible(f"tools.{number}", message)

    def _possible_checkpoints(self) -> None:
        """The best checkpoints are chosen by validation, so they need one."""
        every, saved = self.eval.every, self.checkpoint.every
        if not self.checkpoint.keep_best or self.stage not in ("rl", "distil"):
            return
        if not every:
            message = "validation chooses the best, but there is none; set eval.every, or set this to 0"
            raise impossible("checkpoint.keep_best", message)
        if every % saved:
            message = f"{every} is not a multiple of checkpoint.every ({saved}), which checkpoint.keep_best needs"
            raise impossible("eval.every", f"{message}; give {saved * (every // saved + 1)}")

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
        if self.steps > streams.STEPS:
            message = f"random streams are kept apart for {streams.STEPS:,} steps; give fewer, or add a stage"
            raise impossible("steps", message)
        self._possible_tools()
        self._possible_checkpoints()
        self._possible_model()
        self._possible_launch()
        {
            "sft": self._possible_sft,
            "rl": self._possible_rl,
            "generate": self._possible_generate,
            "distil": self._possible_distil,
        }[self.stage]()
        return self

    def _possible_model(self) -> None:
        tiny = self.model.tiny
        if self.model.path != "tiny" or (self.stage == "generate" and self.teacher is not None):
            return
        if tiny.hidden_size % (2 * tiny.heads):
            message = f"{tiny.hidden_size} cannot be split into {tiny.heads} heads of even size; give a multiple of"
            raise impossible("model.tiny.hidden_size", f"{message} {2 * tiny.heads}")
        if tiny.heads % tiny.kv_heads:
            message = f"{tiny.heads} heads cannot share {tiny.kv_heads} kv heads evenly; give a divisor of {tiny.heads}"
            raise impossible("model.tiny.kv_heads", message)
        for key in ("heads", "kv_heads", "mlp_size"):
            if getattr(tiny, key) % self.parallel.tensor:
                message = (
                    f"{self.parallel.tensor} ranks cannot share the {getattr(tiny, key)} of model.tiny.{key} evenly"
                )
                raise impossible("parallel.tensor", f"{message}; give a divisor of it")
        for key, sampling in (("sampling", self.sampling), ("eval.sampling", self.eval.sampling)):
            if sampling.max_tokens >= tiny.max_positions:
                message = f"{sampling.max_tokens} leaves no room for a prompt in model.tiny.max_positions"
                raise impossible(f"{key}.max_tokens", f"{message} {tiny.max_positions}; lower this or raise that")

    def _possible_launch(self) -> None:
        if self.model.compile and self.parallel.tensor > 1:
            message = "PyTorch does not compile layers that parallel.tensor splits; set this to false, or that to 1"
            raise impossible("model.compile", message)
        processes, nodes = self.parallel.processes, self.launch.slurm.nodes
        if self.launch.kind == "slurm" and processes % nodes:
            message = f"{nodes} nodes cannot hold equal shares of the {processes} processes of parallel; give a divisor"
            raise impossible("launch.slurm.nodes", message)

    def _possible_sft(self) -> None:
        if self.sft.data is not None:
            return
        if self.sft.epochs * self.sft.examples < self.sft.examples_per_step:
            message = f"{self.sft.examples} examples do not fill one step of {self.sft.examples_per_step}"
            raise impossible("sft.examples", f"{message}; give more, or lower sft.examples_per_step")
        name = self.task.name
        task = registered_task(name) if isinstance(self.task, RegisteredConfig) else TASKS[kind_of(name)].task
        known = getattr(task, "trace_styles", ())
        for style in self.sft.styles:
            if style not in known:
                message = f"task {self.task.name} does not have this style; give {' or '.join(known) or 'another task'}"
                raise impossible(f"sft.styles.{style}", message)
        if not self.sft.styles:
            raise impossible("sft.styles", f"without a style there are no examples; give {' or '.join(known)}")

    def _possible_generate(self) -> None:
        if self.teacher is not None and "://" in self.teacher and not self.teacher.partition("#")[2]:
            message = f"{self.teacher} names no model; give an endpoint as URL#MODEL"
            raise impossible("teacher", f"{message}, such as http://127.0.0.1:8000/v1#Qwen/Qwen3-8B")
        if self.sampling.temperature == 0 and self.samples_per_prompt > 1:
            message = f"{self.samples_per_prompt} answers at sampling.temperature 0 are all the same; give 1, or a"
            raise impossible("samples_per_prompt", f"{message} temperature > 0")
        if self.rollout.engine != "native":
            message = (
                f"a teacher behind {self.rollout.engine} is an endpoint: start its server, set this to native and give"
            )
            raise impossible("rollout.engine", f"{message} teacher: http://host:port/v1#MODEL")

    def _possible_distil(self) -> None:
        if self.teacher is None:
            raise impossible("teacher", "required, and not given; give a path, a hub id, or stages.NAME")
        if "://" in self.teacher:
            message = "an endpoint gives no log-probs of given tokens; give a path or a hub id, or use stage: generate"
            raise impossible("teacher", f"{self.teacher}: {message}")
        cut = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        for key, off in cut.items():
            if getattr(self.sampling, key) != off:
                message = f"the KL to the teacher is over the whole distribution; set this to {off:g}"
                raise impossible(f"sampling.{key}", message)
        self._possible_rollouts()
        for key, unused in (("algo.kl.coef", self.algo.kl.coef), ("algo.refill_rounds", self.algo.refill_rounds)):
            if unused:
                raise impossible(key, "the advantage is the teacher's log-prob less the student's; set it to 0")
        if self.rollout.ahead:
            message = "only stage rl corrects for answers of older weights; set this to false"
            raise impossible("rollout.ahead", message)
        if self.lora is not None and self.lora.dropout:
            message = (
                "with dropout the trained network differs from the one that samples; set it to 0, or use it in sft"
            )
            raise impossible("lora.dropout", message)

    def _possible_rollouts(self) -> None:
        if self.rollout.weights == "int8" and self.model.dtype == "bfloat16":
            message = "int8 is made from float32 weights, but model.dtype is bfloat16; remove one of the two"
            raise impossible("rollout.weights", message)
        if self.algo.updates_per_rollout > self.prompts_per_step:
            message = f"{self.algo.updates_per_rollout} updates cannot share the {self.prompts_per_step} prompts of a"
            raise impossible("algo.updates_per_rollout", f"{message} step (prompts_per_step); lower it, or draw more")
        if self.sampling.temperature == 0:
            message = "at 0 answers are not sampled, so no distribution is trained; give a number > 0"
            raise impossible("sampling.temperature", message)

    def _possible_rl(self) -> None:
        if self.samples_per_prompt == 1 and self.algo.advantage in NEEDS_GROUP:
            message = f"algo.advantage {self.algo.advantage} compares the samples of a group, so it needs 2 or more"
            raise impossible("samples_per_prompt", f"{message}; or set algo.advantage to reinforce_pp")
        self._possible_rollouts()
        if self.rollout.ahead and self.parallel.processes > 1:
            message = f"all {self.parallel.processes} processes of parallel learn at the same time, and none samples"
            raise impossible("rollout.ahead", f"{message}; set this to false, or train in one process")
        for part in self.reward.parts:
            tasks = tasks_of(part)
            if tasks and kind_of(self.task.name) not in tasks:
                message = f"this reward is for the task {' or '.join(tasks)}, not for {self.task.name}; remove it"
                raise impossible(f"reward.parts.{part}", message)
        if not any(self.reward.parts.values()):
            raise impossible(
                "reward.parts", "no part has a weight, so every reward is 0; give one, such as outcome: 1.0"
            )
        if self.rollout.ahead:
            self._possible_ahead()
        if self.rollout.engine == "vllm" and self.rollout.vllm.in_process and self.parallel.processes > 1:
            message = (
                "in a process that trains with others, vLLM would take them for its own; remove this: vLLM's server"
            )
            raise impossible("rollout.vllm.in_process", f"{message} works with any `parallel`")
        most = VLLM_RANKS[-1]
        if self.rollout.engine == "vllm" and self.rollout.vllm.serves_adapter and self.lora and self.lora.rank > most:
            message = f"vLLM serves adapters of up to rank {most}; lower it, or set rollout.vllm.lora: merged"
            raise impossible("lora.rank", message)
        schedules.check(self)

    def _possible_ahead(self) -> None:
        if self.rollout.engine == "native":
            message = "the native engine samples from the weights that are being trained; remove this, or set"
            raise impossible("rollout.ahead", f"{message} rollout.engine: vllm or sglang")
        if self.rollout.engine == "vllm" and self.rollout.vllm.in_process:
            message = "vLLM in this process cannot sample while it trains; remove this, or rollout.vllm.in_process"
            raise impossible("rollout.ahead", message)
        if self.algo.correction.kind == "none":
            message = "rollout.ahead samples from older weights, which needs a correction; give tis or mis"
            raise impossible("algo.correction.kind", message)
        if self.curriculum.kind == "adaptive":
            message = "needs the pass rates of a step before the next is sampled; with rollout.ahead, give another kind"
            raise impossible("curriculum.kind", message)


class Pipeline(Section):
    """Several stages; each starts from the model of the one before unless it names another (`hone.recipe.stages`)."""

    name: Name
    runs: str = "runs"
    stages: tuple[Recipe, ...] = Field(min_length=1)  # their run folders are runs/name/<name of the stage>

    @model_validator(mode="after")
    def _possible(self) -> Pipeline:
        names = [stage.name for stage in self.stages]
        for i, stage in enumerate(self.stages):
            if stage.name in names[:i]:
                raise impossible(f"stages.{i}.name", f"two stages are called {stage.name}; rename one")
        chain.check_references(self.stages)
        for key, values in (
            ("parallel", [stage.parallel.processes for stage in self.stages]),
            ("launch", [stage.launch for stage in self.stages]),
        ):
            other = next((i for i, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                what = f"{values[other]} processes, but {values[0]}" if key == "parallel" else "differs from launch"
                message = f"{what} in stage {names[0]}: all stages run in the same processes; set both to the same"
                raise impossible(f"stages.{other}.{key}", message)
        return self


def stages(recipe: Recipe | Pipeline) -> tuple[Recipe, ...]:
    return recipe.stages if isinstance(recipe, Pipeline) else (recipe,)


def resolved(recipe: Recipe | Pipeline) -> dict[str, Any]:
    """Every value, ready for JSON (`config.resolved.json`). Loading that file gives an equal recipe."""
    values = recipe.model_dump(mode="json")
    for stage in values.get("stages", ()):
        del stage["runs"]  # follows from the pipeline's
    return values


def stages_of(recipe: Recipe | Pipeline) -> list[tuple[Recipe, Path]]:
    """The stages and their folders, relative to the run folder."""
    if isinstance(recipe, Pipeline):
        return [(stage, Path(stage.name)) for stage in recipe.stages]
    return [(recipe, Path())]
