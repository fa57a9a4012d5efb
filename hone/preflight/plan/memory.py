"""Peak memory of one process, part by part, before anything is loaded.

    plan = estimate(recipe)             # of the stage that needs the most memory
    plan.peak_bytes, plan.parts         # {"weights": ..., "gradients": ..., ...}

Two moments are compared, the update and generation; the peak is the larger one. W weights in the model's dtype, N
trained parameters (with LoRA those of the adapter), `shard` and `tensor` of `parallel:`.

    base          Python and its libraries: measured (`BASE`)
    weights       W / (shard * tensor); with shard > 1 also `gathered`, the layers that are gathered at a time
    whole copy    shard or tensor > 1, with the native engine: W, to sample from; kept (`Network.local_view`)
    gradients     4 N / (shard * tensor): float32 also below bfloat16 weights (`hone.learn.master`)
    optimizer     8 N: two float32 moments (AdamW, arXiv:1711.05101); 4 N more of master weights below bfloat16
    activations   what the forward pass of the longest micro-batch keeps, and the peak of what the backward pass adds:
                  the step itself, traced on the meta device (`hone.preflight.plan.trace`)
    log-probs     a chunk of logits and the tensors computed from it, `hone.model.logprobs.BUDGET` elements each
    kv cache      2 * layers * kv heads * head size * bytes for each position, as in `hone.rollout.native.memory`
    engine copy   CPU: weights laid out for oneDNN; LoRA in float32: merged matrices
    prefill, sampling   hidden states of 8192 prompt tokens, and the logits of all rows
    reference, answerer, teacher   frozen models beside the policy
    data          CPU: problems in memory (`hone.preflight.plan.batch.data_bytes`)
    kernels       CPU: what oneDNN keeps for every shape that occurs: measured (`hone.preflight.plan.kernels`)
    allocator     CPU: memory that malloc keeps between blocks in use: measured (`SLACK`)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hone.base.parallel import ParallelConfig
from hone.learn.forward import to_device
from hone.learn.optimizer import depths, is_trained, num_layers
from hone.model import linear, lora
from hone.model.logprobs import BUDGET
from hone.model.reduced import Weights
from hone.preflight.plan import batch as batches
from hone.preflight.plan import kernels
from hone.preflight.plan.shapes import config_of, meta_model, share_of
from hone.preflight.plan.trace import trace
from hone.recipe.recipe import Pipeline, Recipe
from hone.rollout.native.core import _PREFILL_TOKENS as PREFILL_TOKENS
from hone.rollout.native.memory import Budget, columns
from hone.types import MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MIB, GIB = 1 << 20, 1 << 30

#: Bytes that a process holds independently of the model, by device. CPU: the peak of a run whose model has 15 000
#: parameters, `benchmarks/plan.py --base`, Linux x86-64, torch 2.13, transformers 5.23. CUDA: assumed; the context and
#: the libraries' kernels, which `torch.cuda.max_memory_allocated` does not count.
BASE = {"cpu": 525 * MIB, "cuda": 600 * MIB}
#: Additional bytes if peft is loaded.
BASE_LORA = 15 * MIB

#: Overhead of the allocator, as a share of activations and log-probs: glibc's malloc takes blocks below 32 MiB from
#: one heap and keeps what lies between those in use. One constant for all, chosen on the short runs of
#: `benchmarks/plan.py`; in long runs of tiny models, whose micro-batches differ in size, it is up to 1.
SLACK = 0.35
#: Blocks from this size on are returned to the system as soon as they are freed (glibc, DEFAULT_MMAP_THRESHOLD_MAX).
OWN_BLOCK = 32 * MIB

#: Assumed memory of a device that is not on this machine, if none is given.
ASSUMED_TOTAL = 80 * GIB

#: Cache of traces in this process: most of the sizes that are tried recur.
_TRACED: dict[tuple[Any, ...], int] = {}

#: Assumed lengths, if they cannot be determined.
ASSUMED_PROMPT, ASSUMED_ANSWER = 512, 2048


@dataclass(frozen=True)
class Plan:
    """The memory that one process of a stage needs."""

    stage: str
    device: str  # cpu or cuda
    total_bytes: int  # of the device
    moment: str  # the moment of the peak: update or generation
    moments: Mapping[str, Mapping[str, int]]  # moment -> part -> bytes
    parameters: int
    trained: int
    prompt_tokens: int  # of the longest prompt
    answer_tokens: int  # of the longest answer
    batch_tokens: int  # of the longest micro-batch
    rows: int  # sequences decoded at once
    kv_bytes_per_token: int
    kv_tokens: int  # positions in the cache of those rows
    assumptions: tuple[str, ...]

    @property
    def parts(self) -> Mapping[str, int]:
        """Bytes of each part at the peak."""
        return self.moments[self.moment]

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def allocated_bytes(self) -> int:
        """Bytes to compare with a measurement: on a GPU without the part outside PyTorch's allocator."""
        if self.device == "cpu":
            return self.peak_bytes
        return max(sum(parts.values()) - parts["base"] for parts in self.moments.values())


