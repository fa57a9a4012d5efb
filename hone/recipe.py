"""The recipe: every setting of one stage (supervised, RL, a teacher's answers), or of several in a row.

One file, read once, validated once; `hone config show RECIPE` prints the result. Each section is
declared beside what it configures; nothing here imports torch.

    recipe = load("recipes/demo/recipe.yaml", ["optim.lr=1e-5"])    # Recipe or Pipeline, or ConfigError
    json.dump(resolved(recipe), file)                               # every value; `load` reads it back
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import (
    BaseModel,
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveInt,
    Tag,
    ValidationError,
    model_validator,
)

from hone import chain
from hone.algo import schedule as schedules
from hone.algo.config import NEEDS_GROUP, AlgoConfig, CurriculumConfig, ResetConfig, WatchConfig
from hone.config import ConfigError, Layer, Place, Section, UserError, merge, override, read, stage_name
from hone.data.config import PromptConfig
from hone.judge.config import JudgeConfig
from hone.model.config import LoraConfig, ModelConfig
from hone.rewards import tasks_of
from hone.rewards.config import RewardConfig
from hone.rollout.config import VLLM_RANKS, RolloutConfig, SamplingConfig
from hone.tasks import TASKS, kind_of
from hone.tasks.registered import RegisteredConfig, registered
from hone.tasks.registered import load as registered_task
from hone.tasks.rows import SUFFIXES
from hone.train.config import CheckpointConfig, GenerateConfig, LayersConfig, OptimConfig, SFTConfig
from hone.validate import explain, impossible, validate, without_defaults
from hone.verify.targets import read_target

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


class EvalConfig(Section):
    split: Literal["validation", "test"] = "test"
    problems: PositiveInt = 200
    samples: PositiveInt = 1  # per problem
    sampling: SamplingConfig = SamplingConfig()
    judge: JudgeConfig = JudgeConfig()  # asked too, if it has a url; see hone.rewards.judge
    every: NonNegativeInt = 0  # RL steps between evaluations on the validation split; 0: none


class Recipe(Section):
    """One stage."""

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
    algo: AlgoConfig = AlgoConfig()
    watch: WatchConfig = WatchConfig()
    optim: OptimConfig = OptimConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    reset: ResetConfig = ResetConfig()
    schedule: tuple[dict[str, Any], ...] = ()  # see hone.algo.schedule
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
    sinks: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()  # where metrics are copied to as well

    @property
    def updates(self) -> int | None:
        """Optimizer updates of the stage; in RL one without any gradient is left out, so at most so many. None: that
        depends on the data, or nothing is trained."""
        if self.stage in ("sft", "generate"):
            return self.sft.num_steps if self.stage == "sft" else None
        return self.steps * self.algo.updates_per_rollout

    @model_validator(mode="after")
    def _possible(self) -> Recipe:
        self._possible_model()
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
        for key, sampling in (("sampling", self.sampling), ("eval.sampling", self.eval.sampling)):
            if sampling.max_tokens >= tiny.max_positions:
                message = f"{sampling.max_tokens} leaves no room for a prompt in model.tiny.max_positions"
                raise impossible(
                    f"{key}.max_tokens", f"{message} {tiny.max_positions}; lower the one or raise the other"
                )

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
        for part in self.reward.parts:
            tasks = tasks_of(part)
            if tasks and kind_of(self.task.name) not in tasks:
                message = f"this reward is for the task {' or '.join(tasks)}, not for {self.task.name}; remove it"
                raise impossible(f"reward.parts.{part}", message)
        if not any(self.reward.parts.values()):
            raise impossible("reward.parts", "no part has a weight, so every reward is 0; give one, as in outcome: 1.0")
        if self.rollout.ahead:
            self._possible_ahead()
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
    """Several stages; each goes on with the model that the one before it left, or says otherwise (`hone.chain`)."""

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
        return self


# --- loading ---------------------------------------------------------------------------------------------------------


def load(path: str | Path, overrides: Sequence[str] = (), check_files: bool = True) -> Recipe | Pipeline:
    """A recipe file, a folder that holds one (a run folder too), or the name of a preset; then overrides `a.b=c`.

    Raises ConfigError, with one line per problem. `check_files`: the files and folders it names must be there; a
    report, which reads a finished run, does not need them.
    """
    layer = read(file := find(path))
    if file.suffix == ".json":
        layer = Layer(_as_written(layer.data), layer.origins)
    if file.name == "config.resolved.json":  # a run folder is that run, wherever it has been moved to
        folder = file.parent if file.parent.name else file.parent.resolve()
        layer.data.update(name=folder.name, runs=str(folder.parent))
    for text in overrides:
        layer = override(layer, text, Recipe)
    recipe = _load_stages(layer) if "stages" in layer.data else _load_one(layer)
    missing = list(_missing_files(recipe, layer)) if check_files else []
    if missing:
        raise ConfigError(missing)
    return recipe


def load_for_task(source: str, overrides: Sequence[str] = ()) -> Recipe | Pipeline:
    """As `load`, where the bare name of a task, or a file or a folder of rows, stands for a recipe of defaults."""
    if is_data(source):
        layer = Layer({"name": "data", "task": {"name": "dataset", "source": source}}, {(): source})
    elif kind_of(source) in TASKS or source in registered():
        layer = Layer({"name": source.replace(":", "-"), "task": {"name": source}}, {(): source})
    else:
        return load(source, overrides)
    for text in overrides:
        layer = override(layer, text, Recipe)
    return validate(Recipe, layer)


def is_data(source: str) -> bool:
    """Whether it is a data file, there or not, or a folder that holds some and no recipe."""
    path = Path(source).expanduser()
    if path.is_dir():
        return not any((path / name).is_file() for name in ("recipe.yaml", "config.resolved.json"))
    if path.suffix == ".json":  # a list of rows, not a recipe
        return path.is_file() and path.read_text(encoding="utf-8-sig", errors="replace").lstrip().startswith("[")
    return path.suffix in SUFFIXES


def find(path: str | Path) -> Path:
    """The file that the user means by a path or by the name of a preset."""
    path = Path(path).expanduser()
    for candidate in (path / "recipe.yaml", path / "config.resolved.json") if path.is_dir() else (path,):
        if candidate.is_file():
            return candidate
    if path.is_dir():
        raise ConfigError([f"{path}: no recipe.yaml and no config.resolved.json in this folder"])
    known = presets()
    if str(path) in known:
        return known[str(path)]
    beside = [str(p) for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(str(path), [*known, *beside], n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise ConfigError([f"{path}: no such recipe; {meant}`hone config presets` lists those that come with hone"])


def presets() -> dict[str, Path]:
    """Recipes that come with hone, by name: of the checkout, or of the installed package."""
    package = Path(__file__).resolve().parent
    for folder in (package.parent / "recipes", package / "recipes"):
        files = sorted(folder.glob("*/recipe.yaml"))
        if files:
            return {file.parent.name: file for file in files}
    return {}


def _load_one(layer: Layer) -> Recipe:
    recipe = validate(Recipe, layer)
    given = {"model.path": recipe.model.path, "teacher": recipe.teacher, "sft.data": recipe.sft.data}
    for key, value in given.items():
        if chain.stage_named(value) is not None:
            place = layer.where(tuple(key.split(".")))
            raise ConfigError([f"{place}: {key}: {value}: this recipe has no stages; give a path, or a hub id"])
    return recipe


class _Header(Section):
    """What a recipe with stages says once, for all of them."""

    name: Name
    runs: str = "runs"


def _load_stages(layer: Layer) -> Pipeline:
    stages = layer.data["stages"]
    if not isinstance(stages, list) or not stages or not all(isinstance(stage, dict) for stage in stages):
        message = "stages: give a list with one mapping per stage, as in `- stage: sft`"
        raise ConfigError([f"{layer.where(('stages',))}: {message}"])
    own: dict[str, Any] = {key: layer.data[key] for key in ("name", "runs") if key in layer.data}
    header = validate(_Header, Layer(own, layer.origins))
    shared = {key: value for key, value in layer.data.items() if key not in ("name", "runs", "stages")}
    shared_origins = {p: o for p, o in layer.origins.items() if p and p[0] in shared}
    recipes: list[Recipe] = []
    lines: list[str] = []
    settled: list[dict[str, Any]] = []
    for i, stage in enumerate(stages):
        if "runs" in stage:
            place = layer.where(("stages", i, "runs"))
            raise ConfigError([f"{place}: stages.{i}.runs: belongs to the whole recipe; move it to the top level"])
        merged = merge(Layer(shared, shared_origins), Layer(stage, layer.below(("stages", i))))
        merged.data.setdefault("name", stage_name(merged.data))
        merged.data["runs"] = f"{header.runs}/{header.name}"
        settled.append(merged.data)
        try:
            merged = chain.begun(merged, stage, settled[:-1], i)
            recipes.append(validate(Recipe, merged))
        except ConfigError as error:
            lines += error.lines
    if lines:
        raise ConfigError(lines)
    try:
        return Pipeline(name=header.name, runs=header.runs, stages=tuple(recipes))
    except ValidationError as error:
        raise ConfigError(explain(error, Pipeline, layer)) from None


def _as_written(data: dict[str, Any]) -> dict[str, Any]:
    """A resolved recipe without its defaults: `has no effect` rules ask whether a setting was given at all."""
    if not isinstance(data.get("stages"), list):
        return without_defaults(data, Recipe)
    return {**data, "stages": [_stage_as_written(stage) for stage in data["stages"]]}


def _stage_as_written(stage: dict[str, Any]) -> dict[str, Any]:
    """Its model's path stays: one that is not given is that of the stage before."""
    given = without_defaults(stage, Recipe)
    path = (stage.get("model") or {}).get("path")
    return given if path is None else {**given, "model": {**given.get("model", {}), "path": path}}


