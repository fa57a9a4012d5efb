"""Rules about settings: what is impossible is an error, what is possible but has no effect is a note; nothing is
ignored silently. The notes are in `hone.recipe.notes`.

Here are the errors that concern several sections. A rule within one section is a validator of that section; the
settings of a kind of stage are those of its class (`hone.recipe.recipe.KINDS`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic_core import PydanticCustomError

from hone.base import streams
from hone.base.validate import impossible
from hone.recipe import schedule as schedules
from hone.recipe.sections.algo import NEEDS_GROUP
from hone.recipe.sections.environment import BUILT_IN_TOOLS
from hone.recipe.sections.rollout import VLLM_RANKS
from hone.recipe.stages import MODELLESS, PREFIX, references, stage_named
from hone.rewards import tasks_of
from hone.tasks import TASKS, kind_of
from hone.tasks.registered import RegisteredConfig
from hone.tasks.registered import load as registered_task

if TYPE_CHECKING:
    from hone.recipe.recipe import (
        DistilStage,
        GenerateStage,
        LoopStage,
        RLStage,
        SFTStage,
        StageSettings,
        TrainedStage,
    )

DROPOUT = "with dropout the trained network differs from the one that samples; set it to 0, or use it in sft"


def check_pipeline(stages: Sequence[StageSettings]) -> None:
    """Called by the pipeline's validator. Raises PydanticCustomError."""
    names = [stage.name for stage in stages]
    for i, stage in enumerate(stages):
        if stage.name in names[:i]:
            raise impossible(f"stages.{i}.name", f"two stages are called {stage.name}; rename one")
    _references(stages)
    first = stages[0]
    for i, stage in enumerate(stages):
        same = "all stages run in the same processes; set both to the same"
        processes, others = stage.parallel.processes, first.parallel.processes
        if processes != others:
            message = f"{processes} processes, but {others} in stage {first.name}: {same}"
            raise impossible(f"stages.{i}.parallel", message)
        if stage.launch != first.launch:
            raise impossible(f"stages.{i}.launch", f"differs from launch in stage {first.name}: {same}")
        if stage.device != first.device:
            message = f"{stage.device}, but {first.device} in stage {first.name}: all stages run in the same processes"
            raise impossible(f"stages.{i}.device", f"{message}; set device once, at the top level of the recipe")


def _references(stages: Sequence[StageSettings]) -> None:
    """Teachers and datasets are those of earlier stages."""
    for i, stage in enumerate(stages):
        for key, value, kind in references(stage):
            name = stage_named(value)
            earlier = [s.name for s in stages[:i] if (s.stage in MODELLESS) == (kind in MODELLESS)]
            if name is not None and name not in earlier:
                what = "dataset" if kind in MODELLESS else "model"
                known = ", ".join(earlier) or "none"
                message = f"{PREFIX}{name} is not an earlier stage with a {what}; those are: {known}"
                raise impossible(f"stages.{i}.{key}", message)


# --- every kind -------------------------------------------------------------------------------------------------------


def check_stage(stage: StageSettings) -> None:
    """Rules for stages of every kind; the functions below it are for one kind. All raise PydanticCustomError for the
    first setting that is impossible, and are called by the recipe's validator."""
    if stage.model.compile and stage.parallel.tensor > 1:
        message = "PyTorch does not compile layers that parallel.tensor splits; set this to false, or that to 1"
        raise impossible("model.compile", message)
    processes, nodes = stage.parallel.processes, stage.launch.slurm.nodes
    if stage.launch.kind == "slurm" and processes % nodes:
        message = f"{nodes} nodes cannot hold equal shares of the {processes} processes of parallel; give a divisor"
        raise impossible("launch.slurm.nodes", message)


def _model(stage: StageSettings) -> None:
    """A model from scratch has sizes that fit together."""
    tiny = stage.model.tiny
    if stage.model.path != "tiny":
        return
    if tiny.hidden_size % (2 * tiny.heads):
        raise impossible(
            "model.tiny.hidden_size",
            f"{tiny.hidden_size} cannot be split into {tiny.heads} heads of even size; give a multiple of "
            f"{2 * tiny.heads}",
        )
    if tiny.heads % tiny.kv_heads:
        message = f"{tiny.heads} heads cannot share {tiny.kv_heads} kv heads evenly; give a divisor of {tiny.heads}"
        raise impossible("model.tiny.kv_heads", message)
    ranks = stage.parallel.tensor
    for key in ("heads", "kv_heads", "mlp_size"):
        size = getattr(tiny, key)
        if size % ranks:
            message = f"{ranks} ranks cannot share the {size} of model.tiny.{key} evenly; give a divisor of it"
            raise impossible("parallel.tensor", message)
    for key, sampling in (("sampling", stage.sampling), ("eval.sampling", stage.eval.sampling)):
        if sampling.max_tokens >= tiny.max_positions:
            raise impossible(
                f"{key}.max_tokens",
                f"{sampling.max_tokens} leaves no room for a prompt in model.tiny.max_positions "
                f"{tiny.max_positions}; lower this or raise that",
            )


