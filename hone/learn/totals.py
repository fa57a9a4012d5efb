"""Sums over the micro-batches of an update and over the updates of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hone.base.world import World
from hone.learn.forward import Outputs
from hone.learn.objective import METRICS, Objective
from hone.types import FloatArray, MicroBatch, StepStats


class Totals:
    """Sums over the micro-batches of one update."""

    def __init__(self) -> None:
        self.loss = self.value_loss = self.mismatch = 0.0
        self.tokens = 0
        self.sums = torch.zeros(len(METRICS), dtype=torch.float64)
        self.logprobs: dict[int, FloatArray] = {}
        self.entropies: dict[int, FloatArray] = {}
        self.grad_norms: dict[int, float] = {}
        self._unread: list[tuple[tuple[int, ...], torch.Tensor]] = []  # per micro-batch: sample ids, all values flat

    def add(self, batch: MicroBatch, outputs: Outputs, objective: Objective, value_loss: torch.Tensor) -> None:
        """Add a micro-batch after its backward pass, which has left a gradient in the hidden states.

        Does not wait for the device, which would then stall until the next micro-batch: see `read`.
        """
        hidden, logprobs, entropy = outputs
        assert hidden.grad is not None
        assert entropy is not None
        squares = hidden.grad.float().square().sum(dim=1)  # [N]
        norms = torch.zeros(len(batch.sample_ids), device=squares.device).index_add_(0, batch.samples, squares).sqrt()
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        gaps = torch.where(batch.sampled_logprobs.any(), (old - batch.sampled_logprobs).abs(), 0.0)  # all 0: no sampler
        mismatch = gaps.max() if len(gaps) else gaps.sum()
        parts = (objective.loss, value_loss, mismatch, objective.sums, norms, batch.samples, logprobs, entropy)
        self._unread.append(
            (batch.sample_ids, torch.cat([p.detach().to(norms.device, torch.float64).reshape(-1) for p in parts]))
        )

    def read(self) -> Totals:
        """Fetch the added values in one transfer."""
        unread, self._unread = self._unread, []
        if not unread:
            return self
        values = torch.cat([flat for _, flat in unread]).cpu().numpy()
        ends = np.cumsum([len(flat) for _, flat in unread])
        for (ids, _), flat in zip(unread, np.split(values, ends[:-1]), strict=True):
            (loss, value_loss, mismatch), sums, norms, rest = np.split(flat, np.cumsum([3, len(METRICS), len(ids)]))
            samples, logprobs, entropies = rest.reshape(3, -1)
            self.loss += float(loss)
            self.value_loss += float(value_loss)
            self.mismatch = max(self.mismatch, float(mismatch))
            self.sums += torch.from_numpy(sums)
            self.tokens += len(samples)
            places = samples.astype(np.int64)
            self.logprobs |= _split(ids, places, logprobs.astype(np.float32))
            self.entropies |= _split(ids, places, entropies.astype(np.float32))
            self.grad_norms |= dict(zip(ids, norms.tolist(), strict=True))
        return self

    def gathered(self, world: World) -> Totals:
        """The totals over all processes."""
        if world.size == 1:
            return self
        whole = Totals()
        for part in world.gather([self] if world.is_writer else [], "totals of the update"):
            whole.loss += part.loss
            whole.value_loss += part.value_loss
            whole.mismatch = max(whole.mismatch, part.mismatch)
            whole.tokens += part.tokens
            whole.sums += part.sums
            whole.logprobs |= part.logprobs
            whole.entropies |= part.entropies
            whole.grad_norms |= part.grad_norms
        return whole

    def stats(self, norm: float, more: dict[str, float]) -> StepStats:
        metrics = {name: float(s) / max(self.tokens, 1) for name, s in zip(METRICS, self.sums, strict=True)}
        metrics["mismatch/max"] = self.mismatch
        return StepStats(
            self.loss, norm, self.tokens, {**metrics, **more}, self.logprobs, self.entropies, self.grad_norms
        )


def split_by_sample(batch: MicroBatch, values: FloatArray) -> list[tuple[int, FloatArray]]:
    """Per-token values [N] of a micro-batch as (the sample's id, [Lc])."""
    return list(_split(batch.sample_ids, batch.samples.cpu().numpy(), values).items())


def _split(ids: Sequence[int], samples: npt.NDArray[np.int64], values: FloatArray) -> dict[int, FloatArray]:
    """Values [N] of tokens -> id -> [Lc]; `samples` [N] are indices into `ids` [S]."""
    if not ids:
        return {}
    counts = np.bincount(samples, minlength=len(ids))
    return dict(zip(ids, np.split(values, np.cumsum(counts)[:-1]), strict=True))


def merge_stats(stats: Sequence[StepStats]) -> StepStats:
    """Several updates as one row: token-weighted means, the largest gradient norm, the last learning rate.

    The mismatch between sampler and trainer is taken from the first update, when both hold the same weights.
    """
    if not stats:
        return StepStats(0.0, 0.0, 0, {"skipped": 0.0})
    tokens = sum(s.num_tokens for s in stats)
    taken = [s for s in stats if not s.metrics["skipped"]] or stats  # skipped updates are not finite
    weight = max(1, sum(s.num_tokens for s in taken))
    metrics = {key: sum(s.metrics[key] * s.num_tokens for s in taken) / weight for key in taken[0].metrics}
    metrics |= {key: value for key, value in taken[0].metrics.items() if key.startswith("mismatch/")}
    metrics["lr"] = stats[-1].metrics["lr"]
    metrics["skipped"] = sum(s.metrics["skipped"] for s in stats)
    return StepStats(
        sum(s.loss for s in taken) / len(taken),
        float(np.max([s.grad_norm for s in stats])),  # NaN if any is
        tokens,
        metrics,
        **{
            name: {i: value for s in stats for i, value in getattr(s, name).items()}
            for name in ("logprobs", "entropies", "grad_norms")
        },
    )