@dataclass(frozen=True)
class Lengths:
    """Tokens of the longest prompt and of the longest answer, the assumptions behind them, and the size of the data."""

    prompt: int
    answer: int
    assumptions: tuple[str, ...] = ()
    data: int = 0  # bytes of the problems in each process


def estimate(
    recipe: Recipe | Pipeline,
    *,
    parallel: ParallelConfig | None = None,
    device: str | None = None,
    total_bytes: int | None = None,
    lengths: Lengths | None = None,
) -> Plan:
    """The plan of a recipe: of the stage that needs the most memory. Loads no weights, and needs no network.

    `parallel`: the recipe's own by default. `device`: cpu or cuda; by default that of this machine, and cuda for a
    model in bfloat16. `total_bytes`: of the device. `lengths`: by default from the data, or assumed. Raises UserError
    for a model whose shape is unknown, or that hone does not support.
    """
    plans = [
        stage_plan(stage, parallel=parallel, device=device, total_bytes=total_bytes, lengths=lengths)
        for stage in recipe.stages
    ]
    return max(plans, key=lambda plan: plan.peak_bytes)


def device_of(stage: Recipe) -> str:
    return "cuda" if torch.cuda.is_available() or stage.model.dtype == "bfloat16" else "cpu"


def batch_of(stage: Recipe) -> batches.BatchShape:
    """The shape of the batch of one step."""
    shared, tokens = stage.share_prompts, stage.tokens_per_microbatch
    if stage.stage == "sft":
        return batches.BatchShape(stage.sft.examples_per_step, 1, 1, shared, tokens, kl=False)
    updates, kl = stage.algo.updates_per_rollout, bool(stage.algo.kl.coef)
    return batches.BatchShape(stage.prompts_per_step, stage.samples_per_prompt, updates, shared, tokens, kl)


