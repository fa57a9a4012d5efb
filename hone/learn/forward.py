"""Forward passes over packed micro-batches: log-probs of the trained tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from hone.base.world import ALONE, World
from hone.learn.pack import deal, empty_batch
from hone.model import attention
from hone.model.compiled import compiled, is_compiled
from hone.model.linear import onednn
from hone.model.logprobs import backbone, head_logprobs
from hone.model.norms import fast_norms
from hone.model.parallel import as_forward
from hone.types import Block, MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Packed lengths are rounded up to a multiple of this: kernels are built per shape and kept, so fewer shapes cost
#: less time and memory.
LENGTH_MULTIPLE = 128


def packed_hidden(model: PreTrainedModel, batch: MicroBatch) -> torch.Tensor:
    """The last hidden states [N, D] from which the trained tokens are predicted."""
    spare = -len(batch.inputs) % LENGTH_MULTIPLE  # a padding sequence without trained tokens
    layout = (*batch.layout, Block(0, (spare,))) if spare else batch.layout
    inputs, positions = (F.pad(x, (0, spare))[None] for x in (batch.inputs, batch.positions))
    current = attention.ForwardPass(layout)
    with attention.forward_pass(current):
        out = backbone(model)(input_ids=inputs, position_ids=positions, use_cache=False, layout=layout)
    attention.check_called(model, current)
    hidden: torch.Tensor = out.last_hidden_state[0][batch.sources]
    return hidden


class Outputs(NamedTuple):
    """What a forward pass computes for the N trained tokens of a micro-batch."""

    hidden: torch.Tensor  # [N, D]
    logprobs: torch.Tensor  # [N]
    entropy: torch.Tensor | None  # [N]; None if it was not wanted


def packed_logprobs(
    model: PreTrainedModel, batch: MicroBatch, temperature: float, want_entropy: bool = False
) -> Outputs:
    """The forward pass of a micro-batch, up to the log-probs of its trained tokens at `temperature`."""

    def forward() -> Outputs:
        hidden = packed_hidden(model, batch)
        return Outputs(hidden, *head_logprobs(model, hidden, batch.targets, temperature, want_entropy))

    return as_forward(model, forward)


@contextmanager
def fast_layers(model: PreTrainedModel) -> Iterator[None]:
    """Context manager in which layers use their fast kernels, forward and backward."""
    if is_compiled(model):
        with compiled(model):
            yield
    else:
        with onednn(model), fast_norms(model):
            yield


@contextmanager
def inference_mode(model: PreTrainedModel) -> Iterator[None]:
    """Context manager in which the model is in eval mode, with fast layers and without gradients."""
    training = model.training
    try:
        with torch.no_grad(), fast_layers(model.eval()):
            yield
    finally:
        if training:
            model.train()


def frozen_logprobs(
    model: PreTrainedModel, batches: Iterable[MicroBatch], temperature: float, world: World = ALONE
) -> list[np.ndarray]:
    """[N] per micro-batch, without gradient: for old and reference log-probs."""

    def forward(batch: MicroBatch) -> torch.Tensor:
        return packed_logprobs(model, batch, temperature).logprobs.float()

    return map_no_grad(model, list(batches), world, forward)


def map_no_grad(
    model: PreTrainedModel, batches: Sequence[MicroBatch], world: World, forward: Callable[[MicroBatch], torch.Tensor]
) -> list[np.ndarray]:
    """`forward` of each micro-batch, [N] each, without gradient; the processes share the work."""
    local: list[tuple[int, np.ndarray]] = []
    with inference_mode(model):
        for i, batch in local_batches(batches, world):
            values = forward(to_device(batch, model.device)).cpu().numpy()
            if i is not None and world.is_writer:
                local.append((i, values))
    gathered = dict(world.gather(local, "log-probs"))
    return [gathered[i] for i in range(len(batches))]


def local_batches(batches: Sequence[MicroBatch], world: World) -> list[tuple[int | None, MicroBatch]]:
    """(index, micro-batch) of this process's micro-batches; the index of an empty one is None."""
    if not batches:
        return []
    indices = deal(batches, world.data)[world.data_rank]
    return [(i, empty_batch(batches[0]) if i is None else batches[i]) for i in indices]


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
