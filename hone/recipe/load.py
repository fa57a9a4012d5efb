"""Load and validate a recipe from files, presets and overrides.

recipe = load("recipes/demo/recipe.yaml", ["optim.lr=1e-5"])    # Recipe or Pipeline, or ConfigError
recipe = load_for_task("knights")                               # a task or a data file; the rest is default
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import (
    BaseModel,
    ValidationError,
)

from hone.base import places, sealed
from hone.base.overrides import override
from hone.base.settings import ConfigError, Layer, Place, Section, UserError, merge, read, stage_name
from hone.base.validate import explain, validate
from hone.grade.targets import functions_in, read_target
from hone.recipe import schedule as schedules
from hone.recipe import stages as chain
from hone.recipe.recipe import KINDS, Name, Pipeline, Recipe, chosen, kinds_with
from hone.recipe.short import long_form
from hone.tasks import TASKS, kind_of
from hone.tasks.registered import registered
from hone.tasks.rows.files import SUFFIXES


def load(path: str | Path, overrides: Sequence[str] = (), check_files: bool = True) -> Recipe | Pipeline:
    """Load a recipe file, a recipe or run folder, or a preset by name, and apply the overrides `a.b=c`.

    Raises ConfigError, with one line per problem. `check_files`: the files and folders that it names must exist, which
    reports of finished runs do not need.
    """
    file = find(path)
    if file.name == "config.resolved.json":
        sealed.require_file(file.parent, file.name)
    if file.name == "config.resolved.json" and check_files:
        places.use(file.parent)
    else:
        places.forget()
    layer = read(file, long_form)
    if file.suffix == ".json":
        layer = Layer(_as_written(layer.data), layer.origins)
    if file.name == "config.resolved.json":  # a run folder may have been moved
        folder = file.parent if file.parent.name else file.parent.resolve()
        layer.data.update(name=folder.name, runs=str(folder.parent))
    for text in overrides:
        layer = override(layer, text, Recipe, _takes, long_form)
    if wrong := [] if file.name == "config.resolved.json" else list(_of_other_kinds(layer)):
        raise ConfigError(wrong)
    recipe = _load_stages(layer) if "stages" in layer.data else _load_one(layer)
    missing = list(_missing_files(recipe, layer)) if check_files else []
    if missing:
        raise ConfigError(missing)
    return recipe


def load_for_task(source: str, overrides: Sequence[str] = ()) -> Recipe | Pipeline:
    """Like `load`; a bare task name, or a file or folder of rows, stands for a recipe with defaults."""
    if is_data(source):
        layer = Layer({"name": "data", "task": {"name": "dataset", "source": source}}, {(): source})
    elif kind_of(source) in (tasks := {*TASKS, *registered()}) or source in tasks:
        layer = Layer({"name": source.replace(":", "-"), "task": {"name": source}}, {(): source})
    else:
        near = difflib.get_close_matches(source, sorted({*tasks, *presets()}), n=1)
        if near and not Path(source).expanduser().exists() and source not in presets():
            raise UserError(f"{source}: no such task, recipe or data; did you mean {near[0]}?")
        return load(source, overrides)
    for text in overrides:
        layer = override(layer, text, Recipe, long_form=long_form)
    return validate(Recipe, layer)


def load_for_model(folder: str, defaults: Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """A recipe for a model without one; `defaults`: its settings, beside name, task and model."""
    name = re.sub(r"[^\w.-]", "-", Path(folder).resolve().name) or "model"
    values = {"name": name, "task": {"name": "knights"}, "model": {"path": folder}, **defaults}
    layer = Layer(values, {(): folder})
    for text in overrides:
        layer = override(layer, text, Recipe, long_form=long_form)
    return validate(Recipe, layer)


def is_data(source: str) -> bool:
    """Whether `source` names a data file, existing or not, or a folder with data files and no recipe."""
    path = Path(source).expanduser()
    if path.is_dir():
        return not any((path / name).is_file() for name in ("recipe.yaml", "config.resolved.json"))
    if path.suffix == ".json":  # a list of rows, not a recipe
        return path.is_file() and path.read_text(encoding="utf-8-sig", errors="replace").lstrip().startswith("[")
    return path.suffix.lower() in SUFFIXES


def find(path: str | Path) -> Path:
    """The recipe file for a path or the name of a preset."""
    path = Path(path).expanduser()
    for candidate in (path / "recipe.yaml", path / "config.resolved.json") if path.is_dir() else (path,):
        if candidate.is_file():
            _refuse_others(candidate)
            return candidate
    if path.is_dir():
        is_model = ". It holds a model: write model=PATH after a recipe" if (path / "config.json").is_file() else ""
        raise ConfigError([f"{path}: no recipe.yaml and no config.resolved.json in this folder{is_model}"])
    known = presets()
    if str(path) in known:
        return known[str(path)]
    beside = {p.stem if p.suffix in (".yaml", ".yml") else p.name: str(p) for p in _listed(path.parent)}
    names = {name: name for name in known} | beside
    near = difflib.get_close_matches(path.stem if path.suffix in (".yaml", ".yml") else path.name, names, n=1)
    meant = f"did you mean {names[near[0]]}? " if near else ""
    raise ConfigError([f"{path}: no such recipe or run; {meant}`hone config presets` lists those that come with hone"])


def _refuse_others(file: Path) -> None:
    """Raises ConfigError for code or data in place of a recipe, and says how to use it."""
    if file.suffix == ".py":
        names = _functions(file)
        use = f"{file}:{names[0] if len(names) == 1 else 'FUNCTION'}"
        how = f"as a reward: hone train RECIPE reward={use}, or hone train --data ROWS --reward {use}"
        functions_are = f"its functions are {', '.join(names) or 'none'}"
        raise ConfigError([f"{file}: a Python file, not a recipe; {functions_are}; {how}"])
    if is_data(str(file)):
        how = f"hone train RECIPE task={file}, or hone train --data {file} --model MODEL"
        raise ConfigError([f"{file}: a file of rows, not a recipe; to train on them: {how}"])


def _functions(file: Path) -> list[str]:
    try:
        return functions_in(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise ConfigError([f"{file}: a Python file, not a recipe, and it cannot be parsed: {error}"]) from None


def _listed(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def presets() -> dict[str, Path]:
    """The recipes that come with hone, by name, from the checkout or the installed package."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package.parent / "recipes", package / "recipes"):
        files = sorted(folder.glob("*/recipe.yaml"))
        if files:
            return {file.parent.name: file for file in files}
    return {}


