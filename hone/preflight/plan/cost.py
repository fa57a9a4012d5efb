"""Seconds of a step: floating-point operations, bytes read and bytes sent, each divided by a rate. See docs/scaling.md.

    work = work_of(stage, batch_of(stage), prompt=300, answer=500, rows=64)
    step_time(work, shape_of(config, "bfloat16"), H100, ParallelConfig(shard=8))

Pure functions. N: weights that take part in matrix products (an embedding that is only looked up does not). Sources:

    forward        2 N per token, and 4 * layers * heads * head size * keys seen for attention (Kaplan et al.,
                   arXiv:2001.08361, table 1); backward twice that; recomputed activations one forward more
    decoding       the larger of 2 N * rows / rate and (weights + keys and values of all rows) / bandwidth, per token
                   (Pope et al., arXiv:2211.05102, section 2)
    shard          per micro-batch each weight is gathered twice and each gradient reduced once, (s - 1) / s of it over
                   the network (Zhao et al., PyTorch FSDP, arXiv:2304.11277); overlapped with the computation
    replicate      one ring all-reduce of the gradients per update, 2 (r - 1) / r of them
    tensor         two all-reduces of hidden states per layer in each direction (Shoeybi et al., Megatron-LM,
                   arXiv:1909.08053, section 3); not overlapped with computation
    sync           with shard or tensor > 1 the weights are gathered once per step, for the engine
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hone.base.parallel import ParallelConfig
from hone.model.logprobs import output_head
from hone.preflight.plan.batch import BatchShape, micro_batches
from hone.preflight.plan.shapes import meta_model
from hone.recipe.recipe import TrainedStage
from hone.rollout.native.memory import Budget, layer_configs

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class Speeds:
    """Achieved speeds of one device, not its peaks: operations or bytes per second."""

    name: str
    train: float  # operations, forward and backward
    decode: float  # operations, while decoding
    bandwidth: float  # bytes read from its memory while decoding
    link: float = math.inf  # bytes sent to a neighbour in the same machine
    network: float = math.inf  # bytes sent to another machine
    per_machine: int = 8  # devices

    def wire(self, ranks: int) -> float:
        """Bytes per second between `ranks` neighbours."""
        return self.link if ranks <= self.per_machine else self.network


#: Assumed: 40 % of the dense bfloat16 peak of 989 TFLOP/s in training, 30 % of it and 60 % of 3.35 TB/s in decoding
#: (peaks: NVIDIA H100 SXM data sheet), 75 % of NVLink's 450 GB/s in one direction, and of 50 GB/s between machines.
H100 = Speeds("H100 SXM, assumed", 0.40 * 989e12, 0.30 * 989e12, 0.60 * 3.35e12, 0.75 * 450e9, 0.75 * 50e9)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model that determine its cost."""

    weights: int  # all weights
    products: int  # N
    layers: int
    hidden: int
    attention: int  # heads * head size
    item: int  # bytes of a weight
    kv_bytes: int  # bytes of one position over all layers


def shape_of(config: PretrainedConfig, dtype: str) -> Shape:
    """The sizes of a model, read from it on the meta device."""
    model = meta_model(config, dtype)
    text = config.get_text_config()
    weights = sum(p.numel() for p in model.parameters())
    embedding: Any = model.get_input_embeddings()
    lookup = embedding.weight
    sizes = [getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads for c in layer_configs(text)]
    return Shape(
        weights,
        weights - (0 if lookup is output_head(model).weight else lookup.numel()),
        text.num_hidden_layers,
        text.hidden_size,
        text.num_attention_heads * max(sizes) if sizes else 0,
        model.dtype.itemsize,
        Budget.of(model, 1.0).bytes_per_token,
    )


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one step, over all devices."""

    prompts: int
    samples: int  # per prompt
    prompt: int  # tokens
    answer: int  # tokens, on average
    longest: int  # tokens of the longest answer, with which generation ends
    shared: bool  # a prompt is computed once for all its samples
    updates: int
    looks: int  # forward passes without gradient, for old and reference log-probs
    micro_batches: int  # of all updates together
    rows: int  # sequences decoded at once in one process
    adapter: bool  # the model's weights are frozen: their gradients are not computed
    recompute: bool

    @property
    def answer_tokens(self) -> int:
        return self.prompts * self.samples * self.answer

    @property
    def train_tokens(self) -> int:
        """Packed tokens of one pass over the batch."""
        return self.answer_tokens + self.prompts * self.prompt * (1 if self.shared else self.samples)


def work_of(
    stage: TrainedStage, batch: BatchShape, prompt: int, answer: int, rows: int, mean: int | None = None
) -> Work:
    """The work of a step of a stage. `prompt`, `answer`: tokens of the longest one. `mean`: mean tokens of an answer,
    by default those of the longest."""
    mean = mean or answer
    return Work(
        prompts=batch.prompts,
        samples=batch.samples,
        prompt=prompt,
        answer=mean,
        longest=0 if stage.stage == "sft" else answer,
        shared=batch.shared,
        updates=batch.updates,
        looks=(batch.updates > 1) + batch.kl + 2 * (stage.stage == "distil"),
        micro_batches=batch.updates * micro_batches(batch, prompt, mean),
        rows=max(1, rows),
        adapter=stage.lora is not None,
        recompute=stage.model.recompute_activations,
    )


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds."""

    generate: float
    train: float
    send: float  # the part of it that is not overlapped
    sync: float

    @property
    def total(self) -> float:
        return self.generate + self.train + self.send + self.sync

    def row(self) -> dict[str, float]:
        return {**asdict(self), "total": self.total}


