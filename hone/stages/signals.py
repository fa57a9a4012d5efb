"""What the groups of a step teach: their rewards, or a teacher's log-probs of their tokens.

    RewardSignal    rewards -> advantages                      stage: rl
    TeacherSignal   log p_teacher - log p_student, per token   stage: distil

A signal turns the groups of a step into the batch that `Policy.update` takes; the loop is the same for all.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from hone.base.world import World
from hone.learn.batches import Batch, prepare
from hone.learn.pack import Packer
from hone.learn.policy import Policy
from hone.recipe.recipe import LoopStage, TrainedStage
from hone.stages.source import Sampled
from hone.stages.teacher import load_teacher, teacher_batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hone.stages.record import StepLog


class Signal(Protocol):
    """Turns the groups of a step into the batch that the policy learns from."""

    part: ClassVar[str]  # the part of a step to which the seconds of `batch` count

    def batch(self, sampled: Sampled) -> Batch: ...

    def note(self, log: StepLog) -> str:
        """The note on a step in the progress line."""
        ...


class RewardSignal:
    """Advantages are computed from the rewards of a group."""

    part: ClassVar[str] = "train"

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def batch(self, sampled: Sampled) -> Batch:
        now, policy = sampled.settings, self._policy
        packer = make_packer(now, policy.world)
        return prepare(sampled.groups, policy, policy.reference, now.algo, now.rollout_sampling, packer)

    def note(self, log: StepLog) -> str:
        m = log.metrics
        correct = f"  correct {m['accuracy']:.3f}" if "accuracy" in m else ""
        return f"reward {m['reward/mean']:.3f}{correct}  length {m['length/mean']:.0f}"


class TeacherSignal:
    """A token's advantage is log p_teacher - log p_student; rewards are only recorded."""

    part: ClassVar[str] = "teacher"

    def __init__(self, policy: Policy, teacher: PreTrainedModel) -> None:
        self._policy, self._teacher = policy, teacher

    def batch(self, sampled: Sampled) -> Batch:
        now, packer = sampled.settings, make_packer(sampled.settings, self._policy.world)
        return teacher_batch(sampled.groups, self._policy, self._teacher, now.algo, now.rollout_sampling, packer)

    def note(self, log: StepLog) -> str:
        return f"KL to the teacher {log.metrics['teacher/kl']:.4f} per token"


def make_signal(recipe: LoopStage, teacher: str | None, folder: Path, policy: Policy) -> Signal:
    """The signal of the stage's kind. Raises UserError if student and teacher do not use the same tokens."""
    if recipe.stage == "distil" and teacher is not None:
        return TeacherSignal(policy, load_teacher(teacher, recipe.model, folder, policy))
    return RewardSignal(policy)


def make_packer(recipe: TrainedStage, world: World) -> Packer:
    """The packer of a stage, for all its processes."""
    return Packer(recipe.tokens_per_microbatch, recipe.share_prompts, parts=world.data)
