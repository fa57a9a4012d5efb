"""What changes during a stage, and when: by step, or with each hard reset.

    schedule:
      - {at: 0,       samples_per_prompt: 16, sampling: {top_p: 0.7}}
      - {at: reset 1, samples_per_prompt: 32, sampling: {temperature: 1.2, top_p: 0.9}, lora: {rank: 64}}

A line holds from its step, or from its reset, to the end of the stage; where two lines set the same thing, the later
line wins. The settings of a step are those of the recipe with all lines that hold merged over them, a whole recipe;
each that can come to be is validated before the run starts.

`stagnation` is the rule that asks for a reset when validation no longer rises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

from hone.base.settings import ConfigError, Layer, Section, merge, show
from hone.base.validate import impossible, nest, validate
from hone.recipe.sections.algo import StagnationConfig

#: What a line may set. The rest holds for a whole stage: another task, another model is another stage.
SCHEDULED = (
    *("prompts_per_step", "samples_per_prompt", "sampling", "algo", "optim", "reward", "curriculum", "layers", "lora"),
    "tokens_per_microbatch",
)

Line = Mapping[str, Any]  # {"at": 100 or "reset 1", and settings}
SectionT = TypeVar("SectionT", bound=Section)


def parse_at(at: Any) -> tuple[Literal["step", "reset"], int] | None:
    """When a line begins to hold, or None if `at` is neither a step nor `reset N`."""
    if isinstance(at, int) and not isinstance(at, bool) and at >= 0:
        return "step", at
    found = re.fullmatch(r"reset ([1-9]\d*)", at) if isinstance(at, str) else None
    return ("reset", int(found[1])) if found else None


def holding(schedule: Sequence[Line], step: int, resets: int) -> tuple[int, ...]:
    """The numbers of the lines that hold in `step`, before which so many hard resets have happened."""
    now = {"step": step, "reset": resets}
    found = [(i, parse_at(line.get("at"))) for i, line in enumerate(schedule)]
    return tuple(i for i, at in found if at is not None and at[1] <= now[at[0]])


class Phases(Generic[SectionT]):
    """The settings of each step of a recipe with a schedule (a `hone.recipe.recipe.Recipe`)."""

    def __init__(self, recipe: SectionT) -> None:
        self.recipe = recipe
        self.schedule: Sequence[Line] = recipe.schedule  # type: ignore[attr-defined]  # Recipe is further up
        self._made: dict[tuple[int, ...], SectionT] = {}

    def at(self, step: int, resets: int) -> SectionT:
        """The recipe of a step; without a schedule the recipe itself."""
        return self.merged(holding(self.schedule, step, resets)) if self.schedule else self.recipe

    def merged(self, lines: tuple[int, ...]) -> SectionT:
        """The recipe with these lines. Raises ConfigError if it is not a possible one."""
        if lines not in self._made:
            layer = Layer(self.recipe.model_dump(mode="json", exclude_unset=True, exclude={"schedule"}))
            for i in lines:
                layer = merge(layer, Layer({key: value for key, value in self.schedule[i].items() if key != "at"}))
            self._made[lines] = validate(type(self.recipe), layer)
        return self._made[lines]

    def sets(self) -> Iterator[tuple[int, ...]]:
        """Every set of lines that can hold together, fewest first."""
        kinds = [(parse_at(line.get("at")) or ("step", 0))[0] for line in self.schedule]
        steps, resets = ([i for i, kind in enumerate(kinds) if kind == k] for k in ("step", "reset"))
        sizes = sorted(((s, r) for s in range(len(steps) + 1) for r in range(len(resets) + 1)), key=sum)
        yield from (tuple(sorted([*steps[:s], *resets[:r]])) for s, r in sizes)

    def news(self, step: int, resets: int, resets_before: int) -> tuple[int, ...]:
        """The lines that hold in `step` and did not in the step before."""
        before = holding(self.schedule, step - 1, resets_before) if step else ()
        return tuple(i for i in holding(self.schedule, step, resets) if i not in before)


def settings(line: Line) -> str:
    """What a line sets, as one would write it on the command line: `sampling.top_p=0.9 lora.rank=64`."""

    def leaves(value: Any, path: str) -> Iterator[str]:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                yield from leaves(inner, f"{path}.{key}" if path else key)
        else:
            yield f"{path}={value if isinstance(value, str) else show(value)}"

    return " ".join(leaves({key: value for key, value in line.items() if key != "at"}, ""))


# --- validation -----------------------------------------------------------------------------------------------------


def check(recipe: Any) -> None:
    """The resets and the schedule of a recipe are possible: every line, and every recipe that it leads to.

    Raises PydanticCustomError, to be called by the recipe's own validator.
    """
    if recipe.lora is not None and recipe.lora.dropout:
        message = "sampler and trainer must be one network, and dropout makes two; set it to 0, or use it in sft"
        raise impossible("lora.dropout", message)
    if recipe.reset.on_stagnation is not None and not recipe.eval.every:
        raise impossible("reset.on_stagnation", "it looks at validation, and there is none; set eval.every")
    if recipe.reset.at and recipe.reset.at[-1] >= recipe.steps:
        raise impossible("reset.at", f"{recipe.reset.at[-1]} is never reached: there are {recipe.steps} steps, from 0")
    last = {"step": -1, "reset": 0}
    for i, line in enumerate(recipe.schedule):
        at = parse_at(line.get("at"))
        if at is None:
            given = f"{show(line['at'])} is not allowed" if "at" in line else "required, and not given"
            raise impossible(f"schedule.{i}.at", f"{given}; give a step, as in 100, or a hard reset, as in reset 1")
        kind, number = at
        if number <= last[kind]:
            raise impossible(f"schedule.{i}.at", f"{line['at']} comes after {kind} {last[kind]}; write lines in order")
        last[kind] = number
        if kind == "step" and number >= recipe.steps:
            raise impossible(f"schedule.{i}.at", f"{number} is never reached: there are {recipe.steps} steps, from 0")
        _check_keys(i, line, at)
    if not recipe.schedule:
        return
    phases = Phases(recipe)
    for lines in phases.sets():
        try:
            now = phases.merged(lines)
        except ConfigError as error:
            _, key, message = error.lines[0].split(": ", 2)
            raise impossible(f"schedule.{_to_blame(recipe.schedule, lines, key)}.{key}", message) from None
        _check_change(recipe, now, lines)


def _check_keys(i: int, line: Line, at: tuple[str, int]) -> None:
    for key in line:
        if key.partition(".")[0] in SCHEDULED and "." in key:
            raise impossible(f"schedule.{i}.{key}", nest(key))
        if key != "at" and key not in SCHEDULED:
            message = f"cannot change during a stage; a schedule sets {', '.join(SCHEDULED)}"
            raise impossible(f"schedule.{i}.{key}", f"{message}; give it for the stage, or make another stage")
    if len(line) == 1:
        raise impossible(f"schedule.{i}", "this line sets nothing; add a setting, or remove it")
    if "lora" in line and at[0] == "step" and at[1] > 0:
        message = "an adapter changes with a hard reset only; write `at: reset 1`, and reset.at for its step"
        raise impossible(f"schedule.{i}.lora", message)


def _check_change(recipe: Any, now: Any, lines: tuple[int, ...]) -> None:
    """What a training run cannot change on the way."""

    def refuse(key: str, message: str) -> Exception:
        return impossible(f"schedule.{_to_blame(recipe.schedule, lines, key)}.{key}", message)

    if (recipe.lora is None) != (now.lora is None):
        raise refuse("lora", "an adapter can neither be added nor dropped during a stage; give lora for the stage")
    if recipe.lora is not None and recipe.lora.path != now.lora.path:
        raise refuse("lora.path", "an adapter is loaded at the start only; give lora.path for the stage")
    if (recipe.algo.advantage == "gae") != (now.algo.advantage == "gae"):
        raise refuse("algo.advantage", "the value head of gae can neither be added nor dropped; make another stage")
    if recipe.algo.updates_per_rollout != now.algo.updates_per_rollout and now.optim.decay != "constant":
        message = f"the number of updates is then not known, and optim.decay {now.optim.decay} needs it; set constant"
        raise refuse("algo.updates_per_rollout", message)


def _to_blame(schedule: Sequence[Line], lines: tuple[int, ...], key: str) -> int:
    """The last of these lines that sets something in the section of `key`, else the last of them."""
    return next((i for i in reversed(lines) if key.split(".")[0] in schedule[i]), lines[-1])


def line_schema(fields: Mapping[str, Any]) -> dict[str, Any]:
    """JSON schema of a line, from that of the recipe's keys."""
    at = {"description": "A step, or `reset N`: from then on the line holds.", "type": ["integer", "string"]}
    keys = {"at": at, **{key: fields[key] for key in SCHEDULED}}
    return {"type": "object", "properties": keys, "required": ["at"], "additionalProperties": False}


