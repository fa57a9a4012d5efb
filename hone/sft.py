"""Supervised training: on worked traces that the task writes.

    hone train RECIPE            with `stage: sft`

Which examples and in which order depends on the seed alone, so a cut run continues exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hone.algo.reduce import token_weights
from hone.config import UserError
from hone.data.pack import pack
from hone.data.render import Renderer
from hone.data.samples import supervised_sample
from hone.model.config import ModelConfig
from hone.recipe import Recipe
from hone.tasks import make_task
from hone.tasks.base import TracedTask
from hone.train.guard import guard
from hone.train.policy import Policy
from hone.train.progress import Clock, Track
from hone.train.run import Run
from hone.types import Example, Sample


def train(recipe: Recipe, folder: Path, model: ModelConfig) -> None:
    """Train `model` in `folder`, from the beginning or from the last checkpoint there.

    Raises `hone.train.run.Interrupted` after saving, if the user asked to stop.
    """
    task = make_task(recipe.task, recipe.seed)
    if not isinstance(task, TracedTask):
        raise UserError(f"task {task.name} writes no worked answers to learn from; stage: sft needs a task that does")
    steps = recipe.sft.num_steps
    policy = Policy.load(model, recipe.optim, steps, lora=recipe.lora, layers=recipe.layers, seed=recipe.seed)
    renderer = Renderer(policy.tokenizer, recipe.prompt, task.system)
    run = Run.open(folder, recipe.model_dump(mode="json"), recipe.checkpoint, recipe.seed)
    samples = [to_sample(example, renderer) for example in examples(recipe, task)]

    first = run.resume(policy)
    with run.interruptible(), Track("SFT", steps, first) as progress:
        for step in range(first, steps):
            clock = Clock()
            chosen = [samples[i] for i in draw(recipe, step)]
            weights = token_weights([int(s.trained.sum()) for s in chosen], "token_mean")
            batches = pack(chosen, list(weights), recipe.tokens_per_microbatch, share_prompts=recipe.share_prompts)
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
            run.log(step, row, clock.seconds())
            guard(run, step, stats, [batches], chosen, recipe.watch)
            run.checkpoint(step + 1, policy)
            progress.advance(f"loss {stats.loss:.4f}")
            run.stop_if_asked(step + 1)
    run.finish(policy, steps)


def examples(recipe: Recipe, task: TracedTask) -> list[Example]:
    """Training problems, in turn, each with a trace in a style drawn by its share."""
    problems = task.problems("train")
    styles = list(recipe.sft.styles)
    shares = np.asarray([recipe.sft.styles[s] for s in styles])
    rng = np.random.default_rng((recipe.seed, 1))
    chosen = rng.choice(len(styles), size=recipe.sft.examples, p=shares / shares.sum())
    return [
        task.trace(problems[i % len(problems)], styles[style], seed=recipe.seed * 1_000_003 + i)
        for i, style in enumerate(chosen.tolist())
    ]


def to_sample(example: Example, renderer: Renderer) -> Sample:
    prompt = renderer.prompt_ids(example.problem)
    return supervised_sample(example.problem.id, prompt, renderer.completion_ids(example.text))


def draw(recipe: Recipe, step: int) -> Sequence[int]:
    """The examples of a step: every one once per epoch, each epoch in an order of its own."""
    size, count = recipe.sft.examples, recipe.sft.examples_per_step
    places = range(step * count, (step + 1) * count)
    orders = {e: np.random.default_rng((recipe.seed, 2, e)).permutation(size) for e in {p // size for p in places}}
    return [int(orders[p // size][p % size]) for p in places]
