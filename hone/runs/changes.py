"""Changed settings of a resumed run: listed by key, and refused where continuing would be meaningless.

    changes(before, now)        # [Change("optim.lr", 0.001, 0.0005)]

`before` and `now` are resolved settings of one stage, as in config.resolved.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from hone.base.settings import UserError
from hone.recipe.sections.optim import OptimConfig

#: Settings, with everything below them, that cannot change: checkpoints would no longer fit, or what has been counted,
#: drawn and learned so far would belong to another run.
FIXED = {
    "stage": "the stage is of another kind",
    "seed": "every random number so far was drawn with the old one",
    "task": "the problems drawn and graded so far are those of the old one",
    "model.path": "checkpoints hold the weights of the old one",
    "model.revision": "checkpoints hold the weights of the old one",
    "model.stage": "checkpoints hold the weights of the old one",
    "model.tiny": "checkpoints hold the weights of the old one",
    "model.dtype": "checkpoints hold weights of the old type",
    "lora": "checkpoints hold the old adapter",
    "teacher": "the student has learned from the old one so far",
    "sft.data": "the progress so far is counted in the old ones",
    "sft.styles": "the progress so far is counted in the old ones",
    "sft.examples": "the progress so far is counted in the old ones",
    "sft.examples_per_step": "the progress so far is counted in the old steps",
    "sft.validation": "the held-out examples were chosen with the old one",
    "generate.problems_per_shard": "the answers so far are in shards of the old size",
}
#: Exceptions, which may change.
FREE = ("lora.dropout",)
#: Settings whose file or model may be reached by another path.
PATHS = ("task.source", "model.path", "lora.path", "sft.data", "teacher")


@dataclass(frozen=True)
class Change:
    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key} {_shown(self.old)} -> {_shown(self.new)}"

    @property
    def why_not(self) -> str | None:
        """Why a run cannot continue with this change; None if it can."""
        if self.key in FREE or (self.key in PATHS and _same_place(self.old, self.new)):
            return None
        if self.key == "algo.advantage" and "gae" in (self.old, self.new):
            return "a value head is trained from the start with gae, and only then"
        return next((why for key, why in FIXED.items() if f"{self.key}.".startswith(f"{key}.")), None)

    def row(self) -> dict[str, Any]:
        """For an event of the run."""
        return {"key": self.key, "old": self.old, "new": self.new}


def changes(before: Mapping[str, Any], now: Mapping[str, Any], without: Iterable[str] = ()) -> list[Change]:
    """All changes, in the order of the settings. `without`: top-level settings to ignore."""
    return list(_changes({k: v for k, v in before.items() if k not in without}, now, "", set(without)))


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str, without: set[str]) -> Iterator[Change]:
    for key in now:
        if key in without:
            continue
        old, new = before.get(key), now[key]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _changes(old, {**dict.fromkeys(old), **new}, f"{prefix}{key}.", set())
        elif old != new:
            yield Change(f"{prefix}{key}", old, new)


def check_possible(listed: Iterable[Change], folder: object) -> None:
    """Raises UserError that names every change with which the run in `folder` cannot continue."""
    lines = [f"  {change}: {why}" for change in listed if (why := change.why_not) is not None]
    if lines:
        raise UserError(
            "\n".join([f"{folder}: the run cannot continue with these changed settings:", *lines])
            + "\nresume with the old values, or train with the new ones under another name (name=...)"
        )


def longer(config: OptimConfig, old: int, new: int) -> str | None:
    """The effect of extending a stage from `old` to `new` optimizer updates; None if the first `old` stay the same.

    Worked example: linear decay, 40 updates, then 60: the rate, which was near 0 at the end, continues at a third.
    """
    if config.decay == "constant" or old == new:
        return None
    last, then = config.schedule(old - 1, old), config.schedule(old, new)
    return (
        f"optim.decay {config.decay} depends on the number of updates, {new} instead of {old}: the learning rate ended "
        f"at {last * config.lr:.3g} and continues at {then * config.lr:.3g}; a run of {new} from the start would differ"
    )


def _same_place(old: Any, new: Any) -> bool:
    """Whether two paths may name the same file, because a moved folder keeps the ends of its paths."""
    if not isinstance(old, str) or not isinstance(new, str):
        return False
    a, b = PurePath(old).parts, PurePath(new).parts
    n = min(2, len(a), len(b))
    return n > 0 and a[-n:] == b[-n:]


def _shown(value: Any) -> str:
    text = f"{value}"
    return text if len(text) <= 60 else f"{text[:57]}..."
