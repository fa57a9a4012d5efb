"""Log-probs and entropies of chosen tokens, straight from hidden states.

The logits of a batch are its largest tensor by far: 4096 tokens with a vocabulary of 151 936 take
2.5 GB in float32, several times over with the gradient. Here they are computed one chunk of
tokens at a time, forward and again backward, and the softmax is in float32 or better.

    logprobs, entropy = head_logprobs(model, hidden, targets, temperature=1.0, want_entropy=True)

Truncated sampling (top-p, top-k), which changes the sampler's distribution, is not accounted for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from hone.model.meta import device_type

#: Elements of one chunk of logits: 64 MB, and on a GPU, which a chunk must fill, 512 MB.
BUDGET = {"cpu": 2**24, "cuda": 2**27}

#: Config entries by which models multiply their logits, and by which they divide them.
FACTORS = ("logit_scale", "lm_head_multiplier")  # Cohere, Falcon-H1
DIVISORS = ("logits_scaling",)  # Granite, MiniCPM3
SOFTCAP = "final_logit_softcapping"  # Gemma 2, nanochat


@dataclass(frozen=True, slots=True)
class Head:
    """From hidden states to logits: c tanh(x / c) with x = factor (hidden @ weight.T + bias); without a cap, x."""

    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    factor: float = 1.0
    softcap: float | None = None

    def finish(self, products: Tensor) -> Tensor:
        """hidden @ weight.T [n, V] -> logits; may overwrite the products."""
        if self.bias is not None:
            products += self.bias
        if self.factor != 1.0:
            products *= self.factor
        return products if self.softcap is None else self.softcap * torch.tanh(products / self.softcap)

    def slope(self, logits: Tensor) -> Tensor | float:
        """The derivative of each logit by its product: factor (1 - (logit / c)^2)."""
        return self.factor if self.softcap is None else self.factor * (1.0 - (logits / self.softcap) ** 2)


def token_logprobs(
    hidden: Tensor,  # [N, D]
    head: Head,
    targets: Tensor,  # [N] int64
    temperature: float = 1.0,
    want_entropy: bool = False,
    budget: int | None = None,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [N] of `targets`, and entropies [N] in nats or None, under softmax(logits / temperature).

    `group`: the vocabulary is cut over these processes, V tokens each in the order of the ranks; hidden states and
    targets are the same on all, and so are the results and the gradient of hidden.

    Both are differentiable (once) with respect to hidden, weight and bias. `budget` bounds the
    elements of a chunk of logits.
    """
    weight, bias = head.weight, head.bias
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be [N, D] and [V, D]")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(f"targets must be int64 [{hidden.shape[0]}], got {targets.dtype} {tuple(targets.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}], got {tuple(bias.shape)}")
    if not temperature > 0.0:
        raise ValueError(f"temperature is {temperature}; log-probs need one above 0 (greedy has no distribution)")
    if budget is None:
        budget = BUDGET.get(device_type(hidden), BUDGET["cuda"])
    rows = max(1, budget // weight.shape[0])
    result: tuple[Tensor, Tensor | None] = _TokenLogprobs.apply(
        hidden, weight, bias, targets, head, float(temperature), want_entropy, rows, group
    )
    return result


def head_logprobs(
    model: nn.Module, hidden: Tensor, targets: Tensor, temperature: float = 1.0, want_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`token_logprobs` with the output head of a Hugging Face causal model; `hidden` is its last, normalised one."""
    head, group = output_head(model), None
    if isinstance(head.weight, DTensor):
        group = head.weight.device_mesh.get_group()
        bias = head.bias.to_local() if isinstance(head.bias, DTensor) else head.bias
        head = replace(head, weight=head.weight.to_local(), bias=bias)
    return token_logprobs(hidden, head, targets, temperature, want_entropy, group=group)


def backbone(model: Any) -> Any:
    """The part of a causal model that returns hidden states. Llama 4's attribute differs from the name that its class
    declares."""
    return model.base_model if model.base_model is not model else model.model


def output_head(model: Any) -> Head:
    """The output head, with the config's scaling and cap of its logits. Raises ValueError if it is not a linear
    layer."""
    text = model.config.get_text_config()
    factor = 1.0
    for name in FACTORS:
        factor *= getattr(text, name, None) or 1.0
    for name in DIVISORS:
        factor /= getattr(text, name, None) or 1.0
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):  # e.g. wrapped by an adapter, whose part of the logits would be lost
        raise ValueError(
            f"{type(model).__name__}: the output head is a {type(head).__name__}, not nn.Linear. "
            "Leave lm_head out of the adapter's target modules."
        )
    return Head(head.weight, head.bias, float(factor), getattr(text, SOFTCAP, None))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        temperature: float,
        want_entropy: bool,
        rows: int,
        group: ProcessGroup | None,
    ) -> tuple[Tensor, Tensor | None]:
        work = _work_dtype(hidden, weight)
        n = hidden.shape[0]
        logprobs, lse = hidden.new_empty(n, dtype=work), hidden.new_empty(n, dtype=work)
        entropy = hidden.new_empty(n, dtype=work) if want_entropy else None
        for part, logits in _chunks(hidden, head, temperature, rows):
            lse[part] = _logsumexp(logits, group)
            place, inside = _places(targets[part], logits.shape[1], group)
            logprobs[part] = _sum(logits.gather(1, place).squeeze(1) * inside, group) - lse[part]
            if entropy is not None:
                logits -= lse[part, None]
                entropy[part] = _sum(-torch.linalg.vecdot(logits.exp(), logits), group)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.factor, ctx.softcap = head.factor, head.softcap
        ctx.temperature, ctx.rows, ctx.group = temperature, rows, group
        ctx.set_materialize_grads(False)  # an entropy that is in no loss costs nothing in the backward pass
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """With l = logits / T, p = softmax(l), H the entropy, g and e the incoming gradients:

        d/dl_v = g (1[v = target] - p_v) - e p_v (log p_v + H)

        and from there to the products by `Head.slope`.
        """
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        head = Head(weight, bias, ctx.factor, ctx.softcap)
        work = _work_dtype(hidden, weight)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(lse)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        # Summed over chunks, hence in the wide dtype; the last step rounds once.
        grad_weight = torch.zeros_like(weight, dtype=work) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=work) if need_bias else None
        for part, logits in _chunks(hidden, head, ctx.temperature, ctx.rows):
            g = grad_logprobs[part, None]
            slope = head.slope(logits * ctx.temperature if head.softcap is not None else logits)
            logits -= lse[part, None]
            if entropy is None or grad_entropy is None:
                grad = logits.exp_().mul_(-g)
            else:
                probs = logits.exp()
                grad = logits.add_(entropy[part, None]).mul_(-grad_entropy[part, None]).sub_(g).mul_(probs)
            place, inside = _places(targets[part], logits.shape[1], ctx.group)
            grad.scatter_add_(1, place, g * inside[:, None])
            if ctx.temperature != 1.0:
                grad /= ctx.temperature
            if isinstance(slope, Tensor) or slope != 1.0:
                grad *= slope
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            narrow = grad.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = (narrow @ weight).to(hidden.dtype)
            if grad_weight is not None:
                _add_product(grad_weight, narrow.t(), hidden[part].to(weight.dtype))
        if grad_hidden is not None:
            _sum(grad_hidden, ctx.group)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 6,
        )


def _sum(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum over the parts of the vocabulary, in place."""
    if group is not None and x.numel():
        dist.all_reduce(x, group=group)
    return x


def _logsumexp(logits: Tensor, group: ProcessGroup | None) -> Tensor:
    """[n, V] -> [n], over all parts of the vocabulary."""
    own = torch.logsumexp(logits, dim=-1)
    if group is None:
        return own
    top = own.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    return top + _sum((own - top).exp(), group).log()


def _places(targets: Tensor, size: int, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Columns [n, 1] of the targets in this part of the vocabulary, and whether they are in it [n]."""
    if group is None:
        return targets[:, None], torch.ones_like(targets, dtype=torch.bool)
    at = targets - size * dist.get_rank(group)
    inside = (at >= 0) & (at < size)
    return (at * inside)[:, None], inside


def _work_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)


def _chunks(hidden: Tensor, head: Head, temperature: float, rows: int) -> Iterator[tuple[slice, Tensor]]:
    """(positions, logits / temperature in the work dtype), chunk by chunk; the consumer may overwrite the logits."""
    for start in range(0, hidden.shape[0], rows):
        part = slice(start, min(start + rows, hidden.shape[0]))
        logits = logits_of(hidden[part], head)
        if temperature != 1.0:
            logits /= temperature
        yield part, logits


def logits_of(hidden: Tensor, head: Head) -> Tensor:
    """hidden [N, D] -> logits [N, V] in float32 or better, rounded as for log-probs: a sampler that rounds differently
    draws from another distribution than the trained one."""
    weight = head.weight
    return head.finish(_product(hidden.to(weight.dtype), weight.t(), _work_dtype(hidden, weight)))


def _product(a: Tensor, b: Tensor, out: torch.dtype) -> Tensor:
    """a @ b in dtype `out`. On a GPU bfloat16 products are returned in `out` without rounding: a logit of 20
    rounded to bfloat16 is off by up to 0.06, and so is every log-prob."""
    if a.dtype != out and a.is_cuda:
        return torch.mm(a, b, out_dtype=out)
    return (a @ b).to(out)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += _product(a, b, total.dtype)
