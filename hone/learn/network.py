"""The network of a policy: a model with its tokenizer, adapter and reference, in one process or spread over several."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hone.base import places, streams
from hone.base.world import ALONE, World
from hone.learn.state import read_weights
from hone.model import lora as adapters
from hone.model.load import load_model, load_tokenizer, stop_token_ids
from hone.model.parallel import assemble, spread, take_part
from hone.model.saving import save_model
from hone.recipe.sections.model import LoraConfig, ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Self = TypeVar("Self", bound="Network")


@dataclass(frozen=True)
class LoadedModel:
    """A model that is to be trained, before an adapter is attached or anything is spread."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    path: str = ""  # its origin, which an adapter's files name
    reference: PreTrainedModel | None = None  # of the KL penalty: a frozen copy; with an adapter the model itself

    @classmethod
    def load(cls, config: ModelConfig, lora: LoraConfig | None, reference: bool, world: World) -> LoadedModel:
        """Load model and tokenizer; `reference` keeps the initial weights for a KL penalty."""
        if lora is not None:
            adapters.require()
        on = torch.device("cpu") if world.is_sharded else None  # the whole model may not fit on one device
        model, tokenizer = load_model(config, on), load_tokenizer(config)
        frozen = None
        if reference:
            frozen = model if lora is not None else load_model(config, on).eval().requires_grad_(False)
        return cls(model, tokenizer, config.path, frozen)


class Network:
    """The model, its adapter if it has one, and what is exported of both.

    `reference` is the model of the KL penalty: a frozen copy, or with an adapter the model itself
    (`hone.learn.batches` turns the adapter off). `base` is the folder of the model under the adapter. `seed` is that
    of new adapters. With `parallel.shard` or `parallel.tensor` this process holds a part of the model.
    """

    def __init__(self, loaded: LoadedModel, lora: LoraConfig | None, seed: int, world: World) -> None:
        model = loaded.model
        self.world, self.tokenizer = world, loaded.tokenizer
        self.stop_ids = stop_token_ids(model, loaded.tokenizer)
        self.base, self.seed = loaded.path, seed
        self.reference = loaded.reference
        self.resets: list[dict[str, Any]] = []  # hard resets so far: step and reason
        self.lora: LoraConfig | None = None
        if world.is_sharded and self.reference is not None and self.reference is not model:
            spread(self.reference, world)
        if lora is None:
            self._take(model)
        else:
            self._attach(model, lora, None if lora.path is None else places.locate(lora.path))

    def _take(self, model: PreTrainedModel) -> None:
        """Set the model to train; if it is to be sharded, keep this process's part."""
        self._cut = spread(model, self.world) if self.world.is_sharded else None
        self._gathered: PreTrainedModel | None = None  # the whole copy of `local_view`
        self._on_host: PreTrainedModel | None = None  # that of `main_view`
        self.model = model.eval()  # always: see `hone.model.update_mode`

    def _attach(self, model: PreTrainedModel, lora: LoraConfig, weights: Path | None = None) -> None:
        """Train a new adapter of `model`, with the weights in a folder if one is given."""
        adapters.attach(model, lora, streams.adapter(self.seed, len(self.resets)))
        if weights is not None:
            adapters.load_adapter(model, weights)
        self.lora = lora
        if self.reference is not None:
            self.reference = model
        self._take(model)

    # --- the model ----------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def exact(self) -> bool:
        """Whether merging the adapter changes outputs by rounding error only: in float32, not in bfloat16."""
        return self.model.dtype == torch.float32

    @property
    def partial(self) -> frozenset[str]:
        """Names of the parameters whose gradient is to be summed over the tensor-parallel processes."""
        return frozenset() if self._cut is None else self._cut.partial

    def gathered_model(self) -> PreTrainedModel:
        """The whole model: itself, or if it is sharded a gathered copy. A collective: every process calls it.

        The copy is the one that `local_view` keeps, if there is one; otherwise it is the caller's.
        """
        return self.model if self._cut is None else assemble(self.model, self._cut, self._gathered)

    def local_view(self: Self) -> Self:
        """A copy for this process alone: its forward passes do not synchronise with other ranks. A collective.

        Of a sharded model, every process keeps a whole copy from then on.
        """
        if self.world.size == 1:
            return self
        model = self.gathered_model()
        if self._cut is not None:
            self._gathered = model
        return self._alone(model)

    def main_view(self: Self) -> Self | None:
        """As `local_view`, for the main process; None in the others. A collective.

        Of a sharded model, the main process keeps a whole copy in the memory of its host, and no device keeps one.
        """
        model = self._whole_on_main()
        return None if model is None else self._alone(model)

    def _whole_on_main(self) -> PreTrainedModel | None:
        """The whole model in the main process, None in the others; the copy of `local_view` if there is one."""
        if self._cut is None or self._gathered is not None:
            model = self.gathered_model()
            return model if self.world.main else None
        if not self.world.main:
            take_part(self.model)
            return None
        self._on_host = assemble(self.model, self._cut, self._on_host, torch.device("cpu"))
        return self._on_host

    def _alone(self: Self, model: PreTrainedModel) -> Self:
        view = copy.copy(self)
        view.world, view.model, view._cut = ALONE, model, None
        return view

    # --- the adapter --------------------------------------------------------------------------

    def renew_adapter(self, lora: LoraConfig) -> None:
        """The current model becomes the reference and the base of a new adapter; its outputs do not change."""
        model = self.gathered_model()
        adapters.merge(model)
        self._attach(model, lora)

    def restore_adapter(self, lora: LoraConfig, weights: Path, base: Path | None) -> None:
        """Read an adapter, and the model under it if `base` is given."""
        model = self.gathered_model()
        adapters.remove(model)
        if base is not None:
            read_weights(model, base)
            self.base = str(base)
        self._attach(model, lora, weights)

    # --- export -------------------------------------------------------------------------------

    def export(self, folder: Path) -> None:
        """Write an ordinary Hugging Face checkpoint, with the adapter merged in."""
        model = self._whole_on_main()
        if model is not None:
            with adapters.merged(model):
                self._export(model, folder)

    def export_base(self, folder: Path) -> None:
        """Write the model without its adapter, as `export` does."""
        model = self._whole_on_main()
        if model is not None:
            with adapters.adapter_off(model):
                self._export(model, folder)

    def export_adapter(self, folder: Path) -> None:
        """Write the adapter alone, in peft's format, with the tokenizer."""
        model = self._whole_on_main()
        if model is not None:
            adapters.save_adapter(model, folder, self.base)
            self.tokenizer.save_pretrained(folder)

    def _export(self, model: PreTrainedModel, folder: Path) -> None:
        save_model(model, folder, max_shard_size="1000GB")  # one file
        self.tokenizer.save_pretrained(folder)
