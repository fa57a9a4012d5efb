"""On-policy distillation: the student answers, and a teacher says of every token how likely it was.

    hone train RECIPE            with `stage: distil` and a `teacher`

Minimised is the reverse KL of the student to the teacher at the student's own answers, token by token: the advantage of
a token is log p_teacher - log p_student (Agarwal et al., On-Policy Distillation of Language Models, arXiv:2306.13649;
Lu et al., On-Policy Distillation, thinkingmachines.ai/blog/on-policy-distillation, 2025). What a token does to the
tokens after it is not counted (a discount of 0). No answer is graded for it; grades are only written down.

The loop is that of `hone.stages.loop`, with advantages from the teacher instead of rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from hone.base.progress import Clock
from hone.base.settings import UserError
from hone.base.world import World
from hone.learn.batches import Batch, Packer, minibatches, per_sample
from hone.learn.policy import Policy, frozen_logprobs
from hone.learn.samples import to_samples, with_advantages
from hone.measure.evaluate import Evaluator
from hone.model.load import load_model, load_tokenizer
from hone.model.lora import coverage
from hone.model.parallel import spread
from hone.preflight.plan.batch import longest_prompt
from hone.preflight.plan.rehearse import rehearse
from hone.recipe.recipe import Recipe
from hone.recipe.sections.algo import AlgoConfig
from hone.recipe.sections.model import ModelConfig
from hone.recipe.sections.rollout import SamplingConfig
from hone.recipe.stages import beside
from hone.rewards import make_reward
from hone.rewards.config import RewardConfig
from hone.rollout import make_engine
from hone.rollout.exactness import check_model, check_policy
from hone.rollout.prompts import Renderer
from hone.runs.writer import Run
from hone.stages.loop import collect, make_packer, record
from hone.tasks import make_task
from hone.tasks.curriculum import Course
from hone.types import FloatArray, Group, Reward, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def train(recipe: Recipe, folder: Path, model: ModelConfig) -> None:
    """Train `model` in `folder`, from the beginning or from the last checkpoint there.

    Raises UserError if student and teacher do not read the same tokens, `hone.runs.writer.Interrupted` after saving, if
    the user asked to stop.
    """
    world = World.from_env(recipe.parallel)
    task = make_task(recipe.task, recipe.seed)
    course = Course(task.problems("train"), recipe.seed, recipe.curriculum)
    policy = Policy.load(
        model, recipe.optim, recipe.steps * recipe.algo.updates_per_rollout, lora=recipe.lora, layers=recipe.layers,
        seed=recipe.seed, world=world,
    )  # fmt: skip
    check_policy(policy)
    teacher = load_teacher(recipe, folder, policy)
    renderer = Renderer(policy.tokenizer, recipe.prompt, task.system)
    reward = make_reward(RewardConfig(), task, None)  # only to be written down
    run = Run.open(folder, recipe.model_dump(mode="json"), recipe.checkpoint, recipe.seed, world)
    if (covered := coverage(policy.model)) is not None:
        run.event("lora", covered)
    engine = make_engine(recipe.rollout, policy, run.folder, run.event)
    packer = make_packer(recipe, world)

    first = run.resume(policy, course)
    rehearse(run, recipe, model, policy, longest_prompt(course.problems, renderer))
    with run.interruptible(), closing(engine), run.track("distil", recipe.steps, first) as progress:
        evaluator = Evaluator(recipe, task, renderer, engine, progress, world)
        for step in range(first, recipe.steps + 1):
            clock = Clock()
            synced = engine.sync(policy, version=step)
            clock.lap("sync")
            for label in evaluator.due(step):
                run.log_eval(step, label, *evaluator.evaluate(label))
            if step == recipe.steps:
                break
            clock.rest()
            groups, _ = collect(recipe, step, course, renderer, engine, reward, progress, clock, world)
            course.observe(groups)
            batch, kl = prepare(groups, policy, teacher, recipe.algo, recipe.sampling, packer)
            clock.lap("teacher")
            stats = policy.update(batch.minibatches, recipe.algo, recipe.sampling.temperature)
            clock.lap("train")
            state: dict[str, float | str] = {**synced, **course.metrics(), "phase": "distil", "teacher/kl": kl}
            run.log_prompts(step, course.taken(step), groups)
            record(run, recipe, step, groups, [], batch, stats, renderer, clock, state)
            run.checkpoint(step + 1, policy, course)
            progress.advance(f"KL to the teacher {kl:.4f} per token")
            run.stop_if_asked(step + 1)
    run.finish(policy, recipe.steps)


def prepare(
    groups: Sequence[Group],
    policy: Policy,
    teacher: PreTrainedModel,
    algo: AlgoConfig,
    sampling: SamplingConfig,
    packer: Packer,
) -> tuple[Batch, float]:
    """What a step trains on, and the mean of log p_student - log p_teacher over all tokens: an estimate of the KL.

    Both log-probs are of the model as it is before the update, at the sampling temperature.
    """
    samples = [s for group in groups for s in to_samples(group)]

    def scored_by(model: PreTrainedModel) -> list[FloatArray]:
        return per_sample(samples, lambda b: frozen_logprobs(model, b, sampling.temperature, policy.world), packer)

    old = scored_by(policy.model)
    judged = teacher_advantages(samples, old, scored_by(teacher))
    every = np.concatenate([s.advantages[s.trained] for s in judged])
    # An answer counts whether or not a verifier has a verdict on it.
    ungraded = [replace(g, rewards=tuple(Reward(0.0, {}, "wrong") for _ in g.rewards)) for g in groups]
    several = algo.updates_per_rollout > 1
    updates = minibatches(ungraded, judged, algo, sampling.max_tokens, packer, old_logprobs=old if several else None)
    return Batch(tuple(judged), tuple(tuple(u) for u in updates)), -float(every.mean(dtype=np.float64))


def teacher_advantages(
    samples: Sequence[Sample], student: Sequence[FloatArray], teacher: Sequence[FloatArray]
) -> list[Sample]:
    """The samples with A_t = log p_teacher - log p_student of each trained token; both [S] arrays [Lc].

    With the loss -A_t * log p_student, A_t held fixed, the gradient expected at a token is that of the KL of the
    student's distribution there to the teacher's: what is missing from A_t, a constant, has none (arXiv:2306.13649).
    """
    return with_advantages(samples, [t - s for s, t in zip(student, teacher, strict=True)])


def load_teacher(recipe: Recipe, folder: Path, policy: Policy) -> PreTrainedModel:
    """Frozen, in the dtype of the student. Raises UserError if its tokens are others than the student's."""
    assert recipe.teacher is not None, "validated"
    where = recipe.model.at(beside(recipe.teacher, folder, "model")).model_copy(update={"revision": None})
    check_same_tokens(policy.tokenizer, load_tokenizer(where), recipe.teacher)
    on = torch.device("cpu") if policy.world.cut else None
    teacher = load_model(where, on).eval().requires_grad_(False)
    check_model(teacher)
    rows, needed = teacher.get_input_embeddings().num_embeddings, len(policy.tokenizer)
    if rows < needed:
        raise UserError(f"teacher: {recipe.teacher} has {rows} embeddings, and the tokenizer {needed} tokens")
    if policy.world.cut:
        spread(teacher, policy.world)
    return teacher


def check_same_tokens(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, name: str) -> None:
    """Raises UserError if a token id means one thing to the student and another to the teacher."""
    ours, theirs = ({i: token for token, i in t.get_vocab().items()} for t in (student, teacher))
    other = sorted(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    if other:
        i = other[0]
        raise UserError(
            f"teacher: {name} has another tokenizer than the student ({len(other)} tokens differ; token {i} is "
            f"{theirs.get(i)!r} to it and {ours.get(i)!r} to the student): log-probs of tokens cannot be compared. "
            "Give a teacher of the same family, or let it write answers: stage: generate, then stage: sft"
        )