def notices(stage: Any, of_phase: Callable[[Any], Iterable[str]]) -> Iterator[str]:
    """What is possible in a stage and has no effect: `of_phase` says it of settings that stay, for each phase."""
    phases = Phases(stage)
    said = [*of_phase(phases.at(0, 0)), *_resets(stage)]
    yield from said
    for lines in phases.sets():
        for text in of_phase(phases.merged(lines)) if set(holding(stage.schedule, 0, 0)) <= set(lines) else ():
            if text not in said:
                said.append(text)
                yield f"schedule, from {stage.schedule[lines[-1]]['at']} on: {text}"


def _resets(stage: Any) -> Iterator[str]:
    """Notices of resets, layers and curriculum."""
    yield from (f"curriculum.{text}" for text in stage.curriculum.idle_settings())
    asked = [at[1] for line in stage.schedule if (at := parse_at(line.get("at"))) and at[0] == "reset"]
    rule, known = stage.reset.on_stagnation, len(stage.reset.at)
    if asked and asked[-1] > known and rule is None:
        yield (
            f"schedule: `reset {asked[-1]}` has no step, since reset.at has {known}: it comes only if you ask for it "
            "with `hone reset`"
        )
    if rule is not None:
        first = (rule.window + rule.patience - 1) * stage.eval.every
        if first >= stage.steps:
            yield (
                f"reset.on_stagnation: needs {rule.window + rule.patience} validations, the last at step {first}, and "
                f"there are {stage.steps} steps"
            )
        answers = rule.window * stage.eval.problems * stage.eval.samples
        if rule.tolerance < (noise := 0.5 * answers**-0.5):
            yield (
                f"reset.on_stagnation.tolerance {rule.tolerance:g}: the mean of {answers:,} answers moves by up to "
                f"{noise:.2g} by chance alone (one standard deviation), which passes for a rise; more eval.problems, a "
                "wider window or a larger tolerance help"
            )
    if stage.lora is not None and stage.lora.path is not None and stage.algo.kl.coef:
        yield "lora.path: the KL penalty is measured against the model without the adapter, not with it as it is loaded"
    if stage.layers.lr_decay == 1.0 and stage.layers.train == "last" and stage.model.recompute_activations:
        yield "model.recompute_activations: the way back goes through the frozen layers too, to the embeddings"


# --- when to reset --------------------------------------------------------------------------------------------------


def stagnation(values: Sequence[float], rule: StagnationConfig) -> Literal["stagnates", "declines"] | None:
    """What validation does since the last reset, oldest value first, if it does not rise; else None.

    With m_i the mean of the `window` values up to i: none of the last `patience` m_i exceeds the largest one before
    them by more than `tolerance`. It declines if the last m_i is below that one by more than `tolerance`.

    Worked example: window 1, tolerance 0.01, patience 2: [0.5, 0.6, 0.605] rises (0.6 > 0.51), [0.6, 0.605, 0.59]
    stagnates, [0.6, 0.605, 0.5] declines.
    """
    means = [sum(values[i - rule.window : i]) / rule.window for i in range(rule.window, len(values) + 1)]
    if len(means) <= rule.patience:
        return None
    best, latest = max(means[: -rule.patience]), means[-rule.patience :]
    if max(latest) > best + rule.tolerance:
        return None
    return "declines" if latest[-1] < best - rule.tolerance else "stagnates"
