"""Measures the speed of this machine: forward and backward pass of a micro-batch, and decoding of a few tokens.

    speeds = calibrate(stage, batch_of(stage), plan, work, shape)    # some seconds; random weights of the real shape

Random weights suffice: neither time nor memory depends on their values.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from hone.base.settings import UserError
from hone.learn.forward import fast_layers, to_device
from hone.model import lora
from hone.model.load import device as here
from hone.preflight.plan import batch as batches
from hone.preflight.plan.cost import Shape, Speeds, Work, forward_flops
from hone.preflight.plan.memory import GIB, Plan, total_of
from hone.preflight.plan.shapes import config_of, meta_model
from hone.preflight.plan.trace import forward_backward
from hone.recipe.recipe import LoopStage
from hone.recipe.sections.rollout import SamplingConfig
from hone.rollout.native.engine import NativeEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Tokens of the timed micro-batch, and of the answers: enough for a rate, but quick on a CPU.
TRAIN_TOKENS, ANSWERS = 1024, {"cpu": (4, 12), "cuda": (32, 96)}  # on a GPU both are long enough to be recorded
MAX_ROWS = 64


def calibrate(stage: LoopStage, step: batches.BatchShape, plan: Plan, work: Work, shape: Shape) -> Speeds:
    """The measured speeds. Raises UserError if the model does not fit this machine."""
    device = here()
    needed = 3 * shape.weights * shape.item
    if needed > total_of(device.type) // 2:
        raise UserError(
            f"--calibrate: the model takes {needed / GIB:.1f} GiB with its gradients, too much for this {device.type}; "
            f"without --calibrate, the time is modelled"
        )
    model = _random_model(stage, device)
    small = replace(step, tokens=min(TRAIN_TOKENS, step.tokens))
    answer = max(1, min(plan.answer_tokens, TRAIN_TOKENS - plan.prompt_tokens))
    batch = to_device(batches.longest(small, plan.prompt_tokens, answer), device)

    def train() -> None:
        with fast_layers(model):
            forward_backward(model, batch, entropy=False)
        model.zero_grad(set_to_none=True)

    keys = plan.prompt_tokens + answer / 2
    passes = 2 + (0 if work.adapter else 1) + work.recompute
    operations = forward_flops(shape, len(batch.inputs), keys) * passes
    reached = operations / _seconds(train, device)
    if not work.longest:
        return Speeds("this machine, calibrated", reached, reached, float("inf"))
    rows = max(1, min(work.rows, MAX_ROWS))
    engine = NativeEngine(model, (), stage.rollout)
    prompts = [np.full(plan.prompt_tokens, i % 97, np.int64) for i in range(-(-rows // work.samples))]

    def generate(tokens: int) -> float:
        sampling = SamplingConfig(max_tokens=tokens)
        samples = -(-rows // len(prompts))
        return _seconds(lambda: engine.generate(prompts, sampling, samples=samples, seed=0), device)

    short, long = ANSWERS[device.type]
    each = max(1e-9, (generate(long) - generate(short)) / (long - short))
    real = len(prompts) * -(-rows // len(prompts))
    decoded = forward_flops(shape, real, plan.prompt_tokens + (short + long) / 2) / each
    return Speeds("this machine, calibrated", reached, decoded, float("inf"))


def _random_model(stage: LoopStage, device: torch.device) -> PreTrainedModel:
    config, _ = config_of(stage.model)
    model = meta_model(config, stage.model.dtype, stage.model.recompute_activations)
    if stage.lora is not None:
        lora.attach(model, stage.lora, seed=0)
    model.to_empty(device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.0, 0.02, generator=generator)
        for buffer in model.buffers():  # rotary frequencies
            buffer.fill_(0.01)
    if stage.model.recompute_activations and not model.get_input_embeddings().weight.requires_grad:
        model.enable_input_require_grads()
    return model.eval()


def _seconds(what: Callable[[], object], device: torch.device) -> float:
    """Seconds of the faster of two calls, after a warm-up. With one thread on a CPU it is processor time: on a busy
    machine wall time would include other programs."""
    times = []
    for _ in range(3):
        _wait(device)
        start, worked = time.perf_counter(), time.process_time()
        what()
        _wait(device)
        wall = time.perf_counter() - start
        busy = time.process_time() - worked
        times.append(min(wall, busy) if device.type == "cpu" and torch.get_num_threads() == 1 else wall)
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
