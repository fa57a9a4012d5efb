"""The only place that decides how much each token counts: loss = sum over tokens of weight * token loss.

The weights know the whole batch of an optimizer step, over all micro-batches and ranks, so that
any split of it gives the same gradient. They are made for a *sum*: where a framework averages
gradients over ranks, the trainer undoes that, once.

Worked example, two samples of 2 and 6 trained tokens:

    token_mean             1/8 each: long samples count more
    sequence_mean          1/(2*2) = 0.25 and 1/(2*6) = 0.0833: samples count the same
    constant, 10 allowed   1/(2*10) = 0.05 each: no length in the denominator (Dr. GRPO)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Weights = npt.NDArray[np.float64]


def token_mean(lengths: Weights, max_tokens: int | None = None) -> Weights:
    """1 / (trained tokens of the batch).

    Yu et al., DAPO, arXiv:2503.14476.
    """
    return np.full(len(lengths), 1.0 / max(lengths.sum(), 1.0))


def sequence_mean(lengths: Weights, max_tokens: int | None = None) -> Weights:
    """1 / (samples * own trained tokens): the mean of the samples' means.

    Shao et al., DeepSeekMath, arXiv:2402.03300.
    """
    return 1.0 / (max(len(lengths), 1) * np.maximum(lengths, 1.0))


def constant(lengths: Weights, max_tokens: int | None = None) -> Weights:
    """1 / (samples * longest completion allowed), whatever was generated.

    Liu et al., Understanding R1-Zero-Like Training, arXiv:2503.20783.
    """
    if max_tokens is None or max_tokens < 1:
        raise ValueError(f"reduction constant: max_tokens is {max_tokens}; pass the completion limit of the sampling")
    if len(lengths) and lengths.max() > max_tokens:
        raise ValueError(
            f"reduction constant: a sample has {lengths.max():.0f} trained tokens, max_tokens {max_tokens}"
        )
    return np.full(len(lengths), 1.0 / (max(len(lengths), 1) * max_tokens))


REDUCTIONS: dict[str, Callable[[Weights, int | None], Weights]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "constant": constant,
}


def token_weights(lengths: Sequence[int], reduction: str, max_tokens: int | None = None) -> Weights:
    """The weight [S] of every trained token of each sample.

    `lengths` [S] counts the trained tokens of *every* sample of one optimizer step, over all ranks. A
    masked sample (length 0) still counts as one of the S.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction {reduction!r}: allowed are {', '.join(REDUCTIONS)}")
    counts = np.asarray(lengths, dtype=np.float64)
    if counts.ndim != 1 or (counts < 0).any():
        raise ValueError(f"token_weights: lengths must be [S] and not negative, got {lengths!r}")
    return REDUCTIONS[reduction](counts, max_tokens)