# --- one kind ---------------------------------------------------------------------------------------------------------


def _tools(stage: TrainedStage) -> None:
    for number, tool in enumerate(stage.tools):
        if ":" not in tool and tool not in BUILT_IN_TOOLS:
            known = " or ".join(BUILT_IN_TOOLS)
            message = f"no tool {tool!r}; give path/file.py:function, search:FOLDER, {known}"
            raise impossible(f"tools.{number}", message)


def _program(stage: LoopStage) -> None:
    """What does not go together with an agent program."""
    if not stage.environment.is_program:
        return
    if stage.tools:
        raise impossible("tools", "a program has tools of its own; remove the tools, or environment.program")
    if stage.prompt.style == "raw":
        raise impossible("prompt.style", "a program sends conversations; set this to chat")


def check_sft(stage: SFTStage) -> None:
    _model(stage)
    _tools(stage)
    if stage.environment.is_program:
        raise impossible("environment.program", "a program has no worked answers; remove it, or use stage: rl")
    sft = stage.sft
    if sft.data is not None:
        return
    if sft.epochs * sft.examples < sft.examples_per_step:
        raise impossible(
            "sft.examples",
            f"{sft.examples} examples do not fill one step of {sft.examples_per_step}; give more, or lower "
            "sft.examples_per_step",
        )
    name = stage.task.name
    task = registered_task(name) if isinstance(stage.task, RegisteredConfig) else TASKS[kind_of(name)].task
    known = getattr(task, "trace_styles", ())
    if not known:
        message = (
            f"{name} has no worked answers to learn from (it has no `trace`); give rows that have some as sft.data, "
            "start with a stage rl from an existing model, or give another task"
        )
        raise impossible("task", message)
    for style in sft.styles:
        if style not in known:
            message = f"task {name} does not have this style; give {' or '.join(known)}"
            raise impossible(f"sft.styles.{style}", message)
    if not sft.styles:
        raise impossible("sft.styles", f"without a style there are no examples; give {' or '.join(known)}")


def check_generate(stage: GenerateStage) -> None:
    if stage.teacher is None:
        _model(stage)
    if stage.teacher is not None and "://" in stage.teacher and not stage.teacher.partition("#")[2]:
        raise impossible(
            "teacher",
            f"{stage.teacher} names no model; give an endpoint as URL#MODEL, such as "
            "http://127.0.0.1:8000/v1#Qwen/Qwen3-8B",
        )
    if stage.sampling.temperature == 0 and stage.samples_per_prompt > 1:
        raise impossible(
            "samples_per_prompt",
            f"{stage.samples_per_prompt} answers at sampling.temperature 0 are all the same; give 1, or a "
            "temperature > 0",
        )
    if stage.rollout.engine != "native":
        raise impossible(
            "rollout.engine",
            f"a teacher behind {stage.rollout.engine} is an endpoint: start its server, set this to native and give "
            "teacher: http://host:port/v1#MODEL",
        )


def check_distil(stage: DistilStage) -> None:
    if stage.teacher is None:
        raise impossible("teacher", "required, and not given; give a path, a hub id, or stages.NAME")
    if "://" in stage.teacher:
        raise impossible(
            "teacher",
            f"{stage.teacher}: an endpoint gives no log-probs of given tokens; give a path or a hub id, or use stage: "
            "generate",
        )
    for key, off in {"top_p": 1.0, "top_k": 0, "min_p": 0.0}.items():
        if getattr(stage.sampling, key) != off:
            message = f"the KL to the teacher is over the whole distribution; set this to {off:g}"
            raise impossible(f"sampling.{key}", message)
    _loop(stage)
    for key, unused in (("algo.kl.coef", stage.algo.kl.coef), ("algo.refill_rounds", stage.algo.refill_rounds)):
        if unused:
            raise impossible(key, "the advantage is the teacher's log-prob less the student's; set it to 0")
    if stage.rollout.ahead:
        raise impossible("rollout.ahead", "only stage rl corrects for answers of older weights; set this to false")


