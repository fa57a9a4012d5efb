"""Log-probs and entropies of chosen tokens, straight from hidden states.

The logits of a batch are its largest tensor by far: 4096 tokens with a vocabulary of 151 936 take
2.5 GB in float32, several times over with the gradient. Here they are computed one chunk of
tokens at a time, forward and again backward, and the softmax is in float32 or better.

    logprobs, entropy = head_logprobs(model, hidden, targets, temperature=1.0, want_entropy=True)

Truncated sampling (top-p, top-k), which changes the sampler's distribution, is not accounted for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

#: Elements of one chunk of logits: 64 MB, and on a GPU, which a chunk must fill, 512 MB.
BUDGET = {"cpu": 2**24, "cuda": 2**27}

#: Config entries of models that transform their logits after the head, with their neutral value.
LOGIT_TRANSFORMS = {
    "final_logit_softcapping": None,  # Gemma 2
    "logit_scale": 1.0,  # Cohere
    "logits_scaling": 1.0,  # Granite
    "lm_head_multiplier": 1.0,  # Falcon-H1
}


@contextmanager
def budget_of(device: str) -> Iterator[None]:
    """Tensors of the meta device stand for those of `device` (cpu or cuda) for the duration: chunks are as large."""
    before = BUDGET.get("meta")
    BUDGET["meta"] = BUDGET[device]
    try:
        yield
    finally:
        if before is None:
            del BUDGET["meta"]
        else:
            BUDGET["meta"] = before


def token_logprobs(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    targets: Tensor,  # [N] int64
    temperature: float = 1.0,
    bias: Tensor | None = None,  # [V]
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
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be [N, D] and [V, D]")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(f"targets must be int64 [{hidden.shape[0]}], got {targets.dtype} {tuple(targets.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}], got {tuple(bias.shape)}")
    if not temperature > 0.0:
        raise ValueError(f"temperature is {temperature}; log-probs need one above 0 (greedy has no distribution)")
    if budget is None:
        budget = BUDGET.get(hidden.device.type, BUDGET["cuda"])
    rows = max(1, budget // weight.shape[0])
    result: tuple[Tensor, Tensor | None] = _TokenLogprobs.apply(
        hidden, weight, bias, targets, float(temperature), want_entropy, rows, group
    )
    return result


def head_logprobs(
    model: nn.Module, hidden: Tensor, targets: Tensor, temperature: float = 1.0, want_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`token_logprobs` with the output head of a Hugging Face causal model; `hidden` is its last, normalised one."""
    weight, bias = output_head(model)
    group = None
    if isinstance(weight, DTensor):
        group, weight = weight.device_mesh.get_group(), weight.to_local()
        bias = bias.to_local() if isinstance(bias, DTensor) else bias
    return token_logprobs(hidden, weight, targets, temperature, bias, want_entropy, group=group)


def output_head(model: Any) -> tuple[Tensor, Tensor | None]:
    """Weight [V, D] and bias [V] of the output head. Raises ValueError if logits are not hidden @ weight + bias."""
    text = model.config.get_text_config()
    for name, neutral in LOGIT_TRANSFORMS.items():
        value = getattr(text, name, neutral)
        if value is not None and value != neutral:
            raise ValueError(
                f"{type(model).__name__} has {name}={value}: its logits are not hidden @ weight, and log-probs "
                "computed that way would be wrong. Use a model without it, or teach hone.model.logprobs."
            )
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):  # e.g. wrapped by an adapter, whose part of the logits would be lost
        raise ValueError(
            f"{type(model).__name__}: the output head is a {type(head).__name__}, not nn.Linear. "
            "Leave lm_head out of the adapter's target modules."
        )
    return head.weight, head.bias


def has_plain_head(model: Any) -> bool:
    """Whether logits are hidden @ weight + bias and nothing else. Other models can be sampled from but not trained."""
    try:
        output_head(model)
    except ValueError:
        return False
    return True


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        want_entropy: bool,
        rows: int,
        group: ProcessGroup | None,
    ) -> tuple[Tensor, Tensor | None]:
        work = _work_dtype(hidden, weight)
        n = hidden.shape[0]
        logprobs, lse = hidden.new_empty(n, dtype=work), hidden.new_empty(n, dtype=work)
        entropy = hidden.new_empty(n, dtype=work) if want_entropy else None
        for part, logits in _chunks(hidden, weight, bias, temperature, rows):
            lse[part] = _logsumexp(logits, group)
            place, inside = _places(targets[part], logits.shape[1], group)
            logprobs[part] = _sum(logits.gather(1, place).squeeze(1) * inside, group) - lse[part]
            if entropy is not None:
                logits -= lse[part, None]
                entropy[part] = _sum(-torch.linalg.vecdot(logits.exp(), logits), group)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.temperature, ctx.rows, ctx.group = temperature, rows, group
        ctx.set_materialize_grads(False)  # an entropy that no loss uses costs nothing in the backward pass
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """With l = logits / T, p = softmax(l), H the entropy, g and e the incoming gradients:

        d/dl_v = g (1[v = target] - p_v) - e p_v (log p_v + H)
        """
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        work = _work_dtype(hidden, weight)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(lse)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        # Summed over chunks, hence in the wide dtype; the last step rounds once.
        grad_weight = torch.zeros_like(weight, dtype=work) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=work) if need_bias else None
        for part, logits in _chunks(hidden, weight, bias, ctx.temperature, ctx.rows):
            g = grad_logprobs[part, None]
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
            None,
            None,
            None,
            None,
            None,
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


def _chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, rows: int
) -> Iterator[tuple[slice, Tensor]]:
    """(positions, logits / temperature in the work dtype), chunk by chunk; the consumer may overwrite the logits."""
    work = _work_dtype(hidden, weight)
    for start in range(0, hidden.shape[0], rows):
        part = slice(start, min(start + rows, hidden.shape[0]))
        logits = _product(hidden[part].to(weight.dtype), weight.t(), work)
        if bias is not None:
            logits += bias
        if temperature != 1.0:
            logits /= temperature
        yield part, logits


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """hidden [N, D], weight [V, D], bias [V] -> logits [N, V] in float32 or better, rounded as for log-probs:
    a sampler that rounds differently draws from another distribution than the trained one."""
    logits = _product(hidden.to(weight.dtype), weight.t(), _work_dtype(hidden, weight))
    return logits if bias is None else logits + bias


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
