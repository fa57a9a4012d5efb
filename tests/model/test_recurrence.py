"""hone.model.recurrence against the functions of transformers that it stands in for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

from hone.model import recurrence
from hone.model.recurrence import ShortConvolution, delta_chunks, delta_step, fast_forward


def test_a_step_of_the_delta_rule_by_hand() -> None:
    """k = (1, 0) and q = (0.6, 0.8) are of length 1: S decays to ((1, 0), (0, 1)), k S = (1, 0), and v = (3, 4) pulls
    half way there: ((2, 2), (0, 1)). q S / sqrt(2) = (1.2, 2.0) / sqrt(2)."""
    row = {
        "query": torch.tensor([[[0.6, 0.8]]]),
        "key": torch.tensor([[[1.0, 0.0]]]),
        "value": torch.tensor([[[3.0, 4.0]]]),
        "log_decay": torch.tensor([[0.5]]).log(),
        "beta": torch.tensor([[0.5]]),
    }
    state = torch.tensor([[[[2.0, 0.0], [0.0, 2.0]]]])
    out, after = delta_step(**row, state=state)
    torch.testing.assert_close(after, torch.tensor([[[[2.0, 2.0], [0.0, 1.0]]]]), atol=1e-5, rtol=0)
    torch.testing.assert_close(out, torch.tensor([[[1.2, 2.0]]]) / 2**0.5, atol=1e-5, rtol=0)
    assert after is state, "in place"


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 9), heads=st.sampled_from([(2, 4), (3, 3), (1, 2)]), seed=st.integers(0, 99))
def test_a_step_equals_that_of_transformers_however_many_rows_share_a_tile(
    rows: int, heads: tuple[int, int], seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    few, many = heads
    query, key, value = draw(rows, 1, few, 16), draw(rows, 1, few, 16), draw(rows, 1, many, 8)
    decay, beta, state = -draw(rows, 1, many).abs(), draw(rows, 1, many).sigmoid(), draw(rows, many, 16, 8)
    expected, expected_state = theirs.torch_recurrent_gated_delta_rule(
        query.repeat_interleave(many // few, dim=2),  # by the caller, in older versions of transformers
        key.repeat_interleave(many // few, dim=2),
        value,
        g=decay,
        beta=beta,
        initial_state=state.clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrence, "TILE", 3 * state[0].numel() * 4)
        out, after = delta_step(query[:, 0], key[:, 0], value[:, 0], decay[:, 0], beta[:, 0], state)
    torch.testing.assert_close(out, expected[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after, expected_state, atol=1e-5, rtol=1e-5)


@settings(max_examples=15, deadline=None)
@given(length=st.integers(1, 70), heads=st.sampled_from([(2, 4), (3, 3)]), begun=st.booleans(), seed=st.integers(0, 99))
def test_many_tokens_and_their_gradients_equal_those_of_transformers(
    length: int, heads: tuple[int, int], begun: bool, seed: int
) -> None:
    """Also of one token after the other, from the state that the others have left."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    few, many = heads
    inputs = [draw(2, length, few, 8), draw(2, length, few, 8), draw(2, length, many, 6)]
    inputs += [-draw(2, length, many).abs(), draw(2, length, many).sigmoid()]
    inputs += [draw(2, many, 8, 6)] if begun else []
    inputs = [x.requires_grad_() for x in inputs]
    query, key, value, decay, beta, state = inputs if begun else (*inputs, None)
    expected = theirs.torch_chunk_gated_delta_rule(
        query.repeat_interleave(many // few, dim=2),
        key.repeat_interleave(many // few, dim=2),
        value,
        g=decay,
        beta=beta,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    ours = delta_chunks(query, key, value, decay, beta, state)
    weights = [draw(*x.shape) for x in expected]
    gradients = [
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(pair, weights, strict=True)), inputs)
        for pair in (ours, expected)
    ]
    for one, other in zip((*ours, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
    now = torch.zeros(2, many, 8, 6) if state is None else state.detach().clone()
    with torch.no_grad():
        for t in range(length):
            step, now = delta_step(query[:, t], key[:, t], value[:, t], decay[:, t], beta[:, t], now)
            torch.testing.assert_close(step, ours[0][:, t], atol=2e-5, rtol=1e-4)


@settings(max_examples=20, deadline=None)
@given(length=st.integers(1, 9), kernel=st.integers(1, 5), biased=st.booleans(), seed=st.integers(0, 99))
def test_a_short_convolution_and_its_gradients(length: int, kernel: int, biased: bool, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64, requires_grad=True)

    hidden, weight, bias = draw(2, 3, length), draw(3, kernel), draw(3) if biased else None
    expected = F.conv1d(hidden, weight[:, None], bias, padding=kernel - 1, groups=3)[..., :length]
    out = ShortConvolution.apply(hidden, weight, bias)
    torch.testing.assert_close(out, expected)
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    pull = torch.randn(out.shape, generator=random, dtype=torch.float64)
    for ours, other in zip(
        torch.autograd.grad(out, inputs, pull), torch.autograd.grad(expected, inputs, pull), strict=True
    ):
        torch.testing.assert_close(ours, other)


@pytest.mark.parametrize("biased", [True, False])
def test_a_step_of_a_convolution_equals_that_of_transformers(biased: bool) -> None:
    torch.manual_seed(0)
    update = recurrence.FASTER["causal_conv1d_update"](pytest.fail)
    ours = torch.randn(5, 6, 4)
    other, weight, bias = ours.clone(), torch.randn(6, 4), torch.randn(6) if biased else None
    for _ in range(3):
        hidden = torch.randn(5, 6, 1)
        expected = theirs.causal_conv1d_update(hidden, other, weight, bias, "silu")
        torch.testing.assert_close(update(hidden, ours, weight, bias, "silu"), expected, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(ours, other, atol=0, rtol=0)


def test_what_does_not_fit_goes_to_transformers() -> None:
    seen: list[str] = []
    rule, conv = (
        recurrence.FASTER[name](lambda *_, name=name, **__: seen.append(name))
        for name in ("torch_recurrent_gated_delta_rule", "causal_conv1d_fn")
    )
    one = torch.zeros(1, 1, 1, 2)
    given = {"g": one[..., 0], "beta": one[..., 0], "output_final_state": True}
    rule(one, one, one, **given)  # not normed
    rule(one, one, one, **given, use_qk_l2norm_in_kernel=True, cu_seqlens=torch.zeros(2))
    conv(torch.zeros(1, 2, 3), torch.zeros(2, 2), activation="gelu")
    conv(torch.zeros(1, 2, 3, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.bfloat16))
    assert seen == ["torch_recurrent_gated_delta_rule"] * 2 + ["causal_conv1d_fn"] * 2


def test_the_class_and_its_module_stay_as_they_are() -> None:
    kind = theirs.Qwen3_5GatedDeltaNet
    before = (kind.forward, theirs.causal_conv1d_fn)
    forward = fast_forward(kind)
    assert forward.__globals__["causal_conv1d_fn"] is not theirs.causal_conv1d_fn  # type: ignore[attr-defined]
    assert (kind.forward, theirs.causal_conv1d_fn) == before
    assert fast_forward(nn.Linear) is nn.Linear.forward
