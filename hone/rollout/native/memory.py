"""How many sequences fit into the memory for keys and values.

The most that the rows can need is reserved, so that no running row is ever evicted:

    (prompts * longest prompt + rows * columns) * bytes_per_token + (prompts + rows) * bytes_per_row

Recurrent mixers have states of a fixed size, for every prompt and every row.

The default is a share of the device's total memory, not of its free memory: which rows run together decides how sums
are rounded, and must not depend on what else the machine does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel

from hone.base.settings import UserError
from hone.model.mixers import WITHOUT_ATTENTION
from hone.rollout.native.states import row_bytes

# With oneDNN, row counts are padded to a multiple of these: few shapes, because it caches each one for good
# (`hone.model.linear`). A row of its products is the same to the bit, however many other rows there are.
ROWS, PROMPT_TOKENS = 8, 128
CHUNK = 32  # columns added at least when the suffixes outgrow their capacity
STATIC_CHUNK = 256  # the same for recorded steps, which are recorded again each time
_SHARE = 0.25
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Budget:
    tokens: int  # key-value positions that fit
    bytes_per_token: int  # over all layers
    bytes_per_row: int = 0  # of the states of recurrent mixers, over all layers

    @staticmethod
    def of(model: PreTrainedModel, gib: float | None) -> Budget:
        """The budget of a model. `gib` None: a quarter of the memory of the model's device."""
        config = model.config.get_text_config()
        # At least 1: a model without attention caches nothing per token.
        each = max(1, sum(_numbers_per_token(layer) for layer in layer_configs(config)) * model.dtype.itemsize)
        total = device_memory(model.device) * _SHARE if gib is None else gib * _GIB
        return Budget(int(total // each), each, row_bytes(model))

    def fits(self, prompts: int, longest: int, rows: int, max_tokens: int, kept: int = 0) -> bool:
        """Whether `rows` samples of `prompts` prompts fit, with at most `longest` and `max_tokens` tokens each.

        `kept`: positions of conversations that wait (`kept.Kept`).
        """
        return self.positions(prompts, longest, rows, max_tokens) + kept <= self.tokens

    def positions(self, prompts: int, longest: int, rows: int, max_tokens: int) -> int:
        """The key-value positions that these rows need."""
        states = -(-(prompts + rows) * self.bytes_per_row // self.bytes_per_token)
        return prompts * longest + rows * columns(max_tokens) + states

    def check_alone(self, length: int, max_tokens: int, name: str) -> None:
        """Raises UserError for a request of which not even one sample fits."""
        if self.fits(1, length, 1, max_tokens):
            return
        needed = self.positions(1, length, 1, max_tokens) * self.bytes_per_token / _GIB
        raise UserError(
            f"{name} needs {needed:.3g} GiB for the keys and values of {length} prompt tokens and up to {max_tokens} "
            f"more, and rollout.kv_cache_gib leaves {self.tokens * self.bytes_per_token / _GIB:.3g}: raise it, or "
            "lower sampling.max_tokens"
        )


def layer_configs(config: Any) -> list[Any]:
    """The config of each layer with attention: in some models, such as Gemma 4, the head size differs between
    layers."""
    kinds = getattr(config, "layer_types", None) or [""] * int(config.num_hidden_layers)
    layers = [layer for layer, kind in enumerate(kinds) if str(kind) not in WITHOUT_ATTENTION]
    if getattr(config, "is_heterogeneous", False):
        return [config.per_layer_config[layer] for layer in layers]
    return [config] * len(layers)


def _numbers_per_token(config: Any) -> int:
    """Cached numbers per token and layer. Multi-head latent attention is cached as keys and values of every head."""
    if getattr(config, "kv_lora_rank", None):
        return int(config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim))
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 0)
    if not heads:
        return 0
    return int(2 * heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads))


def columns(max_tokens: int) -> int:
    """The most columns of a cache whose rows have at most `max_tokens` tokens."""
    return max_tokens + min(CHUNK, max_tokens)


def padded_rows(rows: int) -> int:
    """The rows that the model is called with for `rows`. A single row is not padded: matrix-vector products have
    a kernel of their own, the fastest."""
    return rows if rows == 1 else -(-rows // ROWS) * ROWS


def padded_prompt(tokens: int) -> int:
    """As `padded_rows`, for the tokens of prompts prefilled together."""
    return -(-tokens // PROMPT_TOKENS) * PROMPT_TOKENS


def device_memory(device: torch.device) -> int:
    """The device's total memory in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)
