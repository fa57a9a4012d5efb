"""Every record of the pipeline, in the order in which one problem passes through it.

    Problem -> Rollout (of Turns, in an Episode) -> Reward -> Group -> Sample -> MicroBatch -> StepStats

Records are frozen and complete when built; no stage writes into the one before.
Symbols: P problems, G samples per problem, Lp prompt tokens, Lc completion tokens,
L = Lp + Lc tokens of one sequence, T packed input tokens, N trained tokens of a batch.
This module imports nothing of hone, and torch only for type checking: configuration,
tasks and rewards work without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

Split = Literal["train", "validation", "test"]
Finish = Literal["stop", "length", "abort"]
Verdict = Literal["correct", "wrong", "malformed", "truncated", "ungraded", "verifier_timeout", "verifier_error"]

#: How an episode ended; `environment_*`: by a failure of the environment, not of the model.
End = Literal["done", "max_turns", "max_tokens", "malformed_call", "environment_error", "environment_timeout"]

#: The verdicts of episodes whose environment failed.
ENVIRONMENT_FAILURES: dict[str, Verdict] = {
    "environment_error": "verifier_error",
    "environment_timeout": "verifier_timeout",
}

#: Verdicts about the verifier, not about the sample: such a sample is left out of its group and counted, never scored
#: 0.
VERIFIER_FAILURES: frozenset[str] = frozenset({"verifier_timeout", "verifier_error"})
#: These, and `ungraded`, the verdict of a task without a grader: such a sample has a reward, but counts in no accuracy.
NOT_GRADED: frozenset[str] = VERIFIER_FAILURES | {"ungraded"}


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with a checkable answer."""

    id: str
    task: str
    messages: tuple[Mapping[str, str], ...]  # chat messages: {"role": ..., "content": ...}
    answer: Any  # whatever the task's grader needs, JSON-serialisable
    level: str = ""  # e.g. number of people, "1".."5" for MATH
    domain: str = ""  # e.g. "Algebra"
    reference: str | None = None  # a worked solution, if there is one
    extra: Mapping[str, Any] = field(default_factory=dict)  # other columns of the row


@dataclass(frozen=True, slots=True)
class Turn:
    """The prompt and the completion of one engine call, as tokens: text is never re-tokenised."""

    prompt_ids: IntArray  # [Lp]
    completion_ids: IntArray  # [Lc], including the stop token if finish == "stop"
    logprobs: FloatArray  # [Lc], under the distribution that was sampled from
    finish: Finish
    policy_version: int
    read: int | None = None  # prompt tokens computed for it, of samples with one prompt for the first; None: unknown

    def __post_init__(self) -> None:
        if self.logprobs.shape != self.completion_ids.shape:
            raise ValueError(
                f"Turn: {self.completion_ids.shape[0]} completion tokens but {self.logprobs.shape[0]} log-probs"
            )


@dataclass(frozen=True, slots=True)
class Step:
    """The outcome of one turn: the parsed message, and the environment's reply."""

    message: Mapping[str, Any]  # {"role": "assistant", "content": ..., "tool_calls": [...]}
    replies: tuple[Mapping[str, Any], ...] = ()  # messages of the environment, tool results included
    reward: float | None = None  # for this turn alone; None: the environment gives none
    error: str | None = None  # why a tool call could not be read
    parts: Mapping[str, float] = field(default_factory=dict)  # numbers that the environment logs
    #: Until the turn was said, waiting for a place included, and until the environment had answered; not in any
    #: record that a resumed run repeats.
    seconds: tuple[float, float] = field(default=(0.0, 0.0), compare=False)


@dataclass(frozen=True, slots=True)
class Episode:
    """What happened between the turns of a rollout; empty for a task that is answered in one turn."""

    end: End = "done"
    steps: tuple[Step, ...] = ()  # [turns], or empty
    reward: float | None = None  # of the episode as a whole, in addition to those of its steps; None: not given
    note: str | None = None  # why the environment failed, if it did
    environment: Any = field(default=None, compare=False, repr=False)  # for reward functions, in its own process

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without the environment, which belongs to one process."""
        return Episode, (self.end, self.steps, self.reward, self.note)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled answer to one problem, in one turn or several."""

    problem_id: str
    index: int  # 0..G-1 within its group
    turns: tuple[Turn, ...]
    text: str  # the last turn's text: the opening tag given in the prompt, if any, then the decoded completion
    episode: Episode = Episode()

    @property
    def num_tokens(self) -> int:
        """Completion tokens over all turns."""
        return sum(len(turn.completion_ids) for turn in self.turns)

    @property
    def finish(self) -> Finish:
        """How its last turn ended. A program that was told of a cut, and then ended by itself, was not cut off."""
        return "stop" if self.episode.steps and self.episode.end == "done" else self.turns[-1].finish


@dataclass(frozen=True, slots=True)
class Grade:
    """A task's judgement of one answer."""

    verdict: Verdict
    extracted: str | None = None  # the answer as the parser read it
    note: str | None = None  # why the verifier has no verdict, if it has none
    score: float | None = None  # the task's own score from 0 to 1, if it gives partial credit


@dataclass(frozen=True, slots=True)
class Reward:
    total: float  # weighted sum of the parts
    parts: Mapping[str, float]  # unweighted
    verdict: Verdict
    extracted: str | None = None
    note: str | None = None  # why there is no reward, if there is none
    turns: tuple[float, ...] = ()  # with several turns: the reward of each; they add up to the total


