"""How the stages of a pipeline connect: which model, teacher or dataset a stage takes from an earlier one.

    stages:
      - {name: teacher, stage: rl}
      - {name: answers, stage: generate}                       # by the model of the stage before
      - {name: student, stage: sft, model: {path: tiny, tiny: {layers: 2}}, sft: {data: stages.answers}}
      - {name: cold, stage: rl}                                # continues from the student
      - {name: other, stage: rl, model: stages.teacher}        # continues from the teacher

A stage without a model continues from the stage before it. Settings stay raw values here: a stage that continues gets
`model.stage`, and the path and sizes of the model that its chain of stages started from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.base.settings import ConfigError, Layer

PREFIX = "stages."

#: Keys of `model` that say where a stage starts; the others say how it is computed.
START = ("path", "revision", "tiny", "stage")

#: Kinds of stages that produce no model.
MODELLESS = ("generate",)


def stage_named(reference: str | None) -> str | None:
    """`rl` for `stages.rl`; None for a path, a hub id or None."""
    return reference[len(PREFIX) :] if reference is not None and reference.startswith(PREFIX) else None


def beside(reference: str, folder: Path, what: str) -> str:
    """The path of a reference: `what` in the folder of the named stage, beside `folder`, or the reference itself."""
    name = stage_named(reference)
    return reference if name is None else str(folder.parent / name / what)


def begun(merged: Layer, own: Mapping[str, Any], before: Sequence[Mapping[str, Any]], number: int) -> Layer:
    """The raw stage with its model resolved. `own`: its own keys; `before`: the earlier stages, resolved and named.

    Raises ConfigError if the stage it continues from does not exist, or if it has another `tiny` or `revision`.
    """
    own_model = own.get("model")
    model = own_model if isinstance(own_model, dict) else {}
    path = model.get("path")
    name = model.get("stage") or stage_named(path if isinstance(path, str) else None)
    if name is None and path is None:
        name = next((stage["name"] for stage in reversed(before) if stage.get("stage", "rl") not in MODELLESS), None)
    if name is None:
        return merged

    def wrong(key: str, message: str) -> ConfigError:
        key = f"model.{key}"
        return ConfigError([f"{merged.where(tuple(key.split('.')))}: stages.{number}.{key}: {message}"])

    origin = next((stage for stage in before if stage["name"] == name), None)
    if origin is None or origin.get("stage", "rl") in MODELLESS:
        names = ", ".join(stage["name"] for stage in before if stage.get("stage", "rl") not in MODELLESS)
        raise wrong("path", f"{PREFIX}{name} is not an earlier stage with a model; those are: {names or 'none'}")
    root = origin.get("model") or {}
    for key in ("tiny", "revision"):
        if key in model and model[key] != root.get(key):
            raise wrong(
                key,
                f"cannot differ from that of stage {name}, whose model this stage continues; remove it, or start "
                "afresh with model.path",
            )
    kept = {key: value for key, value in (merged.data.get("model") or {}).items() if key not in START}
    merged.data["model"] = {**{key: root[key] for key in START[:3] if key in root}, **kept, "stage": name}
    return merged


def references(stage: Any) -> Iterator[tuple[str, str | None, str]]:
    """(key, value, kind of stage that it may name) of each reference of a stage, other than its model."""
    if stage.stage in ("generate", "distil"):
        yield "teacher", stage.teacher, "model"
    if stage.stage == "sft":
        yield "sft.data", stage.sft.data, "generate"
