"""Validate raw values into a recipe, and explain problems in lines that a user can act on.

    recipe = validate(Recipe, read("recipe.yaml"))    # or ConfigError

A problem reads `file:line: key: what is wrong; nearest valid key; remedy`:

    recipe.yaml:7: optim.lrr: unknown key; did you mean optim.lr?
    recipe.yaml:9: steps: 'many' is not allowed; give a whole number > 0 (default 100)
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from hone.base.settings import ConfigError, Layer, Place, Section, show

SectionT = TypeVar("SectionT", bound=Section)

#: pydantic's error type -> what is allowed instead.
ALLOWED = {
    "string_type": "text",
    "string_pattern_mismatch": "text of letters, digits, `.`, `_` and `-`",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "greater_than": "a number",
    "greater_than_equal": "a number",
    "less_than": "a number",
    "less_than_equal": "a number",
    "bool_type": "true or false",
    "none_required": "null",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping (indented `key: value` lines)",
    "model_type": "a mapping (indented `key: value` lines)",
    "model_attributes_type": "a mapping (indented `key: value` lines)",
}


def impossible(key: str, message: str) -> PydanticCustomError:
    """For validators: the error to raise for an impossible value of `key` (dotted, from the validated section)."""
    return PydanticCustomError("impossible", "{message}", {"key": key, "message": message})


def validate(model: type[SectionT], layer: Layer) -> SectionT:
    """The only validation. Strict: text is not a number, true is not 1; as JSON, so that lists become tuples."""
    try:
        return model.model_validate_json(json.dumps(layer.data), strict=True)
    except ValidationError as error:
        raise ConfigError(explain(error, model, layer)) from None


def explain(error: ValidationError, model: type[BaseModel], layer: Layer) -> list[str]:
    """One line per problem, in the order of the file."""
    by_place: dict[Place, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        by_place.setdefault(_place(detail, layer.data), []).append(detail)
    # Of a union's alternatives, the one whose error is deepest was meant.
    outer = {path[:n] for path in by_place for n in range(len(path))}
    kept = {p: d for p, d in by_place.items() if p not in outer or not all(_is_type(x) for x in d)}
    lines = [_line(path, details, model, layer) for path, details in kept.items()]
    return sorted(lines, key=lambda line: [int(part) if part.isdecimal() else -1 for part in line.split(":")[1:2]])


def _is_type(detail: ErrorDetails) -> bool:
    return detail["type"] in ALLOWED or detail["type"] == "literal_error"


def _place(detail: ErrorDetails, data: Any) -> Place:
    """The path of an error in the raw values: pydantic's location without union tags."""
    path: list[str | int] = []
    loc = detail["loc"]
    for n, key in enumerate(loc):
        exists = key in data if isinstance(data, dict) else isinstance(data, list) and key in range(len(data))
        if exists:
            data = data[key]
        elif not (n == len(loc) - 1 and detail["type"] == "missing"):
            continue
        path.append(key)
    if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
        path.append("name")  # the discriminator of every union
    return tuple(path)


def _line(path: Place, details: Sequence[ErrorDetails], model: type[BaseModel], layer: Layer) -> str:
    first = details[0]
    kind, context = first["type"], first.get("ctx", {})
    info = _field_at(model, path, layer.data)
    if kind in ("impossible", "value_error"):
        key, message = context.get("key", ""), first["msg"].removeprefix("Value error, ")
        words = re.match(r"([\w.]+): ", message)
        sections = _sections_at(model, path, layer.data)
        if kind == "value_error" and words and any(words[1] in s.model_fields for s in sections):
            key, message = words[1], message[words.end() :]
        path = (*path, *(int(k) if k.isdecimal() else k for k in key.split(".") if k))
    elif kind == "extra_forbidden":
        message = _unknown_key(path, model, layer)
    elif kind == "missing":
        message = "required, and not given; add it"
    elif kind == "union_tag_not_found":
        message = f"required, and not given; add one of {', '.join(_tags(model, path, layer.data))}"
    elif kind == "union_tag_invalid":
        message = _not_one_of(context["tag"], re.findall(r"'([^'(]+)'", context["expected_tags"]), model)
    elif kind == "literal_error":
        message = _not_one_of(first["input"], re.findall(r"'([^']*)'", context["expected"]), model) + _default_of(info)
    elif all(_is_type(d) for d in details):
        allowed = " or ".join(dict.fromkeys(_allowed(d, info) for d in details))
        message = f"{show(first['input'])} is not allowed; give {allowed}{_default_of(info)}"
        message += _hint(first, path, model, layer)
    else:
        message = f"{show(first['input'])} is not allowed: {first['msg'][0].lower()}{first['msg'][1:]}"
    dotted = ".".join(map(str, path))
    return f"{layer.where(path)}: {dotted}: {message}" if dotted else f"{layer.where(path)}: {message}"


