"""Windows, chunks, soft caps and sinks: packed attention is the textbook's softmax, and so are its gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hone.model import attention
from hone.model.attention import packed_attention
from hone.model.scoring import Scoring, Window, scoring_of
from hone.types import Block


def test_the_first_visible_position_by_hand() -> None:
    positions = torch.arange(7)
    assert Window(3).first(positions).tolist() == [0, 0, 0, 1, 2, 3, 4]
    assert Window(3, chunks=True).first(positions).tolist() == [0, 0, 0, 3, 3, 3, 6]
    assert not Window(7).hides(7)
    assert Window(7).hides(8)


def textbook(q: Tensor, k: Tensor, v: Tensor, layout: tuple[Block, ...], scoring: Scoring) -> Tensor:
    """q [1, H, T, D], k and v [1, Hkv, T, *] -> [1, T, H, Dv]: query by query, key by key."""
    repeat, rows, start = q.shape[1] // k.shape[1], [], 0
    for block in layout:
        prompt = list(range(start, start + block.prompt_len))
        sequences, at = [prompt] if prompt else [], start + block.prompt_len
        for length in block.completion_lens:
            sequences.append([*prompt, *range(at, at + length)])
            at += length
        for i, sequence in enumerate(sequences):
            for position in range(0 if not prompt or i == 0 else len(prompt), len(sequence)):
                first = 0 if scoring.window is None else int(scoring.window.first(torch.tensor(position)))
                seen, heads = sequence[first : position + 1], []
                for head in range(q.shape[1]):
                    scores = k[0, head // repeat, seen] @ q[0, head, sequence[position]] * scoring.scaling
                    if scoring.softcap is not None:
                        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
                    total = scores.exp().sum()
                    if scoring.sinks is not None:
                        total = total + scoring.sinks[head].exp()
                    heads.append((scores.exp() / total) @ v[0, head // repeat, seen])
                rows.append(torch.stack(heads))
        start = at
    return torch.stack(rows)[None]


blocks = st.builds(
    lambda prompt, lens: Block(prompt, tuple(lens)),
    st.integers(0, 6),
    st.lists(st.integers(1, 7), min_size=1, max_size=3),
)


@settings(max_examples=40, deadline=None)
@example((Block(6, (3, 1, 2)), Block(0, (5,))), Window(4), None, False, (4, 2), 2**24)
@example((Block(6, (3, 1, 2)), Block(0, (5,))), Window(4), 1.5, True, (4, 2), 1)
@example((Block(6, (3, 5)),), Window(4, chunks=True), None, False, (2, 2), 2**24)
@given(
    layout=st.lists(blocks, min_size=1, max_size=3).map(tuple),
    window=st.sampled_from((Window(4), Window(3), Window(4, chunks=True), Window(1), Window(9), None)),
    softcap=st.sampled_from((None, 1.5)),
    with_sinks=st.booleans(),
    heads=st.sampled_from([(2, 2), (4, 2)]),
    budget=st.sampled_from([1, 2**24]),
)
def test_packed_attention_is_the_textbooks(
    layout: tuple[Block, ...],
    window: Window | None,
    softcap: float | None,
    with_sinks: bool,
    heads: tuple[int, int],
    budget: int,
) -> None:
    tokens, draw = sum(block.num_tokens for block in layout), torch.Generator().manual_seed(0)
    shapes = [(1, heads[0], tokens, 8), (1, heads[1], tokens, 8), (1, heads[1], tokens, 6)]
    inputs = [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]
    sinks = torch.randn(heads[0], generator=draw, dtype=torch.float64).requires_grad_() if with_sinks else None
    scoring = Scoring(0.6, window, softcap, sinks)
    given_to = [*inputs, *([] if sinks is None else [sinks])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SCORES", budget)
        out = packed_attention(*inputs, layout, scoring)
        weights = torch.randn(out.shape, generator=draw, dtype=torch.float64)
        found = [out, *torch.autograd.grad((out * weights).sum(), given_to)]
    expected = textbook(*inputs, layout, scoring)
    wanted = [expected, *torch.autograd.grad((expected * weights).sum(), given_to)]
    tolerance = 1e-10 if scoring.fused else 1e-5  # scores of the others are in float32
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


class SlidingOrNot(nn.Module):
    layer_idx = 1

    def __init__(self, **config: object) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)


def test_the_window_is_that_of_the_layers_type() -> None:
    kinds = ["sliding_attention", "full_attention"]
    full = SlidingOrNot(layer_types=kinds, sliding_window=8)
    assert scoring_of(full, 1.0, 8, None, None).window is None, "a keyword that its type does not have"
    sliding = SlidingOrNot(layer_types=kinds[::-1], sliding_window=8)
    assert scoring_of(sliding, 1.0, None, None, None).window == Window(8), "no keyword, but its type has one"
    chunked = SlidingOrNot(layer_types=["full_attention", "chunked_attention"], attention_chunk_size=5)
    assert scoring_of(chunked, 1.0, None, None, None).window == Window(5, chunks=True)
    without_types = SlidingOrNot(sliding_window=8)
    assert scoring_of(without_types, 1.0, 8, None, None).window == Window(8)
    assert scoring_of(without_types, 1.0, None, None, None).window is None, "its code makes no sliding masks"
    assert scoring_of(SlidingOrNot(sliding_window=None), 1.0, None, None, None).window is None
