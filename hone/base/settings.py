"""Reading recipes: files with `extends`, overrides, one validation, errors with file and line.

    layer = read("recipe.yaml")                # raw values, each with its origin
    layer = override(layer, "optim.lr=1e-5")   # as given on the command line

Raw mappings are merged in order and validated once, at the end, by `hone.base.validate`. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict
from ruamel.yaml import YAML, MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import Node


class Section(BaseModel):
    """A group of settings: frozen, unknown keys are errors, no infinities."""

    #: If `name` selects among sections and this one has many names: their common part before the colon.
    name_prefix: ClassVar[str] = ""
    #: Inner sections whose unset keys default to those of another section: path -> path of the other.
    follows: ClassVar[dict[tuple[str, ...], tuple[str, ...]]] = {}

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def changed(self) -> list[str]:
        """The settings whose value is not the default."""
        optional = {key: info for key, info in type(self).model_fields.items() if not info.is_required()}
        return [k for k, info in optional.items() if getattr(self, k) != info.get_default(call_default_factory=True)]


class UserError(Exception):
    """An error that the user can fix. The command line shows only its message and exits with `exit_code`."""

    exit_code: ClassVar[int] = 2


#: Exit code of a process that lost another process of its run: the cause is there, and the run can be restarted.
PEER_LOST = 76


class ConfigError(UserError):
    """Problems of a recipe, one line each."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = tuple(dict.fromkeys(lines))
        super().__init__("\n".join(self.lines))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        """Make it picklable: it is passed between processes."""
        return type(self), (self.lines,)


#: The key that a bare string sets: `model: tiny` reads as `model: {path: tiny}`.
SHORTHANDS = {"model": "path", "task": "name", "launch": "kind"}

#: Limits far beyond any recipe that a person writes: files may be untrusted.
MAX_DEPTH = 40  # levels of nesting, and of files that extend each other
MAX_VALUES = 20_000
MAX_BYTES = 1 << 20

Place = tuple[str | int, ...]  # the path of a value: ("stages", 0, "optim", "lr")


@dataclass(frozen=True)
class Layer:
    """Raw values, with the origin (`file:line`) of each value and mapping."""

    data: dict[str, Any]
    origins: dict[Place, str] = field(default_factory=dict)

    def where(self, path: Place) -> str:
        """The origin of a value, or of the nearest enclosing mapping if it has no origin itself."""
        while path and path not in self.origins:
            path = path[:-1]
        return self.origins.get(path, "recipe")

    def below(self, prefix: Place) -> dict[Place, str]:
        """The origins of everything under `prefix`, with paths relative to it."""
        n = len(prefix)
        return {path[n:]: place for path, place in self.origins.items() if path[:n] == prefix}


# --- reading ---------------------------------------------------------------------------------------------------------


def read(path: str | Path) -> Layer:
    """Read a recipe file and everything it extends."""
    return _read_extended(Path(path), (), {})


def _read_extended(path: Path, trail: tuple[Path, ...], known: dict[Path, Layer]) -> Layer:
    """`known`: files already read, so that a file extended by two others is read once."""
    if path not in known:
        known[path] = _read_with_parents(path, trail, known)
    return known[path]


def _read_with_parents(path: Path, trail: tuple[Path, ...], known: dict[Path, Layer]) -> Layer:
    layer = _expand(_read_file(path))
    here = path.resolve()
    parents = layer.data.pop("extends", [])
    place = layer.where(("extends",))
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(p, str) for p in parents):
        raise ConfigError([f"{place}: extends: {show(parents)} is not allowed; give a path or a list of paths"])
    merged = Layer({})
    for parent in parents:
        target = Path(os.path.normpath(path.parent / Path(parent).expanduser()))
        if target.resolve() in (*trail, here):
            chain = " -> ".join(p.name for p in (*trail, here, target))
            raise ConfigError([f"{place}: extends: {parent} leads back to itself ({chain}); remove one of the links"])
        if len(trail) >= MAX_DEPTH:
            raise ConfigError([f"{place}: extends: more than {MAX_DEPTH} files deep; join some of them"])
        if not target.is_file():
            raise ConfigError([f"{place}: extends: no file {target}{_near_file(target)}; paths are relative to {path}"])
        merged = merge(merged, _read_extended(target, (*trail, here), known))
    return merge(merged, layer)