def forward_flops(shape: Shape, tokens: float, keys: float) -> float:
    """Operations of a forward pass of `tokens` tokens that attend to `keys` keys each, on average."""
    return tokens * (2 * shape.products + 4 * shape.layers * shape.attention * keys)


def train_flops(work: Work, shape: Shape) -> float:
    """Operations of a step: forward and backward pass of every update, and the passes without gradient."""
    keys = work.prompt + work.answer / 2
    forward = forward_flops(shape, work.train_tokens, keys)
    backward = (1 if work.adapter else 2) + work.recompute
    return forward * (1 + backward + work.looks)


def generate_seconds(work: Work, shape: Shape, speeds: Speeds, processes: int = 1) -> float:
    """Seconds of generation: prompts are prefilled, then rows are decoded token by token until the longest is done."""
    if not work.longest:
        return 0.0
    rows = -(-work.prompts // processes) * work.samples
    prompts = -(-work.prompts // processes)
    seconds = forward_flops(shape, prompts * work.prompt, work.prompt / 2) / speeds.train
    tokens = rows * work.answer  # a waiting row replaces a finished one
    at_once = min(rows, work.rows)
    steps = max(work.longest, tokens / at_once)
    keys = work.prompt + work.answer / 2
    busy = tokens / steps  # rows on average
    computing = forward_flops(shape, busy, keys) / speeds.decode
    own, shared = work.answer / 2, work.prompt / work.samples  # a prompt's keys are read once for all its samples
    reading = (shape.weights * shape.item + busy * (own + shared) * shape.kv_bytes) / speeds.bandwidth
    return seconds + steps * max(computing, reading)


def sent_bytes(work: Work, shape: Shape, split: ParallelConfig) -> dict[str, float]:
    """Bytes that one process sends in a step, by purpose."""
    s, r, t = split.shard, split.replicate, split.tensor
    mine = shape.weights / t
    trained = 0.0 if work.adapter else mine  # almost none for an adapter
    passes = -(-work.micro_batches // (s * r))  # micro-batches of one process
    looked = -(-work.looks * work.micro_batches // max(1, work.updates) // (s * r))
    per_token = 4 * shape.layers * shape.hidden * shape.item * 2 * (t - 1) / t
    return {
        "shard": (s - 1) / s * (passes * (2 * mine * shape.item + 4 * trained) + looked * mine * shape.item),
        "replicate": work.updates * 2 * (r - 1) / r * 4 * trained / s,
        "tensor": per_token * work.train_tokens * (1 + work.looks / 2) / (s * r),
        "sync": 0.0 if s * t == 1 else (s * t - 1) / (s * t) * shape.weights * shape.item,
    }


def step_time(work: Work, shape: Shape, speeds: Speeds, split: ParallelConfig | None = None) -> StepTime:
    """Seconds of one step, without rewards and other work that is not arithmetic."""
    split = split or ParallelConfig()
    train = train_flops(work, shape) / speeds.train / split.processes
    sent = sent_bytes(work, shape, split)
    gathered = sent["shard"] / speeds.wire(split.shard * split.tensor)
    reduced = sent["replicate"] / speeds.wire(split.processes)
    whole = sent["tensor"] / speeds.wire(split.tensor)
    return StepTime(
        generate_seconds(work, shape, speeds, split.processes),
        train,
        max(0.0, gathered - train) + reduced + whole,
        sent["sync"] / speeds.wire(split.shard * split.tensor),
    )
