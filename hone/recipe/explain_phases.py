"""The part of `hone explain` on what is trained, at which learning rate, and what changes when.

schedule    at the start: samples_per_prompt=16 sampling.top_p=0.7
            from reset 1 on: samples_per_prompt=32 lora.rank=64
"""

from __future__ import annotations

from hone.recipe.recipe import LoopStage, RLStage, TrainedStage
from hone.recipe.schedule import parse_at, settings
from hone.recipe.sections.optim import OptimConfig

#: A label, and paragraphs beside it.
Entry = tuple[str, list[str]]


def trained(stage: TrainedStage, updates: int | None, restarts: bool = False) -> list[Entry]:
    """Adapter, layers and learning rate of a stage of at most `updates`. `restarts`: hard resets repeat the warm-up."""
    rates = rate(stage.optim, updates)
    if stage.optim.warmup_steps and restarts and updates is not None:
        rates.insert(1, "the warm-up restarts at each hard reset, the decay does not")
    return [("adapter", adapter(stage)), ("layers", layers(stage)), ("rate", rates)]


def has_resets(stage: RLStage) -> bool:
    return bool(stage.reset.at) or stage.reset.on_stagnation is not None


def reference(stage: RLStage) -> str:
    """The model against which the KL penalty is measured."""
    when = "at the start of the stage"
    if has_resets(stage):
        when += ", or at the latest hard reset"
    return f"ref_t: probability under the model {when}"


def adapter(stage: TrainedStage) -> list[str]:
    lora = stage.lora
    if lora is None:
        return []
    targets = lora.targets if isinstance(lora.targets, str) else ", ".join(lora.targets)
    what = {
        "all": "all linear layers",
        "attention": "the linear layers of attention",
        "mlp": "the linear layers of MLPs",
    }
    lines = [
        f"W x + {g(lora.scale_alpha / lora.rank)} * B A x in {what.get(targets, targets)}; A and B, of rank "
        f"{lora.rank}, are trained, W is frozen; the factor is alpha {g(lora.scale_alpha)} / rank {lora.rank}",
    ]
    if lora.dropout:
        lines.append(f"while training, x of B A x is dropped out with probability {g(lora.dropout)}")
    lines.append(
        f"starts with the adapter in {lora.path}" if lora.path else "B is 0 at first, so the model starts as W"
    )
    return lines


def layers(stage: TrainedStage) -> list[str]:
    chosen, adapter = stage.layers, "the adapter in " if stage.lora is not None else ""
    lines = []
    if chosen.train == "first":
        lines = [
            f"trained: {adapter}the embeddings and the first {count(chosen.count or 0, 'layer')}; the rest is frozen"
        ]
    if chosen.train == "last":
        rest = "" if adapter else ", the final norm and the output head (unless it is the embedding)"
        lines = [f"trained: {adapter}the last {count(chosen.count or 0, 'layer')}{rest}; no gradient is computed below"]
    if chosen.lr_decay < 1:
        lines.append(
            f"learning rate of a layer: {g(chosen.lr_decay)} times that of the layer above; the last has the full rate"
        )
    return lines


def rate(optim: OptimConfig, updates: int | None) -> list[str]:
    warmup = optim.warmup_steps
    clip = f"the norm of the gradient is clipped at {g(optim.grad_clip)}"
    if updates is None:
        start = f"AdamW, learning rate {g(optim.lr)}"
        how = f"after a linear warm-up of {count(warmup, 'update')}" if warmup else "without warm-up"
        end = "then constant" if optim.decay == "constant" else f"then {optim.decay} decay to 0 after the last update"
        return [f"{start}, {how}; {end}", clip]
    decay = "then constant" if optim.decay == "constant" else f"then {optim.decay} decay"

    def at(update: int) -> str:
        """The learning rate at an update, counted from 1."""
        return f"{optim.lr * optim.schedule(update - 1, updates):.4g}"

    start = f"AdamW, learning rate {g(optim.lr)}"
    end = f"{at(updates)} at the last update, {n(updates)}"
    if warmup >= updates:
        text = f"{start}, which the linear warm-up of {count(warmup, 'update')} never reaches: {end}"
    elif warmup:
        text = f"{start} at update {n(warmup + 1)}, after a linear warm-up from {at(1)}; {decay}, {end}"
    else:
        text = f"{start} at the first update, without warm-up; {decay}, {end}"
    return [text, clip]


def curriculum(stage: LoopStage) -> list[str]:
    config = stage.curriculum
    if config.kind == "uniform":
        return []
    if config.kind == "sequential":
        each = "until each of its problems was drawn once" if config.steps_per_level is None else ""
        each = each or f"for {count(config.steps_per_level or 0, 'step')}"
        return [f"one level after the other, the lowest first, each {each}; the last until the end"]
    if config.kind == "mixture":
        total = sum(config.weights.values())
        parts = ", ".join(f"{level} {100 * w / total:.3g} %" for level, w in config.weights.items() if w)
        return [f"shares of the levels: {parts}"]
    return [
        f"share of a level = {g(config.floor)} / levels + {g(1 - config.floor)} * w / sum(w), w = p * (1 - p)",
        f"p: running share of right answers in the level, {g(config.memory)} * p + {g(1 - config.memory)} * the step's "
        "share; 0.5 at first",
    ]


def resets(stage: RLStage) -> list[str]:
    config, rule = stage.reset, stage.reset.on_stagnation
    lines = []
    if config.at:
        lines.append(f"before {'steps' if len(config.at) > 1 else 'step'} {', '.join(map(n, config.at))}")
    if rule is not None:
        most = f", at most {count(config.limit, 'time')}" if config.limit is not None else ""
        lines.append(
            f"when validation does not improve: none of the last {count(rule.patience, 'mean')} of {rule.window} "
            f"validations is more than {g(rule.tolerance)} above the best earlier one since the last reset{most}"
        )
    if lines:
        old = "the adapter is merged into the weights and a new one starts" if stage.lora else "the weights stay"
        lines.append(f"each: {old}; the model becomes the reference, the optimizer starts afresh")
    return lines


def schedule(stage: RLStage) -> list[str]:
    """What each line changes; the other sections describe the start of the stage."""
    lines = []
    for line in stage.schedule:
        when = "at the start" if parse_at(line["at"]) == ("step", 0) else f"from {_when(line['at'])} on"
        lines.append(f"{when}: {settings(line)}")
    return [*lines, "the other sections describe the start of the stage"] if lines else []


def _when(at: int | str) -> str:
    return f"step {n(at)}" if isinstance(at, int) else at


def g(value: float) -> str:
    """A number without floating-point noise: 1.28, not 1.2800000000000002."""
    return f"{value:.10g}"


def n(number: int) -> str:
    return f"{number:,}"


def count(number: int, what: str) -> str:
    return f"{n(number)} {what}{'' if number == 1 else 's'}"
