"""The recipe: every setting of one stage (supervised, RL, a teacher's answers), or of several in a row.

One file, read once, validated once; `hone config show RECIPE` prints the result. Each section is
declared beside what it configures; nothing here imports torch.

    json.dump(resolved(recipe), file)       # every value; `hone.recipe.load.load` reads it back
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import (
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveInt,
    Tag,
    model_validator,
)

from hone.base.parallel import ParallelConfig
from hone.base.settings import Section
from hone.base.validate import impossible
from hone.recipe import schedule as schedules
from hone.recipe import stages as chain
from hone.recipe.sections.algo import NEEDS_GROUP, AlgoConfig, ResetConfig, WatchConfig
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


#: The member of the union of task sections that stands for all tasks of installed packages; errors leave it out.
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
    seed: NonNegativeInt = 0
    runs: str = "runs"  # the run folder is runs/name
    task: TaskConfig
    prompt: PromptConfig = PromptConfig()
    model: ModelConfig = ModelConfig()
    lora: LoraConfig | None = None  # null: all weights are trained
    layers: LayersConfig = LayersConfig()
    reward: RewardConfig = RewardConfig()
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
    teacher: str | None = None  # a path, a hub id, stages.NAME, or URL#model; generate: null is the stage's own model
    generate: GenerateConfig = GenerateConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    prompts_per_step: PositiveInt = 16
    samples_per_prompt: PositiveInt = 8
    tokens_per_microbatch: PositiveInt = 8192
    share_prompts: bool = True  # compute the prompt of a group once for all its samples in training
    steps: PositiveInt = 100  # of stages rl and distil
    launch: LaunchConfig = LaunchConfig()  # where the processes are started
    sinks: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()  # where metrics are copied to as well

    @property
    def updates(self) -> int | None:
        """Optimizer updates of the stage; in RL one without any gradient is left out, so at most so many. None: that
        depends on the data, or nothing is trained."""
        if self.stage in ("sft", "generate"):
            return self.sft.num_steps if self.stage == "sft" else None
        return self.steps * self.algo.updates_per_rollout

    @property
    def starts_server(self) -> bool:
        """Whether the stage samples from a server that is started for it."""
        return self.stage in ("rl", "distil") and self.rollout.starts_server

    def _possible_checkpoints(self) -> None:
        """Only those that are validated can be the best."""
        every, saved = self.eval.every, self.checkpoint.every
        if not self.checkpoint.keep_best or self.stage not in ("rl", "distil"):
            return
        if not every:
            message = "the best are those of the validation split, and there is no validation; set eval.every, or 0"
            raise impossible("checkpoint.keep_best", message)
        if every % saved:
            message = f"{every} is no multiple of checkpoint.every ({saved}), so what is validated is not always saved;"
            raise impossible("eval.every", f"{message} with checkpoint.keep_best give {saved * (every // saved + 1)}")

    @model_validator(mode="after")
    def _evaluate_as_trained(self) -> Recipe:
        """Evaluation samples as training does, but for the keys that `eval.sampling` gives.

        `model_fields_set` stays that of the recipe as it was written, so that such a key is still not a given one.
        """
        own = self.eval.sampling if "sampling" in self.eval.model_fields_set else SamplingConfig()
        sampling = self.sampling.model_copy(update={key: getattr(own, key) for key in own.model_fields_set})
        sampling.__pydantic_fields_set__ = set(own.model_fields_set)
        evaluation, given = self.eval.model_copy(update={"sampling": sampling}), set(self.eval.model_fields_set)
        evaluation.__pydantic_fields_set__ = given
        self.__dict__["eval"] = evaluation  # frozen for everyone else; this is still its construction
        return self

    @model_validator(mode="after")
    def _possible(self) -> Recipe:
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
            message = f"{tiny.hidden_size} does not split over {tiny.heads} heads of even size; give a multiple of"
            raise impossible("model.tiny.hidden_size", f"{message} {2 * tiny.heads}")
        if tiny.heads % tiny.kv_heads:
            message = f"{tiny.heads} heads cannot share {tiny.kv_heads} kv heads evenly; give a divisor of {tiny.heads}"
            raise impossible("model.tiny.kv_heads", message)
        for key in ("heads", "kv_heads", "mlp_size"):
            if getattr(tiny, key) % self.parallel.tensor:
                message = (
                    f"{self.parallel.tensor} parts cannot share the {getattr(tiny, key)} of model.tiny.{key} evenly"
                )
                raise impossible("parallel.tensor", f"{message}; give a divisor of it")
        for key, sampling in (("sampling", self.sampling), ("eval.sampling", self.eval.sampling)):
            if sampling.max_tokens >= tiny.max_positions:
                message = f"{sampling.max_tokens} leaves no room for a prompt in model.tiny.max_positions"
                raise impossible(
                    f"{key}.max_tokens", f"{message} {tiny.max_positions}; lower the one or raise the other"
                )

    def _possible_launch(self) -> None:
        if self.model.compile and self.parallel.tensor > 1:
            message = "PyTorch does not compile layers that parallel.tensor has cut; set it to false, or tensor to 1"
            raise impossible("model.compile", message)
        processes, nodes = self.parallel.processes, self.launch.slurm.nodes
        if self.launch.kind == "slurm" and processes % nodes:
            message = f"{nodes} nodes cannot hold equal shares of the {processes} processes of parallel; give a divisor"
            raise impossible("launch.slurm.nodes", message)

    def _possible_sft(self) -> None:
        if self.sft.data is not None:
            return
        if self.sft.epochs * self.sft.examples < self.sft.examples_per_step:
            message = f"{self.sft.examples} examples are less than one step (sft.examples_per_step"
            raise impossible("sft.examples", f"{message} {self.sft.examples_per_step}); give more, or smaller steps")
        name = self.task.name
        task = registered_task(name) if isinstance(self.task, RegisteredConfig) else TASKS[kind_of(name)].task
        known = getattr(task, "trace_styles", ())
        for style in self.sft.styles:
            if style not in known:
                message = (
                    f"task {self.task.name} writes no such worked answers; give {' or '.join(known) or 'another task'}"
                )
                raise impossible(f"sft.styles.{style}", message)
        if not self.sft.styles:
            raise impossible("sft.styles", f"no style, so no examples; give {' or '.join(known)}")

    def _possible_generate(self) -> None:
        if self.teacher is not None and "://" in self.teacher and not self.teacher.partition("#")[2]:
            message = f"{self.teacher} names no model; give an endpoint as URL#MODEL"
            raise impossible("teacher", f"{message}, as in http://127.0.0.1:8000/v1#Qwen/Qwen3-8B")
        if self.sampling.temperature == 0 and self.samples_per_prompt > 1:
            message = f"{self.samples_per_prompt} answers at sampling.temperature 0 are all the same; give 1, or a"
            raise impossible("samples_per_prompt", f"{message} temperature > 0")
        if self.rollout.engine != "native":
            message = f"a teacher behind {self.rollout.engine} is an endpoint: start its server and give"
            raise impossible("rollout.engine", f"{message} teacher: http://host:port/v1#MODEL; here set native")

    def _possible_distil(self) -> None:
        if self.teacher is None:
            raise impossible("teacher", "required, and not given; give a path, a hub id, or stages.NAME")
        if "://" in self.teacher:
            message = "an endpoint gives no log-probs of given tokens; give a path or a hub id, or use stage: generate"
            raise impossible("teacher", f"{self.teacher}: {message}")
        cut = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        for key, off in cut.items():
            if getattr(self.sampling, key) != off:
                message = f"the KL to the teacher is over the whole distribution; set it to {off:g}"
                raise impossible(f"sampling.{key}", message)
        self._possible_rollouts()
        for key, unused in (("algo.kl.coef", self.algo.kl.coef), ("algo.refill_rounds", self.algo.refill_rounds)):
            if unused:
                raise impossible(key, "the advantage is the teacher's log-prob less the student's; set it to 0")
        if self.rollout.ahead:
            message = "answers of older weights are for stage rl, which corrects them; set it to false"
            raise impossible("rollout.ahead", message)
        if self.lora is not None and self.lora.dropout:
            message = "sampler and trainer must be one network, and dropout makes two; set it to 0, or use it in sft"
            raise impossible("lora.dropout", message)

    def _possible_rollouts(self) -> None:
        if self.rollout.weights == "int8" and self.model.dtype == "bfloat16":
            message = "is made of float32 weights, and model.dtype is bfloat16; remove one of the two"
            raise impossible("rollout.weights", message)
        if self.algo.updates_per_rollout > self.prompts_per_step:
            message = f"{self.algo.updates_per_rollout} updates cannot share the {self.prompts_per_step} prompts of a"
            raise impossible("algo.updates_per_rollout", f"{message} step (prompts_per_step); lower it, or draw more")
        if self.sampling.temperature == 0:
            message = "at 0 nothing is sampled: there is no distribution to train; give a number > 0"
            raise impossible("sampling.temperature", message)

    def _possible_rl(self) -> None:
        if self.samples_per_prompt == 1 and self.algo.advantage in NEEDS_GROUP:
            message = f"a group of 1 has no other sample to compare with, and algo.advantage {self.algo.advantage}"
            remedy = "needs one; give 2 or more, or algo.advantage: reinforce_pp"
            raise impossible("samples_per_prompt", f"{message} {remedy}")
        self._possible_rollouts()
        if self.rollout.ahead and self.parallel.processes > 1:
            message = (
                f"of the {self.parallel.processes} processes (parallel) none samples while the others learn; set it to"
            )
            raise impossible("rollout.ahead", f"{message} false, or train in one process")
        for part in self.reward.parts:
            tasks = tasks_of(part)
            if tasks and kind_of(self.task.name) not in tasks:
                message = f"this reward is for the task {' or '.join(tasks)}, not for {self.task.name}; remove it"
                raise impossible(f"reward.parts.{part}", message)
        if not any(self.reward.parts.values()):
            raise impossible("reward.parts", "no part has a weight, so every reward is 0; give one, as in outcome: 1.0")
        if self.rollout.ahead:
            self._possible_ahead()
        if self.rollout.engine == "vllm" and self.rollout.vllm.in_process and self.parallel.processes > 1:
            message = "vLLM in a process that trains with others would take them for its own; remove it: vLLM's server"
            raise impossible("rollout.vllm.in_process", f"{message} works with any `parallel`")
        most = VLLM_RANKS[-1]
        if self.rollout.engine == "vllm" and self.rollout.vllm.serves_adapter and self.lora and self.lora.rank > most:
            message = f"vLLM serves adapters of up to rank {most}; lower it, or set rollout.vllm.lora: merged"
            raise impossible("lora.rank", message)
        schedules.check(self)

    def _possible_ahead(self) -> None:
        if self.rollout.engine == "native":
            message = "the native engine samples from the weights that are being trained; remove it, or give"
            raise impossible("rollout.ahead", f"{message} rollout.engine: vllm or sglang")
        if self.rollout.engine == "vllm" and self.rollout.vllm.in_process:
            message = "the engine in this process waits for its answers; remove it, or remove rollout.vllm.in_process"
            raise impossible("rollout.ahead", message)
        if self.algo.correction.kind == "none":
            message = "rollouts ahead are from older weights, which nothing corrects; give tis or mis"
            raise impossible("algo.correction.kind", message)
        if self.curriculum.kind == "adaptive":
            message = "needs the pass rates of a step before the next is drawn; with rollout.ahead give another kind"
            raise impossible("curriculum.kind", message)


class Pipeline(Section):
    """Several stages; each starts from the model that the one before left, or says otherwise (`hone.recipe.stages`)."""

    name: Name
    runs: str = "runs"
    stages: tuple[Recipe, ...] = Field(min_length=1)  # their run folders are runs/name/<name of the stage>

    @model_validator(mode="after")
    def _possible(self) -> Pipeline:
        names = [stage.name for stage in self.stages]
        for i, stage in enumerate(self.stages):
            if stage.name in names[:i]:
                raise impossible(f"stages.{i}.name", f"two stages are called {stage.name}; give one another name")
        chain.check_references(self.stages)
        for key, values in (
            ("parallel", [stage.parallel.processes for stage in self.stages]),
            ("launch", [stage.launch for stage in self.stages]),
        ):
            other = next((i for i, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                what = f"{values[other]} processes, and {values[0]}" if key == "parallel" else "other settings than"
                message = f"{what} in stage {names[0]}: all stages run in the same processes; give both the same"
                raise impossible(f"stages.{other}.{key}", message)
        return self


def stages(recipe: Recipe | Pipeline) -> tuple[Recipe, ...]:
    return recipe.stages if isinstance(recipe, Pipeline) else (recipe,)


def resolved(recipe: Recipe | Pipeline) -> dict[str, Any]:
    """Every value, ready for JSON (`config.resolved.json`). `load` of that file gives an equal recipe."""
    values = recipe.model_dump(mode="json")
    for stage in values.get("stages", ()):
        del stage["runs"]  # follows from the whole recipe's
    return values


def stages_of(recipe: Recipe | Pipeline) -> list[tuple[Recipe, Path]]:
    """The stages with their folders, relative to the run folder."""
    if isinstance(recipe, Pipeline):
        return [(stage, Path(stage.name)) for stage in recipe.stages]
    return [(recipe, Path())]
