"""Proof, after every sync and before any rollout, that the engine serves the policy's weights.

Stale weights in the sampler are the costliest silent fault of RL on language models: training continues, the curves
look plausible, and every rollout is from another model. Three things are compared, as far as the engine supports them:

1. A digest of every tensor that it holds (vLLM with hone's extension).
2. Log-probs of fixed token sequences, against the policy's own of the same tokens. They must agree as closely as two
   implementations in the model's precision do.
3. The same log-probs against the policy's own at the last and the first sync. An engine that agrees much better with
   those is stale, however small the step was; one that suddenly agrees less well than before, by a share of what the
   step changed, has received only a part of the update.

An engine in the same process shares the weights: it samples through the code path of every rollout, and the policy
scores the tokens, with freshly rounded weights if the engine samples from rounded ones.

    engine = Verified(NativeEngine(...), policy.tokenizer, config, dtype, event)
    engine.sync(policy, version=3)      # raises PolicyMismatch
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch

from hone.base import streams
from hone.base.settings import UserError
from hone.learn.pack import Packer
from hone.learn.samples import supervised_sample
from hone.model.lora import adapter_off, adapter_weights, factor, merged
from hone.recipe.sections.rollout import IdentityConfig, SamplingConfig
from hone.rollout.engine import Engine, Event, Weights
from hone.rollout.servers.inside.hone_worker import digest
from hone.rollout.turns import Progress, Turns, open_turns
from hone.types import FloatArray, IntArray, Turn

if TYPE_CHECKING:
    from hone.learn.policy import Policy

#: Largest mean |difference| of log-probs between implementations with the same weights, by precision: measured in
#: float32 (docs/rollout.md), estimated in bfloat16, which has not been run. `rounded`: the policy with the same rounded
#: weights (`rollout.weights`), which differs by up to 0.005 as inputs are rounded too.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.08, "rounded": 0.02}
#: An engine is stale if its log-probs are closer to those of older weights by this factor.
CLOSER = 4.0
#: A part of an update is missing if the difference exceeds GROWN times the smallest so far, and SHARE of the update's
#: change of the policy's own log-probs. Rounding exceeds neither.
GROWN, SHARE = 10.0, 0.1
#: Differences below this are rounding, nats.
ROUNDING = 1e-6

PROBE_TEXT = (
    "Let me think about this step by step. If the first one tells the truth, then the second one is lying, "
    "and 3 * (7 + 2) - 6 = 21. So that cannot be: the answer is \\boxed{42}, and nothing else."
)
#: Scored sequences, and tokens of each.
SEQUENCES, LENGTH = 2, 24
#: For engines that only sample: the first token tests prefill, the second decoding.
SAMPLED = SamplingConfig(temperature=1.0, max_tokens=2)
#: Syncs between two checks of shared weights, so that checks take less than 1 % of the time.
SHARED_EVERY = 5


class PolicyMismatch(UserError):
    """The engine does not serve the weights of the policy."""


@runtime_checkable
class Scorer(Protocol):
    """An engine with its own weights: it can score fixed tokens, may report digests, and can be restarted."""

    on_restart: Callable[[], None]

    def probe(self, sequences: Sequence[IntArray]) -> tuple[list[Turn], Weights | None]: ...

    def close(self) -> None: ...


@runtime_checkable
class Rounding(Protocol):
    """An engine in the same process, which may sample from rounded copies of the policy's weights."""

    reduces: bool

    def as_served(self, model: Any) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class Expected:
    """The answers of an engine that serves the current policy."""

    version: int
    logprobs: FloatArray  # [N] of the fixed sequences
    digests: Mapping[str, int]  # of the engine's tensors, computed from the policy's