def _unknown_key(path: Place, model: type[BaseModel], layer: Layer) -> str:
    key, itself = str(path[-1]), ".".join(map(str, path))
    prefix = itself.removesuffix(key)
    sections = _sections_at(model, path[:-1], layer.data)
    hints = [hint for s in sections if issubclass(s, Section) and (hint := s.hint(key))]
    if hints:
        return f"unknown key; {hints[0]}"
    if "." in key:
        return nest(key)
    names = model.other_names if issubclass(model, Section) else {}
    if other := names.get(itself) or names.get(key):
        if other.startswith("none: "):
            return f"unknown key; remove it: {other.removeprefix('none: ')}"
        return f"unknown key; hone's name for it is {other}"
    everywhere = [k for k in _all_keys(model) if k != itself]  # it may be valid in another member of a union
    if same := [k for k in everywhere if k.rpartition(".")[2] == key]:
        inside = [k for k in same if prefix and k.startswith(prefix)] or same
        nearest = [k for k in inside if k.count(".") == min(k.count(".") for k in inside)]
        place = f"did you mean {' or '.join(nearest[:3])}?"
        if len(nearest) == 1 and layer.where(path).startswith("override"):
            return f"unknown key; {place} write {nearest[0]}={show(_value(layer.data, path))}"
        return f"unknown key here; {place} move it there"
    here = [name for s in sections for name in s.model_fields]
    if near := difflib.get_close_matches(key, here, n=1):
        return f"unknown key; did you mean {prefix}{near[0]}?"
    if near := difflib.get_close_matches(key, everywhere, n=1, cutoff=0.7):
        return f"unknown key; did you mean {near[0]}?"
    return f"unknown key; valid here: {', '.join(here) or 'nothing'}; remove it or name one of these"


def setting_of(name: str, model: type[Section]) -> str | None:
    """Our setting for a name in another program, or for the end of one of ours (`lr`, `optim.lr`); None if there is
    none or several. `none: ` and why, for what needs no setting."""
    if other := model.other_names.get(name):
        return other
    ours = [key for key in dict.fromkeys(_all_keys(model)) if f".{key}".endswith(f".{name}")]
    outer = [key for key in ours if key.count(".") == min(k.count(".") for k in ours)]
    return outer[0] if len(outer) == 1 else None


def _value(data: Any, path: Place) -> Any:
    for key in path:
        data = data[key]
    return data


def nest(key: str) -> str:
    """A message with the form in files, `a: {b: ...}`, of an override's key `a.b`."""
    *outer, last = key.split(".")
    nested = "".join(f"{part}: {{" for part in outer) + f"{last}: ..." + "}" * len(outer)
    return f"keys with dots are for the command line; write {nested}"


def _not_one_of(value: Any, allowed: Sequence[str], model: type[BaseModel]) -> str:
    values = model.other_values if issubclass(model, Section) else {}
    near = [values.get(str(value).lower(), "")]
    near = near if near[0] in allowed else difflib.get_close_matches(str(value), allowed, n=1)
    suggestion = f"did you mean {near[0]}? " if near else ""
    return f"{show(value)} is not allowed; {suggestion}give one of {', '.join(allowed)}"


def _allowed(detail: ErrorDetails, info: FieldInfo | None) -> str:
    if detail["type"] == "literal_error":
        return detail["ctx"]["expected"].replace("'", "")
    text = ALLOWED[detail["type"]]
    bounds = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    if "number" in text:
        if detail["type"] in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
            if info and "int" in str(info.annotation) and "float" not in str(info.annotation):
                text = "a whole number"
            known = {name: value for name, value in detail["ctx"].items() if name in bounds}
        else:
            known = {}
        for rule in info.metadata if info else ():
            known |= {name: getattr(rule, name) for name in bounds if getattr(rule, name, None) is not None}
        text += " and".join(f" {sign} {known[name]}" for name, sign in bounds.items() if name in known)
    return text


