"""Changes of settings during a stage, by step or with hard resets.

    schedule:
      - {at: 0,       samples_per_prompt: 16, sampling: {top_p: 0.7}}
      - {at: reset 1, samples_per_prompt: 32, sampling: {temperature: 1.2, top_p: 0.9}, lora: {rank: 64}}

A line applies from its step or reset to the end of the stage; if two lines set the same key, the later one wins. The
settings of a step are the recipe with all applicable lines merged over it. Every recipe that can result is validated
before the run starts.

`stagnation` is the rule that triggers a reset when validation stops improving.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

from hone.base.settings import ConfigError, Layer, Section, merge, show
from hone.base.validate import impossible, nest, validate
from hone.recipe.sections.algo import StagnationConfig

#: Keys that a line may set. Others, such as the task or the model, are fixed within a stage.
SCHEDULED = (
    *("prompts_per_step", "samples_per_prompt", "sampling", "algo", "optim", "reward", "curriculum", "layers", "lora"),
    "tokens_per_microbatch",
)

Line = Mapping[str, Any]  # {"at": 100 or "reset 1", and settings}
SectionT = TypeVar("SectionT", bound=Section, covariant=True)


def parse_at(at: Any) -> tuple[Literal["step", "reset"], int] | None:
    """The step or reset from which a line applies, or None if `at` is neither a step nor `reset N`."""
    if isinstance(at, int) and not isinstance(at, bool) and at >= 0:
        return "step", at
    match = re.fullmatch(r"reset ([1-9]\d*)", at) if isinstance(at, str) else None
    return ("reset", int(match[1])) if match else None


def holding(schedule: Sequence[Line], step: int, resets: int) -> tuple[int, ...]:
    """The numbers of the lines that apply in `step`, after `resets` hard resets."""
    now = {"step": step, "reset": resets}
    starts = [(i, parse_at(line.get("at"))) for i, line in enumerate(schedule)]
    return tuple(i for i, at in starts if at is not None and at[1] <= now[at[0]])


class Phases(Generic[SectionT]):
    """The settings of each step of a recipe with a schedule (a `hone.recipe.recipe.Recipe`)."""

    def __init__(self, recipe: SectionT) -> None:
        self.recipe = recipe
        self.schedule: Sequence[Line] = recipe.schedule  # type: ignore[attr-defined]  # Recipe imports this module
        self._made: dict[tuple[int, ...], SectionT] = {}

    def at(self, step: int, resets: int) -> SectionT:
        """The recipe of a step; without a schedule, the recipe itself."""
        return self.merged(holding(self.schedule, step, resets)) if self.schedule else self.recipe

    def merged(self, lines: tuple[int, ...]) -> SectionT:
        """The recipe with these lines merged over it. Raises ConfigError if the result is invalid."""
        if lines not in self._made:
            layer = Layer(self.recipe.model_dump(mode="json", exclude_unset=True, exclude={"schedule"}))
            for i in lines:
                layer = merge(layer, Layer({key: value for key, value in self.schedule[i].items() if key != "at"}))
            self._made[lines] = validate(type(self.recipe), layer)
        return self._made[lines]

    def sets(self) -> Iterator[tuple[int, ...]]:
        """Every set of lines that can apply together, smallest first."""
        kinds = [(parse_at(line.get("at")) or ("step", 0))[0] for line in self.schedule]
        steps, resets = ([i for i, kind in enumerate(kinds) if kind == k] for k in ("step", "reset"))
        sizes = sorted(((s, r) for s in range(len(steps) + 1) for r in range(len(resets) + 1)), key=sum)
        yield from (tuple(sorted([*steps[:s], *resets[:r]])) for s, r in sizes)

    def news(self, step: int, resets: int, resets_before: int) -> tuple[int, ...]:
        """The lines that apply in `step` but not in the step before."""
        before = holding(self.schedule, step - 1, resets_before) if step else ()
        return tuple(i for i in holding(self.schedule, step, resets) if i not in before)


def settings(line: Line) -> str:
    """The settings of a line as command-line overrides: `sampling.top_p=0.9 lora.rank=64`."""

    def leaves(value: Any, path: str) -> Iterator[str]:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                yield from leaves(inner, f"{path}.{key}" if path else key)
        else:
            yield f"{path}={value if isinstance(value, str) else show(value)}"

    return " ".join(leaves({key: value for key, value in line.items() if key != "at"}, ""))


# --- validation -----------------------------------------------------------------------------------------------------


def check(recipe: Any) -> None:
    """Check the schedule of a recipe: every line, and every recipe that results from it.

    Called by `hone.recipe.rules`; raises PydanticCustomError.
    """
    last = {"step": -1, "reset": 0}
    for i, line in enumerate(recipe.schedule):
        at = parse_at(line.get("at"))
        if at is None:
            problem = f"{show(line['at'])} is not allowed" if "at" in line else "required, and not given"
            raise impossible(
                f"schedule.{i}.at", f"{problem}; give a step, such as 100, or a hard reset, such as reset 1"
            )
        kind, number = at
        if number <= last[kind]:
            raise impossible(
                f"schedule.{i}.at", f"{line['at']} follows {kind} {last[kind]}; write the lines in increasing order"
            )
        last[kind] = number
        if kind == "step" and number >= recipe.steps:
            raise impossible(f"schedule.{i}.at", f"step {number} is never reached: the last step is {recipe.steps - 1}")
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
            raise impossible(
                f"schedule.{i}.{key}",
                f"cannot change during a stage; a schedule can set {', '.join(SCHEDULED)}; set it for the stage, or "
                "add another stage",
            )
    if len(line) == 1:
        raise impossible(f"schedule.{i}", "this line sets nothing; add a setting, or remove it")
    if "lora" in line and at[0] == "step" and at[1] > 0:
        message = "an adapter can change only at a hard reset; write `at: reset 1`, and give its step in reset.at"
        raise impossible(f"schedule.{i}.lora", message)


def _check_change(recipe: Any, now: Any, lines: tuple[int, ...]) -> None:
    """Raises PydanticCustomError for a change that is impossible during training."""

    def refuse(key: str, message: str) -> Exception:
        return impossible(f"schedule.{_to_blame(recipe.schedule, lines, key)}.{key}", message)

    if (recipe.lora is None) != (now.lora is None):
        raise refuse("lora", "an adapter cannot be added or removed during a stage; set lora for the stage")
    if recipe.lora is not None and recipe.lora.path != now.lora.path:
        raise refuse("lora.path", "an adapter is loaded only at the start; set lora.path for the stage")
    if (recipe.algo.advantage == "gae") != (now.algo.advantage == "gae"):
        raise refuse("algo.advantage", "the value head of gae cannot be added or removed; add another stage")
    if recipe.algo.updates_per_rollout != now.algo.updates_per_rollout and now.optim.decay != "constant":
        message = (
            f"makes the number of updates unknown, which optim.decay {now.optim.decay} needs; set that to constant"
        )
        raise refuse("algo.updates_per_rollout", message)


def _to_blame(schedule: Sequence[Line], lines: tuple[int, ...], key: str) -> int:
    """The last of these lines that sets a key in the section of `key`, or else the last line."""
    return next((i for i in reversed(lines) if key.split(".")[0] in schedule[i]), lines[-1])


def line_schema(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a line, built from the schema of the recipe's keys."""
    at = {"description": "The step, or `reset N`, from which the line applies.", "type": ["integer", "string"]}
    keys = {"at": at, **{key: fields[key] for key in SCHEDULED}}
    return {"type": "object", "properties": keys, "required": ["at"], "additionalProperties": False}


# --- when to reset --------------------------------------------------------------------------------------------------


def stagnation(values: Sequence[float], rule: StagnationConfig) -> Literal["stagnates", "declines"] | None:
    """Whether validation stagnates or declines since the last reset; None if it improves. `values`: oldest first.

    Let m_i be the mean of the `window` values up to i. Validation stagnates if none of the last `patience` m_i exceeds
    the largest earlier m_i by more than `tolerance`; it declines if the last is below that by more than `tolerance`.

    Worked example: window 1, tolerance 0.01, patience 2: [0.5, 0.6, 0.605] improves (0.6 > 0.51), [0.6, 0.605, 0.59]
    stagnates, [0.6, 0.605, 0.5] declines.
    """
    means = [sum(values[i - rule.window : i]) / rule.window for i in range(rule.window, len(values) + 1)]
    if len(means) <= rule.patience:
        return None
    best, latest = max(means[: -rule.patience]), means[-rule.patience :]
    if max(latest) > best + rule.tolerance:
        return None
    return "declines" if latest[-1] < best - rule.tolerance else "stagnates"