def total_of(device: str) -> int:
    """Memory of this machine's device, or `ASSUMED_TOTAL`."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else ASSUMED_TOTAL
    import psutil

    return int(psutil.virtual_memory().total)


def stage_plan(
    stage: Recipe,
    *,
    parallel: ParallelConfig | None = None,
    device: str | None = None,
    total_bytes: int | None = None,
    lengths: Lengths | None = None,
) -> Plan:
    """The plan of one stage; see `estimate`."""
    from hone.preflight.plan.lengths import lengths_of  # it imports this module

    split, device = parallel or stage.parallel, device or device_of(stage)
    total = total_bytes or total_of(device)
    config, where = config_of(stage.model)
    lengths = lengths or lengths_of(stage)
    assumptions = [f"shape of {stage.model.path}: {where}", *lengths.assumptions]
    if device == "cuda" and not torch.cuda.is_available():
        assumptions.append(f"no GPU on this machine: {total / GIB:.0f} GiB, and attention that stores no scores")
    trains, samples = stage.stage != "generate", stage.stage != "sft"
    whole = meta_model(config, stage.model.dtype)
    mine = _training_model(stage, share_of(config, split.tensor))
    parts = _standing(stage, whole, mine, split, device) if trains else _served(whole, device)
    if device == "cpu" and lengths.data:  # not in the memory of a GPU
        parts["data"] = lengths.data
    moments: dict[str, dict[str, int]] = {}
    micro = batches.longest(batch_of(stage), lengths.prompt, lengths.answer)
    rows, tokens, each = _cache(stage, whole, split, lengths, total)
    many = batches.micro_batches(batch_of(stage), lengths.prompt, lengths.answer)
    if device == "cpu" and linear.available() and whole.dtype == torch.float32:
        own = -(-many // (split.replicate * split.shard))  # micro-batches of each process
        sampled = whole if samples and stage.rollout.engine == "native" else None
        parts["kernels"] = kernels.memory(
            sampled, rows, mine if trains else None, len(micro.inputs), _updates(stage) * own
        )
    if trains:
        again = many > split.replicate * split.shard
        moments["update"] = parts | _update(stage, mine, micro, again, split, device)
    if samples and stage.rollout.engine == "native":
        moments["generation"] = parts | _generation(stage, whole, split, lengths, rows, tokens * each, device)
        if device == "cpu" and "update" in moments:
            _keep_heap(moments, tokens * each // (2 * num_layers(whole)), _merged(stage, whole))
    elif samples:
        assumptions.append(f"{stage.rollout.engine} runs in its own server, whose memory is not counted here")
    return Plan(
        stage.name,
        device,
        total,
        max(moments, key=lambda name: sum(moments[name].values())),
        moments,
        sum(p.numel() for p in whole.parameters()),
        sum(p.numel() for p in mine.parameters() if p.requires_grad) * split.tensor if trains else 0,
        lengths.prompt,
        lengths.answer,
        len(micro.inputs),
        rows,
        each,
        tokens,
        tuple(assumptions),
    )


def _updates(stage: Recipe) -> int:
    """Number of optimizer steps of a stage."""
    if stage.stage != "sft":
        return stage.steps
    return max(1, stage.sft.epochs * stage.sft.examples // batch_of(stage).rows)


# --- the parts -------------------------------------------------------------------------------------------------------


def size_of(model: nn.Module) -> int:
    """Bytes of weights and buffers; shared ones once."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def _training_model(stage: Recipe, config: object) -> PreTrainedModel:
    """The policy's model on the meta device: adapter attached, layers frozen."""
    model = meta_model(config, stage.model.dtype, stage.model.recompute_activations)  # type: ignore[arg-type]
    if stage.lora is not None:
        lora.attach(model, stage.lora, seed=0)
    last, depth = num_layers(model), depths(model)
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad and is_trained(depth[name], stage.layers, last))
    if stage.model.recompute_activations and not model.get_input_embeddings().weight.requires_grad:
        model.enable_input_require_grads()
    return model.eval()