# --- kinds of stages -------------------------------------------------------------------------------------------------


def _kind(stage: Mapping[str, Any]) -> str:
    return str(stage.get("stage", "rl"))


def _takes(stage: Mapping[str, Any], key: str) -> bool:
    """Whether a raw stage has a setting of the top level; keys that no kind has are left to the validation."""
    kinds = kinds_with(key)
    return not kinds or _kind(stage) not in KINDS or _kind(stage) in kinds


def _of_other_kinds(layer: Layer) -> Iterator[str]:
    """Error lines for settings that are written in a stage whose kind does not have them.

    At the top level of a pipeline they are for other stages. A resolved recipe is not checked: each of its stages holds
    what it inherited.
    """
    stages = layer.data.get("stages")
    places: list[tuple[Place, dict[str, Any]]] = [((), layer.data)] if "stages" not in layer.data else []
    if isinstance(stages, list):
        places = [(("stages", i), stage) for i, stage in enumerate(stages) if isinstance(stage, dict)]
    for prefix, stage in places:
        kind = f"{_kind(stage)}{'' if 'stage' in stage else ' (the default)'}"
        for key in stage:
            if not _takes(stage, key):
                kinds = kinds_with(key)
                remedy = f"set stage: {' or '.join(kinds)}"
                if prefix:
                    remedy = "move it to the top level of the recipe, if it is for other stages"
                place, dotted = layer.where((*prefix, key)), ".".join(map(str, (*prefix, key)))
                of = f"stages of kind {' and '.join(kinds)}"
                yield f"{place}: {dotted}: a setting of {of}, and this stage is of kind {kind}; remove it, or {remedy}"


