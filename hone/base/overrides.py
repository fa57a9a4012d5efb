"""Overrides of the command line, `a.b=c`, applied to the raw values of a recipe.

layer = override(read("recipe.yaml"), "optim.lr=1e-5")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from hone.base.settings import ConfigError, Layer, LongForm, Place, merged, parse, places, stage_name


def source(text: str) -> str:
    """How error messages name an override."""
    return f"override {text!r}"


def override(
    layer: Layer,
    text: str,
    model: type[BaseModel] | None = None,
    takes: Callable[[Mapping[str, Any], str], bool] = lambda stage, key: True,
    long_form: LongForm = lambda key, value: value,
) -> Layer:
    """Apply one `a.b=c` from the command line; c is parsed as YAML (1e-5 is a number, [a, b] a list).

    In a recipe with stages `a.b=c` applies to every stage that takes the key `a`, or to the top level if none does;
    `stages.rl.a.b=c` to one, named by name, kind or index.
    """
    origin = source(text)
    key, equals, raw = text.partition("=")
    head, mark, function = key.strip().partition("reward.parts.")  # names of functions contain dots
    parts = (*head.split(".")[:-1], "reward", "parts", function) if mark else tuple(key.strip().split("."))
    if not equals or "" in parts:
        raise ConfigError([f"{origin}: overrides read key=value with a dotted key, as in optim.lr=1e-5"])
    if parts[0] == "extends":
        raise ConfigError([f"{origin}: extends is read from files only; write a recipe that extends the other"])
    value, _ = parse(raw, origin)
    if parts[-2:] == ("task", "name"):
        parts, value = parts[:-1], {"name": value}
    data, origins = layer.data, dict(layer.origins)
    if model is not None and parts[0] not in model.model_fields and parts[0] in _stage_names(data):
        raise ConfigError([f"{origin}: {parts[0]} is a stage; write stages.{text.strip()}"])
    for prefix, path in _targets(data, parts, origin, takes):
        default = _default(model, path[:-1])
        unset = _get(data, (*prefix, *path[:-1])) is None and _get(data, path[:-1]) is None
        # Setting one entry of a free mapping keeps the default entries.
        top: Any = {**default, path[-1]: value} if default and unset else {path[-1]: value}
        for part in reversed(path[:-1]):
            top = {part: top}
        top = {key: long_form(key, inner) for key, inner in top.items()}
        for place in places(top, ()):
            whole: Place = (*prefix, *place)
            if len(place) >= len(path):
                origins[whole] = origin
            else:
                origins.setdefault(whole, origin)
        data = _put(data, prefix, top)
    return Layer(data, origins)


def _get(data: Any, path: Place) -> Any:
    for key in path:
        data = data.get(key) if isinstance(data, dict) else data[int(key)] if isinstance(data, list) else None
    return data


def _default(model: type[BaseModel] | None, path: Place) -> dict[str, Any] | None:
    """The default of a setting that is a free mapping, such as reward.parts, else None."""
    info = model.model_fields.get(str(path[0])) if model and path else None
    value = info.get_default(call_default_factory=True) if info and not info.is_required() else None
    for key in path[1:]:
        value = getattr(value, str(key), None)
    return value if isinstance(value, dict) else None


def _targets(
    data: dict[str, Any], parts: tuple[str, ...], source: str, takes: Callable[[Mapping[str, Any], str], bool]
) -> list[tuple[Place, tuple[str, ...]]]:
    """The targets of an override: (path of the recipe or stage mapping, path within it)."""
    stages = data.get("stages")
    if parts[0] == "model" and isinstance(stages, list) and (len(parts) == 1 or parts[1] in _STARTS):
        # The model to start from: applies only to stages that start from their own model.
        begins = [i for i, stage in enumerate(stages) if _begins(stage)]
        return [((), parts), *((("stages", i), parts) for i in begins)]
    if parts[0] != "stages":
        staged = isinstance(stages, list) and parts[0] not in ("name", "runs")
        numbered = enumerate(stages if staged and isinstance(stages, list) else ())
        taking = [i for i, stage in numbered if isinstance(stage, dict) and takes(stage, parts[0])]
        return [(("stages", i), parts) for i in taking] or [((), parts)]
    if len(parts) < 3:
        raise ConfigError([f"{source}: give one setting of one stage, as in stages.rl.steps=10"])
    names = _stage_names(data)
    index = int(parts[1]) if parts[1].isdecimal() else names.index(parts[1]) if parts[1] in names else -1
    if not 0 <= index < len(names):
        known = ", ".join(names) or "none, this recipe is a single stage"
        raise ConfigError([f"{source}: there is no stage {parts[1]}; stages: {known}"])
    return [(("stages", index), parts[2:])]


def _stage_names(data: dict[str, Any]) -> list[str]:
    stages = data.get("stages")
    return [stage_name(stage) for stage in stages] if isinstance(stages, list) else []


_STARTS = ("path", "revision", "tiny")


def _begins(stage: Any) -> bool:
    """Whether a stage starts from its own model instead of another stage's."""
    model = stage.get("model") if isinstance(stage, dict) else None
    path = model.get("path") if isinstance(model, dict) and not model.get("stage") else None
    return isinstance(path, str) and not path.startswith("stages.")


def _put(data: Any, prefix: Place, top: Any) -> Any:
    """`data` with `top` merged in at `prefix`."""
    if not prefix:
        return merged(data, top, (), {})
    key, rest = prefix[0], prefix[1:]
    if isinstance(data, list):
        return [_put(item, rest, top) if i == key else item for i, item in enumerate(data)]
    return {**data, key: _put(data[key], rest, top)}
