"""Reading recipes: files with `extends`, overrides, one validation, errors with file and line.

    layer = read("recipe.yaml")    # raw values, each with its origin

Overrides of the command line: `hone.base.overrides`. Raw mappings are merged in order and validated once, at the end,
by `hone.base.validate`. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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

    #: Of the outermost section, names in other programs: of settings -> ours, dotted; of values -> ours.
    other_names: ClassVar[Mapping[str, str]] = {}
    other_values: ClassVar[Mapping[str, str]] = {}

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def hint(cls, key: str) -> str | None:
        """What to write instead of an unknown key of this section, if the key reveals it."""
        return None

    def without_effect(self) -> list[str]:
        """Notes on settings that have no effect beside the others, for sections of tasks, which are added in one file;
        those of other sections are in `hone.recipe.notes`."""
        return []

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


#: Limits far beyond any recipe that a person writes: files may be untrusted.
MAX_DEPTH = 40  # levels of nesting, and of files that extend each other
MAX_VALUES = 20_000
MAX_BYTES = 1 << 20

Place = tuple[str | int, ...]  # the path of a value: ("stages", 0, "optim", "lr")
LongForm = Callable[[str, Any], Any]  # (key of the top level, value) -> the value, or what its short form stands for


class Exactly(dict[str, Any]):
    """A mapping that replaces another one when they are merged, as lists do."""


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


def read(path: str | Path, long_form: LongForm = lambda key, value: value) -> Layer:
    """Read a recipe file and everything it extends, with short forms replaced by what they stand for."""

    def expanded(path: Path) -> Layer:
        return _expand(_read_file(path), long_form)

    return _read_extended(Path(path), (), {}, expanded)


def _read_extended(
    path: Path, trail: tuple[Path, ...], known: dict[Path, Layer], read_one: Callable[[Path], Layer]
) -> Layer:
    """Read a file and those that it extends. `known`: files already read, so that a file extended by two others is read
    once."""
    if path not in known:
        known[path] = _read_with_parents(path, trail, known, read_one)
    return known[path]


def _read_with_parents(
    path: Path, trail: tuple[Path, ...], known: dict[Path, Layer], read_one: Callable[[Path], Layer]
) -> Layer:
    layer = read_one(path)
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
        merged = merge(merged, _read_extended(target, (*trail, here), known, read_one))
    return merge(merged, layer)


def _read_file(path: Path) -> Layer:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError([f"{path}: {path.stat().st_size} bytes are too many for a recipe; at most {MAX_BYTES}"])
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            [f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"]
        ) from None
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror}){_near_file(path)}"]) from None
    data, origins = _parse_json(text, str(path)) if path.suffix == ".json" else parse(text, str(path))
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


def parse(text: str, name: str) -> tuple[Any, dict[Place, str]]:
    """Parses YAML 1.2 into plain values and the line of every value."""
    yaml = YAML(typ="safe", pure=True)
    origins: dict[Place, str] = {}
    if (depth := _brackets_deep(text)) > MAX_DEPTH:  # the parser itself would run out of stack or time
        raise ConfigError([f"{name}: nested too deep ({depth} open brackets); at most {MAX_DEPTH} are allowed"])
    try:
        node = yaml.compose(text)
        return (None if node is None else _plain(node, (), name, origins, yaml)), origins
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark and not name.startswith("override") else ""
        raise ConfigError([f"{name}{line}: not valid YAML: {error.problem or error.context}"]) from None
    except RecursionError:
        raise ConfigError([f"{name}: nested too deep; at most {MAX_DEPTH} levels are allowed"]) from None
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
    data = merged(base.data, top.data, (), origins)
    return Layer(data, origins | top.origins)


def merged(base: Any, top: Any, path: Place, origins: dict[Place, str]) -> Any:
    """`top` merged over `base`, both at `path`; drops the origins of replaced values."""
    both = isinstance(base, dict) and isinstance(top, dict) and not isinstance(top, Exactly)
    # The settings of one task do not carry over to another.
    other = both and path[-1:] == ("task",) and "name" in top and "name" in base and top["name"] != base["name"]
    if not both or other:
        for old in [p for p in origins if p[: len(path)] == path]:
            del origins[old]
        return top
    return {**base, **{k: merged(base[k], v, (*path, k), origins) if k in base else v for k, v in top.items()}}


def _expand(layer: Layer, long_form: LongForm) -> Layer:
    """Replace short forms at the top level, in each stage and in each line of a schedule."""
    origins = dict(layer.origins)

    def expanded(data: Any, path: Place) -> Any:
        if not isinstance(data, dict):
            return data
        result = {}
        for key, value in data.items():
            result[key] = long_form(key, value)
            if result[key] is not value:
                outer: Place = (*path, key)
                for place in places(result[key], outer):
                    origins.setdefault(place, origins.get(outer, origins[()]))
            if key in ("stages", "schedule") and isinstance(value, list):
                result[key] = [expanded(item, (*path, key, i)) for i, item in enumerate(value)]
        return result

    return Layer(expanded(layer.data, ()), origins)


def places(value: Any, path: Place) -> Iterator[Place]:
    """The paths of `value`, which is at `path`, and of everything in it."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def stage_name(stage: Any) -> str:
    """The `name` of a stage, else its kind."""
    return str(stage.get("name", stage.get("stage", "rl"))) if isinstance(stage, dict) else "?"
