"""Settings of the model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from hone.base.settings import Section

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
    """`path` is `tiny`, a folder holding a Hugging Face checkpoint, a hub id, or in a pipeline `stages.NAME`."""

    path: str = "tiny"
    revision: str | None = None
    stage: str | None = None  # go on with the model that this earlier stage left; `path: stages.NAME` says the same
    dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and products; bfloat16 keeps float32 master weights
    recompute_activations: bool = False  # keep only each layer's input and compute the rest again on the way back
    compile: bool = False  # training passes through torch.compile: for a GPU and long runs, see hone.model.compiled
    tiny: TinyConfig = TinyConfig()

    def at(self, path: str) -> ModelConfig:
        """The same settings for the model at `path`."""
        return self.model_copy(update={"path": path, "stage": None})


class LoraConfig(Section):
    """Low-rank adapters (Hu et al., arXiv:2106.09685): all other weights are frozen."""

    rank: PositiveInt = 32
    alpha: PositiveFloat | None = None  # the adapter counts alpha / rank times; null: twice the rank
    targets: Literal["all", "attention", "mlp"] | tuple[str, ...] = "all"  # linear layers; or names, as in [q_proj]
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)  # supervised stages only
    path: str | None = None  # go on with this adapter, a folder in peft's format, instead of a new one

    @field_validator("targets")
    @classmethod
    def _no_head(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not targets:
            raise ValueError("none are named, so nothing would be trained; give all, attention, mlp or names")
        if "lm_head" in targets:
            raise ValueError(
                "lm_head is no target: log-probs are computed from the output head's own weights; remove it"
            )
        return targets

    @property
    def scale_alpha(self) -> float:
        """`alpha`, or what stands for it."""
        return 2.0 * self.rank if self.alpha is None else self.alpha
