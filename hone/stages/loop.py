"""THE training loop: reinforcement learning, sampling in the step or one update ahead, and on-policy distillation.

    hone train RECIPE            with `stage: rl` or `stage: distil`

One step: serve the current weights, draw problems, sample a group of answers to each, reward them, turn them into a
batch, update. *When* groups are sampled is a `Source`, *what* they teach is a `Signal`. Everything random is keyed by
(seed, step), so an interrupted run continues exactly where it was.
"""

from __future__ import annotations

from contextlib import closing

from hone.base.progress import Clock
from hone.measure.evaluate import Evaluator
from hone.preflight.plan.batch import data_bytes, longest_prompt
from hone.preflight.plan.rehearse import rehearse
from hone.recipe.recipe import RLStage
from hone.stages.record import StepLog, record
from hone.stages.reset import announce, due, reset
from hone.stages.source import make_source
from hone.stages.stage import Stage


def train(stage: Stage) -> None:
    """Train the stage's policy, from the beginning or from the run's last checkpoint.

    Raises `hone.base.stop.Interrupted` after saving, if the user asked to stop; UserError if rollouts exceed their time
    limit, or if student and teacher do not use the same tokens; `hone.base.stop.Halted` if what was finished before the
    error was saved.
    """
    recipe, run, policy, curriculum, signal = stage.recipe, stage.run, stage.policy, stage.curriculum, stage.signal
    writer = run.writer
    first = run.resume(policy, curriculum)
    longest, data = longest_prompt(curriculum.problems, stage.renderer), data_bytes(curriculum.problems)
    rehearse(writer, recipe.model_copy(update={"model": stage.model}), policy, longest, data)  # the longest first
    now: RLStage = stage.phases.at(0, 0)  # the settings of a step; a schedule changes them
    with (
        run.interruptible(),
        run.track(stage.title, recipe.steps, first) as progress,
        make_source(recipe, stage.sampler, progress.inner) as source,
        closing(stage.engine) as engine,
    ):
        evaluator = Evaluator(recipe, stage.task, stage.sampler.episodes, engine, progress, stage.world)
        for step in range(first, recipe.steps + 1):
            source.settle()
            clock = Clock()
            synced = engine.sync(policy, version=step)  # the only weight sync, verified
            clock.lap("sync")
            for label in evaluator.due(step):
                writer.log_eval(step, label, *evaluator.evaluate(label, stage.held_out_reward(now)))
            if step == recipe.steps:
                break
            sampled = source.groups(step)
            run.update_begins()  # the curriculum has observed the answers, too
            clock.rest()
            clock.count(sampled.seconds)
            before, now = now, sampled.settings
            if now != before:
                announce(writer, step, stage.phases, len(policy.resets))
                policy.configure(now.optim, now.layers)
            batch = signal.batch(sampled)
            clock.lap(signal.part)
            stats = policy.update(batch.minibatches, now.algo, now.sampling.temperature)
            clock.lap("train")
            clock.beside(sampled.beside)
            log = StepLog.of(sampled, batch, stats, stage.state(synced), clock.seconds())
            record(writer, log, stage.renderer)
            if why := due(recipe.reset, step + 1, recipe.steps, writer, policy.resets):
                reset(writer, step + 1, why, policy, stage.phases, batch.minibatches)  # new reference and optimizer
            run.checkpoint(step + 1, policy, curriculum, now=why is not None)
            progress.advance(signal.note(log))
            run.stop_if_asked(step + 1)
    run.finish(policy, recipe.steps)
