"""The frozen model of the perplexity reward, in this process: the groups of a step packed, as in training.

answerer = load_answerer(recipe.reward, model, recipe.prompt, task.system)      # None unless the reward uses it
answerer.logprobs(problem, ["", "A context."], cue, "42")                       # [2] arrays, one value per token
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hone.base.settings import UserError
from hone.learn.forward import frozen_logprobs
from hone.learn.pack import Packer
from hone.learn.totals import split_by_sample
from hone.model.limits import longest_exact
from hone.model.load import load_tokenizer
from hone.recipe.sections.model import ModelConfig
from hone.recipe.sections.prompt import PromptConfig
from hone.rewards.config import RewardConfig
from hone.rewards.perplexity import Answerer, AnswererError, AnswerRequest, answer_prompt
from hone.rollout.answer_server import AnswerServer
from hone.rollout.local import load_frozen
from hone.rollout.prompts import Renderer
from hone.types import FloatArray, IntArray, Problem, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LocalAnswerer(Answerer):
    """An answerer in this process. Never changes `model`."""

    def __init__(self, model: PreTrainedModel, renderer: Renderer, tokens_per_microbatch: int = 16384) -> None:
        self.model, self.renderer, self.tokens_per_microbatch = model, renderer, tokens_per_microbatch
        if not renderer.tokenizer.is_fast:
            raise UserError(
                f"the answerer's tokenizer {type(renderer.tokenizer).__name__} does not report the offsets of its "
                "tokens, so the answer cannot be separated from the prompt; choose a model with a fast tokenizer"
            )

    def logprobs_all(self, requests: Sequence[AnswerRequest], cue: str) -> list[list[FloatArray] | AnswererError]:
        """See `hone.rewards.perplexity.Answerer`. The common prefix of a group's sequences is computed once."""
        places: list[tuple[int, str]] = []  # the group and context of each sample; equal contexts are one sample
        samples: list[Sample] = []
        for n, one in enumerate(requests):
            question = self._question(one.problem)
            different = list(dict.fromkeys(one.contexts))
            encoded = [self._encode(question, context, cue, one.answer) for context in different]
            # The shared prompt has at least one token, and none of the answer.
            shared = max(1, min((min(_common(encoded[0][0], ids), first) for ids, first in encoded), default=1))
            samples += [_sample(str(n), ids, first, shared) for ids, first in encoded]
            places += [(n, context) for context in different]
        batches = Packer(self.tokens_per_microbatch)(samples, [0.0] * len(samples)) if samples else []
        values_of: dict[tuple[int, str], FloatArray] = {}
        for batch, values in zip(batches, frozen_logprobs(self.model, batches, 1.0), strict=True):
            values_of |= {places[i]: part for i, part in split_by_sample(batch, values)}
        return [[values_of[n, context] for context in one.contexts] for n, one in enumerate(requests)]

    def prompt_ids(self, problem: Problem, context: str, cue: str) -> IntArray:
        """Ids [Lp] of the prompt alone, for the answerer to continue. Trailing blanks belong to the next token."""
        text = answer_prompt(self._question(problem), self._harmless(context), cue.rstrip(" "))
        ids = self.renderer.tokenizer.encode(text, add_special_tokens=False)
        return np.asarray([*self.renderer.begin_ids, *ids], np.int64)

    def _question(self, problem: Problem) -> str:
        """The prompt without an opening <think>, which is part of the context that follows."""
        text, opening = self.renderer.prompt_text(problem), self.renderer.prefix
        return text.rstrip().removesuffix(opening) if opening else text

    def _harmless(self, context: str) -> str:
        """Remove special tokens that the policy wrote as text: they would be tokenised as real ones."""
        for token in self.renderer.tokenizer.all_special_tokens:
            context = context.replace(token, "")
        return context

    def _encode(self, question: str, context: str, cue: str, answer: str) -> tuple[IntArray, int]:
        """Token ids [L] of prompt and answer, tokenised as one text, and the place of the answer's first token.

        A token that spans the end of the cue and the start of the answer belongs to the answer. If the text is longer
        than the model's context, the beginning of `context` is cut.
        """
        tokenizer = self.renderer.tokenizer
        prompt = answer_prompt(question, self._harmless(context), cue)
        out = tokenizer(prompt + answer, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ends = [end for _, end in out["offset_mapping"]]
        begin = self.renderer.begin_ids
        ids = np.asarray([*begin, *out["input_ids"]], np.int64)
        first = len(begin) + next((i for i, end in enumerate(ends) if end > len(prompt)), len(ends))
        if not 0 < first < len(ids):
            what = "the prompt" if first == 0 else f"the gold answer {answer!r}"
            raise UserError(f"reward.perplexity: {what} has no tokens, so nothing can be predicted")
        longest = longest_exact(self.model.config) or len(ids)
        excess = max(0, len(ids) - longest)
        kept = len(begin) + sum(end <= len(question) for end in ends)
        if excess and kept + excess > first:
            raise UserError(
                f"reward.perplexity.answerer: question, cue and gold answer alone exceed its context of {longest} "
                f"tokens: {question[:60]!r}...; choose an answerer with a longer context"
            )
        return np.delete(ids, slice(kept, kept + excess)), first - excess


def _sample(problem_id: str, ids: IntArray, first: int, shared: int) -> Sample:
    zeros = np.zeros(len(ids), np.float32)
    return Sample(ids, np.arange(len(ids)) >= first, zeros, zeros, shared, problem_id, 0)


def _common(a: IntArray, b: IntArray) -> int:
    """The length of the common prefix."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def load_answerer(
    reward: RewardConfig,
    model: ModelConfig,
    prompt: PromptConfig,
    system: str,
    loaded: PreTrainedModel | None = None,
) -> Answerer | None:
    """Load the answerer of `reward.perplexity`; None if the reward does not use it.

    `model` is the stage's initial model; `loaded` is the same in memory if it never changes: then `answerer: policy`
    needs no copy. (The reference of a KL penalty does not qualify: a hard reset changes it.)
    """
    if "perplexity" not in reward.parts:
        return None
    config = reward.perplexity
    if config.is_server:
        return AnswerServer(config.answerer, str(config.served_model), prompt, system)
    if config.answerer != "policy":
        model, loaded = model.model_copy(update={"path": config.answerer, "revision": None}), None
    frozen = loaded if loaded is not None else load_frozen(model)
    return LocalAnswerer(frozen, Renderer(load_tokenizer(model), prompt, system))
