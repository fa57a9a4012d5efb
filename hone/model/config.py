"""Settings of the model."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from hone.config import Section


class TinyConfig(Section):
    """The from-scratch model: an ordinary small Qwen2 with a tokenizer trained on task text."""

    vocab_size: PositiveInt = 512
    hidden_size: PositiveInt = 128
    layers: PositiveInt = 4
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    mlp_size: PositiveInt = 352
    max_positions: PositiveInt = 2048
    init_std: PositiveFloat = 0.08  # near 1/sqrt(hidden_size); the 0.02 of large models learns half as fast here


class ModelConfig(Section):
    """`path` is `tiny`, a folder holding a Hugging Face checkpoint, or a hub id."""

    path: str = "tiny"
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: float32 on CPU, bfloat16 compute on GPU
    tiny: TinyConfig = TinyConfig()