# --- stages ----------------------------------------------------------------------------------------------------------


def _load_one(layer: Layer) -> Recipe:
    recipe = validate(Recipe, layer)
    references = {"model.path": recipe.model.path, "teacher": recipe.teacher, "sft.data": recipe.sft.data}
    for key, value in references.items():
        if chain.stage_named(value) is not None:
            place = layer.where(tuple(key.split(".")))
            raise ConfigError([f"{place}: {key}: {value}: this recipe has no stages; give a path, or a hub id"])
    return recipe


class _Header(Section):
    """The keys of a pipeline that its stages do not have."""

    name: Name
    runs: str = "runs"


def _load_stages(layer: Layer) -> Pipeline:
    stages = layer.data["stages"]
    if not isinstance(stages, list) or not stages or not all(isinstance(stage, dict) for stage in stages):
        message = "stages: give a list with one mapping per stage, such as `- stage: sft`"
        raise ConfigError([f"{layer.where(('stages',))}: {message}"])
    own: dict[str, Any] = {key: layer.data[key] for key in ("name", "runs") if key in layer.data}
    header = validate(_Header, Layer(own, layer.origins))
    shared = {key: value for key, value in layer.data.items() if key not in ("name", "runs", "stages")}
    shared_origins = {p: o for p, o in layer.origins.items() if p and p[0] in shared}
    recipes: list[Recipe] = []
    lines: list[str] = []
    settled: list[dict[str, Any]] = []
    for i, stage in enumerate(stages):
        if "runs" in stage:
            place = layer.where(("stages", i, "runs"))
            raise ConfigError([f"{place}: stages.{i}.runs: belongs to the whole recipe; move it to the top level"])
        merged = merge(Layer(shared, shared_origins), Layer(stage, layer.below(("stages", i))))
        merged.data.setdefault("name", stage_name(merged.data))
        merged.data["runs"] = f"{header.runs}/{header.name}"
        settled.append(merged.data)
        try:
            merged = chain.begun(merged, stage, settled[:-1], i)
            recipes.append(validate(Recipe, merged))
        except ConfigError as error:
            lines += error.lines
    if lines:
        raise ConfigError(lines)
    try:
        return Pipeline(name=header.name, runs=header.runs, stages=tuple(recipes))
    except ValidationError as error:
        raise ConfigError(explain(error, Pipeline, layer)) from None


def _as_written(data: dict[str, Any]) -> dict[str, Any]:
    """A resolved recipe without its defaults, because rules about settings ask whether a setting was given."""
    if not isinstance(data.get("stages"), list):
        return chosen(data)
    return {**data, "stages": [_stage_as_written(stage) for stage in data["stages"]]}


def _stage_as_written(stage: dict[str, Any]) -> dict[str, Any]:
    """A resolved stage without its defaults. `model.path` stays: without it, a stage continues from the one before."""
    written = chosen(stage)
    path = (stage.get("model") or {}).get("path")
    return written if path is None else {**written, "model": {**written.get("model", {}), "path": path}}