def _read_file(path: Path) -> Layer:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError([f"{path}: {path.stat().st_size} bytes are no recipe; {MAX_BYTES} are the most"])
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            [f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"]
        ) from None
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror}){_near_file(path)}"]) from None
    data, origins = _parse_json(text, str(path)) if path.suffix == ".json" else _parse(text, str(path))
    if data is None:
        raise ConfigError([f"{path}:1: the file is empty; a recipe needs at least name and task"])
    if not isinstance(data, dict):
        raise ConfigError([f"{path}:1: {show(data)} is not a recipe; write `key: value` lines"])
    return Layer(data, origins)


def show(value: Any) -> str:
    """A value as quoted in messages."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _near_file(path: Path) -> str:
    names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def _parse(text: str, name: str) -> tuple[Any, dict[Place, str]]:
    """Parse YAML 1.2 into plain values and the line of every value."""
    yaml = YAML(typ="safe", pure=True)
    origins: dict[Place, str] = {}
    if (depth := _brackets_deep(text)) > MAX_DEPTH:  # the parser itself would run out of stack or time
        raise ConfigError([f"{name}: nested too deep ({depth} open brackets); {MAX_DEPTH} are the most"])
    try:
        node = yaml.compose(text)
        return (None if node is None else _plain(node, (), name, origins, yaml)), origins
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark and not name.startswith("override") else ""
        raise ConfigError([f"{name}{line}: not valid YAML: {error.problem or error.context}"]) from None
    except RecursionError:
        raise ConfigError([f"{name}: nested too deep; {MAX_DEPTH} levels are the most"]) from None
    except (YAMLError, ValueError) as error:  # ValueError: an invalid number or escape
        raise ConfigError([f"{name}: not valid YAML: {str(error).splitlines()[0]}"]) from None


def _brackets_deep(text: str) -> int:
    """The largest number of open brackets, including brackets in strings and comments."""
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth = depth + 1 if bracket in "[{" else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


def _parse_json(text: str, name: str) -> tuple[Any, dict[Place, str]]:
    """Parse config.resolved.json: hone writes it, so exact values matter more than line numbers."""
    try:
        if _brackets_deep(text) > 10 * MAX_DEPTH:  # brackets in strings count too
            raise RecursionError
        return json.loads(text), {(): name}
    except RecursionError:
        raise ConfigError([f"{name}: nested too deep"]) from None
    except ValueError as error:
        raise ConfigError([f"{name}: not valid JSON: {error}"]) from None


def _plain(node: Node, path: Place, name: str, origins: dict[Place, str], yaml: YAML) -> Any:
    place = f"{name}:{node.start_mark.line + 1}"
    origins.setdefault(path, place)  # a mapping entry has already set the line of its key
    if len(path) > MAX_DEPTH:
        raise ConfigError([f"{place}: nested too deep, or an alias that contains itself"])
    if len(origins) > MAX_VALUES:
        raise ConfigError([f"{place}: more than {MAX_VALUES} values, aliases written out; a recipe has some hundred"])
    if isinstance(node, SequenceNode):
        return [_plain(item, (*path, i), name, origins, yaml) for i, item in enumerate(node.value)]
    if isinstance(node, MappingNode):
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = f"{name}:{key_node.start_mark.line + 1}"
            key = key_node.value
            if not isinstance(key_node, ScalarNode) or key == "<<":
                raise ConfigError([f"{place}: keys are plain words here; to build on another file use extends"])
            inner: Place = (*path, key)
            if key in values:
                raise ConfigError([f"{place}: {key}: given twice (first at {origins[inner]}); remove one"])
            origins[inner] = place
            values[key] = _plain(value_node, inner, name, origins, yaml)
        return values
    tag = str(node.tag)
    if tag.endswith((":str", ":timestamp")):  # a date is text: no setting is a date
        return node.value
    if not tag.endswith((":int", ":float", ":bool", ":null")):
        raise ConfigError([f"{place}: tag {tag} is not allowed; write a plain value"])
    return yaml.constructor.construct_object(node)


# --- merging ---------------------------------------------------------------------------------------------------------


def merge(base: Layer, top: Layer) -> Layer:
    """Merge `top` over `base`: mappings key by key; everything else, including lists, is replaced."""
    origins = dict(base.origins)
    data = _merged(base.data, top.data, (), origins)
    return Layer(data, origins | top.origins)


def _merged(base: Any, top: Any, path: Place, origins: dict[Place, str]) -> Any:
    both = isinstance(base, dict) and isinstance(top, dict)
    # The settings of one task do not carry over to another.
    kind = SHORTHANDS.get(str(path[-1])) if path else None
    other = both and kind == "name" and "name" in top and "name" in base and top["name"] != base["name"]
    if not both or other:
        for old in [p for p in origins if p[: len(path)] == path]:
            del origins[old]
        return top
    return {**base, **{k: _merged(base[k], v, (*path, k), origins) if k in base else v for k, v in top.items()}}


def _expand(layer: Layer) -> Layer:
    """Expand bare strings of shorthand keys to mappings, at the top level and in each stage."""
    origins = dict(layer.origins)

    def expanded(data: Any, path: Place) -> Any:
        if not isinstance(data, dict):
            return data
        result = {}
        for key, value in data.items():
            if isinstance(value, str) and key in SHORTHANDS:
                outer: Place = (*path, key)
                origins.setdefault((*outer, SHORTHANDS[key]), origins.get(outer, origins[()]))
                value = {SHORTHANDS[key]: value}
            result[key] = value
        return result

    data = expanded(layer.data, ())
    if isinstance(data.get("stages"), list):
        data["stages"] = [expanded(stage, ("stages", i)) for i, stage in enumerate(data["stages"])]
    return Layer(data, origins)


# --- overrides -------------------------------------------------------------------------------------------------------


def override(layer: Layer, text: str, model: type[BaseModel] | None = None) -> Layer:
    """Apply one `a.b=c` from the command line; c is parsed as YAML (1e-5 is a number, [a, b] a list).

    In a recipe with stages `a.b=c` applies to every stage, `stages.rl.a.b=c` to one, named by name, kind or index.
    """
    source = f"override {text!r}"
    key, equals, raw = text.partition("=")
    head, mark, function = key.strip().partition("reward.parts.")  # names of functions contain dots
    parts = (*head.split(".")[:-1], "reward", "parts", function) if mark else tuple(key.strip().split("."))
    if not equals or "" in parts:
        raise ConfigError([f"{source}: overrides read key=value with a dotted key, as in optim.lr=1e-5"])
    if parts[0] == "extends":
        raise ConfigError([f"{source}: extends is read from files only; write a recipe that extends the other"])
    value, _ = _parse(raw, source)
    if parts[-1] in SHORTHANDS and isinstance(value, str):
        value = {SHORTHANDS[parts[-1]]: value}
    elif len(parts) > 1 and SHORTHANDS.get(parts[-2]) == parts[-1] == "name":
        parts, value = parts[:-1], {"name": value}
    data, origins = layer.data, dict(layer.origins)
    if model is not None and parts[0] not in model.model_fields and parts[0] in _stage_names(data):
        raise ConfigError([f"{source}: {parts[0]} is a stage; write stages.{text.strip()}"])
    for prefix, path in _targets(data, parts, source):
        default = _default(model, path[:-1])
        unset = _get(data, (*prefix, *path[:-1])) is None and _get(data, path[:-1]) is None
        # Setting one entry of a free mapping keeps the default entries.
        top: Any = {**default, path[-1]: value} if default and unset else {path[-1]: value}
        for part in reversed(path[:-1]):
            top = {part: top}
        for place in _places(top, ()):
            whole: Place = (*prefix, *place)
            if len(place) >= len(path):
                origins[whole] = source
            else:
                origins.setdefault(whole, source)
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


def _targets(data: dict[str, Any], parts: tuple[str, ...], source: str) -> list[tuple[Place, tuple[str, ...]]]:
    """The targets of an override: (path of the recipe or stage mapping, path within it)."""
    stages = data.get("stages")
    if parts[0] == "model" and isinstance(stages, list) and (len(parts) == 1 or parts[1] in _STARTS):
        # The model to start from: only stages that start from a model of their own take it.
        begins = [i for i, stage in enumerate(stages) if _begins(stage)]
        return [((), parts), *((("stages", i), parts) for i in begins)]
    if parts[0] != "stages":
        staged = isinstance(stages, list) and parts[0] not in ("name", "runs")
        return [(("stages", i), parts) for i in range(len(stages or ()))] if staged else [((), parts)]
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


def stage_name(stage: Any) -> str:
    """The `name` of a stage, else its kind."""
    return str(stage.get("name", stage.get("stage", "rl"))) if isinstance(stage, dict) else "?"


def _put(data: Any, prefix: Place, top: Any) -> Any:
    """`data` with `top` merged in at `prefix`."""
    if not prefix:
        return _merged(data, top, (), {})
    key, rest = prefix[0], prefix[1:]
    if isinstance(data, list):
        return [_put(item, rest, top) if i == key else item for i, item in enumerate(data)]
    return {**data, key: _put(data[key], rest, top)}


def _places(value: Any, path: Place) -> Iterator[Place]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*path, key))
