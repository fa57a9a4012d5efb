"""A run as its training loop sees it: a writer, checkpoints, and points at which it may stop.

run = Run.open(folder, recipe, world)
first = run.resume(policy, curriculum)
with run.interruptible(), run.track("RL", steps, first) as progress:
    for step in range(first, steps):
        ...                                                   # what a stop or an error here interrupts is repeated
        run.update_begins()
        ...                                                   # run.writer.log(step, ...)
        run.checkpoint(step + 1, policy, curriculum)
        run.stop_if_asked(step + 1)
run.finish(policy, steps)
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from hone.base.progress import Track
from hone.base.world import ALONE, World
from hone.learn.policy import Policy
from hone.recipe.recipe import StageSettings
from hone.recipe.sections.optim import CheckpointConfig
from hone.runs.checkpoints import Checkpoints
from hone.runs.stops import StopPoints
from hone.runs.writer import RunWriter
from hone.tasks.curriculum import Curriculum


class Run:
    """One run folder that is being trained."""

    def __init__(self, writer: RunWriter, config: CheckpointConfig) -> None:
        self.writer = writer
        self.checkpoints = Checkpoints(writer, config)
        self.stops = StopPoints(writer, self.checkpoints)

    @classmethod
    def open(cls, folder: Path, recipe: StageSettings, world: World = ALONE) -> Run:
        """Create the folder of a stage, or continue in it; see `RunWriter.open`."""
        writer = RunWriter.open(folder, recipe.model_dump(mode="json"), recipe.seed, world)
        return cls(writer, recipe.checkpoint)

    def resume(self, policy: Policy, curriculum: Curriculum | None = None) -> int:
        """Load the newest intact checkpoint; returns the step to continue with. See `Checkpoints.resume`."""
        return self.checkpoints.resume(policy, curriculum)

    def interruptible(self) -> AbstractContextManager[None]:
        return self.stops.interruptible()

    def track(self, title: str, total: int, done: int) -> Track:
        return self.stops.track(title, total, done)

    def update_begins(self) -> None:
        """From here until `checkpoint` the weights change: a stop or an error cannot save the beginning of the step."""
        self.checkpoints.leave()

    def checkpoint(self, step: int, policy: Policy, curriculum: Curriculum | None = None, now: bool = False) -> None:
        """Save what is needed to begin step `step`, if it is due, if `now`, or if the user asked to stop.

        Raises OSError if the checkpoint before could not be written.
        """
        self.checkpoints.begin(step, policy, curriculum)
        stopping = self.stops.agree()
        if step % self.checkpoints.config.every == 0 or stopping or now:
            self.checkpoints.save()

    def stop_if_asked(self, step: int) -> None:
        """After `checkpoint`: raises `Interrupted` or `Preempted` if a stop was requested."""
        self.stops.stop_if_asked(step)

    def finish(self, policy: Policy, steps: int) -> None:
        """Export the final model; a stage with a `model` folder is complete."""
        self.checkpoints.finish(policy, steps)
