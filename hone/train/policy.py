"""The policy: a model and its optimizer, and the one way in which weights ever change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from hone.algo.config import AlgoConfig
from hone.algo.objective import METRICS, objective
from hone.config import UserError
from hone.model.config import ModelConfig
from hone.model.linear import onednn
from hone.model.load import load_model, load_tokenizer, stop_token_ids
from hone.model.logprobs import head_logprobs
from hone.train.config import OptimConfig
from hone.types import Block, FloatArray, MicroBatch, StepStats

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: Packed lengths are rounded up to a multiple of this. Kernels are built per shape and kept: few shapes take less
#: time to build and less memory to keep.
LENGTH_MULTIPLE = 128

#: What to minimise over one micro-batch: (batch, logprobs [N], entropy [N]) -> (loss, sums of METRICS).
LossFn = Callable[[MicroBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def packed_logprobs(
    model: PreTrainedModel, batch: MicroBatch, temperature: float, *, want_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs [N] of the trained tokens under the sampling temperature, and their entropies [N]."""
    spare = -len(batch.inputs) % LENGTH_MULTIPLE  # one more sequence, which nobody asks anything of
    layout = (*batch.layout, Block(0, (spare,))) if spare else batch.layout
    inputs, positions = (F.pad(x, (0, spare))[None] for x in (batch.inputs, batch.positions))
    with onednn(model):
        hidden = model.base_model(
            input_ids=inputs, position_ids=positions, use_cache=False, layout=layout
        ).last_hidden_state[0]
    return head_logprobs(model, hidden[batch.sources], batch.targets, temperature, want_entropy)


