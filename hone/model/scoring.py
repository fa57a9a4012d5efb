"""How a layer weighs keys: the scale of its products, and what some architectures add to plain causal attention.

    scoring = scoring_of(module, scaling, sliding_window, softcap, sinks)    # from what the layer passes on

A query sees the keys of its sequence up to its own position. A *window* hides the early ones: in a sliding window of
W tokens position q sees q - W + 1 .. q (Mistral 7B, arXiv:2310.06825), in chunks of W tokens the positions from the
start of its own chunk (Llama 4). A *soft cap* c replaces a score s by c tanh(s / c) (Gemma 2, arXiv:2408.00118). A
*sink* is a learned score of each head that takes part in the softmax and has no value (gpt-oss, arXiv:2508.10925).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: Kinds of layers that hide early keys, and the config entry with the size.
WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


@dataclass(frozen=True, slots=True)
class Window:
    """The first position that a query sees: the last `size` positions, or those of the query's chunk of `size`."""

    size: int
    chunks: bool = False

    def first(self, position: Tensor) -> Tensor:
        """[...] positions of queries -> [...] the first position that each of them sees."""
        if self.chunks:
            return position - position % self.size
        return (position - (self.size - 1)).clamp(min=0)

    def hides(self, tokens: int) -> bool:
        """Whether anything is hidden in a sequence of so many tokens."""
        return tokens > self.size


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """What a layer computes from the product of a query and a key."""

    scaling: float
    window: Window | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [H], trained

    @property
    def fused(self) -> bool:
        """Whether a fused kernel computes it, which knows masks but neither caps nor sinks."""
        return self.softcap is None and self.sinks is None

    def capped(self, scores: Tensor) -> Tensor:
        """Scaled products [...] -> scores [...]."""
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)


def scoring_of(
    module: nn.Module, scaling: float, sliding_window: int | None, softcap: float | None, sinks: Tensor | None
) -> Scoring:
    """The scoring of an attention module of a Hugging Face model, with what it passes to its attention function."""
    return Scoring(scaling, _window(module, sliding_window), softcap, sinks)


def _window(module: Any, sliding_window: int | None) -> Window | None:
    """By the type of the layer, which chooses the mask in the model's own code: the keyword is not always passed."""
    config = getattr(module, "config", None)
    if config is None:
        return Window(sliding_window) if sliding_window else None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kind = "sliding_attention" if sliding_window or _makes_sliding_masks(type(module)) else ""
    else:
        kind = kinds[module.layer_idx]
    size = getattr(config, WINDOWS[kind], None) if kind in WINDOWS else None
    return Window(size, kind == "chunked_attention") if size else None


def _makes_sliding_masks(kind: type) -> bool:
    """Whether the model's code uses a sliding mask where its config has a window (PhiMoE does, MiniMax M2 does not)."""
    return hasattr(sys.modules.get(kind.__module__), "create_sliding_window_causal_mask")
