"""The policy: a network and its optimizer. Weights change only here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hone.base import streams
from hone.base.settings import UserError
from hone.base.world import ALONE, World
from hone.learn import state
from hone.learn.forward import (
    fast_layers,
    frozen_logprobs,
    local_batches,
    map_no_grad,
    packed_hidden,
    packed_logprobs,
    to_device,
)
from hone.learn.network import LoadedModel, Network
from hone.learn.objective import Objective, imitation, objective
from hone.learn.optimizer import MasterAdamW, check_layers
from hone.learn.state import State
from hone.learn.totals import Totals, merge_stats
from hone.learn.value import ValueHead
from hone.model import lora as adapters
from hone.model import shards
from hone.model.parallel import as_forward
from hone.model.random_state import own_random_numbers
from hone.model.update_mode import update_mode
from hone.recipe.sections.algo import AlgoConfig, ValueConfig
from hone.recipe.sections.model import LoraConfig, ModelConfig
from hone.recipe.sections.optim import LayersConfig, OptimConfig
from hone.types import MicroBatch, StepStats

#: The loss of one micro-batch, from the log-probs [N] and entropies [N] of its tokens.
LossFn = Callable[[MicroBatch, torch.Tensor, torch.Tensor], Objective]


@dataclass(frozen=True)
class Trainable:
    """What is trained: all weights, those of some layers, or an adapter; for PPO a value head as well."""

    lora: LoraConfig | None = None
    layers: LayersConfig = field(default_factory=LayersConfig)
    value: ValueConfig | None = None
    seed: int = 0  # of an adapter's first weights and its dropout


ALL_WEIGHTS = Trainable()


class Policy(Network):
    """A network that is trained. `updates` counts optimizer steps, including skipped ones.

    The parts: `Network` (model, adapter, reference, export), `optimizer` (`MasterAdamW`), `value_head` (`ValueHead`,
    PPO only), and `hone.learn.state` (what a checkpoint holds).
    """

    def __init__(
        self,
        loaded: LoadedModel,
        optim: OptimConfig,
        total_updates: int,
        trainable: Trainable = ALL_WEIGHTS,
        world: World = ALONE,
    ) -> None:
        super().__init__(loaded, trainable.lora, trainable.seed, world)
        self.total_updates = total_updates
        self.updates = 0
        self.fresh_at = 0  # the first update of this optimizer
        self.value_head = None if trainable.value is None else ValueHead(self.model, trainable.value)
        self.optimizer = MasterAdamW(self.model, self.value_head, optim, trainable.layers)
        self._files: tuple[int, dict[str, bytes]] | None = None  # (resets, files of a checkpoint that only they change)

    @classmethod
    def load(
        cls,
        model: ModelConfig,
        optim: OptimConfig,
        total_updates: int,
        trainable: Trainable = ALL_WEIGHTS,
        *,
        reference: bool = False,
        world: World = ALONE,
    ) -> Policy:
        """Load model and tokenizer; `reference` keeps the initial weights for a KL penalty."""
        loaded = LoadedModel.load(model, trainable.lora, reference, world)
        return cls(loaded, optim, total_updates, trainable, world)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The trainable parameters of the model."""
        return self.optimizer.parameters

    # --- forward ------------------------------------------------------------------------------

    def logprobs(self, batches: Iterable[MicroBatch], temperature: float) -> list[np.ndarray]:
        """Log-probs [N] per micro-batch, without gradient."""
        return frozen_logprobs(self.model, batches, temperature, self.world)

    def values(self, batches: Iterable[MicroBatch]) -> list[np.ndarray]:
        """Values [N] of the trained tokens per micro-batch, without gradient."""
        assert self.value_head is not None, "a policy without a value head"
        head = self.value_head

        def forward(batch: MicroBatch) -> torch.Tensor:
            return head.values(as_forward(self.model, lambda: packed_hidden(self.model, batch)))

        return map_no_grad(self.model, list(batches), self.world, forward)

    # --- update -------------------------------------------------------------------------------

    def update(self, minibatches: Sequence[Sequence[MicroBatch]], algo: AlgoConfig, temperature: float) -> StepStats:
        """One optimizer step per mini-batch, a list of micro-batches whose losses add up.

        Without mini-batches (no group had a reward difference) nothing changes.
        """
        loss_fn = partial(objective, algo=algo)
        return merge_stats([self._step(batches, loss_fn, temperature) for batches in minibatches])

    def imitate(self, batches: Sequence[MicroBatch]) -> StepStats:
        """One optimizer step of supervised training: weighted cross-entropy."""
        if self.lora is None or not self.lora.dropout:
            return self._step(batches, imitation, 1.0)
        with own_random_numbers(self.device):  # dropout depends only on the seed and the update
            torch.manual_seed(streams.dropout(self.seed, self.updates, self.world.data_rank))
            return self._step(batches, imitation, 1.0)

    def _step(self, batches: Sequence[MicroBatch], loss_fn: LossFn, temperature: float) -> StepStats:
        """Add up the gradients of the micro-batches, clip their norm, step; skipped if something is not finite."""
        totals, optimizer = Totals(), self.optimizer
        # Around the backward pass too, which may recompute parts of the forward pass.
        with fast_layers(self.model), update_mode(self.model):
            for batch in (to_device(b, self.device) for _, b in local_batches(batches, self.world)):
                outputs = packed_logprobs(self.model, batch, temperature, want_entropy=True)
                outputs.hidden.retain_grad()
                assert outputs.entropy is not None
                part = loss_fn(batch, outputs.logprobs, outputs.entropy)
                value_loss = self._value_loss(batch, outputs.hidden)
                (part.loss + value_loss).backward()
                totals.add(batch, outputs, part, value_loss)
        totals = totals.read().gathered(self.world)
        optimizer.sum_gradients(self.world, self.partial)
        norm, value_norm = optimizer.clip(self.world)
        finite = all(map(math.isfinite, (norm, value_norm, totals.loss, totals.value_loss)))
        factor = optimizer.optim.schedule(self.updates, self.total_updates, self.fresh_at)
        if finite:
            optimizer.apply(factor)
        optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        metrics = {"lr": optimizer.optim.lr * factor, "skipped": float(not finite)}
        if self.value_head is not None:
            metrics |= {"value/loss": totals.value_loss, "value/grad_norm": value_norm}
        return totals.stats(norm, metrics)

    def _value_loss(self, batch: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.new_zeros(()) if self.value_head is None else self.value_head.loss(batch, hidden)

    # --- between updates ----------------------------------------------------------------------

    def check(self, layers: LayersConfig, lora: LoraConfig | None) -> None:
        """Raises UserError if a later phase needs layers or modules that this model does not have."""
        check_layers(self.model, layers)
        if lora is not None:
            with adapters.adapter_off(self.model):
                adapters.target_names(self.model, lora.targets)

    def configure(self, optim: OptimConfig, layers: LayersConfig) -> None:
        """Set rates and layers, which a schedule may change between two updates. The moments stay."""
        self.optimizer.configure(optim, layers)

    def merge_and_reset(
        self, step: int, optim: OptimConfig, layers: LayersConfig, lora: LoraConfig | None, why: dict[str, Any]
    ) -> None:
        """Hard reset before `step`: the current model becomes the reference and the base of a new adapter, which may
        have another rank and other targets, with a fresh optimizer. The outputs of the model do not change.

        Without an adapter only reference and optimizer are reset; float32 master weights stay: they are the policy.
        """
        self.resets.append({"step": step, **why})
        self.fresh_at = self.updates
        if self.lora is None:
            if self.reference is not None:
                self.reference.load_state_dict(self.model.state_dict())
            self.optimizer.renew(optim, layers)
            return
        assert lora is not None, "a schedule neither adds an adapter nor drops it"
        self.renew_adapter(lora)
        self.optimizer = MasterAdamW(self.model, self.value_head, optim, layers)

    # --- checkpoints --------------------------------------------------------------------------

    def save(self) -> State:
        """A copy of weights, moments and counters; every process calls it and gets its own part.

        With an adapter only its weights are copied: the base is the stage's model or that of the last reset.
        """
        if self._files is None or self._files[0] != len(self.resets):
            self._files = len(self.resets), state.files(self) if self.world.main else {}
        tensors = {folder: shards.stage(own) for folder, own in state.tensors(self).items()}
        scalars = {
            "updates": self.updates,
            "fresh_at": self.fresh_at,
            "resets": list(self.resets),
            "lora": None if self.lora is None else self.lora.model_dump(mode="json"),
        }
        return State(tensors, self._files[1], scalars)

    def restore(self, folder: Path, scalars: Mapping[str, Any], base: Path | None = None) -> None:
        """Restore exactly what `save` copied: weights, moments, counters. `base`: the model of the last hard reset.

        The checkpoint may come from a different world size or sharding.
        Raises UserError if only one of checkpoint and recipe has an adapter.
        """
        saved_lora = scalars.get("lora")
        if (saved_lora is None) != (self.lora is None):
            has, wants = ("no adapter", "one") if saved_lora is None else ("an adapter", "none")
            raise UserError(f"{folder} has {has} and the recipe wants {wants}; resume with lora as it was")
        self.resets = list(scalars.get("resets", ()))
        if saved_lora is not None:
            self.restore_adapter(LoraConfig.model_validate(saved_lora), folder / "model", base)
            optim, layers = self.optimizer.optim, self.optimizer.layers
            self.optimizer = MasterAdamW(self.model, self.value_head, optim, layers)
        else:
            state.read_weights(self.model, folder / "model")
            if base is not None and self.reference is not None:
                state.read_weights(self.reference, base)
        state.restore(self, folder)
        self.updates, self.fresh_at = int(scalars["updates"]), int(scalars.get("fresh_at", 0))