class Verified:
    """An engine whose every sync is checked. Implements `hone.rollout.engine.Engine`."""

    def __init__(self, engine: Engine, tokenizer: Any, config: IdentityConfig, dtype: str, event: Event) -> None:
        self._engine = engine
        rounded = isinstance(engine, Rounding) and engine.reduces
        self._tolerance = config.tolerance or TOLERANCE["rounded" if rounded else dtype]
        self._event = event
        self._sequences = probe_sequences(tokenizer)
        self._first: Expected | None = None
        self._last: Expected | None = None
        self._smallest_gap = math.inf
        self._reported_partial = self._checked_shared = False
        if isinstance(engine, Scorer):
            engine.on_restart = self._check_again

    def generate(
        self,
        prompts: Sequence[IntArray],
        sampling: SamplingConfig,
        *,
        samples: int,
        seed: int,
        progress: Callable[[int, int], None] | None = None,
        stream_ids: Sequence[int] | None = None,
    ) -> list[list[Turn]]:
        part = {} if stream_ids is None else {"stream_ids": stream_ids}
        return self._engine.generate(prompts, sampling, samples=samples, seed=seed, progress=progress, **part)

    def turns(
        self, sampling: SamplingConfig, seed: int, keep: bool, progress: Progress | None
    ) -> AbstractContextManager[Turns]:
        """See `hone.rollout.turns`."""
        return open_turns(self._engine, sampling, seed, keep=keep, progress=progress)

    @property
    def context(self) -> int | None:
        return self._engine.context

    def sync(self, policy: Policy, version: int) -> dict[str, float]:
        """Transfer the weights and compare. Returns metrics of the comparison. Raises PolicyMismatch."""
        before = self._last
        self._last = None  # a restart during the sync is covered by the check below
        self._engine.sync(policy, version)
        if not isinstance(self._engine, Scorer):
            return self._check_shared(policy, version)
        turns, held = self._engine.probe(self._sequences)
        expected = Expected(version, policy_logprobs(policy, turns), self._expected_digests(policy, held))
        self._compare_digests(expected, held)
        older = {e.version: e for e in (self._first, before) if e is not None and e.version != version}
        gap = self._compare(turns, expected.logprobs, version, tuple(older.values()))
        self._first, self._last = self._first or expected, expected
        return {"identity/gap": gap, "identity/tensors": float(len(expected.digests))}

    def close(self) -> None:
        """Ends what the engine started."""
        if isinstance(self._engine, Scorer):
            self._engine.close()

    # --- comparing ----------------------------------------------------------------------------

    def _check_shared(self, policy: Policy, version: int) -> dict[str, float]:
        """The metrics depend on the version alone, so that a resumed run has the same rows."""
        due = version % SHARED_EVERY == 0
        if not due and self._checked_shared:
            return {}
        groups = self._engine.generate(self._sequences, SAMPLED, samples=1, seed=streams.answers("identity check"))
        turns = [turn for group in groups for turn in group]
        with self._engine.as_served(policy.model) if isinstance(self._engine, Rounding) else nullcontext():
            expected = policy_logprobs(policy, turns)
        gap = self._compare(turns, expected, version, ())
        self._checked_shared = True
        return {"identity/gap": gap} if due else {}

    def _check_again(self) -> None:
        """Check again after a restart, against what the last sync expected."""
        assert isinstance(self._engine, Scorer)
        if self._last is None:
            return
        turns, held = self._engine.probe(self._sequences)
        self._compare_digests(self._last, held)
        older = () if self._first is None or self._first.version == self._last.version else (self._first,)
        self._compare(turns, self._last.logprobs, self._last.version, older)

    def _compare(self, turns: Sequence[Turn], expected: FloatArray, version: int, older: Sequence[Expected]) -> float:
        """The mean |difference| between the engine's log-probs and `expected` [N]."""
        served = np.concatenate([turn.logprobs for turn in turns])
        gap = mean_difference(served, expected)
        values = (
            f"mean log-prob of {len(served)} probe tokens: the engine's {served.mean():.6f}, the policy's "
            f"{expected.mean():.6f}; mean |difference| {gap:.3g}"
        )
        for old in older:
            distance, moved = mean_difference(served, old.logprobs), mean_difference(expected, old.logprobs)
            if gap > ROUNDING and distance * CLOSER < gap:
                raise self._mismatch(
                    f"version {version} was transferred, but the engine answers like version {old.version}: {values}, "
                    f"{distance:.3g} to version {old.version}"
                )
            if gap > GROWN * max(self._smallest_gap, ROUNDING) and gap > SHARE * moved:
                raise self._mismatch(
                    f"the engine has only a part of version {version}: {values}. At an earlier sync the difference was "
                    f"{self._smallest_gap:.3g}; since version {old.version} the policy has moved by {moved:.3g}"
                )
        if not gap <= self._tolerance:  # NaN too
            raise self._mismatch(
                f"after the sync of version {version} the engine does not answer as the policy does: {values}, more "
                f"than {self._tolerance:g} (rollout.identity.tolerance)"
            )
        self._smallest_gap = min(self._smallest_gap, gap)
        return gap

    def _expected_digests(self, policy: Policy, held: Weights | None) -> dict[str, int]:
        if held is None:
            self._report_partial("the engine has no digests of its weights: only log-probs are compared")
            return {}
        # An adapter is served beside its base, or merged into it.
        with (adapter_off if held.adapter else merged)(policy.model):
            expected, missing = policy_digests(policy.model.named_parameters(), held)
        if held.adapter:
            expected |= adapter_digests(policy.model, held)
        if missing:
            self._report_partial(
                f"digests of {len(missing)} of the policy's tensors are not compared, as the engine has no such names "
                f"(the first: {missing[0]}); log-probs are compared"
            )
        return expected

    def _compare_digests(self, expected: Expected, held: Weights | None) -> None:
        wrong = [name for name, value in expected.digests.items() if held is None or held.digests.get(name) != value]
        if wrong:
            name = wrong[0]
            theirs = None if held is None else held.digests.get(name)
            raise self._mismatch(
                f"version {expected.version} was transferred, but {len(wrong)} of {len(expected.digests)} tensors of "
                f"the engine differ from the policy's, the first {name}: digest {theirs}, the policy's "
                f"{expected.digests[name]}"
            )

    def _mismatch(self, message: str) -> PolicyMismatch:
        self._event("policy_mismatch", message)
        return PolicyMismatch(f"{message}. No rollout of these weights was made; the run stops here.")

    def _report_partial(self, message: str) -> None:
        if not self._reported_partial:
            self._reported_partial = True
            self._event("identity", message)


