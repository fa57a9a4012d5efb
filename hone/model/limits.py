"""The longest sequence for which hone's attention computes exactly what the model's own code does.

    context_limit(model.config)     # Limit(tokens=4096, setting="max_position_embeddings"), or None: unknown

Some rotary embeddings change their frequencies for *all* tokens of a forward pass once its longest sequence exceeds a
bound: in a packed row this would depend on the neighbours, so that bound is a limit.
Llama 4 scales the queries of some layers by their place in the row, beginning with position `floor_scale` - 1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from hone.base.settings import UserError
from hone.model.scoring import WINDOWS

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
    limits = list(_rope(text))
    if getattr(text, "attn_temperature_tuning", False) and _size(text, "floor_scale"):
        limits.append(Limit(text.floor_scale - 1, "floor_scale"))
    positions = getattr(text, "max_position_embeddings", None)
    if isinstance(positions, int):
        limits.append(Limit(positions, "max_position_embeddings"))
    return min(limits, key=lambda limit: limit.tokens, default=None)


def longest_exact(config: Any) -> int | None:
    """Tokens of the longest sequence that is exact; None: unknown."""
    limit = context_limit(config)
    return None if limit is None else limit.tokens


def check_layer_types(config: Any, recurrent: Collection[str] = ()) -> None:
    """Raises UserError for layers other than full attention, windows and chunks of known size, and the kinds in
    `recurrent`."""
    text = config.get_text_config()
    kinds = {str(kind) for kind in getattr(text, "layer_types", None) or []}
    other = kinds - {"full_attention", *WINDOWS, *recurrent}
    other |= {kind for kind in kinds & set(WINDOWS) if not _size(text, WINDOWS[kind])}
    if other:
        raise UserError(
            f"{text.model_type} has layers of type {', '.join(sorted(other))}; hone supports "
            "full attention, sliding windows, chunks and recurrent mixers: choose a model without"
        )


def ignore_places_in_the_row(model: Any) -> None:
    """Switch off scales that depend on a token's position in its row; up to `context_limit` they are 1 in a row of one
    sequence."""
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", None) and hasattr(module, "floor_scale"):
            module.attn_temperature_tuning = False


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