def _standing(
    stage: Recipe, whole: PreTrainedModel, mine: PreTrainedModel, split: ParallelConfig, device: str
) -> dict[str, int]:
    """Parts that are in memory all the time, from the first update on."""
    trained = [p for p in mine.parameters() if p.requires_grad]
    numel = sum(p.numel() for p in trained)
    per_weight = 8 + sum(4 * p.numel() for p in trained if p.dtype != torch.float32) / max(1, numel)
    weights = size_of(mine)
    parts = {
        "base": BASE[device] + (BASE_LORA if stage.lora is not None and device == "cpu" else 0),
        "weights": weights // split.shard,
        "optimizer": int(numel * per_weight) // split.shard,
    }
    if split.shard > 1:
        parts["gathered"] = _gathered(mine)
    frozen = size_of(whole)
    if split.shard * split.tensor > 1 and (stage.rollout.engine == "native" or device == "cpu"):
        parts["whole copy"] = frozen  # with servers in the main process's host memory
    if stage.stage == "rl" and stage.algo.kl.coef and stage.lora is None:
        parts["reference"] = frozen // (split.shard * split.tensor)
    perplexity = stage.reward.perplexity
    if stage.stage == "rl" and "perplexity" in stage.reward.parts and not perplexity.is_server:
        parts["answerer"] = frozen if perplexity.answerer == "policy" else _weights_of(stage, perplexity.answerer)
    if stage.stage == "distil" and stage.teacher is not None:
        parts["teacher"] = _weights_of(stage, stage.teacher)
    return parts


def _served(whole: PreTrainedModel, device: str) -> dict[str, int]:
    return {"base": BASE[device], "weights": size_of(whole)}


def _weights_of(stage: Recipe, path: str) -> int:
    if path.startswith("stages."):  # an earlier stage's model, assumed to have the shape of this stage's own
        return size_of(meta_model(config_of(stage.model)[0], stage.model.dtype))
    return size_of(meta_model(config_of(stage.model.at(path))[0], stage.model.dtype))


def _gathered(model: PreTrainedModel) -> int:
    """Bytes gathered by FSDP2: the current and the next layer, and weights outside of the layers; in the backward pass
    also the gradient of a layer (PyTorch's `fully_shard`: one unit per layer, one for the rest)."""
    by_depth: dict[int, int] = {}
    for name, depth in depths(model).items():
        by_depth[depth] = by_depth.get(depth, 0) + model.get_parameter(name).nbytes
    last = num_layers(model)
    return 3 * max(by_depth.get(n, 0) for n in range(1, last + 1)) + by_depth.get(0, 0) + by_depth.get(last + 1, 0)


