"""Memory that oneDNN, which computes matrix products on CPUs, keeps for every shape that occurs in a run."""

from __future__ import annotations

from torch import nn

from hone.learn.forward import LENGTH_MULTIPLE
from hone.model import linear
from hone.rollout.native.memory import ROWS

#: Bytes that oneDNN keeps for every shape of a product, regardless of its size: the first permanently, the second while
#: its primitive is one of the last `linear.CAPACITY`. Measured with products of up to 500 different row counts, with
#: ONEDNN_PRIMITIVE_CACHE_CAPACITY 0 and 1024 (torch 2.13): 279 KiB, and 561 to 602 KiB, a shape.
KERNEL, PRIMITIVE = 280 * 1024, 295 * 1024


def memory(sampled: nn.Module | None, rows: int, trained: nn.Module | None, tokens: int, micro_batches: int) -> int:
    """Bytes for the shapes of a long run: while decoding, every padded number of rows; in training, every padded length
    of a micro-batch, at most one for each of `micro_batches`. A layer has one product in the forward pass, one for the
    gradient of its input, and if it is trained one for the gradient of its weight; layers of the same shape share
    them."""
    shapes = 0
    if sampled is not None:
        shapes += (-(-rows // ROWS) + 1) * len({m.weight.shape for m in sampled.modules() if isinstance(m, nn.Linear)})
    if trained is not None:
        head = trained.get_output_embeddings()  # type: ignore[operator]
        layers = [m for m in trained.modules() if isinstance(m, nn.Linear) and m is not head]
        products = sum(2 + learns for _, learns in {(m.weight.shape, m.weight.requires_grad) for m in layers})
        shapes += min(-(-tokens // LENGTH_MULTIPLE), micro_batches) * products
    return shapes * KERNEL + min(shapes, linear.CAPACITY) * PRIMITIVE
