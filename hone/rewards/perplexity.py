"""Perplexity rewards: how much a reasoning context helps a frozen model to predict the gold answer.

The policy writes a context a for a question x; a frozen answerer reads it, then a cue, then the gold answer y.
With PPL = exp(-mean log p(y_t)):

    absolute   1 / PPL(y | x, a, cue)
    relative   max(0, 1 - PPL(y | x, a, cue) / PPL(y | x, cue))
    hybrid     alpha * relative + (1 - alpha) * absolute
    vr_cli     0, 0.5, 0.9 or 1 for an improvement below 0.05 %, 1 %, 2 %, or more: Gurung & Lapata, arXiv:2503.22828

The cue is in both prompts: in one only, it would be rewarded itself. The policy's answer is not graded, so any task
with gold answers can be trained; the obvious shortcut is to write the answer into the context, see `leaks`.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from hone.rewards.base import Judged, Score
from hone.rewards.config import PerplexityReward, RewardConfig
from hone.rewards.gold import NeedsGold, gold_text, number, written_numbers
from hone.types import FloatArray, Problem


class AnswererError(Exception):
    """The answerer failed: a failure of the verifier, not a score of 0."""


class AnswerRequest(NamedTuple):
    """The contexts and the gold answer of one group, to be scored by an answerer."""

    problem: Problem
    contexts: Sequence[str]  # [S]; "": without a context
    answer: str  # the gold answer


class Answerer(Protocol):
    """A frozen model that computes log-probs of the gold answer after question, context and cue."""

    def logprobs_all(self, requests: Sequence[AnswerRequest], cue: str) -> list[list[FloatArray] | AnswererError]:
        """[P][S] log-probs [Ly] of the answer's tokens after each context; for a group that failed, the error.

        Equal contexts within a group have bit-identical results.
        """
        ...

    def logprobs(self, problem: Problem, contexts: Sequence[str], cue: str, answer: str) -> list[FloatArray]:
        """`logprobs_all` for one group. Raises AnswererError."""
        (result,) = self.logprobs_all([AnswerRequest(problem, contexts, answer)], cue)
        if isinstance(result, AnswererError):
            raise result
        return result


class Perplexity(NeedsGold):
    """A function (`reward.perplexity.kind`) of the gold answer's perplexity; all ingredients are logged.

    `leak` is 1 if the context holds the gold answer; with `leak: zero` such a sample scores 0.
    """

    offline = False  # calls a model

    def __init__(self, config: RewardConfig, answerer: Answerer) -> None:
        super().__init__(config)
        self.answerer = answerer

    def __call__(self, problem: Problem, group: Sequence[Judged]) -> list[Score]:
        return self.score_all([(problem, group)])[0]

    def score_all(self, groups: Sequence[tuple[Problem, Sequence[Judged]]]) -> list[list[Score]]:
        config = self.config.perplexity
        contexts = [[context_of(one, config.context).strip() for one in group] for _, group in groups]
        pairs = zip(groups, contexts, strict=True)
        requests = [AnswerRequest(problem, ["", *own], gold_text(problem)) for (problem, _), own in pairs]
        results = self.answerer.logprobs_all(requests, config.cue)
        return [self._group(request, result) for request, result in zip(requests, results, strict=True)]

    def _group(self, request: AnswerRequest, result: list[FloatArray] | AnswererError) -> list[Score]:
        try:
            if isinstance(result, AnswererError):
                raise result
            base, *with_context = (perplexity(logprobs) for logprobs in result)
        except AnswererError as error:  # a server, the network: no sample of the group gets a score
            return [Score(0.0, failure="verifier_error", note=str(error)) for _ in request.contexts[1:]]
        pairs = zip(with_context, request.contexts[1:], strict=True)
        return [score(ppl, base, leaks(context, request.answer), self.config.perplexity) for ppl, context in pairs]


def answer_prompt(question: str, context: str, cue: str) -> str:
    """The text before the gold answer; the context may be empty."""
    return f"{question}{context}\n{cue}" if context else f"{question}{cue}"


def score(with_context: float, without: float, leak: bool, config: PerplexityReward) -> Score:
    """The score of one context, from the perplexities with and without it."""
    absolute, relative = 1.0 / with_context, relative_improvement(with_context, without)
    value = {
        "absolute": absolute,
        "relative": relative,
        "hybrid": config.alpha * relative + (1.0 - config.alpha) * absolute,
        "vr_cli": vr_cli(with_context, without),
    }[config.kind]
    details = {
        "gold_ppl": with_context,
        "gold_ppl_without": without,
        "absolute": absolute,
        "relative": relative,
        "leak": float(leak),
    }
    return Score(0.0 if leak and config.leak == "zero" else value, details)


def perplexity(logprobs: FloatArray) -> float:
    """exp(-mean) of log-probs [Ly], capped at exp(700) to stay finite. Raises AnswererError for NaN."""
    nll = -float(np.mean(logprobs, dtype=np.float64))
    if math.isnan(nll):
        raise AnswererError(f"{len(logprobs)} log-probs of the gold answer, not all of them numbers")
    return math.exp(min(700.0, nll))


def relative_improvement(with_context: float, without: float) -> float:
    """In [0, 1): 0 if the context does not help."""
    return max(0.0, 1.0 - with_context / without)


def vr_cli(with_context: float, without: float) -> float:
    """Thresholds of the improvement in percent: below 0.05 0, below 1 0.5, below 2 0.9, else 1."""
    percent = 100.0 * (1.0 - with_context / without)
    return 0.0 if percent < 0.05 else 0.5 if percent < 1.0 else 0.9 if percent < 2.0 else 1.0


def context_of(one: Judged, which: str) -> str:
    """The text that the answerer reads: the whole output, the thinking, or all before the last answer block."""
    text = one.rollout.text
    if which == "thinking":
        return one.parsed.thinking or ""
    if which == "before_answer":
        at = text.rfind("<answer>")
        return text if at < 0 else text[:at]
    return text


# --- leaks -----------------------------------------------------------------------------------


def leaks(context: str, gold: str) -> bool:
    """Whether the context holds the gold answer word for word.

    A number leaks if the context holds a number of the same value: `1,000` gives away 1000, `$42.00` gives away 42, but
    142, 42.5, 4200 and -42 do not. Other answers leak if they occur as whole words, in any case and spacing; a single
    letter (multiple choice) must match in case. Invisible characters are ignored.
    """
    text, plain_gold = _visible(context), _visible(gold)
    value = number(plain_gold)
    if value is not None:
        digits = _significant("".join(plain_gold.split()))
        candidates = {written for written in written_numbers(text) if _significant(written) == digits}
        return any(number(written) == value for written in candidates)
    words = plain_gold.split()
    if not words:
        return False
    if len(plain_gold) > 1:
        text, words = text.casefold(), plain_gold.casefold().split()
    plain, needle = " ".join(text.split()), " ".join(words)
    return _stands_in(plain, needle)


_NOT_DIGITS = str.maketrans("", "", "$%+-\u2212,.")


def _significant(written: str) -> str:
    """The digits of a number without the zeros at its ends: numbers of equal value have the same."""
    return written.translate(_NOT_DIGITS).strip("0")


def _stands_in(text: str, needle: str) -> bool:
    """Whether the needle occurs as whole words, with no letter or digit attached to its ends."""
    at = text.find(needle)
    while at >= 0:
        end = at + len(needle)
        before = at > 0 and text[at - 1].isalnum() and needle[0].isalnum()
        after = end < len(text) and text[end].isalnum() and needle[-1].isalnum()
        if not before and not after:
            return True
        at = text.find(needle, at + 1)
    return False


def _visible(text: str) -> str:
    """The text with each character in its plainest form (all digits as 0-9), without invisible characters.

    Character by character: normalising a whole text takes quadratic time for a pile of accents.
    """
    if text.isascii():
        return text
    return text.translate({ord(c): c if c.isascii() else _plain(c) for c in set(text)})


def _plain(character: str) -> str:
    if unicodedata.category(character) == "Cf":
        return ""
    digit = unicodedata.decimal(character, None)
    plain = unicodedata.normalize("NFKD", character) if digit is None else str(digit)
    return plain if len(plain) <= 3 else character  # a ligature that expands to many letters is left alone
