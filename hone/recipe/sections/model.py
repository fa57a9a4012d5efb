"""Settings of the model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from hone.base.settings import Section

SMALLEST_VOCAB = 300
#: Causal models of the hub from before its ids had owners.
WITHOUT_OWNER = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2", "openai-gpt", "ctrl")


class TinyConfig(Section):
    """The from-scratch model, with a tokenizer trained on task text."""

    # gemma3: every other layer sees 64 tokens (a sliding window). qwen3_5: three layers in four are gated delta nets.
    # lfm2: two in three are short convolutions.
    architecture: Literal["qwen2", "gemma3", "qwen3_5", "lfm2"] = "qwen2"
    vocab_size: int = Field(default=512, ge=SMALLEST_VOCAB)  # 256 bytes, special tokens, tags, and some merges
    phrases: NonNegativeInt = 0  # how many of them are whole phrases, which the model learns to copy sooner
    hidden_size: PositiveInt = 128
    layers: PositiveInt = 4
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    mlp_size: PositiveInt = 352
    max_positions: PositiveInt = 2048
    init_std: PositiveFloat = 0.08  # near 1/sqrt(hidden_size); with the usual 0.02, learning is half as fast here

    @model_validator(mode="after")
    def _room(self) -> TinyConfig:
        if self.vocab_size - self.phrases < SMALLEST_VOCAB:
            raise ValueError(
                f"phrases: {self.phrases} leave {self.vocab_size - self.phrases} of {self.vocab_size} tokens for bytes "
                f"and words, which need at least {SMALLEST_VOCAB}; lower it or raise vocab_size"
            )
        return self


class ModelConfig(Section):
    """`path` is `tiny`, a folder holding a Hugging Face checkpoint, a hub id, or in a pipeline `stages.NAME`."""

    path: str = "tiny"
    revision: str | None = None
    stage: str | None = None  # continue from the model of this earlier stage, like `path: stages.NAME`
    dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and products; bfloat16 keeps float32 master weights
    recompute_activations: bool = False  # keep only each layer's input, and recompute the rest in the backward pass
    compile: bool = False  # training forward passes use torch.compile: for long runs on a GPU, see hone.model.compiled
    tiny: TinyConfig = TinyConfig()

    def at(self, path: str) -> ModelConfig:
        """The same settings for the model at `path`."""
        return self.model_copy(update={"path": path, "stage": None})


class LoraConfig(Section):
    """Low-rank adapters (Hu et al., arXiv:2106.09685): all other weights are frozen."""

    rank: PositiveInt = 32
    alpha: PositiveFloat | None = None  # the adapter is scaled by alpha / rank; null: twice the rank
    targets: Literal["all", "attention", "mlp"] | tuple[str, ...] = "all"  # linear layers; or names, such as [q_proj]
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)  # supervised stages only
    path: str | None = None  # start from this adapter, a folder in PEFT format, instead of a new one

    @field_validator("targets")
    @classmethod
    def _no_head(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not targets:
            raise ValueError("no layers are named, so nothing would be trained; give all, attention, mlp or names")
        if "lm_head" in targets:
            raise ValueError(
                "lm_head cannot be a target: log-probs are computed from the output head's own weights; remove it"
            )
        return targets

    @property
    def scale_alpha(self) -> float:
        """`alpha`, or its default of twice the rank."""
        return 2.0 * self.rank if self.alpha is None else self.alpha
