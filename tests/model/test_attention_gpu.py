"""What the kernels of a GPU are given, computed by plain means; and on a GPU, the kernels themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from hone.model import attention_gpu as gpu
from hone.model.attention import packed_attention
from hone.model.scoring import Scoring, Window
from hone.types import Block

CPU = torch.device("cpu")
LAYOUTS = {
    "shared": (Block(5, (3, 3, 7)), Block(0, (4, 6)), Block(9, (1,)), Block(2, ())),
    "plain": (Block(0, (6, 2, 8)), Block(0, (16,))),
}
#: Query and key heads: each its own, and groups of 3.
HEADS = [(4, 4), (6, 2)]
#: What flex attention computes beside plain causal attention: for the 6 heads of HEADS[1].
SCORINGS = [
    Scoring(0.3),
    Scoring(0.3, Window(4)),
    Scoring(0.3, Window(4, chunks=True)),
    Scoring(0.3, softcap=2.0),
    Scoring(0.3, Window(3), sinks=torch.tensor([-1.0, 0.0, 1.0, 2.0, 0.5, -3.0])),
]


def test_a_layout_by_hand() -> None:
    got = gpu.varlen((Block(2, (2, 3)), Block(0, (2,))), CPU)
    assert got.queries.tolist() == [0, 2, 4, 7, 9]
    assert got.keys.tolist() == [0, 2, 6, 11, 13]
    assert got.fetched is not None
    assert got.fetched.tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 4, 5, 6, 7, 8]
    assert (got.longest_query, got.longest_key) == (3, 5)
    assert got.queries.dtype == got.keys.dtype == torch.int32
    assert gpu.varlen((Block(0, (2, 3)),), CPU).fetched is None  # nothing is shared: keys are where they are


def test_who_sees_whom_by_hand() -> None:
    """A prompt a b with completions c d and e, and a sequence of its own, f g."""
    sees = gpu.sees((Block(2, (2, 1)), Block(0, (2,))), CPU)
    index = torch.arange(7)
    table = sees(None, None, index[:, None], index[None, :])
    rows = ["".join(name for name, seen in zip("abcdefg", row) if seen) for row in table.tolist()]
    assert rows == ["a", "ab", "abc", "abcd", "abe", "f", "fg"]


def test_who_sees_whom_behind_windows_by_hand() -> None:
    """A prompt a b c with completions d e and f g h: positions 3 4 and 3 4 5."""
    layout, index = (Block(3, (2, 3)),), torch.arange(8)

    def rows(window: Window) -> list[str]:
        table = gpu.sees(layout, CPU, window)(None, None, index[:, None], index[None, :])
        return ["".join(name for name, seen in zip("abcdefgh", row) if seen) for row in table.tolist()]

    assert rows(Window(3)) == ["a", "ab", "abc", "bcd", "cde", "bcf", "cfg", "fgh"]
    assert rows(Window(2, chunks=True)) == ["a", "ab", "c", "cd", "e", "cf", "g", "gh"]


def plain_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tensor,
    keys: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """What `varlen_attn` says that it does, one sequence at a time: the last query sees the last key."""
    assert enable_gqa == (q.shape[1] != k.shape[1])
    assert window_size[1] == 0
    assert q.is_contiguous()
    assert (longest_query, longest_key) == (int(queries.diff().max()), int(keys.diff().max()))
    out = []
    for a, b, c, d in zip(queries[:-1], queries[1:], keys[:-1], keys[1:]):
        one, theirs, values = (x[s:e].transpose(0, 1)[None] for x, s, e in ((q, a, b), (k, c, d), (v, c, d)))
        before = theirs.shape[2] - one.shape[2]
        mask = torch.ones(one.shape[2], theirs.shape[2], dtype=torch.bool).tril(before)
        if window_size[0] >= 0:
            mask = mask.triu(before - window_size[0])
        got = F.scaled_dot_product_attention(one, theirs, values, mask, scale=scale, enable_gqa=enable_gqa)
        out.append(got[0].transpose(0, 1))
    return torch.cat(out)


def inputs(layout: tuple[Block, ...], heads: tuple[int, int], device: torch.device = CPU) -> list[Tensor]:
    tokens, (many, few) = sum(block.num_tokens for block in layout), heads
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, tokens, 16, generator=draw).to(device).requires_grad_() for n in (many, few, few)]


def with_gradients(out: Tensor, given: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of a weighted sum of it."""
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out, *torch.autograd.grad((out * weights).sum(), given)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("window", [None, Window(4), Window(1)])
def test_flash_is_given_what_makes_it_the_packed_attention(
    name: str, heads: tuple[int, int], window: Window | None
) -> None:
    layout, given, scoring = LAYOUTS[name], inputs(LAYOUTS[name], heads), Scoring(0.3, window)
    expected = with_gradients(packed_attention(*given, layout, scoring), given)
    got = with_gradients(gpu.flash(*given, gpu.varlen(layout, CPU), scoring, plain_varlen), given)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def varlen_2_11(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, longest_query: int, longest_key: int, *,
    return_aux: None = None, scale: float, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    """PyTorch 2.11 has no `enable_gqa`."""
    return plain_varlen(
        q, k, v, queries, keys, longest_query, longest_key, scale=scale, window_size=window_size
    )  # fmt: skip


@pytest.mark.parametrize("heads", HEADS)
def test_a_varlen_without_grouped_heads_gets_a_key_head_for_each_query_head(heads: tuple[int, int]) -> None:
    layout, given = LAYOUTS["shared"], inputs(LAYOUTS["shared"], heads)
    expected = with_gradients(packed_attention(*given, layout, Scoring(0.3)), given)
    got = with_gradients(gpu.flash(*given, gpu.varlen(layout, CPU), Scoring(0.3), varlen_2_11), given)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_the_call_of_pytorch_2_11_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every model goes through flex attention there, which is compiled anew for new shapes."""
    from torch.nn.attention import varlen

    monkeypatch.setattr(varlen, "varlen_attn", varlen_2_11)
    gpu._varlen_attn.cache_clear()
    try:
        assert gpu._varlen_attn() is varlen_2_11
    finally:
        gpu._varlen_attn.cache_clear()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("scoring", SCORINGS)
def test_flex_is_given_what_makes_it_the_packed_attention(scoring: Scoring) -> None:
    """Not compiled, it computes all scores and masks them; on a CPU it has no way back."""
    layout = LAYOUTS["shared"]
    given = [x.detach() for x in inputs(layout, HEADS[1])]
    got = gpu.flex(*given, layout, scoring, flex_attention)
    torch.testing.assert_close(got, packed_attention(*given, layout, scoring), atol=1e-5, rtol=1e-5)


def test_a_cpu_and_float32_go_on_block_by_block() -> None:
    query = torch.zeros(1, 2, 3, 16)
    assert gpu.kind(query, query, Scoring(1.0)) is None
    assert gpu.kind(query.bfloat16(), query.bfloat16(), Scoring(1.0)) is None


def test_this_pytorch_knows_the_call_that_flash_makes() -> None:
    assert gpu._varlen_attn() is not None


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["flash", "flex"])
@pytest.mark.parametrize("heads", HEADS)
def test_on_a_gpu_both_agree_with_float32_block_by_block(how: Any, heads: tuple[int, int]) -> None:
    device = torch.device("cuda")
    layout = (Block(70, (33, 41, 90)), Block(0, (64, 20)), Block(0, (-(70 + 33 + 41 + 90 + 84) % 128,)))
    exact = inputs(layout, heads, device)
    expected = with_gradients(packed_attention(*exact, layout, Scoring(0.25)), exact)
    given = [x.detach().bfloat16().requires_grad_() for x in exact]
    assert gpu.kind(given[0], given[2], Scoring(0.25)) == "flash"
    got = with_gradients(gpu.attention(*given, layout, Scoring(0.25), how), given)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.float(), b, atol=0.03 * float(b.abs().max()), rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("scoring", SCORINGS[1:])
def test_on_a_gpu_windows_caps_and_sinks_agree_with_float32(scoring: Scoring) -> None:
    device = torch.device("cuda")
    layout = (Block(70, (33, 41, 90)), Block(0, (64, 20)), Block(0, (-(70 + 33 + 41 + 90 + 84) % 128,)))
    sinks = None if scoring.sinks is None else scoring.sinks.to(device).requires_grad_()
    exact = inputs(layout, HEADS[1], device)
    trained = [] if sinks is None else [sinks]
    scoring = replace(scoring, sinks=sinks)
    expected = with_gradients(packed_attention(*exact, layout, scoring), [*exact, *trained])
    given = [x.detach().bfloat16().requires_grad_() for x in exact]
    how = gpu.kind(given[0], given[2], scoring)
    assert how == ("flash" if scoring.fused and not (scoring.window and scoring.window.chunks) else "flex")
    got = with_gradients(gpu.attention(*given, layout, scoring, how), [*given, *trained])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.float(), b, atol=0.03 * float(b.abs().max()), rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS)
def test_float32_takes_the_fused_kernel_too(heads: tuple[int, int]) -> None:
    """Without it all scores exist at once, which `hone plan` does not count."""
    layout = (Block(70, (33, 41, 90)), Block(0, (64, 20)))
    given = inputs(layout, heads, torch.device("cuda"))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        got = with_gradients(packed_attention(*given, layout, Scoring(0.25)), given)
    on_cpu = inputs(layout, heads)
    for a, b in zip(got, with_gradients(packed_attention(*on_cpu, layout, Scoring(0.25)), on_cpu), strict=True):
        torch.testing.assert_close(a.cpu(), b, atol=1e-4, rtol=1e-4)
