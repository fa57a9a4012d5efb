"""Recurrent mixers over packed rows: linear attention, short convolutions, state-space models.

    route(model)        # once, after loading: mixers look at the pass in progress (`attention.forward_pass`)

A mixer reads a sequence from left to right and keeps a state of fixed size: the last inputs of a short convolution,
and the matrix of a gated delta net, of Kimi delta attention or of Mamba. A packed row holds many sequences, so its
tokens are laid out as rectangles [rows, longest] of several sequences, and the mixer's own forward runs on these. In
training (`layout=`) the prompts of all groups are read first; their completions then start from the states after their
prompts. A group's prompt is therefore computed once, and in the backward pass the gradients of its state sum over the
completions. In generation the states are kept by the cache (`hone.rollout.native.states`).

Everything is computed by the code of transformers, with the fast kernels that it uses where they are installed
(`flash-linear-attention` and `causal-conv1d`, on a GPU). Only its cache is replaced, by `States`, which keeps the
graph. Completions of similar length share a rectangle, padded on the right, which nothing reads. Prompts share one if
they are equally long: padding on the left would be exact too, but in a gated delta net it decays what is not there, and
the running sum of log decays loses digits by it (log-probs of a random Qwen3.5 1.5e-4 away from float64, instead of the
6e-5 of the model's own float32 pass).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.base.settings import UserError
from hone.model import attention, recurrence
from hone.types import Block

#: The methods that a mixer calls on its cache, by which mixers are recognised.
CACHE_CALLS = ("update_conv_state", "update_recurrent_state")
#: Types of layers (`layer_types` of a config) with a recurrent mixer; "hybrid" ones have attention beside it.
RECURRENT = ("linear_attention", "mamba", "conv", "hybrid")
#: Types of layers without cached keys and values: recurrent ones, and those without any mixer.
WITHOUT_ATTENTION = ("linear_attention", "mamba", "conv", "mlp", "moe")
#: Completions share a rectangle if padding adds at most a quarter to each. Lengths are rounded up to one of eight in
#: each octave, so that there are few shapes: libraries keep what they have compiled for each.
SIMILAR = 1.25
SHORT = 8


@dataclass(slots=True)
class States:
    """The states of mixers for each row; a mixer gets this in place of transformers' cache.

    The methods are those of `transformers.Cache` that mixers call (also before 5.23, which reads `layers` itself). They
    change nothing in place, so that the graph of a training pass is kept. `state_idx` numbers the convolutions or
    recurrences of a mixer.
    """

    conv_states: dict[int, Tensor] = field(default_factory=dict)  # [R, C, k]: the last k inputs
    recurrent_states: dict[int, Tensor] = field(default_factory=dict)  # [R, ...]

    record_past = False  # transformers' speculative decoding

    @property
    def layers(self) -> _SameForAll:
        return _SameForAll(self)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.conv_states or self.recurrent_states)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.conv_states.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent_states.get(state_idx)

    def update_conv_state(
        self, inputs: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Keep the last of `inputs` [R, C, L]; returns them, preceded by those kept before."""
        before = self.conv_states.get(state_idx)
        joined = inputs if before is None else torch.cat([before, inputs], dim=-1)
        kept = conv_kernel_size or (inputs.shape[-1] if before is None else before.shape[-1])
        self.conv_states[state_idx] = F.pad(joined, (max(0, kept - joined.shape[-1]), 0))[..., -kept:]
        return joined

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.recurrent_states[state_idx] = state
        return state

    def map(self, change: Callable[[Tensor], Tensor]) -> States:
        """States with `change` applied to each tensor."""
        return States(
            {i: change(t) for i, t in self.conv_states.items()},
            {i: change(t) for i, t in self.recurrent_states.items()},
        )

    def rows(self, index: Tensor) -> States:
        """The states of these rows, which may contain duplicates."""
        return self.map(lambda t: t.index_select(0, index))

    def tensors(self) -> list[Tensor]:
        return [*self.conv_states.values(), *self.recurrent_states.values()]

    @staticmethod
    def joined(parts: Sequence[States]) -> States:
        """The rows of all parts."""
        first = parts[0]
        return States(
            {i: torch.cat([p.conv_states[i] for p in parts]) for i in first.conv_states},
            {i: torch.cat([p.recurrent_states[i] for p in parts]) for i in first.recurrent_states},
        )


