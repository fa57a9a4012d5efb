"""THE reinforcement-learning loop.

    hone train RECIPE            with `stage: rl`

One step: serve the current weights, draw problems, sample a group of answers to each, reward
them, turn rewards into advantages, update. Everything random is keyed by (seed, step), so a run
that was cut continues exactly where it was.
"""

from __future__ import annotations

from pathlib import Path

from hone.algo.config import WatchConfig
from hone.algo.curriculum import Course
from hone.algo.watch import collapse_warnings
from hone.data.render import Renderer
from hone.evaluate import Evaluator
from hone.model.config import ModelConfig
from hone.recipe import Recipe
from hone.rewards import make_reward
from hone.rollout import make_engine
from hone.rollout.collect import rollouts, score
from hone.tasks import make_task
from hone.train.batches import Batch, load_reference, prepare
from hone.train.metrics import rollout_metrics
from hone.train.policy import Policy
from hone.train.progress import Clock, Track
from hone.train.run import Run
from hone.types import Group, StepStats


def train(recipe: Recipe, folder: Path, model: ModelConfig) -> None:
    """Train `model` in `folder`, from the beginning or from the last checkpoint there.

    Raises `hone.train.run.Interrupted` after saving, if the user asked to stop.
    """
    task = make_task(recipe.task, recipe.seed)
    policy = Policy.load(model, recipe.optim, recipe.steps * recipe.algo.updates_per_rollout)
    reference = load_reference(model, recipe.algo)
    renderer = Renderer(policy.tokenizer, recipe.prompt, task.system)
    engine = make_engine(recipe.rollout, policy)
    reward = make_reward(recipe.reward, task)
    course = Course(task.problems("train"), recipe.seed)
    run = Run.open(folder, recipe.model_dump(mode="json"), recipe.checkpoint, recipe.seed)

    first = run.resume(policy)
    with run.interruptible(), Track("RL", recipe.steps, first) as progress:
        evaluator = Evaluator(recipe, task, renderer, engine, progress)
        for step in range(first, recipe.steps + 1):
            engine.sync(policy, version=step)  # the only weight sync
            for label in evaluator.due(step):
                run.log_eval(step, label, *evaluator.evaluate(label))
            if step == recipe.steps:
                break
            clock = Clock()
            problems = course.draw(step, recipe.prompts_per_step)
            answers = rollouts(
                problems,
                renderer,
                engine,
                recipe.sampling,
                samples=recipe.samples_per_prompt,
                seed=step_seed(recipe.seed, step),
                progress=progress.inner,
            )
            clock.lap("generate")
            groups = score(problems, answers, reward)
            clock.lap("reward")
            batch = prepare(groups, policy, reference, recipe.algo, recipe.sampling, recipe.tokens_per_microbatch)
            stats = policy.update(batch.minibatches, recipe.algo, recipe.sampling.temperature)
            clock.lap("train")
            note = record(run, step, groups, batch, stats, renderer, clock, recipe.watch)
            run.checkpoint(step + 1, policy)
            progress.advance(note)
            run.stop_if_asked(step + 1)
    run.finish(policy)


def step_seed(seed: int, step: int) -> int:
    """Random numbers of a step: no two (seed, step) pairs of ordinary size share them."""
    return seed * 1_000_003 + step


def record(
    run: Run,
    step: int,
    groups: list[Group],
    batch: Batch,
    stats: StepStats,
    renderer: Renderer,
    clock: Clock,
    watch: WatchConfig,
) -> str:
    """Write down what the step did and warn of what looks wrong; returns a note for the progress line."""
    metrics = {**rollout_metrics(groups), "loss": stats.loss, "grad_norm": stats.grad_norm, **stats.metrics}
    run.log(step, {"phase": "rl", "trained_tokens": stats.num_tokens, **metrics}, clock.seconds())
    prompts = [renderer.prompt_text(group.problem) for group in groups]
    run.log_rollouts(step, groups, prompts, batch.samples, stats, renderer.piece)
    if not batch.minibatches:
        run.event("no_signal", "no group had a reward difference: nothing was learned in this step", step)
    for warning in collapse_warnings(run.history, watch):
        run.event("collapse", str(warning), step)
    return (
        f"reward {metrics['reward/mean']:.3f}  correct {metrics['accuracy']:.3f}  length {metrics['length/mean']:.0f}"
    )
