from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hone.model.logprobs import BUDGET, Head, head_logprobs, logits_of, output_head, token_logprobs


def random_head(n: int, d: int, v: int, dtype: torch.dtype = torch.float64, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(v, d, generator=generator, dtype=dtype).requires_grad_()
    bias = torch.randn(v, generator=generator, dtype=dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(0, v, (n,), generator=generator)


def naive(hidden, weight, targets, temperature, bias):
    table = torch.log_softmax((hidden @ weight.t() + bias) / temperature, dim=-1)
    return table.gather(1, targets[:, None]).squeeze(1), -(table.exp() * table).sum(-1)


def test_by_hand() -> None:
    # hidden 1, weights log 1, log 2, log 5: probabilities 1/8, 2/8, 5/8.
    # log p: -2.0794415, -1.3862944, -0.4700036. Entropy 0.2599302 + 0.3465736 + 0.2937523 = 0.9002561
    weight = torch.tensor([[1.0], [2.0], [5.0]]).log()
    logprobs, entropy = token_logprobs(torch.ones(3, 1), Head(weight), torch.arange(3), want_entropy=True)
    torch.testing.assert_close(logprobs, torch.tensor([-2.0794415, -1.3862944, -0.4700036]))
    torch.testing.assert_close(entropy, torch.full((3,), 0.9002561))
    # Temperature 1/2 squares the odds: 1/30, 4/30, 25/30; a bias of log 3 on the first makes them 3, 2, 5 of 10.
    squared, none = token_logprobs(torch.ones(3, 1), Head(weight), torch.arange(3), temperature=0.5)
    torch.testing.assert_close(squared.exp(), torch.tensor([1.0, 4, 25]) / 30)
    assert none is None
    biased, _ = token_logprobs(torch.ones(3, 1), Head(weight, torch.tensor([3.0, 1, 1]).log()), torch.arange(3))
    torch.testing.assert_close(biased.exp(), torch.tensor([0.3, 0.2, 0.5]))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("want_entropy", [False, True])
def test_gradcheck(want_entropy: bool, softcap: float | None) -> None:
    hidden, weight, bias, targets = random_head(5, 3, 7)

    def chunked(h, w, b):
        head = Head(w, b) if softcap is None else Head(w, b, 0.3, softcap)
        logprobs, entropy = token_logprobs(h, head, targets, 0.7, want_entropy, budget=14)  # 2 + 2 + 1 tokens
        return (logprobs, entropy) if want_entropy else logprobs

    assert torch.autograd.gradcheck(chunked, (hidden, weight, bias))


@pytest.mark.parametrize("budget", [1, 11 * 4, 10**6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_the_naive_computation(dtype: torch.dtype, budget: int) -> None:
    hidden, weight, bias, targets = random_head(9, 4, 11, dtype)
    mix = torch.randn(2, 9, dtype=dtype, generator=torch.Generator().manual_seed(1))
    results = []
    for compute in (
        lambda: token_logprobs(hidden, Head(weight, bias), targets, 1.3, True, budget),
        lambda: naive(hidden, weight, targets, 1.3, bias),
    ):
        logprobs, entropy = compute()
        grads = torch.autograd.grad((mix[0] * logprobs + mix[1] * entropy).sum(), (hidden, weight, bias))
        results.append((logprobs, entropy, *grads))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-6 if dtype == torch.float64 else 5e-6, rtol=1e-6)


def test_an_entropy_that_the_loss_ignores_changes_nothing() -> None:
    hidden, weight, _, targets = random_head(4, 3, 5)
    with_entropy, _ = token_logprobs(hidden, Head(weight), targets, want_entropy=True)
    without, _ = token_logprobs(hidden, Head(weight), targets)
    a = torch.autograd.grad(with_entropy.sum(), (hidden, weight))
    b = torch.autograd.grad(without.sum(), (hidden, weight))
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y)
    _, entropy = token_logprobs(hidden, Head(weight), targets, want_entropy=True)
    (only,) = torch.autograd.grad(entropy.sum(), hidden)
    _, expected = naive(hidden, weight, targets, 1.0, torch.zeros(5, dtype=hidden.dtype))
    torch.testing.assert_close(only, torch.autograd.grad(expected.sum(), hidden)[0])


def test_no_tokens_still_touch_the_parameters() -> None:
    # Ranks without work take part in the backward pass: gradients are zeros, not None.
    hidden, weight, bias, targets = random_head(0, 3, 5)
    logprobs, entropy = token_logprobs(hidden, Head(weight, bias), targets, 1.0, True)
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.equal(weight.grad, torch.zeros(5, 3, dtype=torch.float64))
    assert torch.equal(bias.grad, torch.zeros(5, dtype=torch.float64))


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, _, targets = random_head(4, 3, 5)
    token_logprobs(hidden, Head(weight.detach()), targets)[0].sum().backward()
    assert hidden.grad.abs().sum() > 0


def test_bfloat16_head_is_computed_in_float32() -> None:
    hidden, weight, _, targets = (x.detach() for x in random_head(6, 4, 9, torch.bfloat16))
    logprobs, entropy = token_logprobs(hidden, Head(weight), targets, want_entropy=True)
    assert logprobs.dtype == entropy.dtype == torch.float32
    expected, _ = naive(hidden.double(), weight.double(), targets, 1.0, 0.0)
    torch.testing.assert_close(logprobs.double(), expected, atol=0.05, rtol=0)
    # A float32 head under bfloat16 activations loses nothing at all.
    exact, _ = token_logprobs(hidden, Head(weight.float()), targets)
    torch.testing.assert_close(exact.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.gpu
def test_on_a_gpu_the_logits_of_a_bfloat16_head_are_not_rounded() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    hidden, weight, _, targets = (x.detach() for x in random_head(64, 128, 500, torch.bfloat16))
    on_gpu = [hidden.cuda().requires_grad_(), weight.cuda().requires_grad_()]
    exact = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    logprobs, entropy = token_logprobs(on_gpu[0], Head(on_gpu[1]), targets.cuda(), want_entropy=True, budget=500 * 10)
    expected, expected_entropy = naive(*exact, targets, 1.0, 0.0)
    torch.testing.assert_close(logprobs.cpu().double(), expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(entropy.cpu().double(), expected_entropy, atol=1e-4, rtol=1e-4)
    (logprobs + entropy).sum().backward()
    (expected + expected_entropy).sum().backward()
    for ours, true in zip(on_gpu, exact, strict=True):
        assert ours.grad.dtype == torch.bfloat16
        error = (ours.grad.cpu().double() - true.grad).norm() / true.grad.norm()
        assert error < 0.01


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return out


def test_no_operation_makes_the_whole_table_of_logits() -> None:
    # On the meta device: the true sizes, N = 4096 and V = 151 936, without computing them.
    n, v, d = 4096, 151_936, 16
    hidden = torch.empty(n, d, device="meta", requires_grad=True)
    weight = torch.empty(v, d, device="meta", requires_grad=True)
    targets = torch.empty(n, dtype=torch.int64, device="meta")
    for want_entropy in (False, True):
        with Largest() as seen:
            logprobs, entropy = token_logprobs(hidden, Head(weight), targets, 0.9, want_entropy, budget=BUDGET["cpu"])
            (logprobs if entropy is None else logprobs + entropy).sum().backward()
        assert v * d <= seen.elements <= BUDGET["cpu"] < n * v / 30
    with Largest() as seen:
        naive(hidden, weight, targets, 0.9, 0.0)
    assert seen.elements == n * v  # the measuring works


PEAK = """
import resource, sys, torch
from hone.model.logprobs import Head, token_logprobs
n, v, d, budget = map(int, sys.argv[1:])
hidden = torch.randn(n, d, requires_grad=True)
weight = torch.randn(v, d, requires_grad=True)
targets = torch.randint(0, v, (n,))
def step(rows):
    logprobs, entropy = token_logprobs(hidden[:rows], Head(weight), targets[:rows], 1.0, True, budget=budget)
    (logprobs + entropy).sum().backward()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
step(8)
before = peak()
step(n)
print(peak() - before)
"""


@pytest.mark.parametrize(
    "sizes", [(4096, 8192, 2, 2**19), pytest.param((4096, 151_936, 2, 2**24), marks=pytest.mark.slow)]
)
def test_peak_memory_of_the_process(sizes: tuple[int, int, int, int]) -> None:
    pytest.importorskip("resource")  # not on Windows
    result = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, sizes)], capture_output=True, text=True, check=True, timeout=110
    )
    n, v, *_ = sizes
    assert int(result.stdout) < n * v * 4 / 4  # one float32 table of logits would be 4 * n * v bytes


def tiny_model(**changes):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.Qwen2Config(vocab_size=40, num_key_value_heads=1, max_position_embeddings=32, **sizes)
    model = transformers.Qwen2ForCausalLM(config)
    for name, value in changes.items():
        setattr(model.config, name, value)
    return model


def test_head_of_a_model_gives_its_own_logprobs() -> None:
    model = tiny_model()
    ids = torch.tensor([[3, 9, 27, 1, 4]])
    hidden = model.model(ids).last_hidden_state[0, :-1]
    ours, _ = head_logprobs(model, hidden, ids[0, 1:], temperature=0.8)
    table = torch.log_softmax(model(ids).logits[0, :-1] / 0.8, dim=-1)
    torch.testing.assert_close(ours, table.gather(1, ids[0, 1:, None]).squeeze(1), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("entries", "factor", "softcap"),
    [
        ({}, 1.0, None),
        ({"logits_scaling": 8.0}, 0.125, None),
        ({"logit_scale": 0.25, "final_logit_softcapping": None}, 0.25, None),
        ({"lm_head_multiplier": 3.0, "final_logit_softcapping": 30.0}, 3.0, 30.0),
    ],
)
def test_what_the_config_says_of_the_logits(entries: dict[str, float], factor: float, softcap: float | None) -> None:
    head = output_head(tiny_model(**entries))
    assert (head.factor, head.softcap) == (factor, softcap)


def test_factor_and_cap_by_hand() -> None:
    # Products 1, 3; 0.5 (product + 1) = 1, 2; capped at 2: 2 tanh(0.5) = 0.9242343, 2 tanh(1) = 1.5231883.
    head = Head(torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 1.0]), factor=0.5, softcap=2.0)
    logits = logits_of(torch.ones(1, 1), head)
    torch.testing.assert_close(logits, torch.tensor([[0.9242343, 1.5231883]]))
    logprobs, _ = token_logprobs(torch.ones(1, 1), head, torch.tensor([0]))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[:, 0])
    torch.testing.assert_close(head.slope(logits), torch.tensor([[0.3932239, 0.2099872]]))  # 0.5 / cosh(x / 2)^2


def test_a_wrapped_head_is_refused() -> None:
    model = tiny_model()
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match=r"Sequential, not nn\.Linear"):
        output_head(model)


def test_inputs_are_checked() -> None:
    hidden, weight, targets = torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"must be \[N, D\] and \[V, D\]"):
        token_logprobs(hidden, Head(torch.zeros(5, 4)), targets)
    with pytest.raises(ValueError, match=r"targets must be int64 \[2\]"):
        token_logprobs(hidden, Head(weight), targets.float())
    with pytest.raises(ValueError, match=r"bias must be \[5\]"):
        token_logprobs(hidden, Head(weight, torch.zeros(4)), targets)
    with pytest.raises(ValueError, match=r"temperature is 0\.0"):
        token_logprobs(hidden, Head(weight), targets, temperature=0.0)
