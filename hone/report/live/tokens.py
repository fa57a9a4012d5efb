"""The tokens of a sample, read from tokens/step_N.safetensors without loading the whole file.

    tokens = read_tokens(Path("runs/demo/rl"), step=3, place=17)
    tokens["pieces"], tokens["entropies"]      # [T] each

Written by `hone.runs.tokens`. An absent or damaged file gives None: texts and rewards are shown without it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hone.runs.layout import inside, tokens_name

#: Per-token arrays of a tokens file.
FIELDS = ("sampled_logprobs", "trainer_logprobs", "entropies", "advantages")


def read_tokens(stage: Path, step: int, place: int) -> dict[str, list[Any]] | None:
    """The tokens of the sample at `place`: `ids` [T], `pieces` [T] (their texts) and `FIELDS` [T]; None if there are
    none.

    A value that was not computed is None.
    """
    opened = _open(stage, step)
    if opened is None:
        return None
    with opened as file:
        lengths = file.get_tensor("lengths")
        if not 0 <= place < len(lengths):
            return None
        start = int(lengths[:place].sum())
        stop = start + int(lengths[place])
        ids = file.get_slice("ids")[start:stop].tolist()
        pieces = _pieces(file.metadata())
        values = {name: _finite(file.get_slice(name)[start:stop].tolist()) for name in FIELDS}
    return {"ids": ids, "pieces": [pieces.get(str(i), f"⟨{i}⟩") for i in ids], **values}


def token_means(stage: Path, step: int, count: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """[n] mean |log-prob of sampler - of trainer|, and [n] mean entropy of `count` samples; NaN where unknown."""
    unknown = np.full(count, np.nan, np.float32)
    opened = _open(stage, step)
    if opened is None:
        return unknown, unknown
    with opened as file:
        lengths = file.get_tensor("lengths")
        if len(lengths) != count:
            return unknown, unknown
        difference = np.abs(file.get_tensor("sampled_logprobs") - file.get_tensor("trainer_logprobs"))
        return _means(difference, lengths), _means(file.get_tensor("entropies"), lengths)


def _means(values: npt.NDArray[np.float32], lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """The mean of each piece of `values` [sum(lengths)]; NaN for an empty piece."""
    ends = np.concatenate([[0], np.cumsum(lengths)])
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    if np.isnan(sums[-1]):  # a cumulative sum would carry the NaN of one sample into the next
        known = ~np.isnan(values)
        sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0), dtype=np.float64)])
        counts = np.concatenate([[0], np.cumsum(known)])[ends]
    else:
        counts = ends
    numbers = np.diff(counts)
    means = np.full(len(lengths), np.nan)
    np.divide(np.diff(sums[ends]), numbers, out=means, where=numbers > 0)
    return means.astype(np.float32)


def _open(stage: Path, step: int) -> Any:
    """An open safetensors file; None if it is absent, being written or damaged."""
    from safetensors import SafetensorError, safe_open

    path = inside(stage, tokens_name(step))
    if path is None:
        return None
    try:
        file = safe_open(path, framework="numpy")
        return file if {"lengths", "ids", *FIELDS} <= set(file.keys()) else None
    except (OSError, SafetensorError):
        return None


def _pieces(metadata: Any) -> dict[str, str]:
    try:
        pieces = json.loads((metadata or {}).get("pieces", "{}"))
    except ValueError:
        return {}
    return pieces if isinstance(pieces, dict) else {}


def _finite(values: Sequence[float]) -> list[float | None]:
    return [round(value, 5) if math.isfinite(value) else None for value in values]