def _missing_files(recipe: Recipe | Pipeline, layer: Layer) -> Iterator[str]:
    """Lines for what a recipe names and is not there: keys ending in `_file`, and a model path that is no hub id."""
    for i, stage in enumerate(stages(recipe)):
        prefix = ("stages", i) if isinstance(recipe, Pipeline) else ()
        yield from _missing_functions(stage, layer, prefix)
        for path, value in _leaves(stage):
            is_model = path == ("model", "path") and value != "tiny" and _is_path(value)
            is_model |= path == ("teacher",) and value is not None and "://" not in value and _is_path(value)
            is_adapter = path == ("lora", "path") and value is not None
            is_data_ = path == ("sft", "data") and value is not None and (_is_path(value) or is_data(value))
            is_model, is_data_ = (found and chain.stage_named(value) is None for found in (is_model, is_data_))
            if is_data_ and Path(value).expanduser().is_dir():
                continue
            if not is_model and not is_adapter and not is_data_ and not (path[-1].endswith("_file") and value):
                continue
            target = Path(value).expanduser()
            place = layer.where((*prefix, *path)) if (*prefix, *path) in layer.origins else layer.where(path)
            if is_adapter and not (target / "adapter_config.json").is_file():
                yield f"{place}: lora.path: {value} has no adapter_config.json; give the folder of an adapter of peft"
            elif is_model and not any((target / name).is_file() for name in ("config.json", "adapter_config.json")):
                what = "has no config.json" if target.is_dir() else "is no folder here"
                remedy = "give `tiny`, the folder of a Hugging Face checkpoint, or a hub id such as Qwen/Qwen3-0.6B"
                yield f"{place}: {'.'.join(path)}: {value} {what}; {remedy}"
            elif not is_model and not is_adapter and not target.is_file():
                yield f"{place}: {'.'.join(path)}: no file {value}; paths are relative to {Path.cwd()}"


