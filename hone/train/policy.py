"""The policy: a model and its optimizer, and the one way in which weights ever change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from hone.algo.config import AlgoConfig, ValueConfig
from hone.algo.losses import value_loss
from hone.algo.objective import METRICS, objective
from hone.model.config import ModelConfig
from hone.model.linear import onednn
from hone.model.load import load_model, load_tokenizer, stop_token_ids
from hone.model.logprobs import head_logprobs
from hone.train.config import OptimConfig
from hone.train.master import master_weights, publish
from hone.types import Block, FloatArray, MicroBatch, StepStats

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: Packed lengths are rounded up to a multiple of this. Kernels are built per shape and kept: few shapes take less
#: time to build and less memory to keep.
LENGTH_MULTIPLE = 128

#: What to minimise over one micro-batch: (batch, logprobs [N], entropy [N]) -> (loss, sums of METRICS).
LossFn = Callable[[MicroBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def packed_hidden(model: PreTrainedModel, batch: MicroBatch) -> torch.Tensor:
    """The last hidden states [N, D] from which the trained tokens are predicted."""
    spare = -len(batch.inputs) % LENGTH_MULTIPLE  # one more sequence, which nobody asks anything of
    layout = (*batch.layout, Block(0, (spare,))) if spare else batch.layout
    inputs, positions = (F.pad(x, (0, spare))[None] for x in (batch.inputs, batch.positions))
    out = model.base_model(input_ids=inputs, position_ids=positions, use_cache=False, layout=layout)
    hidden: torch.Tensor = out.last_hidden_state[0][batch.sources]
    return hidden


@contextmanager
def looking(model: PreTrainedModel) -> Iterator[None]:
    """No gradient, and nothing that only training needs, for the duration."""
    training = model.training
    try:
        with torch.no_grad(), onednn(model.eval()):
            yield
    finally:
        model.train(training)


def frozen_logprobs(model: PreTrainedModel, batches: Iterable[MicroBatch], temperature: float) -> list[np.ndarray]:
    """[N] per micro-batch, without gradient: old log-probs, and those of a reference model."""
    result = []
    with looking(model):
        for batch in (to_device(b, model.device) for b in batches):
            values, _ = head_logprobs(model, packed_hidden(model, batch), batch.targets, temperature)
            result.append(values.float().cpu().numpy())
    return result


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


class Policy:
    """Model, tokenizer and AdamW; with `value`, PPO's value head too.

    `updates` counts optimizer steps, skipped ones included. `parameters` are the model's, `masters` the float32
    tensors that the optimizer steps (see `hone.train.master`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        optim: OptimConfig,
        total_updates: int,
        value: ValueConfig | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.optim = optim
        self.total_updates = total_updates
        self.updates = 0
        self.stop_ids = stop_token_ids(model, tokenizer)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.masters = master_weights(self.parameters)
        self.value = value
        self.value_head = None if value is None else new_value_head(model)
        groups = [{"params": self.masters, "full_lr": optim.lr}]
        if value is not None and self.value_head is not None:
            groups.append({"params": list(self.value_head.parameters()), "full_lr": value.lr})
        self.optimizer = torch.optim.AdamW(
            groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=True
        )
        model.train()

    @classmethod
    def load(
        cls, model: ModelConfig, optim: OptimConfig, total_updates: int, value: ValueConfig | None = None
    ) -> Policy:
        return cls(load_model(model), load_tokenizer(model), optim, total_updates, value)

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    # --- forward ------------------------------------------------------------------------------

    def logprobs(self, batches: Iterable[MicroBatch], temperature: float) -> list[np.ndarray]:
        """[N] per micro-batch, without gradient."""
        return frozen_logprobs(self.model, batches, temperature)

    def values(self, batches: Iterable[MicroBatch]) -> list[np.ndarray]:
        """[N] per micro-batch, without gradient: what the value head expects at each trained token."""
        assert self.value_head is not None, "a policy without a value head"
        with looking(self.model):
            moved = (to_device(batch, self.device) for batch in batches)
            return [self.value_head(packed_hidden(self.model, b).float())[:, 0].cpu().numpy() for b in moved]

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
        total = Totals()
        with onednn(self.model):  # around the way back too, which may compute parts of the way there again
            for batch in (to_device(b, self.device) for b in batches):
                hidden = packed_hidden(self.model, batch)
                hidden.retain_grad()
                logprobs, entropy = head_logprobs(self.model, hidden, batch.targets, temperature, want_entropy=True)
                assert entropy is not None
                part, sums = loss_fn(batch, logprobs, entropy)
                value_part = self._value_loss(batch, hidden)
                (part + value_part).backward()
                total.add(batch, hidden, logprobs, entropy, part, value_part, sums)
        norm = self._clip(self.masters)
        # The value head on its own: its gradient says nothing of how far the policy may go.
        value_norm = 0.0 if self.value_head is None else self._clip(list(self.value_head.parameters()))
        finite = all(map(math.isfinite, (norm, value_norm, total.loss, total.value_loss)))
        factor = self.optim.schedule(self.updates, self.total_updates)
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = group["full_lr"] * factor
            self.optimizer.step()
            publish(self.masters, self.parameters)
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        more = {"lr": self.optim.lr * factor, "skipped": float(not finite)}
        if self.value_head is not None:
            more |= {"value/loss": total.value_loss, "value/grad_norm": value_norm}
        return total.stats(norm, more)

    def _clip(self, parameters: Sequence[torch.Tensor]) -> float:
        """The norm over all these gradients, before it is cut to `grad_clip`."""
        return float(torch.nn.utils.clip_grad_norm_(parameters, self.optim.grad_clip))

    def _value_loss(self, batch: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
        """Of this micro-batch's share of the batch; it trains the head only."""
        if self.value_head is None or self.value is None or batch.old_values is None or batch.value_targets is None:
            return hidden.new_zeros(())
        values = self.value_head(hidden.detach().float())[:, 0]
        return (batch.weights * value_loss(values, batch.old_values, batch.value_targets, self.value.clip)).sum()

    # --- state --------------------------------------------------------------------------------

    def export(self, folder: Path) -> None:
        """An ordinary Hugging Face checkpoint."""
        self.model.save_pretrained(folder, max_shard_size="1000GB")  # one file: `restore` reads it back
        self.tokenizer.save_pretrained(folder)

    def save(self, folder: Path) -> dict[str, Any]:
        """Weights and moments into `folder`; returns the scalars to keep beside them."""
        self.export(folder / "model")
        save_file(self._state_tensors(), folder / "optimizer.safetensors")
        return {"updates": self.updates}

    def restore(self, folder: Path, state: dict[str, Any]) -> None:
        """Back to exactly what `save` wrote: weights, moments, counters."""
        weights = load_file(folder / "model" / "model.safetensors")
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or {})
        if set(missing) - tied or unexpected:
            raise ValueError(f"{folder}: weights do not fit the model (missing {missing}, unexpected {unexpected})")
        for master, p in zip(self.masters, self.parameters, strict=True):
            master.data.copy_(p)  # unless the checkpoint has something more precise, below
        tensors = load_file(folder / "optimizer.safetensors")
        for i, stepped in enumerate(self._stepped()):
            if f"{i}.weight" in tensors:
                stepped.data.copy_(tensors[f"{i}.weight"])
            if f"{i}.step" in tensors:
                self.optimizer.state[stepped] = {
                    key: tensors[f"{i}.{key}"].to(stepped.device) for key in ("step", "exp_avg", "exp_avg_sq")
                }
        self.updates = int(state["updates"])

    def _stepped(self) -> list[torch.Tensor]:
        """Everything that the optimizer steps, in a fixed order."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _state_tensors(self) -> dict[str, torch.Tensor]:
        """Moments, and the weights that the exported model does not hold: masters that are copies, the value head."""
        exported = {id(p) for p in self.parameters}
        tensors: dict[str, torch.Tensor] = {}
        for i, p in enumerate(self._stepped()):
            tensors |= {f"{i}.{key}": value.contiguous() for key, value in self.optimizer.state.get(p, {}).items()}
            if id(p) not in exported:
                tensors[f"{i}.weight"] = p.detach().contiguous()
        return tensors


def new_value_head(model: PreTrainedModel) -> torch.nn.Linear:
    """Hidden states [N, D] -> values [N, 1]; at first all are 0."""
    head = torch.nn.Linear(model.config.get_text_config().hidden_size, 1, device=model.device)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    return head


class Totals:
    """What the micro-batches of one update add up to."""

    def __init__(self) -> None:
        self.loss = self.value_loss = self.mismatch = 0.0
        self.tokens = 0
        self.sums = torch.zeros(len(METRICS), dtype=torch.float64)
        self.logprobs: dict[int, FloatArray] = {}
        self.entropies: dict[int, FloatArray] = {}
        self.grad_norms: dict[int, float] = {}

    def add(
        self,
        batch: MicroBatch,
        hidden: torch.Tensor,  # [N, D], after the backward pass
        logprobs: torch.Tensor,  # [N]
        entropy: torch.Tensor,  # [N]
        loss: torch.Tensor,
        value_loss: torch.Tensor,
        sums: torch.Tensor,  # [len(METRICS)]
    ) -> None:
        self.loss += float(loss.detach())
        self.value_loss += float(value_loss.detach())
        self.tokens += len(batch.targets)
        if batch.sampled_logprobs.any():  # there was a sampler
            old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
            self.mismatch = max(self.mismatch, float((old - batch.sampled_logprobs).abs().max()))
        self.sums += sums.cpu()
        self.logprobs.update(split_by_sample(batch, logprobs.detach().float().cpu().numpy()))
        self.entropies.update(split_by_sample(batch, entropy.detach().float().cpu().numpy()))
        assert hidden.grad is not None
        squares = hidden.grad.float().square().sum(dim=1)  # [N]
        per_sample = torch.zeros(len(batch.sample_ids), device=squares.device).index_add_(0, batch.samples, squares)
        self.grad_norms.update(zip(batch.sample_ids, per_sample.sqrt().tolist(), strict=True))

    def stats(self, norm: float, more: dict[str, float]) -> StepStats:
        metrics = {name: float(s) / max(self.tokens, 1) for name, s in zip(METRICS, self.sums, strict=True)}
        metrics["mismatch/max"] = self.mismatch
        return StepStats(
            self.loss, norm, self.tokens, {**metrics, **more}, self.logprobs, self.entropies, self.grad_norms
        )


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
    taken = [s for s in stats if not s.metrics["skipped"]] or stats  # what was skipped is not finite, and says nothing
    weight = max(1, sum(s.num_tokens for s in taken))
    metrics = {key: sum(s.metrics[key] * s.num_tokens for s in taken) / weight for key in taken[0].metrics}
    metrics |= {key: value for key, value in taken[0].metrics.items() if key.startswith("mismatch/")}
    metrics["lr"] = stats[-1].metrics["lr"]
    metrics["skipped"] = sum(s.metrics["skipped"] for s in stats)
    return StepStats(
        sum(s.loss for s in taken) / len(taken),
        float(np.max([s.grad_norm for s in stats])),  # NaN if one is
        tokens,
        metrics,
        **{
            name: {i: value for s in stats for i, value in getattr(s, name).items()}
            for name in ("logprobs", "entropies", "grad_norms")
        },
    )