def _loop(stage: LoopStage) -> None:
    """Stages rl and distil."""
    if stage.steps > streams.STEPS:
        raise impossible("steps", f"random streams are kept apart for {streams.STEPS:,} steps; give fewer steps")
    _model(stage)
    _tools(stage)
    _program(stage)
    _best_checkpoints(stage)
    if stage.lora is not None and stage.lora.dropout:
        raise impossible("lora.dropout", DROPOUT)
    if stage.rollout.weights == "int8" and stage.model.dtype == "bfloat16":
        message = "int8 is made from float32 weights, but model.dtype is bfloat16; remove one of the two"
        raise impossible("rollout.weights", message)
    updates, prompts = stage.algo.updates_per_rollout, stage.prompts_per_step
    if updates > prompts:
        raise impossible(
            "algo.updates_per_rollout",
            f"{updates} updates cannot share the {prompts} prompts of a step (prompts_per_step); lower it, or draw "
            "more",
        )
    if stage.sampling.temperature == 0:
        message = "at 0 answers are not sampled, so no distribution is trained; give a number > 0"
        raise impossible("sampling.temperature", message)


def _best_checkpoints(stage: LoopStage) -> None:
    """The best checkpoints are chosen by validation, so they need one."""
    every, saved = stage.eval.every, stage.checkpoint.every
    if not stage.checkpoint.keep_best:
        return
    if not every:
        message = "validation chooses the best, but there is none; set eval.every, or set this to 0"
        raise impossible("checkpoint.keep_best", message)
    if every % saved:
        raise impossible(
            "eval.every",
            f"{every} is not a multiple of checkpoint.every ({saved}), which checkpoint.keep_best needs; give "
            f"{saved * (every // saved + 1)}",
        )


def check_rl(stage: RLStage) -> None:
    if stage.samples_per_prompt == 1 and stage.algo.advantage in NEEDS_GROUP:
        raise impossible(
            "samples_per_prompt",
            f"algo.advantage {stage.algo.advantage} compares the samples of a group, so it needs 2 or more; or set "
            "algo.advantage to reinforce_pp",
        )
    _loop(stage)
    _reward(stage)
    _rollout(stage)
    _resets(stage)
    schedules.check(stage)


def _reward(stage: RLStage) -> None:
    if stage.environment.is_program:
        if stage.environment.scored_by is None and "environment" in stage.reward.parts:
            message = "the reward has the part environment, which a program gives; set this to file or exit"
            raise impossible("environment.reward", message)
        if stage.algo.credit == "turn":
            raise impossible("algo.credit", "a program gives no rewards for single turns; set this to episode")
    for part in stage.reward.parts:
        tasks = tasks_of(part)
        if tasks and kind_of(stage.task.name) not in tasks:
            message = f"this reward is for the task {' or '.join(tasks)}, not for {stage.task.name}; remove it"
            raise impossible(f"reward.parts.{part}", message)
    if not any(stage.reward.parts.values()):
        message = "no part has a weight, so every reward is 0; give one, such as outcome: 1.0"
        raise impossible("reward.parts", message)


def _rollout(stage: RLStage) -> None:
    rollout, processes = stage.rollout, stage.parallel.processes
    if rollout.ahead:
        _ahead(stage)
    if rollout.engine != "vllm":
        return
    if rollout.vllm.in_process and processes > 1:
        raise impossible(
            "rollout.vllm.in_process",
            "in a process that trains with others, vLLM would take them for its own; remove this: vLLM's server "
            "works with any `parallel`",
        )
    most = VLLM_RANKS[-1]
    if rollout.vllm.serves_adapter and stage.lora is not None and stage.lora.rank > most:
        message = f"vLLM serves adapters of up to rank {most}; lower it, or set rollout.vllm.lora: merged"
        raise impossible("lora.rank", message)


def _ahead(stage: RLStage) -> None:
    """Sampling the next step while this one is learned needs a server with its own weights."""

    def refused(message: str) -> PydanticCustomError:
        return impossible("rollout.ahead", message)

    processes = stage.parallel.processes
    if processes > 1:
        raise refused(
            f"all {processes} processes of parallel learn at the same time, and none samples; set this to false, or "
            "train in one process",
        )
    if stage.rollout.engine == "native":
        raise refused(
            "the native engine samples from the weights that are being trained; remove this, or set "
            "rollout.engine: vllm or sglang",
        )
    if stage.rollout.engine == "vllm" and stage.rollout.vllm.in_process:
        raise refused("vLLM in this process cannot sample while it trains; remove this, or rollout.vllm.in_process")
    if stage.algo.correction.kind == "none":
        message = "rollout.ahead samples from older weights, which needs a correction; give tis or mis"
        raise impossible("algo.correction.kind", message)
    if stage.curriculum.kind == "adaptive":
        message = "needs the pass rates of a step before the next is sampled; with rollout.ahead, give another kind"
        raise impossible("curriculum.kind", message)


def _resets(stage: RLStage) -> None:
    if stage.reset.on_stagnation is not None and not stage.eval.every:
        raise impossible("reset.on_stagnation", "needs validations, and there are none; set eval.every")
    if stage.reset.at and stage.reset.at[-1] >= stage.steps:
        message = f"step {stage.reset.at[-1]} is never reached: the last step is {stage.steps - 1}"
        raise impossible("reset.at", message)
