"""States of recurrent mixers in generation: one after each prompt, and one for each row that is decoded.

A prompt is prefilled once, and its rows start from copies of its state; each step then replaces the states of all rows.
Memory does not depend on the length of a row: `row_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hone.base.settings import UserError
from hone.model import mixers
from hone.model.attention import layer_index
from hone.model.mixers import States


@dataclass(slots=True)
class PromptStates:
    """The states after prompts that are prefilled in one row."""

    lengths: Sequence[int]  # [P] tokens of each in this pass
    starts: Sequence[Mapping[int, States] | None] = ()  # [P] layer -> the state that it starts from; empty: all from 0
    layers: dict[int, States] = field(default_factory=dict)

    def mix(self, mixer: nn.Module, hidden: Tensor) -> Tensor:
        """hidden [1, T, D] -> [1, T, D]. Raises UserError for a mixer that is called twice in a pass."""
        layer = layer_index(mixer)
        if layer in self.layers:
            raise UserError(
                f"layer {layer} of this model is called twice in one pass, so its state has no single place in the "
                "cache; choose another model"
            )
        starts = [None if start is None else start[layer] for start in self.starts]
        out, self.layers[layer] = mixers.read_prompts(mixer, hidden, self.lengths, starts)
        return out

    def of(self, prompt: int) -> dict[int, States]:
        """Layer -> the state after this prompt, as one row."""
        return {layer: states.map(lambda t: t[prompt : prompt + 1]) for layer, states in self.layers.items()}


@dataclass(slots=True)
class RowStates:
    """The states of the rows that are decoded."""

    layers: dict[int, States] = field(default_factory=dict)
    static: bool = False  # for recorded steps: new states overwrite the old ones in place

    def mix(self, mixer: nn.Module, hidden: Tensor) -> Tensor:
        """hidden [B, 1, D] -> [B, 1, D]; rows beyond the states are padding, which gets its own states."""
        layer = layer_index(mixer)
        states = self.layers[layer]
        spare = len(hidden) - len(states.tensors()[0])
        if spare > 0:
            states = states.map(lambda t: F.pad(t, (0, 0) * (t.ndim - 1) + (0, spare)))
            self.layers[layer] = states
        before = states.map(lambda t: t)
        out = mixers.step(mixer, hidden, states)
        if self.static:
            for old, new in zip(before.tensors(), states.tensors(), strict=True):
                if old is not new:
                    old.copy_(new)
            self.layers[layer] = before
        return out

    def of(self, row: int) -> dict[int, States]:
        """Layer -> a copy of this row's state."""
        return {layer: states.map(lambda t: t[row : row + 1].clone()) for layer, states in self.layers.items()}

    @property
    def device(self) -> torch.device:
        return next(iter(self.layers.values())).tensors()[0].device

    def rebuild(self, keep: Sequence[int], entering: Sequence[Mapping[int, States]]) -> None:
        """Keep the states of these rows, in this order, and append the initial states of entering rows."""
        first = self.layers or (entering[0] if entering else {})
        if not keep and not entering:
            self.layers = {}
            return
        for layer in list(first):
            parts = [states[layer] for states in entering]
            if keep:
                old = self.layers[layer]
                parts.insert(0, old.rows(torch.tensor(keep, device=old.tensors()[0].device)))
            self.layers[layer] = States.joined(parts)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Context manager in which steps leave the states unchanged."""
        before = {layer: states.map(torch.clone) for layer, states in self.layers.items()}
        try:
            yield
        finally:
            for layer, states in before.items():
                # A step adds rows for padding; they stay, since the recording writes to them.
                for tensor, value in zip(self.layers[layer].tensors(), states.tensors(), strict=True):
                    tensor[: len(value)].copy_(value)


@torch.no_grad()
def row_bytes(model: PreTrainedModel) -> int:
    """Bytes of the states of one row, over all mixers. Measured once for mixers of the same shape, with two tokens."""
    sizes: dict[tuple[object, ...], int] = {}
    total = 0
    for mixer in mixers.recurrent(model):
        shapes = tuple((name, tuple(p.shape)) for name, p in mixer.named_parameters())
        key = (type(mixer), shapes)
        if key not in sizes:
            sizes[key] = _bytes(mixer, int(model.config.get_text_config().hidden_size))
        total += sizes[key]
    return total


def _bytes(mixer: nn.Module, width: int) -> int:
    weight = next(mixer.parameters())
    states = States()
    mixers.apply(mixer, torch.zeros(1, 2, width, dtype=weight.dtype, device=weight.device), states)
    return sum(t.numel() * t.itemsize for t in states.tensors())
