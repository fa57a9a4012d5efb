"""The longest sequence for which hone's attention computes exactly what the model's own code does.

    context_limit(model.config)     # Limit(tokens=4096, setting="sliding_window"), or None: unknown

hone computes full causal attention. A sliding window of W tokens hides nothing in a sequence of at most W tokens, so
such a model is exact up to that length. Some rotary embeddings change their frequencies for *all* tokens of a forward
pass once its longest sequence exceeds a bound: in a packed row this would depend on the neighbours, so that bound is a
limit too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hone.base.settings import UserError

#: Kinds of attention that equal full attention in short sequences, and the config entry with the bound.
WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
#: Rotary embeddings whose frequencies depend on the longest sequence of the forward pass.
VARYING_ROPE = ("longrope", "dynamic")


@dataclass(frozen=True, slots=True)
class Limit:
    """Tokens of prompt and completion together, and the entry of the model's config that sets this bound."""

    tokens: int
    setting: str

    def __str__(self) -> str:
        return f"{self.tokens} ({self.setting})"


def context_limit(config: Any) -> Limit | None:
    """The smallest bound on the sequence length, or None if the config has no bound."""
    text = config.get_text_config()
    limits = [*_windows(text), *_rope(text)]
    positions = getattr(text, "max_position_embeddings", None)
    if isinstance(positions, int):
        limits.append(Limit(positions, "max_position_embeddings"))
    return min(limits, key=lambda limit: limit.tokens, default=None)


def longest_exact(config: Any) -> int | None:
    """Tokens of the longest sequence that is exact; None: unknown."""
    limit = context_limit(config)
    return None if limit is None else limit.tokens


def check_layer_types(config: Any) -> None:
    """Raises UserError for layers other than full attention and windows of known size."""
    text = config.get_text_config()
    kinds = {str(kind) for kind in getattr(text, "layer_types", None) or []}
    other = kinds - {"full_attention", *WINDOWS}
    other |= {kind for kind in kinds & set(WINDOWS) if not _size(text, WINDOWS[kind])}
    if other:
        raise UserError(
            f"{text.model_type} has layers of type {', '.join(sorted(other))}; hone supports full attention only "
            "(and sliding windows in sequences that are not longer than the window): choose a model without"
        )


def _windows(text: Any) -> Iterator[Limit]:
    kinds = getattr(text, "layer_types", None)
    for kind, setting in WINDOWS.items():
        # A model without layer types applies `sliding_window` to every layer, unless it is switched off.
        applies = kind in kinds if kinds else setting == "sliding_window"
        if setting == "sliding_window" and getattr(text, "use_sliding_window", True) is False:
            applies = False
        if applies and (size := _size(text, setting)):
            yield Limit(size, setting)


def _size(text: Any, setting: str) -> int | None:
    size = getattr(text, setting, None)
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None


def _rope(text: Any) -> Iterator[Limit]:
    settings = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    by_layer = [value for value in settings.values() if isinstance(value, dict)]
    for rope in by_layer or [settings]:
        kind = rope.get("rope_type", rope.get("type"))
        original = rope.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        if kind in VARYING_ROPE and original:
            yield Limit(int(original), f"original_max_position_embeddings of {kind} rope")