def _default_of(info: FieldInfo | None) -> str:
    if info is None or info.is_required():
        return ""
    default = info.get_default(call_default_factory=True)
    return "" if isinstance(default, BaseModel) else f" (default {show(default)})"


def _hint(detail: ErrorDetails, path: Place, model: type[BaseModel], layer: Layer) -> str:
    value, kind = detail["input"], detail["type"]
    if kind == "string_type" and layer.where(path).startswith("override"):
        return f"; quote it twice: '{'.'.join(map(str, path))}=\"...\"'"
    if kind in ("int_type", "int_from_float") and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if kind in ("int_type", "float_type", "bool_type") and isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return ""
        return "; remove the quotes"
    if kind.startswith("model_"):
        keys = [name for s in _sections_at(model, path, layer.data) for name in s.model_fields]
        return f"; its keys are {', '.join(keys)}" if keys else ""
    return ""


def without_defaults(data: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Raw values without those that equal the default."""
    result: dict[str, Any] = {}
    for key, value in data.items():
        info, sections = model.model_fields.get(key), _sections_at(model, (key,), data)
        default = info.get_default(call_default_factory=True) if info and not info.is_required() else ...
        plain = default.model_dump(mode="json") if isinstance(default, BaseModel) else default
        if key != "name" and value == (list(plain) if isinstance(plain, tuple) else plain):
            continue
        nested = isinstance(value, dict) and len(sections) == 1
        result[key] = without_defaults(value, sections[0]) if nested else value
    for place, other in (model.follows if issubclass(model, Section) else {}).items():
        _without_followed(result, data, place, other)
    return result


def _without_followed(
    result: dict[str, Any], data: dict[str, Any], place: tuple[str, ...], other: tuple[str, ...]
) -> None:
    """In `result`, keep only the keys of the section at `place` that differ from its default, the one at `other`."""
    own, followed = (_at(data, path) for path in (place, other))
    if own is None or followed is None:
        return
    *outer, last = place
    for key in outer:
        result = result.setdefault(key, {})
    result[last] = {key: value for key, value in own.items() if key not in followed or value != followed[key]}


def _at(data: Any, path: Place) -> dict[str, Any] | None:
    """The mapping at `path`, or None."""
    for key in path:
        data = data.get(key) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else None


def with_defaults(stored: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """A resolved recipe with settings added since then at their defaults. A recipe that no longer validates (a setting
    was removed) is returned unchanged."""
    try:
        return model.model_validate(without_defaults(stored, model)).model_dump(mode="json")
    except ValidationError:
        return stored


# --- the tree of sections --------------------------------------------------------------------------------------------


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field can hold: one for an Optional, several for a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in _sections(argument)]


def _sections_at(model: type[BaseModel], path: Place, data: Any) -> list[type[BaseModel]]:
    """The sections allowed at `path`; for a union only the one that `name` selects, if any."""
    current: list[type[BaseModel]] = [model]
    for key in path:
        if isinstance(key, str):
            fields = [section.model_fields[key] for section in current if key in section.model_fields]
            current = [section for info in fields for section in _sections(info.annotation)]
        data = data.get(key) if isinstance(data, dict) else None
        if len(current) > 1 and isinstance(data, dict):
            name = str(data.get("name"))
            current = [s for s in current if {name, name.partition(":")[0]} & set(_names(s))] or current
    return current


def _field_at(model: type[BaseModel], path: Place, data: Any) -> FieldInfo | None:
    sections = _sections_at(model, path[:-1], data) if path else []
    return next((s.model_fields[str(path[-1])] for s in sections if path[-1] in s.model_fields), None)


def _names(section: type[BaseModel]) -> tuple[str, ...]:
    """The values of `name` that select this section."""
    info = section.model_fields.get("name")
    return (
        (section.name_prefix,)
        if issubclass(section, Section) and section.name_prefix
        else get_args(info.annotation if info else None)
    )


def _tags(model: type[BaseModel], path: Place, data: Any) -> list[str]:
    return [name for section in _sections_at(model, path[:-1], data) for name in _names(section)]


def _all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of the tree."""
    for name, info in model.model_fields.items():
        yield prefix + name
        for section in _sections(info.annotation):
            yield from _all_keys(section, f"{prefix}{name}.")
