"""Log-probs of a prompt's own tokens, for clients that score text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hone.model.logprobs import BUDGET, logits_of, output_head
from hone.types import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probs of the model itself: temperature 1, no filters.

    Entry t is token t given those before it; the first has no context, and its numbers are nan.
    """

    logprobs: FloatArray  # [Lp]
    top_ids: IntArray  # [Lp, K] the likeliest tokens at that position, likeliest first
    top_logprobs: FloatArray  # [Lp, K]


def prompt_scores(
    model: PreTrainedModel, hidden: Tensor, tokens: Tensor, lengths: Sequence[int], top: int
) -> list[PromptScores]:
    """hidden [T, D] and tokens [T] of prompts packed in one row, lengths [P]. Logits are computed chunk by chunk."""
    head = output_head(model)
    budget = BUDGET.get(hidden.device.type, BUDGET["cuda"])
    rows, top = max(1, budget // head.weight.shape[0]), min(top, head.weight.shape[0])
    parts = []
    for part, target in zip(hidden[:-1].split(rows), tokens[1:].split(rows)):
        logprobs = logits_of(part, head).log_softmax(-1)
        values, ids = logprobs.topk(top, dim=-1)
        parts.append((logprobs.gather(1, target[:, None]).squeeze(1), ids, values))
    nothing = hidden.new_full((1,), torch.nan, dtype=torch.float32)
    none_ids, none_values = tokens.new_zeros((1, top)), nothing.expand(1, top)
    # The first token of each prompt has no context.
    logprobs = torch.cat([nothing, *(p[0] for p in parts)])
    ids = torch.cat([none_ids, *(p[1] for p in parts)])
    values = torch.cat([none_values, *(p[2] for p in parts)])
    starts = torch.tensor([0, *lengths[:-1]], device=tokens.device).cumsum(0)
    logprobs[starts], values[starts], ids[starts] = torch.nan, torch.nan, 0
    pieces = zip(*(x.cpu().split(list(lengths)) for x in (logprobs, ids, values)))
    return [PromptScores(a.numpy(), b.numpy(), c.numpy()) for a, b, c in pieces]