def probe_sequences(tokenizer: Any) -> list[IntArray]:
    """The fixed token sequences, `SEQUENCES` of at most `LENGTH`."""
    ids = np.asarray(tokenizer.encode(PROBE_TEXT, add_special_tokens=False), np.int64)
    starts = range(0, SEQUENCES * LENGTH, LENGTH)
    sequences = [ids[start : start + LENGTH] for start in starts]
    return [sequence for sequence in sequences if len(sequence) > 1] or [np.arange(2, dtype=np.int64)]


def policy_logprobs(policy: Policy, turns: Sequence[Turn]) -> FloatArray:
    """The policy's own log-probs [N] of the turns' tokens at temperature 1, turn after turn."""
    samples = [supervised_sample(f"probe {i}", turn.prompt_ids, turn.completion_ids) for i, turn in enumerate(turns)]
    batches = Packer(1 << 30, share_prompts=False)(samples, [0.0] * len(samples))
    by_turn: dict[int, FloatArray] = {}
    for batch, values in zip(batches, policy.logprobs(batches, 1.0), strict=True):
        of = batch.samples.cpu().numpy()
        by_turn |= {i: values[of == row] for row, i in enumerate(batch.sample_ids)}
    return np.concatenate([by_turn[i] for i in range(len(turns))])


def mean_difference(a: FloatArray, b: FloatArray) -> float:
    return float(np.abs(a.astype(np.float64) - b.astype(np.float64)).mean())


def policy_digests(parameters: Any, held: Weights) -> tuple[dict[str, int], list[str]]:
    """The expected digests by the engine's names, and the policy's names that the engine does not have.

    The engine's `qkv_proj` is the policy's q_proj, k_proj and v_proj stacked: their digests add up.
    """
    whole = {part: name for name, parts in held.parts.items() for part in parts}
    expected: dict[str, int] = {}
    missing = []
    for name, p in parameters:
        theirs = ".".join(whole.get(part, part) for part in name.split("."))
        if theirs not in held.digests:
            missing.append(name)
            continue
        rounded = p.detach().to(getattr(torch, held.dtypes[theirs]))
        expected[theirs] = (expected.get(theirs, 0) + digest(rounded)) % 2**64
    return expected, missing


def adapter_digests(model: Any, held: Weights) -> dict[str, int]:
    """Digests of the policy's A and B in the engine's form; 0 for layers without an adapter."""
    expected = {name: 0 for name in held.digests if ".lora_" in name}
    for name, tensor in adapter_weights(model).items():
        rounded = tensor.detach().to(getattr(torch, held.dtypes[name]) if name in held.dtypes else tensor.dtype)
        expected[name] = digest(rounded * factor(model) if ".lora_B." in name else rounded)
    return expected