@dataclass(frozen=True, slots=True)
class _SameForAll:
    """`cache.layers[i]` of a cache that belongs to one layer."""

    states: States

    def __getitem__(self, layer: int) -> States:
        return self.states


# --- which modules are mixers, and where their calls go --------------------------------------------------------------


def check(model: nn.Module) -> tuple[str, ...]:
    """Types of layers that are computed exactly because of the mixers found in `model`.

    Raises UserError for a layer of such a type without a mixer that takes a cache of states, since its sequences could
    not be separated, and for a mixer that needs further inputs.
    """
    config: Any = model.config
    text = config.get_text_config()
    kinds = [str(kind) for kind in getattr(text, "layer_types", None) or []]
    layers = sum(kind in RECURRENT for kind in kinds)
    mixers = recurrent(model)
    names = ", ".join(sorted({type(mixer).__name__ for mixer in mixers}))
    for mixer in mixers:
        if unknown := _unknown_inputs(type(mixer)):  # type: ignore[arg-type]
            raise UserError(
                f"{text.model_type}: {type(mixer).__name__} keeps a recurrent state and needs {', '.join(unknown)} "
                "beside hidden states; hone separates the sequences of mixers that need hidden states only: choose "
                "another model"
            )
    if len(mixers) < layers:
        raise UserError(
            f"{text.model_type} has {layers} recurrent layers ({', '.join(sorted(set(kinds) & set(RECURRENT)))}), of "
            f"which {len(mixers)} take a cache of states{f' ({names})' if names else ''}: the sequences of the others "
            "could not be separated; choose another model"
        )
    return (*RECURRENT, *WITHOUT_ATTENTION) if mixers else ()


def route(model: nn.Module) -> None:
    """Make the mixers of `model` follow the pass in progress; without one they are unchanged."""
    for mixer in recurrent(model):
        vars(mixer)["forward"] = functools.partial(_routed, mixer)


def keep_out_of_graphs(model: nn.Module) -> None:
    """Break compiled graphs at the mixers, which need the layout from Python."""
    for mixer in recurrent(model):
        vars(mixer)["forward"] = torch.compiler.disable(functools.partial(_routed, mixer))


def recurrent(model: nn.Module) -> list[nn.Module]:
    """The mixers of `model`, in order: the modules whose forward updates a cache of states."""
    return [module for module in model.modules() if _is_recurrent(type(module))]  # type: ignore[arg-type]


@functools.cache
def _is_recurrent(kind: type[nn.Module]) -> bool:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and bool(set(CACHE_CALLS) & set(code.co_names))


def continues(mixer: nn.Module) -> bool:
    """Whether the mixer can start from a state and read several tokens. Mamba-1 cannot: its scan begins at zero."""
    return not hasattr(mixer, "dt_proj")


