"""One model over several processes: matrices cut by the plan that transformers publishes, layers gathered by FSDP2.

    cut = spread(model, world)          # in place; the model is an ordinary one, the same on every process
    as_forward(model, lambda: ...)      # a forward pass; FSDP gathers weights outside of the layers around it
    whole = assemble(model, cut, whole) # an ordinary model with the current weights

Tensor parallel comes first, FSDP2 around it (as in torchtitan, arXiv:2410.06511). Matrices become DTensors on the
`tensor` dimension of the mesh, and all parameters on its `shard` dimension. The output head is cut by the vocabulary,
and `hone.model.logprobs` works on its part. Gradients are summed over shards, never averaged: the weights of the loss
are global. A peft adapter is cut like its layer: B of a layer cut by its outputs, A of one cut by its inputs.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from hone.base.settings import UserError
from hone.base.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

T = TypeVar("T")

#: Supported styles of transformers' plans: which way a matrix is cut.
OUTPUTS, INPUTS = ("colwise", "colwise_gather_output", "colwise_rep"), ("rowwise", "rowwise_split_input", "rowwise_rep")
EMBEDDING = ("embedding_rowwise",)
#: Weights that every process holds whole and uses for its heads: their gradients are partial sums.
PARTIAL = ("replicated_with_grad_allreduce",)
IDLE = ("replicate", "replicated")
STYLES = (*OUTPUTS, *INPUTS, *EMBEDDING, *PARTIAL, *IDLE)


@dataclass(frozen=True)
class Cut:
    """How a model was spread."""

    blueprint: PreTrainedModel  # the whole model, without memory for its weights
    partial: frozenset[str]  # parameters whose gradient has to be summed over the tensor-parallel processes


def spread(model: PreTrainedModel, world: World) -> Cut:
    """Cut the model in place to this process's part. Raises UserError if it cannot be cut."""
    assert world.mesh is not None, "one process holds the whole model"
    meta = {id(p): _empty(p, torch.device("meta")) for p in model.parameters()}
    blueprint = copy.deepcopy(model, meta)
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    partial = _cut_matrices(model, world.mesh["tensor"]) if world.tensor > 1 else frozenset()
    for name, p in model.named_parameters():
        p.requires_grad_(trained[name])
    if world.shard > 1:
        _shard_layers(model, world.mesh["shard"])
    nn.Module.to(model, world.mesh.device_type)
    return Cut(blueprint, partial)


def as_forward(model: nn.Module, call: Callable[[], T]) -> T:
    """`call()` as the model's forward pass, around which FSDP gathers the weights outside of the layers."""
    if not isinstance(model, FSDPModule):
        return call()
    vars(model)["forward"] = call
    try:
        result: Any = model()
    finally:
        del vars(model)["forward"]
    return result


# --- tensor parallel ------------------------------------------------------------------------------------------------


def tp_plan(model: PreTrainedModel) -> dict[str, str]:
    """Pattern of module names -> style, from transformers. Raises UserError if it publishes no plan."""
    inner = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    plan = {f"{model.base_model_prefix}.{pattern}": style for pattern, style in inner.items()}
    plan |= getattr(type(model), "_tp_plan", None) or {}
    name = type(model).__name__
    if not inner:
        raise UserError(
            f"parallel.tensor: transformers publishes no tensor-parallel plan for {name}; set parallel.tensor to 1 and "
            "use parallel.shard"
        )
    odd = sorted({style for style in plan.values() if style not in STYLES})
    if odd:
        raise UserError(
            f"parallel.tensor: the plan of {name} cuts layers in ways that are not supported ({', '.join(odd)}; "
            f"supported are {', '.join(STYLES)}); set parallel.tensor to 1 and use parallel.shard"
        )
    return plan


def check_tensor(model: PreTrainedModel, parts: int) -> None:
    """Raises UserError if `parts` processes cannot share the model evenly."""
    tp_plan(model)
    text = model.config.get_text_config()
    counts = {
        "attention heads": text.num_attention_heads,
        "key/value heads": getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        "tokens of the vocabulary": model.get_output_embeddings().weight.shape[0],
        "units of the MLP": getattr(text, "intermediate_size", None) or parts,
    }
    for what, count in counts.items():
        if count % parts:
            allowed = [n for n in range(1, parts + 1) if not any(c % n for c in counts.values())]
            raise UserError(
                f"parallel.tensor: {parts} processes cannot share the {count} {what} of {type(model).__name__} evenly; "
                f"give {' or '.join(map(str, allowed))}"
            )


