"""The policy: a model and its optimizer. Weights change only here."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hone.base import places, streams
from hone.base.settings import UserError
from hone.base.world import ALONE, World
from hone.learn import state
from hone.learn.forward import fast_layers, local_batches, map_no_grad, packed_hidden, packed_logprobs, to_device
from hone.learn.forward import frozen_logprobs as frozen_logprobs
from hone.learn.losses import value_loss
from hone.learn.master import clip_gradients, collect_gradients, master_weights, publish
from hone.learn.objective import Objective, imitation, objective
from hone.learn.optimizer import check_layers, configure, depths, freeze, new_optimizer, new_value_head, num_layers
from hone.learn.state import State
from hone.learn.totals import Totals, merge_stats
from hone.learn.totals import split_by_sample as split_by_sample
from hone.model import lora as adapters
from hone.model import shards
from hone.model.load import load_model, load_tokenizer, stop_token_ids
from hone.model.parallel import as_forward, assemble, spread
from hone.model.random_state import own_random_numbers
from hone.model.saving import save_model
from hone.model.update_mode import update_mode
from hone.recipe.sections.algo import AlgoConfig, ValueConfig
from hone.recipe.sections.model import LoraConfig, ModelConfig
from hone.recipe.sections.optim import LayersConfig, OptimConfig
from hone.types import MicroBatch, StepStats

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: What to minimise over one micro-batch, from the log-probs [N] and entropies [N] of its tokens.
LossFn = Callable[[MicroBatch, torch.Tensor, torch.Tensor], Objective]


class Policy:
    """Model, tokenizer and AdamW; with `value` also PPO's value head; with `lora` an adapter, and only it is trained.

    `updates` counts optimizer steps, including skipped ones. `parameters` are the trainable ones, `masters` the float32
    tensors that the optimizer steps (see `hone.learn.master`). `reference` is the model of the KL penalty: a frozen
    copy, or with an adapter the model itself (`hone.learn.batches` turns the adapter off).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        optim: OptimConfig,
        total_updates: int,
        value: ValueConfig | None = None,
        *,
        lora: LoraConfig | None = None,
        layers: LayersConfig = LayersConfig(),  # noqa: B008  # frozen
        reference: PreTrainedModel | None = None,
        base: str = "",
        seed: int = 0,
        world: World = ALONE,
    ) -> None:
        self.world = world
        self.model = model
        self.tokenizer = tokenizer
        self.total_updates = total_updates
        self.updates = 0
        self.fresh_at = 0  # the first update of this optimizer
        self.resets: list[dict[str, Any]] = []  # hard resets so far: step and reason
        self.stop_ids = stop_token_ids(model, tokenizer)
        self._files: tuple[int, dict[str, bytes]] | None = None  # (resets, files of a checkpoint that only they change)
        self.lora, self.base, self.seed = lora, base, seed
        if lora is not None:
            adapters.attach(model, lora, streams.adapter(self.seed, len(self.resets)))
            if lora.path is not None:
                adapters.load_adapter(model, places.locate(lora.path))
        if world.is_sharded and reference is not None and reference is not model:
            spread(reference, world)
        self.reference = reference
        self._take(model)
        self.value = value
        self.value_head = None if value is None else new_value_head(model)
        self._begin(optim, layers)

    @classmethod
    def load(
        cls,
        model: ModelConfig,
        optim: OptimConfig,
        total_updates: int,
        value: ValueConfig | None = None,
        *,
        lora: LoraConfig | None = None,
        layers: LayersConfig = LayersConfig(),  # noqa: B008
        reference: bool = False,
        seed: int = 0,
        world: World = ALONE,
    ) -> Policy:
        """Load model and tokenizer; `reference` keeps the initial weights for a KL penalty."""
        if lora is not None:
            adapters.require()
        on = torch.device("cpu") if world.is_sharded else None  # the whole model may not fit on one device
        loaded, tokenizer = load_model(model, on), load_tokenizer(model)
        frozen = None
        if reference:
            frozen = loaded if lora is not None else load_model(model, on).eval().requires_grad_(False)
        return cls(
            loaded,
            tokenizer,
            optim,
            total_updates,
            value,
            lora=lora,
            layers=layers,
            reference=frozen,
            base=model.path,
            seed=seed,
            world=world,
        )

    def _take(self, model: PreTrainedModel) -> None:
        """Set the model to train; with `parallel.shard` or `parallel.tensor` this process keeps its part."""
        self._cut = spread(model, self.world) if self.world.is_sharded else None
        self._gathered: PreTrainedModel | None = None
        self.model = model.eval()  # always: see `hone.model.update_mode`

    def _begin(self, optim: OptimConfig, layers: LayersConfig) -> None:
        """Collect the trainable parameters and create a fresh optimizer."""
        depth = depths(self.model)
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        trained = {p: depth[name] for name, p in named.items()}
        self.names, self.parameters = list(named), list(trained)
        self.masters = master_weights(self.parameters)
        self._depths = trained
        self._fresh_optimizer(optim, layers)

    def _fresh_optimizer(self, optim: OptimConfig, layers: LayersConfig) -> None:
        self.optimizer = new_optimizer(zip(self._depths.values(), self.masters, strict=True), self.value_head, optim)
        self.configure(optim, layers)

    def check(self, layers: LayersConfig, lora: LoraConfig | None) -> None:
        """Raises UserError if a later phase needs layers or modules that this model does not have."""
        check_layers(self.model, layers)
        if lora is not None:
            with adapters.adapter_off(self.model):
                adapters.target_names(self.model, lora.targets)

    def configure(self, optim: OptimConfig, layers: LayersConfig) -> None:
        """Set rates and layers, which a schedule may change between two updates. The moments stay."""
        self.optim, self.layers = optim, layers
        configure(self.optimizer, optim, layers, num_layers(self.model), self.value.lr if self.value else 0.0)
        freeze(self.model, self._depths, layers)

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
            self._fresh_optimizer(optim, layers)
            return
        assert lora is not None, "a schedule neither adds an adapter nor drops it"
        model = self.gathered_model()
        adapters.merge(model)
        adapters.attach(model, lora, streams.adapter(self.seed, len(self.resets)))
        self.lora = lora
        if self.reference is not None:
            self.reference = model
        self._take(model)
        self._begin(optim, layers)

    def gathered_model(self) -> PreTrainedModel:
        """The whole model: itself, or if it is sharded a gathered copy. A collective: every process calls it."""
        if self._cut is None:
            return self.model
        self._gathered = assemble(self.model, self._cut, self._gathered)
        return self._gathered

    def local_view(self) -> Policy:
        """The policy for this process alone: its forward passes do not synchronise with other ranks."""
        if self.world.size == 1:
            return self
        other = copy.copy(self)
        other.world, other.model, other._cut = ALONE, self.gathered_model(), None
        return other

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    @property
    def exact(self) -> bool:
        """Whether merging the adapter changes outputs by rounding error only: in float32, not in bfloat16."""
        return self.model.dtype == torch.float32

    # --- forward ------------------------------------------------------------------------------

    def logprobs(self, batches: Iterable[MicroBatch], temperature: float) -> list[np.ndarray]:
        """Log-probs [N] per micro-batch, without gradient."""
        return frozen_logprobs(self.model, batches, temperature, self.world)

    def values(self, batches: Iterable[MicroBatch]) -> list[np.ndarray]:
        """Values [N] of the trained tokens per micro-batch, without gradient."""
        assert self.value_head is not None, "a policy without a value head"
        head = self.value_head

        def forward(batch: MicroBatch) -> torch.Tensor:
            hidden = as_forward(self.model, lambda: packed_hidden(self.model, batch))
            return head(hidden.float())[:, 0]

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
        """Accumulate the gradient over micro-batches, clip by its global norm, step."""
        total = Totals()
        # Around the backward pass too, which may recompute parts of the forward pass.
        with fast_layers(self.model), update_mode(self.model):
            for batch in (to_device(b, self.device) for _, b in local_batches(batches, self.world)):
                outputs = packed_logprobs(self.model, batch, temperature, want_entropy=True)
                outputs.hidden.retain_grad()
                assert outputs.entropy is not None
                part = loss_fn(batch, outputs.logprobs, outputs.entropy)
                value_part = self._value_loss(batch, outputs.hidden)
                (part.loss + value_part).backward()
                total.add(batch, outputs, part, value_part)
        total = total.read().gathered(self.world)
        self._sum_gradients()
        norm = clip_gradients(self.masters, self.parameters, self.optim.grad_clip, self.world)
        value_norm = 0.0
        if self.value_head is not None:  # clipped separately, so that it does not limit the policy's step
            value_norm = float(torch.nn.utils.clip_grad_norm_(self.value_head.parameters(), self.optim.grad_clip))
        finite = all(map(math.isfinite, (norm, value_norm, total.loss, total.value_loss)))
        factor = self.optim.schedule(self.updates, self.total_updates, self.fresh_at)
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

    def _sum_gradients(self) -> None:
        """Sum over all processes, never average: the weights of the loss are those of the whole batch."""
        collect_gradients(self.masters, self.parameters)
        self._same_gradients()
        named = zip(self.names, self.masters, strict=True)
        grads = {name: m.grad for name, m in named if m.grad is not None}
        self.world.sum(list(grads.values()), "replicate")
        if self._cut is not None:
            self.world.sum([grad for name, grad in grads.items() if name in self._cut.partial], "tensor")
        if self.value_head is not None:
            head_grads = [p.grad for p in self.value_head.parameters() if p.grad is not None]
            self.world.sum(head_grads, "replicate", "shard")

    def _same_gradients(self) -> None:
        """Fill in zero gradients, so that all processes sum the same list of tensors.

        Experts or skipped parts of a model may have been used only by the samples of one process.
        """
        tensors = [*self.masters, *(self.value_head.parameters() if self.value_head is not None else ())]
        gathered = self.world.gather([[t.grad is not None for t in tensors]], "which weights have a gradient")
        for t, used in zip(tensors, map(any, zip(*gathered, strict=True)), strict=True):
            if used and t.grad is None:
                t.grad = torch.zeros_like(t)

    def _value_loss(self, batch: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
        """The value loss of this micro-batch; it trains only the head."""
        if self.value_head is None or self.value is None or batch.old_values is None or batch.value_targets is None:
            return hidden.new_zeros(())
        values = self.value_head(hidden.detach().float())[:, 0]
        return (batch.weights * value_loss(values, batch.old_values, batch.value_targets, self.value.clip)).sum()

    # --- state --------------------------------------------------------------------------------

    def export(self, folder: Path) -> None:
        """Write an ordinary Hugging Face checkpoint, with the adapter merged in."""
        model = self.gathered_model()
        with adapters.merged(model):
            self._export(model, folder)

    def export_base(self, folder: Path) -> None:
        """Write the model without its adapter, as `export` does."""
        model = self.gathered_model()
        with adapters.adapter_off(model):
            self._export(model, folder)

    def export_adapter(self, folder: Path) -> None:
        """Write the adapter alone, in peft's format, with the tokenizer."""
        model = self.gathered_model()
        if not self.world.main:
            return
        adapters.save_adapter(model, folder, self.base)
        self.tokenizer.save_pretrained(folder)

    def _export(self, model: PreTrainedModel, folder: Path) -> None:
        if not self.world.main:
            return
        save_model(model, folder, max_shard_size="1000GB")  # one file
        self.tokenizer.save_pretrained(folder)

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
            model = self.gathered_model()
            adapters.remove(model)
            if base is not None:
                state.read_weights(model, base)
                self.base = str(base)
            self.lora = LoraConfig.model_validate(saved_lora)
            adapters.attach(model, self.lora, streams.adapter(self.seed, len(self.resets)))
            adapters.load_adapter(model, folder / "model")
            if self.reference is not None:
                self.reference = model
            self._take(model)
            self._begin(self.optim, self.layers)
        else:
            state.read_weights(self.model, folder / "model")
            if base is not None and self.reference is not None:
                state.read_weights(self.reference, base)
        state.restore(self, folder)
        self.updates, self.fresh_at = int(scalars["updates"]), int(scalars.get("fresh_at", 0))

    def _stepped(self) -> list[torch.Tensor]:
        """All tensors that the optimizer steps, in a fixed order."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]
