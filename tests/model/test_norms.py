"""hone.model.norms against the modules of transformers that it computes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from hone.model.norms import RMSNorm, fast_norms, rms_norm


def test_a_norm_by_hand() -> None:
    """The mean square of (3, 4, 0, 0) is 25 / 4, so its root is 2.5."""
    out = rms_norm(torch.tensor([[3.0, 4.0, 0.0, 0.0]]), torch.tensor([1.0, 10.0, 1.0, 1.0]), 0.0)
    torch.testing.assert_close(out, torch.tensor([[1.2, 16.0, 0.0, 0.0]]))


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 5), size=st.integers(1, 9), seed=st.integers(0, 99))
def test_gradients(rows: int, size: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, size, generator=random, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(size, generator=random, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, scale: RMSNorm.apply(x, scale, 0.1), (x, scale))


@pytest.mark.parametrize("kind", [Gemma3RMSNorm, Qwen3_5RMSNorm, Qwen3_5RMSNormGated])
@pytest.mark.parametrize("shape", [(1, 6, 16), (1, 6, 4, 16)])
def test_outputs_and_gradients_equal_those_of_the_module(kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(0)
    model = nn.Sequential(kind(16))
    norm = model[0]
    with torch.no_grad():
        norm.weight.normal_(generator=random)
    inputs = [torch.randn(shape, generator=random) for _ in range(1 + (kind is Qwen3_5RMSNormGated))]
    inputs = [x.transpose(1, 2) if x.ndim == 4 else x for x in inputs]  # heads before tokens, as after a projection
    pull = torch.randn(inputs[0].shape, generator=random)

    def results() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = norm(*leaves)
        return [out, *torch.autograd.grad(out, [*leaves, norm.weight], pull)]

    expected = results()
    with fast_norms(model):
        assert "forward" in vars(norm)
        found = results()
        with torch.no_grad():
            torch.testing.assert_close(norm(*inputs), expected[0], atol=1e-5, rtol=1e-5)
    assert "forward" not in vars(norm)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


class OutsideRoot(nn.Module):
    """As Gemma's, but with eps outside the root, which only small numbers show."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.eps, self.weight = 1e-6, nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * (1.0 + self.weight)


class Scaled(OutsideRoot):
    """As Gemma's while its weight is 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (1.0 + 2.0 * self.weight)


class Shaped(OutsideRoot):
    """Takes three dimensions only."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape
        return x.view(batch, length, size)


def test_modules_that_compute_something_else_keep_their_own_code() -> None:
    """They scale by the weight, gate before the norm or by another function, or have another precision or eps."""
    gated = [BambaRMSNormGated(8, 4), KimiLinearRMSNormGated(8)]
    others = [Qwen2RMSNorm(8), *gated, OutsideRoot(8), Scaled(8), Shaped(8), nn.LayerNorm(8), nn.Linear(8, 8)]
    others.append(Gemma3RMSNorm(8).bfloat16())
    with fast_norms(nn.ModuleList(others)):
        assert not any("forward" in vars(module) for module in others)


def test_inputs_of_another_precision_go_through_the_modules_own_code() -> None:
    norm = Gemma3RMSNorm(8)
    x = torch.linspace(-2, 3, 16).view(2, 8).bfloat16()
    expected = norm(x)
    with fast_norms(norm):
        assert torch.equal(norm(x), expected)
        assert norm(x).dtype == torch.bfloat16
