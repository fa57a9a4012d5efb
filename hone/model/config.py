"""Settings of the model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from hone.config import Section

SMALLEST_VOCAB = 300


class TinyConfig(Section):
    """The from-scratch model: an ordinary small Qwen2 with a tokenizer trained on task text."""

    vocab_size: int = Field(default=512, ge=SMALLEST_VOCAB)  # 256 bytes, special tokens, tags, and some merges
    phrases: NonNegativeInt = 0  # so many of them are whole phrases: what is copied whole is learned sooner
    hidden_size: PositiveInt = 128
    layers: PositiveInt = 4
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    mlp_size: PositiveInt = 352
    max_positions: PositiveInt = 2048
    init_std: PositiveFloat = 0.08  # near 1/sqrt(hidden_size); the 0.02 of large models learns half as fast here

    @model_validator(mode="after")
    def _room(self) -> TinyConfig:
        if self.vocab_size - self.phrases < SMALLEST_VOCAB:
            raise ValueError(
                f"phrases: {self.phrases} leave {self.vocab_size - self.phrases} of {self.vocab_size} tokens for bytes "
                f"and words, at least {SMALLEST_VOCAB} are needed; lower it or raise vocab_size"
            )
        return self


class ModelConfig(Section):
    """`path` is `tiny`, a folder holding a Hugging Face checkpoint, or a hub id."""

    path: str = "tiny"
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and products; bfloat16 keeps float32 master weights
    recompute_activations: bool = False  # keep only each layer's input and compute the rest again on the way back
    tiny: TinyConfig = TinyConfig()

    def at(self, path: str) -> ModelConfig:
        """The same settings for the model at `path`."""
        return self.model_copy(update={"path": path})
