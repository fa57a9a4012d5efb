"""Supervised training: on worked answers that the task writes, or on a dataset, such as a teacher's answers.

    hone train RECIPE            with `stage: sft`

Which examples and in which order depends on the seed alone, so a cut run continues exactly. The validation loss is that
of problems that are not trained on: of the task's validation split, or of those held out from the dataset.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hone.base import streams
from hone.base.progress import Clock
from hone.base.settings import UserError
from hone.base.world import World
from hone.environments.demonstrate import demonstrated
from hone.environments.make import make_episodes
from hone.environments.play import Episodes
from hone.learn.examples import examples
from hone.learn.policy import Policy, Trainable
from hone.learn.reduce import token_weights
from hone.learn.samples import supervised_sample
from hone.model.limits import context_limit
from hone.model.load import left_out
from hone.preflight.plan.rehearse import rehearse_examples
from hone.recipe.recipe import Recipe
from hone.recipe.sections.model import ModelConfig
from hone.rollout.exactness import check_policy
from hone.rollout.prompts import Renderer
from hone.runs.run import Run
from hone.stages.guard import guard
from hone.stages.signals import make_packer
from hone.tasks import make_task
from hone.types import Example, MicroBatch, Sample


def train(recipe: Recipe, folder: Path, model: ModelConfig) -> None:
    """Train `model` in `folder`, from the beginning or from the last checkpoint there.

    Raises `hone.base.stop.Interrupted` after saving, if the user asked to stop.
    """
    world = World.from_env(recipe.parallel)
    task = make_task(recipe.task, recipe.seed)
    found = examples(recipe, task, folder)
    size, count = len(found.train), recipe.sft.examples_per_step
    steps = recipe.sft.epochs * size // count
    if not steps:
        raise UserError(
            f"sft: {size} examples in {recipe.sft.epochs} epoch(s) are less than one step (sft.examples_per_step "
            f"{count}); give more, or smaller steps"
        )
    trainable = Trainable(recipe.lora, recipe.layers, seed=recipe.seed)
    policy = Policy.load(model, recipe.optim, steps, trainable, world=world)
    check_policy(policy)
    renderer = Renderer(policy.tokenizer, recipe.prompt, task.system)
    run = Run.open(folder, recipe, world)
    writer = run.writer
    for kind, message in left_out(policy.model):
        writer.event(kind, message)
    for line in found.report:
        writer.event("data", line)
    episodes = make_episodes(recipe, renderer)
    parts = ([s for e in part for s in to_samples(e, episodes)] for part in (found.train, found.validation))
    samples, held_out = (fitting(part, policy) for part in parts)
    packer = make_packer(recipe, world)

    first = run.resume(policy)
    rehearse_examples(writer, recipe, model, policy, samples)
    with run.interruptible(), run.track("SFT", steps, first) as progress:
        for step in range(first, steps):
            clock = Clock()
            chosen = [samples[i] for i in draw(recipe.seed, step, size, count)]
            weights = token_weights([int(s.trained.sum()) for s in chosen], "token_mean")
            batches = packer(chosen, list(weights))
            stats = policy.imitate(batches)
            clock.lap("train")
            row: dict[str, float | str] = {
                "phase": "sft",
                "loss": stats.loss,
                "grad_norm": stats.grad_norm,
                "lr": stats.metrics["lr"],
                "entropy": stats.metrics["entropy"],
                "trained_tokens": stats.num_tokens,
                "skipped": stats.metrics["skipped"],
            }
            if held_out and validation_due(recipe, step, steps, size):
                row["validation_loss"] = mean_loss(policy, packer(held_out, [0.0] * len(held_out)))
                progress.say(f"after step {step + 1}: validation loss {row['validation_loss']:.4f}")
                clock.lap("validate")
            writer.log_prompts(step, [[s.problem_id for s in chosen]], ())
            writer.log(step, row, clock.seconds())
            guard(writer, step, stats, [batches], chosen, recipe.watch)
            run.checkpoint(step + 1, policy)
            progress.advance(f"loss {stats.loss:.4f}")
            run.stop_if_asked(step + 1)
    run.finish(policy, steps)


# --- examples ---------------------------------------------------------------------------------------------------------


def to_samples(example: Example, episodes: Episodes) -> list[Sample]:
    """One sample, or of several turns one for each chain. Raises UserError for an answer that cannot follow the prompt
    of this model."""
    renderer = episodes.renderer
    try:
        if example.turns:
            return demonstrated(example, episodes)
        prompt = renderer.prompt_ids(example.problem)
        return [supervised_sample(example.problem.id, prompt, renderer.completion_ids(example.text))]
    except ValueError as error:
        raise UserError(f"sft: {example.problem.id}: {error}; see prompt.open_think and the chat template") from error


def fitting(samples: list[Sample], policy: Policy) -> list[Sample]:
    """The samples. Raises UserError for one that is longer than what the model can read."""
    bound = context_limit(policy.model.config)
    limit = None if bound is None else bound.tokens
    longest = max(samples, key=lambda s: len(s.token_ids), default=None)
    if bound is not None and limit is not None and longest is not None and len(longest.token_ids) > limit:
        many = sum(len(s.token_ids) > limit for s in samples)
        raise UserError(
            f"sft: {many} of {len(samples)} examples are longer than the model's context of {limit} tokens "
            f"({bound.setting}), the "
            f"longest ({longest.problem_id}) {len(longest.token_ids)}; leave them out of the data"
        )
    return samples


def draw(seed: int, step: int, size: int, count: int) -> Sequence[int]:
    """The `count` examples, of `size`, of a step: every one once per epoch, each epoch in an order of its own."""
    places = range(step * count, (step + 1) * count)
    orders = {
        e: streams.generator("example order", seed=seed, epoch=e).permutation(size) for e in {p // size for p in places}
    }
    return [int(orders[p // size][p % size]) for p in places]


# --- validation -------------------------------------------------------------------------------------------------------


def validation_due(recipe: Recipe, step: int, steps: int, size: int) -> bool:
    """Whether the loss on held-out problems is measured after a step: every so many, or when an epoch is over."""
    every, count = recipe.sft.validate_every, recipe.sft.examples_per_step
    if every is None:
        return (step + 1) * count // size > step * count // size or step + 1 == steps
    return bool(every) and ((step + 1) % every == 0 or step + 1 == steps)


def mean_loss(policy: Policy, batches: Sequence[MicroBatch]) -> float:
    """Cross-entropy in nats per token, over all tokens of all answers."""
    values = np.concatenate(policy.logprobs(batches, 1.0))
    return float(-values.astype(np.float64).mean())