def _cut_matrices(model: PreTrainedModel, mesh: DeviceMesh) -> frozenset[str]:
    """Apply tensor parallelism in place; returns the names of parameters with partial gradients."""
    check_tensor(model, mesh.size())
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head.weight is embedding.weight
    modules = dict(model.named_modules())
    partial: set[str] = set()
    for pattern, style in tp_plan(model).items():
        matches = re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch
        for name in filter(matches, modules):
            module = modules[name]
            if style in PARTIAL:
                partial |= {f"{name}.{key}" for key, _ in module.named_parameters()}
            elif module is not head and module is not embedding and style not in IDLE:
                _cut_linear(module, mesh, style)
    if tied or any(style in EMBEDDING for style in tp_plan(model).values()):
        _apply(embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
    if tied:
        head.weight = embedding.weight
    else:
        head.weight = nn.Parameter(_distribute(head.weight, mesh))
    if head.bias is not None:
        head.bias = nn.Parameter(_distribute(head.bias, mesh))
    return frozenset(partial)


def _cut_linear(module: nn.Module, mesh: DeviceMesh, style: str) -> None:
    """Cut a linear layer and the adapter around it."""
    adapted: Any = module
    base = adapted.get_base_layer() if hasattr(module, "get_base_layer") else module
    by_outputs = style in OUTPUTS
    whole = style in OUTPUTS[1:] if by_outputs else style in INPUTS[1:]  # the output, or the input, is not cut
    if by_outputs:
        _apply(base, mesh, ColwiseParallel(output_layouts=Replicate() if whole else Shard(-1)))
    else:
        _apply(base, mesh, RowwiseParallel(input_layouts=Replicate() if whole else Shard(-1)))
    if base is module:
        return
    if whole:
        raise UserError(f"lora: layers that are cut by {style} (parallel.tensor) cannot have an adapter")
    for half in (adapted.lora_B if by_outputs else adapted.lora_A).values():
        _apply(half, mesh, ColwiseParallel() if by_outputs else RowwiseParallel())


def _apply(module: nn.Module, mesh: DeviceMesh, style: ParallelStyle) -> None:
    parallelize_module(module, mesh, style, src_data_rank=None)  # every process has loaded the same weights


def _distribute(p: nn.Parameter, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None)


# --- FSDP2 ----------------------------------------------------------------------------------------------------------


def _shard_layers(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Apply FSDP2: each layer is gathered when it runs, forward and backward; the rest around the whole pass."""
    names = tuple(model._no_split_modules or ())
    layers = [m for m in model.modules() if type(m).__name__ in names]
    if not layers:
        raise UserError(f"parallel.shard: {type(model).__name__} does not declare its layers; set it to 1")
    # Sums of bfloat16 gradients over processes are in float32.
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for module in (*layers, model):
        # True for the whole model too: if it stayed gathered, it would compute with the weights before the update.
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=precision)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
            if hasattr(module, "set_reduce_scatter_unused_params"):  # as of torch 2.13
                module.set_reduce_scatter_unused_params(True)  # processes may use different parameters


# --- parts and wholes -----------------------------------------------------------------------------------------------


def own_part(t: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor; shares its memory."""
    with torch.no_grad():
        return t.to_local() if isinstance(t, DTensor) else t


def cut_dims(t: torch.Tensor) -> frozenset[str]:
    """The dimensions of the mesh along which processes hold different parts."""
    if not isinstance(t, DTensor):
        return frozenset()
    dims = zip(t.device_mesh.mesh_dim_names or (), t.placements, strict=True)
    return frozenset(dim for dim, placement in dims if not isinstance(placement, Replicate))


def whole_tensor(p: torch.Tensor, part: torch.Tensor | None = None) -> torch.Tensor:
    """The whole parameter, or a tensor cut like it (a moment), from all parts. A collective: every process calls it."""
    if not isinstance(p, DTensor):
        return p.detach() if part is None else part
    with torch.no_grad():
        whole: torch.Tensor = cut_as(p, own_part(p) if part is None else part).full_tensor()  # type: ignore[attr-defined]
    return whole


def cut_as(p: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
    """`part` as a DTensor that is cut like the parameter; shares its memory."""
    if not isinstance(p, DTensor):
        return part
    return DTensor.from_local(
        part.detach(), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def assemble(
    model: PreTrainedModel, cut: Cut, into: PreTrainedModel | None = None, device: torch.device | None = None
) -> PreTrainedModel:
    """An ordinary model with the current weights, gathered one parameter at a time. Every process calls it.

    `into`: an earlier result. `device`: of a new one; by default that of the parts.
    """
    if into is None:
        into = _unfilled(cut, model.device if device is None else device)
    targets = dict(into.named_parameters())
    with torch.no_grad():
        for name, p in model.named_parameters():
            targets[name].copy_(whole_tensor(p))
    return into


def take_part(model: PreTrainedModel) -> None:
    """The part of `assemble` of a process that needs no copy: it only sends."""
    for p in model.parameters():
        whole_tensor(p)


def _unfilled(cut: Cut, device: torch.device) -> PreTrainedModel:
    """The whole model on `device`; its parameters have no values yet."""
    memory = {id(p): _empty(p, device) for p in cut.blueprint.parameters()}
    model = copy.deepcopy(cut.blueprint, memory)
    nn.Module.to(model, device)
    return model


def _empty(p: torch.Tensor, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(p, device=device), requires_grad=p.requires_grad)