def _missing_functions(stage: Recipe, layer: Layer, prefix: Place) -> Iterator[str]:
    for name in stage.reward.parts:
        try:
            if ":" in name:
                read_target(name)
        except UserError as error:
            whole: Place = (*prefix, "reward", "parts", name)
            place = layer.where(whole if whole in layer.origins else ("reward", "parts", name))
            yield f"{place}: reward.parts: {error}"


def _is_path(value: str) -> bool:
    """A folder rather than a hub id (`name` or `owner/name`)."""
    head = value.split("/")[0]
    return value.startswith(("/", ".", "~")) or value.count("/") > 1 or os.path.isdir(head) or os.path.exists(value)


def _leaves(section: BaseModel, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in section:
        if isinstance(value, BaseModel):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


# --- after loading ---------------------------------------------------------------------------------------------------


def stages(recipe: Recipe | Pipeline) -> tuple[Recipe, ...]:
    return recipe.stages if isinstance(recipe, Pipeline) else (recipe,)


def resolved(recipe: Recipe | Pipeline) -> dict[str, Any]:
    """Every value, ready for JSON (`config.resolved.json`). `load` of that file gives an equal recipe."""
    values = recipe.model_dump(mode="json")
    for stage in values.get("stages", ()):
        del stage["runs"]  # follows from the whole recipe's
    return values


def schema() -> dict[str, Any]:
    """JSON schema of a recipe file, for editors."""
    tree = Recipe.model_json_schema()
    fields = tree["properties"]
    text_or = [{"type": "string"}]
    fields["model"] = {**fields["model"], "anyOf": [{"$ref": fields["model"].pop("$ref", "")}, *text_or]}
    paths = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    stage = {"type": "object", "properties": dict(fields), "additionalProperties": False}
    fields["schedule"] = {**fields["schedule"], "items": schedules.line_schema(fields)}
    fields["extends"] = {**paths, "description": "Recipe files to build on, relative to this one."}
    fields["stages"] = {
        "type": "array",
        "items": stage,
        "description": "Each is merged over the keys of the top level.",
    }
    del tree["required"]  # what a file does not give may come from one that it extends, or from a stage
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **tree, "title": "hone recipe"}