@dataclass(frozen=True, slots=True)
class Group:
    problem: Problem
    rollouts: tuple[Rollout, ...]  # [G]
    rewards: tuple[Reward, ...]  # [G]

    def __post_init__(self) -> None:
        if len(self.rollouts) != len(self.rewards):
            raise ValueError(f"Group {self.problem.id}: {len(self.rollouts)} rollouts, {len(self.rewards)} rewards")


@dataclass(frozen=True, slots=True)
class Sample:
    """One training sequence. `trained`, `logprobs` and `advantages` are aligned with
    `token_ids`: entry t belongs to token t itself, not to its successor. The one shift of
    the whole system is in `hone.learn.pack`.

    Worked example: prompt [5, 6], completion [7, 2(eos)], advantage 1.5::

        token_ids  = [5, 6, 7, 2]
        trained    = [F, F, T, T]
        logprobs   = [0, 0, -0.1, -0.7]
        advantages = [0, 0, 1.5, 1.5]
    """

    token_ids: IntArray  # [L]
    trained: BoolArray  # [L]
    logprobs: FloatArray  # [L], the sampler's; 0 where not trained
    advantages: FloatArray  # [L]; 0 where not trained
    prompt_len: int  # Lp, tokens shared by the samples of a group
    problem_id: str
    policy_version: int

    def __post_init__(self) -> None:
        n = self.token_ids.shape
        for name in ("trained", "logprobs", "advantages"):
            if getattr(self, name).shape != n:
                raise ValueError(f"Sample {self.problem_id}: {name} has shape {getattr(self, name).shape}, tokens {n}")
        if not 0 < self.prompt_len <= n[0]:
            raise ValueError(f"Sample {self.problem_id}: prompt_len {self.prompt_len} of {n[0]} tokens")
        if self.trained[: self.prompt_len].any():
            raise ValueError(f"Sample {self.problem_id}: a prompt token is marked as trained")


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive packed tokens: one prompt, then the completions that share it.

    Each completion attends to the prompt and to itself. `prompt_len` may be 0 (a completion
    then holds a whole sequence).
    """

    prompt_len: int
    completion_lens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.prompt_len + sum(self.completion_lens)


#: Fields of a MicroBatch that hold one number per trained token, beside `targets`.
TOKEN_FIELDS = (
    *("sources", "samples", "sampled_logprobs", "advantages", "weights"),
    *("old_logprobs", "ref_logprobs", "old_values", "value_targets"),
)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed sequences and, apart from them, the N trained tokens.

    The shift happened once, in `hone.learn.pack`: trained token n is `targets[n]`, predicted
    from the hidden state at packed position `sources[n]`. With a shared prompt its last
    position is the source of the first token of every completion.

    Worked example: prompt [5, 6] shared by completions [7, 2] and [8, 9, 2]::

        inputs    = [5, 6, 7, 2, 8, 9, 2]
        positions = [0, 1, 2, 3, 2, 3, 4]
        layout    = (Block(2, (2, 3)),)
        sources   = [1, 2,  1, 4, 5]
        targets   = [7, 2,  8, 9, 2]
        samples   = [0, 0,  1, 1, 1]
    """

    inputs: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, restarting per sequence
    layout: tuple[Block, ...]  # sums to T
    sources: torch.Tensor  # [N] int64, indices into T
    targets: torch.Tensor  # [N] int64
    samples: torch.Tensor  # [N] int64, which sequence of this micro-batch a token belongs to: 0..S-1
    sampled_logprobs: torch.Tensor  # [N] float32, the sampler's
    advantages: torch.Tensor  # [N] float32
    weights: torch.Tensor  # [N] float32, the reduction: loss = sum(weights * token_loss), global over the batch
    old_logprobs: torch.Tensor | None = None  # [N] float32; None: on-policy, the current ones are the old ones
    ref_logprobs: torch.Tensor | None = None  # [N] float32; None: no reference in use
    old_values: torch.Tensor | None = None  # [N] float32, the value head's at the time of sampling; None: no value head
    value_targets: torch.Tensor | None = None  # [N] float32
    sample_ids: tuple[int, ...] = ()  # [S] position of each sequence in the step's list of samples

    def __post_init__(self) -> None:
        t, n = self.inputs.shape[0], self.targets.shape[0]
        if sum(block.num_tokens for block in self.layout) != t or self.positions.shape[0] != t:
            raise ValueError(f"MicroBatch: layout or positions do not cover the {t} packed tokens")
        for name in TOKEN_FIELDS:
            value = getattr(self, name)
            if value is not None and value.shape != (n,):
                raise ValueError(f"MicroBatch: {name} has shape {tuple(value.shape)}, trained tokens {n}")


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics of one call of `Policy.update`, over all its optimizer steps."""

    loss: float
    grad_norm: float  # before clipping; the largest of the updates
    num_tokens: int  # trained tokens
    metrics: Mapping[str, float]
    #: sample -> the trainer's log-probs [Lc] when it was first trained on; samples without gradient are missing
    logprobs: Mapping[int, FloatArray] = field(default_factory=dict)
    entropies: Mapping[int, FloatArray] = field(default_factory=dict)  # [Lc] likewise, in nats
    #: sample -> norm of its loss's gradient with respect to the last hidden states: how much it contributes
    grad_norms: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its confidence interval, as every reported number has one."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class Example:
    """One supervised pair: the problem, and the text that the model should learn to produce."""

    problem: Problem
    text: str
    style: str = ""
    turns: tuple[str, ...] = ()  # earlier turns, in an environment that replies to each


Messages = Sequence[Mapping[str, str]]
