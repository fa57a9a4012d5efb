"""On-policy distillation: a teacher scores every token of the student's own answers.

It minimises the reverse KL of the student to the teacher, token by token: the advantage of a token is
log p_teacher - log p_student (Agarwal et al., On-Policy Distillation of Language Models, arXiv:2306.13649; Lu et al.,
On-Policy Distillation, thinkingmachines.ai/blog/on-policy-distillation, 2025). A token's effect on later tokens is not
counted (a discount of 0). Grades are only recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from hone.base.settings import UserError
from hone.learn.batches import Batch, minibatches, per_sample, updates_of
from hone.learn.forward import frozen_logprobs
from hone.learn.pack import Packer
from hone.learn.policy import Policy
from hone.learn.samples import to_samples, with_advantages
from hone.model.load import load_tokenizer
from hone.model.parallel import spread
from hone.recipe.sections.algo import AlgoConfig
from hone.recipe.sections.model import ModelConfig
from hone.recipe.sections.rollout import SamplingConfig
from hone.recipe.stages import beside
from hone.rollout.local import load_frozen
from hone.types import FloatArray, Group, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def teacher_batch(
    groups: Sequence[Group],
    policy: Policy,
    teacher: PreTrainedModel,
    algo: AlgoConfig,
    sampling: SamplingConfig,
    packer: Packer,
) -> Batch:
    """The batch of a step. Its metric `teacher/kl` is the mean of log p_student - log p_teacher over all tokens, an
    estimate of the KL divergence.

    Both log-probs are computed before the update, at the sampling temperature.
    """
    samples = [s for group in groups for s in to_samples(group)]

    def logprobs_of(model: PreTrainedModel) -> list[FloatArray]:
        return per_sample(samples, lambda b: frozen_logprobs(model, b, sampling.temperature, policy.world), packer)

    old = logprobs_of(policy.model)
    judged = teacher_advantages(samples, old, logprobs_of(teacher))
    every = np.concatenate([s.advantages[s.trained] for s in judged])
    members = updates_of(groups, algo, graded=False)  # the teacher scores ungraded answers too
    several = algo.updates_per_rollout > 1
    updates = minibatches(members, judged, algo, sampling.max_tokens, packer, old_logprobs=old if several else None)
    kl = -float(every.mean(dtype=np.float64))
    return Batch(tuple(judged), tuple(tuple(u) for u in updates), {"teacher/kl": kl})


def teacher_advantages(
    samples: Sequence[Sample], student: Sequence[FloatArray], teacher: Sequence[FloatArray]
) -> list[Sample]:
    """The samples with A_t = log p_teacher - log p_student of each trained token; both [S] arrays [Lc].

    With the loss -A_t * log p_student, A_t held fixed, the gradient expected at a token is that of the KL of the
    student's distribution there to the teacher's: the constant that is missing from A_t has an expected gradient of
    zero (arXiv:2306.13649).
    """
    return with_advantages(samples, [t - s for s, t in zip(student, teacher, strict=True)])


def load_teacher(reference: str, model: ModelConfig, folder: Path, policy: Policy) -> PreTrainedModel:
    """Load the frozen teacher, in the student's dtype. Raises UserError if it has another tokenizer.

    `reference`: the recipe's `teacher`; `model`: the student's settings.
    """
    where = model.at(beside(reference, folder, "model")).model_copy(update={"revision": None})
    check_same_tokens(policy.tokenizer, load_tokenizer(where), reference)
    on = torch.device("cpu") if policy.world.is_sharded else None
    teacher = load_frozen(where, on)
    rows: int = teacher.get_input_embeddings().num_embeddings  # type: ignore[assignment]
    needed = len(policy.tokenizer)
    if rows < needed:
        raise UserError(f"teacher: {reference} has {rows} embeddings, and the tokenizer {needed} tokens")
    if policy.world.is_sharded:
        spread(teacher, policy.world)
    return teacher


def check_same_tokens(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, name: str) -> None:
    """Raises UserError if a token id stands for different tokens in the two tokenizers."""
    ours, theirs = ({i: token for token, i in t.get_vocab().items()} for t in (student, teacher))
    other = sorted(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    if other:
        i = other[0]
        raise UserError(
            f"teacher: {name} has another tokenizer than the student ({len(other)} tokens differ; token {i} is "
            f"{theirs.get(i)!r} to it and {ours.get(i)!r} to the student): log-probs of tokens cannot be compared. "
            "Give a teacher of the same family, or let it write answers: stage: generate, then stage: sft"
        )