@torch.no_grad()
def frozen_logprobs(model: PreTrainedModel, batches: Iterable[MicroBatch], temperature: float) -> list[np.ndarray]:
    """[N] per micro-batch, without gradient: old log-probs, and those of a reference model."""
    moved = (to_device(batch, model.device) for batch in batches)
    return [packed_logprobs(model, b, temperature, want_entropy=False)[0].float().cpu().numpy() for b in moved]


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The same micro-batch with its tensors on `device`."""
    if batch.inputs.device == device:
        return batch
    moved: dict[str, Any] = {
        f.name: value.to(device, non_blocking=True)
        for f in fields(batch)
        if isinstance(value := getattr(batch, f.name), torch.Tensor)
    }
    return replace(batch, **moved)


class NonFiniteUpdate(UserError):
    """Raised when updates keep being skipped because of a loss or gradient that is not finite."""


class Policy:
    """Model, tokenizer and AdamW. `updates` counts optimizer steps, skipped ones included."""

    #: Consecutive skipped updates after which training stops.
    MAX_SKIPPED = 3

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, optim: OptimConfig, total_updates: int
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.optim = optim
        self.total_updates = total_updates
        self.updates = 0
        self.skipped = 0  # in a row
        self.stop_ids = stop_token_ids(model, tokenizer)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        model.train()

    @classmethod
    def load(cls, model: ModelConfig, optim: OptimConfig, total_updates: int) -> Policy:
        return cls(load_model(model), load_tokenizer(model), optim, total_updates)

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    # --- forward ------------------------------------------------------------------------------

    def logprobs(self, batches: Iterable[MicroBatch], temperature: float) -> list[np.ndarray]:
        """[N] per micro-batch, without gradient."""
        return frozen_logprobs(self.model, batches, temperature)

    # --- update -------------------------------------------------------------------------------

    def update(self, minibatches: Sequence[Sequence[MicroBatch]], algo: AlgoConfig, temperature: float) -> StepStats:
        """One optimizer step per mini-batch; each is a list of micro-batches whose losses add up.

        With no mini-batch (no group had a reward difference) nothing changes.
        """

        def loss_fn(
            batch: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return objective(batch, logprobs, entropy, algo)

        stats = [self._step(m, loss_fn, temperature) for m in minibatches]
        return merge_stats(stats)

    def imitate(self, batches: Sequence[MicroBatch]) -> StepStats:
        """One optimizer step of supervised training: weighted cross-entropy."""

        def loss_fn(
            batch: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            sums = torch.zeros(len(METRICS), dtype=torch.float64)
            sums[0] = entropy.detach().sum()
            return -(batch.weights * logprobs).sum(), sums

        return self._step(batches, loss_fn, 1.0)

    def _step(self, batches: Sequence[MicroBatch], loss_fn: LossFn, temperature: float) -> StepStats:
        """Accumulate the gradient over micro-batches, clip by its global norm, step."""
        loss = torch.zeros((), dtype=torch.float64)
        sums = torch.zeros(len(METRICS), dtype=torch.float64)
        tokens = 0
        seen: dict[str, dict[int, FloatArray]] = {"logprobs": {}, "entropies": {}}
        for batch in (to_device(b, self.device) for b in batches):
            logprobs, entropy = packed_logprobs(self.model, batch, temperature, want_entropy=True)
            assert entropy is not None
            for name, values in (("logprobs", logprobs), ("entropies", entropy)):
                seen[name].update(split_by_sample(batch, values.detach().float().cpu().numpy()))
            part, part_sums = loss_fn(batch, logprobs, entropy)
            part.backward()
            loss += part.detach().double().cpu()
            sums += part_sums.cpu()
            tokens += len(batch.targets)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.optim.grad_clip))
        finite = math.isfinite(norm) and math.isfinite(float(loss))
        lr = self.learning_rate()
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        self.skipped = 0 if finite else self.skipped + 1
        if self.skipped >= self.MAX_SKIPPED:
            raise NonFiniteUpdate(
                f"{self.skipped} updates in a row had a loss or gradient that is not finite (loss {float(loss)}, "
                f"gradient norm {norm}): lower optim.lr, or look at the samples of the last steps"
            )
        metrics = {name: float(s) / max(tokens, 1) for name, s in zip(METRICS, sums, strict=True)}
        return StepStats(float(loss), norm, tokens, {**metrics, "lr": lr, "skipped": float(not finite)}, **seen)

    def learning_rate(self) -> float:
        """Linear warm-up, then constant, or linear/cosine decay to zero at the last update."""
        warmup = min(1.0, (self.updates + 1) / (self.optim.warmup_steps + 1))
        span = max(1, self.total_updates - self.optim.warmup_steps)
        done = min(1.0, max(0.0, (self.updates - self.optim.warmup_steps) / span))
        decay = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
        return self.optim.lr * warmup * decay[self.optim.decay]

    # --- state --------------------------------------------------------------------------------

    def export(self, folder: Path) -> None:
        """An ordinary Hugging Face checkpoint."""
        self.model.save_pretrained(folder, max_shard_size="1000GB")  # one file: `restore` reads it back
        self.tokenizer.save_pretrained(folder)

    def save(self, folder: Path) -> dict[str, Any]:
        """Weights and moments into `folder`; returns the scalars to keep beside them."""
        self.export(folder / "model")
        save_file(self._moments(), folder / "optimizer.safetensors")
        return {"updates": self.updates, "skipped": self.skipped}

    def restore(self, folder: Path, state: dict[str, Any]) -> None:
        """Back to exactly what `save` wrote: weights, moments, counters."""
        weights = load_file(folder / "model" / "model.safetensors")
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or {})
        if set(missing) - tied or unexpected:
            raise ValueError(f"{folder}: weights do not fit the model (missing {missing}, unexpected {unexpected})")
        moments = load_file(folder / "optimizer.safetensors")
        for i, p in enumerate(self.parameters):
            if f"{i}.step" in moments:
                self.optimizer.state[p] = {
                    key: moments[f"{i}.{key}"].to(p.device) for key in ("step", "exp_avg", "exp_avg_sq")
                }
        self.updates, self.skipped = int(state["updates"]), int(state["skipped"])

    def _moments(self) -> dict[str, torch.Tensor]:
        return {
            f"{i}.{key}": value.contiguous()
            for i, p in enumerate(self.parameters)
            for key, value in self.optimizer.state.get(p, {}).items()
        }


def split_by_sample(batch: MicroBatch, values: FloatArray) -> list[tuple[int, FloatArray]]:
    """Per-token values [N] of a micro-batch as (the sample's id, [Lc])."""
    counts = np.bincount(batch.samples.cpu().numpy(), minlength=len(batch.sample_ids))
    return list(zip(batch.sample_ids, np.split(values, np.cumsum(counts)[:-1]), strict=True))


def merge_stats(stats: Sequence[StepStats]) -> StepStats:
    """Several updates as one row: token-weighted means, the largest gradient norm, the last rate.

    The mismatch between sampler and trainer is that of the first update, when both hold the same weights.
    """
    if not stats:
        return StepStats(0.0, 0.0, 0, {"skipped": 0.0})
    tokens = sum(s.num_tokens for s in stats)
    metrics = {key: sum(s.metrics[key] * s.num_tokens for s in stats) / max(tokens, 1) for key in stats[0].metrics}
    metrics["mismatch/mean_abs"] = stats[0].metrics["mismatch/mean_abs"]
    metrics["lr"] = stats[-1].metrics["lr"]
    metrics["skipped"] = sum(s.metrics["skipped"] for s in stats)
    return StepStats(
        sum(s.loss for s in stats) / len(stats),
        max(s.grad_norm for s in stats),
        tokens,
        metrics,
        {i: values for s in stats for i, values in s.logprobs.items()},
        {i: values for s in stats for i, values in s.entropies.items()},
    )