def _routed(mixer: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The forward of a mixer: hidden_states [B, T, D] -> [B, T, D]."""
    current = attention.current_pass()
    if current is None:
        return type(mixer).forward(mixer, hidden_states, *args, **kwargs)
    current.calls += 1
    if current.decode_cache is not None:
        return current.decode_cache.mix(mixer, hidden_states)
    assert current.layout is not None
    return packed(mixer, hidden_states, current.layout)


def step(mixer: nn.Module, hidden: Tensor, states: States) -> Tensor:
    """One token of each row: hidden [R, 1, D] -> [R, 1, D]. `states` are updated, their tensors perhaps in place.

    The single-token path of Mamba-2 in transformers ignores the limits of the time step, softplus(dt + dt_bias), which
    Nemotron-H has (at least 0.001). They are applied to dt, the last columns of `in_proj`.
    """
    low, high = getattr(mixer, "time_step_limit", None) or (0.0, math.inf)
    if low <= 0 and high == math.inf:
        return apply(mixer, hidden, states)
    projection: Any = mixer.in_proj
    bias: Any = mixer.dt_bias.float()
    bounds = [_inverse_softplus(end) - bias for end in (low, high)]

    def limit(_: nn.Module, __: Any, projected: Tensor) -> Tensor:
        rest, dt = projected.split([projected.shape[-1] - len(bias), len(bias)], dim=-1)
        return torch.cat([rest, dt.float().clamp(*bounds).to(dt.dtype)], dim=-1)

    hook = projection.register_forward_hook(limit)
    try:
        return apply(mixer, hidden, states)
    finally:
        hook.remove()


def _inverse_softplus(value: float) -> float:
    """x with log(1 + exp(x)) = `value`, which is not negative."""
    return -math.inf if value == 0 else value + math.log(-math.expm1(-value))


def apply(mixer: nn.Module, hidden: Tensor, states: States | None) -> Tensor:
    """The mixer's own forward: hidden [R, L, D] -> [R, L, D]. Row r starts from `states`, which is updated."""
    forward = recurrence.fast_forward(type(mixer))  # type: ignore[arg-type]
    out: Tensor = forward(mixer, hidden, **{_cache_name(type(mixer)): states})  # type: ignore[arg-type]
    return out


@functools.cache
def _unknown_inputs(kind: type[nn.Module]) -> list[str]:
    """Inputs of the forward that have no default and are not the hidden states."""
    needed = [p for p in inspect.signature(kind.forward).parameters.values() if p.default is p.empty]
    plain = [p.name for p in needed if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return plain[2:]


@functools.cache
def _cache_name(kind: type[nn.Module]) -> str:
    names = inspect.signature(kind.forward).parameters
    return "cache_params" if "cache_params" in names else "past_key_values"


# --- packed rows -----------------------------------------------------------------------------------------------------


def packed(mixer: nn.Module, hidden: Tensor, layout: tuple[Block, ...]) -> Tensor:
    """hidden [1, T, D] -> [1, T, D]: each sequence separately, a completion after its prompt."""
    plan = _plan(layout, continues(mixer), hidden.device)
    tokens = F.pad(hidden[0], (0, 0, 0, 1))  # padding reads the last, a zero
    outputs, states = read(mixer, tokens, plan.prompts)
    if states is not None:  # sequences without a prompt start from zero
        states = states.map(lambda t: F.pad(t, (0, 0) * (t.ndim - 1) + (0, 1)))
    for rows in plan.completions:
        start = None if states is None else states.rows(rows.starts)
        outputs.append(apply(mixer, rows.of(tokens), start).flatten(0, 1))
    return F.embedding(plan.places, torch.cat(outputs))[None]


def read(mixer: nn.Module, tokens: Tensor, prompts: Sequence[_Rows]) -> tuple[list[Tensor], States | None]:
    """Outputs [slots, D] of the rectangles of prompts, and the states behind the prompts, in the rectangles' order."""
    states = [States() for _ in prompts]
    outputs = [apply(mixer, rows.of(tokens), after).flatten(0, 1) for rows, after in zip(prompts, states, strict=True)]
    return outputs, States.joined(states) if states else None


def read_prompts(
    mixer: nn.Module, hidden: Tensor, lengths: Sequence[int], starts: Sequence[States | None] = ()
) -> tuple[Tensor, States]:
    """hidden [1, T, D] of prompts packed in one row -> [1, T, D], and the state after each of the prompts.

    `starts` [P]: the state, of one row, that a prompt goes on from (see `continues`); None, or an empty `starts`: zero.
    """
    parts = hidden[0].split(list(lengths))
    befores = list(starts) or [None] * len(parts)
    outputs, states = list(parts), [States()] * len(parts)
    for is_fresh in (True, False):
        chosen = [i for i, before in enumerate(befores) if (before is None) == is_fresh]
        for group in equal([lengths[i] for i in chosen]):
            members = [chosen[i] for i in group]
            before = [start for i in members if (start := befores[i]) is not None]
            after = States.joined(before) if before else States()
            rows = torch.stack([parts[i] for i in members])  # [R, L, D]
            out = step(mixer, rows, after) if before and rows.shape[1] == 1 else apply(mixer, rows, after)
            for row, i in enumerate(members):
                outputs[i], states[i] = out[row], after.rows(torch.tensor([row], device=hidden.device))
    return torch.cat(outputs)[None], States.joined(states)


@dataclass(frozen=True, slots=True)
class _Rows:
    """A rectangle of sequences; slots are numbered row by row, through all rectangles of a plan."""

    take: Tensor  # [R, L] packed position of each slot; T where there is padding
    starts: Tensor  # [R] row of the prompts' states from which a completion starts; the number of prompts: from zero

    def of(self, tokens: Tensor) -> Tensor:
        """[T + 1, D] -> [R, L, D]. `F.embedding`, since its gradient is summed in a fixed order."""
        return F.embedding(self.take, tokens, padding_idx=len(tokens) - 1)


@dataclass(frozen=True, slots=True)
class _Plan:
    prompts: list[_Rows]
    completions: list[_Rows]
    places: Tensor  # [T] the slot of each packed token


@lru_cache(maxsize=16)
def _plan(layout: tuple[Block, ...], forks: bool, device: torch.device) -> _Plan:
    """The rectangles of a packed row; without `forks`, completions repeat their prompt. Cached for the layers."""
    prompts: list[range] = []
    completions: list[_Completion] = []
    start = 0
    for block in layout:
        prompt = range(start, start + block.prompt_len)
        at = prompt.stop
        forked = bool(prompt) and (forks or not block.completion_lens)
        for i, length in enumerate(block.completion_lens):
            repeated = prompt if prompt and not forked else range(0)
            number = len(prompts) if forked else None
            completions.append(_Completion([*repeated, *range(at, at + length)], len(repeated) if i else 0, number))
            at += length
        if forked:
            prompts.append(prompt)
        start = at
    places = torch.zeros(start, dtype=torch.int64)
    order = torch.zeros(len(prompts), dtype=torch.int64)
    read: list[_Rows] = []
    ended: list[_Rows] = []
    slots = states = 0
    for group in equal([len(prompt) for prompt in prompts]):
        take = torch.tensor([list(prompts[i]) for i in group])
        places[take.flatten()] = slots + torch.arange(take.numel())
        order[group] = states + torch.arange(len(group))
        slots, states = slots + take.numel(), states + len(group)
        read.append(_Rows(take.to(device), order[group].to(device)))
    for group in similar([len(one.positions) for one in completions]):
        members = [completions[i] for i in group]
        longest = rounded(len(members[0].positions))
        take = torch.full((len(group), longest), start)
        for row, one in enumerate(members):
            positions = torch.tensor(one.positions)
            take[row, : len(positions)] = positions
            places[positions[one.repeated :]] = slots + row * longest + torch.arange(one.repeated, len(positions))
        slots += take.numel()
        starts = [states if one.prompt is None else int(order[one.prompt]) for one in members]
        ended.append(_Rows(take.to(device), torch.tensor(starts).to(device)))
    return _Plan(read, ended, places.to(device))


@dataclass(frozen=True, slots=True)
class _Completion:
    positions: list[int]  # packed positions that the row reads
    repeated: int  # the first of them, whose outputs another row computes
    prompt: int | None  # the prompt whose state it starts from


def equal(lengths: Sequence[int]) -> list[list[int]]:
    """The indices of `lengths` in groups of the same length."""
    groups: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        groups.setdefault(length, []).append(i)
    return [groups[length] for length in sorted(groups)]


def similar(lengths: Sequence[int]) -> list[list[int]]:
    """The indices of `lengths`, longest first, in groups in which padding adds at most a quarter."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and lengths[groups[-1][0]] <= SIMILAR * lengths[i] + SHORT:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def rounded(length: int) -> int:
    """The length rounded up to one of eight lengths in each octave, and to a multiple of 8."""
    step = max(8, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step