def _update(
    stage: Recipe, mine: PreTrainedModel, batch: MicroBatch, again: bool, split: ParallelConfig, device: str
) -> dict[str, int]:
    entropy = stage.stage != "sft" and bool(stage.algo.entropy_coef)
    key = (repr(mine.config), stage.model, stage.lora, stage.layers, batch.layout, entropy, again, device)
    if key not in _TRACED:
        _TRACED[key] = trace(mine, to_device(batch, torch.device("meta")), device=device, entropy=entropy, again=again)
    peak = _TRACED[key]
    trained = [p for p in mine.parameters() if p.requires_grad]
    low = any(p.dtype != torch.float32 for p in trained)
    gradients = 4 * sum(p.numel() for p in trained) // split.shard
    born = 0 if again else sum(p.nbytes for p in trained)  # included in the trace, if there were none before
    # With a single micro-batch, gradients reuse the memory of activations.
    both = peak if born and not low and split.shard == 1 else gradients + peak - born * (not low)
    vocabulary = mine.get_output_embeddings().weight.shape[0]
    chunk = min(len(batch.targets), max(1, BUDGET[device] // vocabulary)) * vocabulary
    workspace = min(peak, chunk * (8 + (2 if low else 0)))
    rest = max(0, both - gradients - workspace)
    parts = {"gradients": gradients, "log-probs": workspace, "activations": rest}
    if device == "cpu":
        parts["allocator"] = int(SLACK * (workspace + rest))
    return parts


def _cache(
    stage: Recipe, whole: PreTrainedModel, split: ParallelConfig, lengths: Lengths, total: int
) -> tuple[int, int, int]:
    """(rows decoded at once, positions that they need, bytes of one position)."""
    cache = Budget.of(whole, 1.0)
    each = cache.bytes_per_token
    budget = (total // 4 if stage.rollout.kv_cache_gib is None else int(stage.rollout.kv_cache_gib * GIB)) // each
    sampled = [(-(-stage.prompts_per_step // split.processes), stage.samples_per_prompt, stage.sampling.max_tokens)]
    if stage.stage != "generate":
        sampled.append((-(-stage.eval.problems // split.processes), stage.eval.samples, stage.eval.sampling.max_tokens))
    shapes = [(lengths.prompt, *shape) for shape in sampled]
    if stage.stage in ("rl", "distil") and stage.has_turns:
        # In its last turn, each sample has a prompt of its own: all of its conversation so far.
        shapes += [(lengths.prompt + max(0, lengths.answer - most), p * g, 1, most) for p, g, most in sampled]
    best = (0, 0)
    for prompt, prompts, samples, most in shapes:
        rows = min(stage.rollout.max_sequences, prompts * samples)
        states = (1 + 1 / samples) * cache.bytes_per_row / each
        rows = min(rows, max(1, int(budget / (prompt / samples + columns(most) + states))))
        best = max(best, (cache.positions(-(-rows // samples), prompt, rows, most), rows))
    return best[1], best[0], each


def _generation(
    stage: Recipe, whole: PreTrainedModel, split: ParallelConfig, lengths: Lengths, rows: int, kv: int, device: str
) -> dict[str, int]:
    config, item = whole.config.get_text_config(), whole.dtype.itemsize
    packed = _copies(whole, stage.rollout.weights, device)
    copy = packed + (_merged(stage, whole) if stage.stage != "generate" else 0)
    width = 8 * config.hidden_size + 3 * getattr(config, "intermediate_size", 4 * config.hidden_size)
    prompt_tokens = min(PREFILL_TOKENS, -(-rows // stage.samples_per_prompt) * lengths.prompt)
    cut = stage.sampling.top_p < 1 or stage.sampling.top_k > 0
    # with top-p also sorted values, indices, cumulative sums
    logits = rows * config.vocab_size * 4 * (10 if cut else 5)
    return {"engine copy": copy, "kv cache": kv, "prefill": prompt_tokens * width * item, "sampling": logits}


def _copies(whole: PreTrainedModel, weights: Weights, device: str) -> int:
    """Bytes of the engine's copies of weights: see `hone.model.reduced`, and `hone.model.linear.onednn` for the
    others."""
    if whole.dtype != torch.float32:
        return 0
    size = sum(m.weight.nbytes for m in whole.modules() if isinstance(m, nn.Linear))
    rounded = 0 if weights == "policy" else size - whole.get_output_embeddings().weight.nbytes
    packed = size - rounded if device == "cpu" and linear.available() else 0
    # int8 also keeps a copy of 2 bytes per weight, for batches of more than a few rows.
    return rounded * (3 if weights == "int8" else 2) // 4 + (packed if packed <= linear.PACKED_BYTES else 0)


def _merged(stage: Recipe, whole: PreTrainedModel) -> int:
    """Bytes of merged matrices: see `hone.model.lora.for_sampling`."""
    if stage.lora is None or whole.dtype != torch.float32:
        return 0
    ends = tuple(f".{name}" for name in lora.target_names(whole, stage.lora.targets))
    return sum(
        m.weight.nbytes for name, m in whole.named_modules() if isinstance(m, nn.Linear) and f".{name}".endswith(ends)
    )


def _keep_heap(moments: dict[str, dict[str, int]], largest: int, merged: int) -> None:
    """Add to `generation` the heap that malloc keeps from the update. Generation reuses it, except for blocks that are
    too large (`largest`: bytes of the cache's largest block) and for the second copy of the weights that an adapter
    needs (`merged`)."""
    update, generation = moments["update"], moments["generation"]
    heap = sum(update[name] for name in ("gradients", "log-probs", "activations", "allocator"))
    own = merged + (generation["kv cache"] if largest >= OWN_BLOCK else 0)
    used = sum(generation[name] for name in ("engine copy", "kv cache", "prefill", "sampling")) - own
    generation["allocator"] = max(0, heap - used)