def _missing_files(recipe: Recipe | Pipeline, layer: Layer) -> Iterator[str]:
    """Error lines for missing files: keys ending in `_file`, data, adapters, and model paths that are not hub ids."""
    for i, stage in enumerate(recipe.stages):
        prefix = ("stages", i) if isinstance(recipe, Pipeline) else ()
        yield from _missing_functions(stage, layer, prefix)
        for path, value in leaves(stage):
            is_model = path == ("model", "path") and value != "tiny" and is_path(value)
            is_model |= path == ("teacher",) and value is not None and "://" not in value and is_path(value)
            is_adapter = path == ("lora", "path") and value is not None
            is_data_ = path == ("sft", "data") and value is not None and (is_path(value) or is_data(value))
            is_data_ |= path == ("task", "source") and value is not None and is_data(value)
            is_model, is_data_ = (is_named and chain.stage_named(value) is None for is_named in (is_model, is_data_))
            if not (is_model or is_adapter or is_data_ or (path[-1].endswith("_file") and value)):
                continue
            target = places.locate(value)
            if is_data_ and target.is_dir():
                continue
            place = layer.where((*prefix, *path)) if (*prefix, *path) in layer.origins else layer.where(path)
            if is_adapter and not (target / "adapter_config.json").is_file():
                yield f"{place}: lora.path: {value} has no adapter_config.json; give the folder of a PEFT adapter"
            elif is_model and not any((target / name).is_file() for name in ("config.json", "adapter_config.json")):
                what = "has no config.json" if target.is_dir() else "is not a folder here"
                remedy = "give `tiny`, the folder of a Hugging Face checkpoint, or a hub id such as Qwen/Qwen3-0.6B"
                if (target / "model" / "config.json").is_file():  # the folder of a stage
                    remedy = f"give {value.rstrip('/')}/model, the model inside of it"
                yield f"{place}: {'.'.join(path)}: {value} {what}; {remedy}"
            elif not is_model and not is_adapter and not target.is_file():
                yield f"{place}: {'.'.join(path)}: no file {value}; paths are relative to {Path.cwd()}"


def _missing_functions(stage: Recipe, layer: Layer, prefix: Place) -> Iterator[str]:
    for name in stage.reward.parts:
        try:
            if ":" in name:
                read_target(name)
        except UserError as error:
            whole: Place = (*prefix, "reward", "parts", name)
            place = layer.where(whole if whole in layer.origins else ("reward", "parts", name))
            yield f"{place}: reward.parts: {error}"


def is_path(value: str) -> bool:
    """Whether a value names a folder rather than a hub id (`name` or `owner/name`)."""
    head = value.split("/")[0]
    return (
        places.is_known(value)
        or value.startswith(("/", ".", "~"))
        or value.count("/") > 1
        or os.path.isdir(head)
        or os.path.exists(value)
    )


def leaves(section: BaseModel, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every setting that is not a section itself: its path of keys, and its value."""
    for key, value in section:
        if isinstance(value, BaseModel):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def schema() -> dict[str, Any]:
    """JSON schema of a recipe file, for editors."""
    tree = Recipe.model_json_schema()
    fields = tree["properties"]
    text_or = [{"type": "string"}]
    names = {"type": "array", "items": {"type": "string"}}
    for key, short in (("model", text_or), ("launch", text_or), ("reward", [*text_or, names])):
        fields[key] = {**fields[key], "anyOf": [{"$ref": fields[key].pop("$ref", "")}, *short]}
    fields["task"] = {"anyOf": [fields["task"], *text_or]}
    parts = tree["$defs"]["RewardConfig"]["properties"]
    parts["parts"] = {"anyOf": [parts["parts"], names]}
    paths = {"anyOf": [{"type": "string"}, names]}
    stage = {
        "type": "object",
        "properties": dict(fields),
        "additionalProperties": False,
        "allOf": list(_kind_schemas()),
    }
    fields["schedule"] = {**fields["schedule"], "items": schedules.line_schema(fields)}
    fields["extends"] = {**paths, "description": "Recipe files to build on, relative to this one."}
    fields["stages"] = {
        "type": "array",
        "items": stage,
        "description": "Each is merged over the keys of the top level.",
    }
    del tree["required"]  # may come from a file that it extends, or from a stage
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **tree, "title": "hone recipe"}


def _kind_schemas() -> Iterator[dict[str, Any]]:
    """For each kind of stage: the keys that such a stage of a pipeline can have."""
    for kind, settings in KINDS.items():
        named: dict[str, Any] = {"properties": {"stage": {"const": kind}}}
        if kind != "rl":  # the default
            named["required"] = ["stage"]
        yield {
            "if": named,
            "then": {"propertyNames": {"enum": [key for key in settings.model_fields if key != "runs"]}},
        }
