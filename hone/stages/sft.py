"""Supervised training: on worked answers that the task writes, or on a dataset, such as a teacher's answers.

    hone train RECIPE            with `stage: sft`

Which examples are trained on, and in which order, depends on the seed alone, so that an interrupted run continues
exactly. The validation loss is measured on problems that are not trained on (`hone.learn.examples`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from hone.base import streams
from hone.base.progress import Clock
from hone.base.settings import UserError
from hone.base.world import World
from hone.environments.demonstrate import demonstrated
from hone.environments.make import make_episodes
from hone.environments.play import Episodes
from hone.learn.examples import Examples, examples
from hone.learn.pack import Packer
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
from hone.types import Example, MicroBatch, Sample, StepStats


@dataclass(frozen=True)
class Supervised:
    """The parts of a supervised stage, loaded before the first step."""

    recipe: Recipe
    policy: Policy
    run: Run
    examples: list[list[Sample]]  # to train on; several samples if the history of a conversation is rewritten
    held_out: list[Sample]  # for the validation loss
    steps: int

    @classmethod
    def load(cls, recipe: Recipe, folder: Path, model: ModelConfig) -> Supervised:
        """Load everything. Raises UserError if there are no examples, or if the model cannot be trained on them."""
        world, task = World.from_env(recipe.parallel), make_task(recipe.task, recipe.seed)
        data = examples(recipe, task, folder)
        steps = num_steps(recipe, data)
        trainable = Trainable(recipe.lora, recipe.layers, seed=recipe.seed)
        policy = Policy.load(model, recipe.optim, steps, trainable, world=world)
        check_policy(policy)
        renderer = Renderer(policy.tokenizer, recipe.prompt, task.system)
        run = Run.open(folder, recipe, world)
        for kind, message in left_out(policy.model):
            run.writer.event(kind, message)
        for line in data.report:
            run.writer.event("data", line)
        episodes = make_episodes(recipe, renderer)
        train, held_out = ([to_samples(e, episodes) for e in part] for part in (data.train, data.validation))
        for part in (train, held_out):
            check_length([s for samples in part for s in samples], policy)
        return cls(recipe, policy, run, train, [s for samples in held_out for s in samples], steps)

    @cached_property
    def packer(self) -> Packer:
        return make_packer(self.recipe, self.policy.world)

    @property
    def samples(self) -> list[Sample]:
        return [s for samples in self.examples for s in samples]

    def draw(self, step: int) -> list[list[Sample]]:
        """The examples of a step."""
        places = draw(self.recipe.seed, step, len(self.examples), self.recipe.sft.examples_per_step)
        return [self.examples[i] for i in places]

    def pack(self, samples: list[Sample]) -> list[MicroBatch]:
        """The micro-batches of an update, in which every trained token has the same weight."""
        weights = token_weights([int(s.trained.sum()) for s in samples], "token_mean")
        return self.packer(samples, list(weights))

    def validation_loss(self) -> float:
        """Cross-entropy of the held-out answers, nats per token."""
        batches = self.packer(self.held_out, [0.0] * len(self.held_out))
        logprobs = np.concatenate(self.policy.logprobs(batches, 1.0))
        return float(-logprobs.astype(np.float64).mean())


def train(recipe: Recipe, folder: Path, model: ModelConfig) -> None:
    """Train `model` in `folder`, from the beginning or from the last checkpoint there.

    Raises `hone.base.stop.Interrupted` after saving, if the user asked to stop.
    """
    stage = Supervised.load(recipe, folder, model)
    policy, run, writer = stage.policy, stage.run, stage.run.writer
    first = run.resume(policy)
    rehearse_examples(writer, recipe, model, policy, stage.samples)
    with run.interruptible(), run.track("SFT", stage.steps, first) as progress:
        for step in range(first, stage.steps):
            clock = Clock()
            chosen = stage.draw(step)
            samples = [s for example in chosen for s in example]
            batches = stage.pack(samples)
            run.update_begins()
            stats = policy.imitate(batches)
            clock.lap("train")
            row = metrics(stats)
            if stage.held_out and validation_due(recipe, step, stage.steps, len(stage.examples)):
                row["validation_loss"] = stage.validation_loss()
                progress.say(f"after step {step + 1}: validation loss {row['validation_loss']:.4f}")
                clock.lap("validate")
            writer.log_prompts(step, [[example[0].problem_id for example in chosen]], ())
            writer.log(step, row, clock.seconds())
            guard(writer, step, stats, [batches], samples, recipe.watch)
            run.checkpoint(step + 1, policy)
            progress.advance(f"loss {stats.loss:.4f}")
            run.stop_if_asked(step + 1)
    run.finish(policy, stage.steps)


def metrics(stats: StepStats) -> dict[str, float | str]:
    """The row of metrics.jsonl, without the validation loss."""
    return {
        "phase": "sft",
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "lr": stats.metrics["lr"],
        "entropy": stats.metrics["entropy"],
        "trained_tokens": stats.num_tokens,
        "skipped": stats.metrics["skipped"],
    }


def num_steps(recipe: Recipe, data: Examples) -> int:
    """The number of steps. Raises UserError if there are fewer examples than one step needs."""
    size, count = len(data.train), recipe.sft.examples_per_step
    steps = recipe.sft.epochs * size // count
    if not steps:
        raise UserError(
            f"sft: {size} examples in {recipe.sft.epochs} epoch(s) are less than one step (sft.examples_per_step "
            f"{count}); give more examples, or smaller steps"
        )
    return steps


def validation_due(recipe: Recipe, step: int, steps: int, size: int) -> bool:
    """Whether the validation loss is measured after a step: every `validate_every` steps, or at the end of an epoch.

    `steps`: of the stage; `size`: number of examples.
    """
    every, count = recipe.sft.validate_every, recipe.sft.examples_per_step
    if every is None:
        return (step + 1) * count // size > step * count // size or step + 1 == steps
    return bool(every) and ((step + 1) % every == 0 or step + 1 == steps)


# --- samples ------------------------------------------------------------------------------------


def to_samples(example: Example, episodes: Episodes) -> list[Sample]:
    """Tokenise an example: one sample, or with several turns one per chain.

    Raises UserError for an answer that cannot follow the prompt of this model.
    """
    renderer = episodes.renderer
    try:
        if example.turns:
            return demonstrated(example, episodes)
        prompt = renderer.prompt_ids(example.problem)
        return [supervised_sample(example.problem.id, prompt, renderer.completion_ids(example.text))]
    except ValueError as error:
        raise UserError(f"sft: {example.problem.id}: {error}; see prompt.open_think and the chat template") from error


def check_length(samples: Sequence[Sample], policy: Policy) -> None:
    """Raises UserError if a sample is longer than the model's context."""
    bound = context_limit(policy.model.config)
    longest = max(samples, key=lambda s: len(s.token_ids), default=None)
    if bound is not None and longest is not None and len(longest.token_ids) > bound.tokens:
        count = sum(len(s.token_ids) > bound.tokens for s in samples)
        raise UserError(
            f"sft: {count} of {len(samples)} examples are longer than the model's context of {bound.tokens} tokens "
            f"({bound.setting}), the longest ({longest.problem_id}) {len(longest.token_ids)}; leave them out of the "
            "data"
        )


def draw(seed: int, step: int, size: int, count: int) -> Sequence[int]:
    """Indices of the `count` examples of a step, out of `size`: each once per epoch, shuffled for each epoch."""
    places = range(step * count, (step + 1) * count)
    orders = {
        e: streams.generator("example order", seed=seed, epoch=e).permutation(size) for e in {p // size for p in places}
    }
    return [int(orders[p // size][p % size]) for p in places]
