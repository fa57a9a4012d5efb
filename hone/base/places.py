"""Find the files that a recipe names. The only module that resolves such paths.

A path in a recipe is relative to the folder in which hone was started. But a run folder may be copied or used from
another folder, so it records the files that its recipe names, with copies of small ones:

    RUN/inputs.json   {"folders": ["/home/me/runs/x"],      where the run has been
                       "inputs": {"data/train.jsonl": {"keys": ["task.source"], "kind": "data", "sha256": "...",
                           "absolute": "/home/me/data/train.jsonl", "relative": "../../data/train.jsonl",
                           "copy": "inputs/1a2b3c4d/train.jsonl"}}}
    RUN/inputs/       copies: user functions with the local files that they import, and small data

The values in the recipe stay unchanged. When a run folder is loaded (`use`), each is looked up in this order: the copy,
the path relative to the run, the absolute path, the path from here; only files with the recorded contents count.

    places.record(folder, config)       # when a run begins or continues
    places.use(folder)                  # when a run folder is loaded
    places.locate("data/train.jsonl")   # Path; UserError if the run in use lacks it
    places.moved(base, near)            # a path recorded in a run, after the run has moved

Imports no torch.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hone.base import checksums
from hone.base.settings import UserError

FILE = "inputs.json"
COPIES = "inputs"

#: Data up to this many bytes are copied into the run.
COPY_BYTES = 16 * 2**20
#: Files of a model up to this many bytes are hashed; larger ones count by size: weights are read on loading.
SMALL = 2**20

_REMEDY = "restore it from a copy, or remove it and give paths on the command line, as in task.source=PATH"

_known: dict[str, Path] = {}
_problems: dict[str, str] = {}


# --- look-up ----------------------------------------------------------------------------------------------------------


def locate(value: str | Path) -> Path:
    """The path for a value of a recipe. Raises UserError if the run in use names it and it is missing."""
    text = str(value)
    if text in _problems:
        raise UserError(_problems[text])
    return _known.get(text) or Path(value).expanduser()


def locate_target(target: str) -> str:
    """`path/file.py:function` with the located file."""
    place, _, name = target.rpartition(":")
    return f"{locate(place)}:{name}" if place in _known or place in _problems else target


def is_known(value: str) -> bool:
    """Whether the run in use records the value as a local file or folder."""
    return value in _known or value in _problems


def forget() -> None:
    """Stop using a run: paths are relative to the current folder again."""
    _known.clear()
    _problems.clear()


def use(folder: Path) -> None:
    """Resolve paths for the run in this folder from now on. Raises UserError if its record is damaged."""
    forget()
    for file in (folder / FILE, *sorted(folder.glob(f"*/{FILE}"))):
        if not file.is_file():
            continue
        for value, entry in _read(file)["inputs"].items():
            place = _find(file.parent, value, entry)
            if place is not None:
                _known[value] = place
                _problems.pop(value, None)
            elif value not in _known:
                _problems[value] = _missing(file.parent, value, entry)


def _find(run: Path, value: str, entry: Mapping[str, Any]) -> Path | None:
    places = [run / str(entry["copy"])] if entry.get("copy") else []
    places += [run / str(entry.get("relative")), Path(str(entry.get("absolute"))), Path(value).expanduser()]
    for place in places:
        if place.exists() and digest(place, str(entry.get("kind"))) == entry.get("sha256"):
            return Path(os.path.normpath(place))
    return None


def _missing(run: Path, value: str, entry: Mapping[str, Any]) -> str:
    keys = [str(key) for key in entry.get("keys", ())]
    here = next((p for p in (Path(str(entry.get("absolute"))), Path(value).expanduser()) if p.exists()), None)
    why = f"{here} has other contents than when the run was made" if here else f"it was {entry.get('absolute')}"
    key = keys[0] if keys else "the setting"
    remedy = f"put it back, or give {key}=PATH" if ":" not in key else "put it back"
    return f"{run}: {', '.join(keys)}: {value} is not there as the run knows it ({why}); {remedy}"


def moved(path: str, near: Path) -> Path | None:
    """The current place of `path`, an absolute path recorded by a run at `near` that has moved since; None if unknown.

    A file in or beside the run is looked up relative to all earlier places of the run.
    """
    for run in (near, *near.resolve().parents):
        if not (run / FILE).is_file():
            continue
        for before in _read(run / FILE)["folders"]:
            place = Path(os.path.normpath(run / os.path.relpath(path, before)))
            if place.exists():
                return place
    return None


# --- record -----------------------------------------------------------------------------------------------------------


def record(folder: Path, config: Mapping[str, Any]) -> tuple[str, list[str]]:
    """(text of inputs.json for the run in `folder`, keys whose contents differ from the earlier record).

    Makes the copies; the caller writes the text. Entries of missing files stay as recorded.
    """
    file = folder / FILE
    before = _read(file) if file.is_file() else {"folders": [], "inputs": {}}
    inputs: dict[str, Any] = {}
    changed: list[str] = []
    for key, value, kind in references(config):
        place = locate(value)
        if value in inputs:
            inputs[value]["keys"].append(key)
        elif place.exists():
            inputs[value] = _entry(folder, key, value, kind, place, before["inputs"].get(value))
            if inputs[value]["sha256"] != before["inputs"].get(value, inputs[value])["sha256"]:
                changed.append(key)
        elif value in before["inputs"]:
            inputs[value] = before["inputs"][value]
    here = str(folder.resolve())
    folders = [*(place for place in before["folders"] if place != here), here]
    return json.dumps({"folders": folders, "inputs": inputs}, indent=1), changed


def _entry(folder: Path, key: str, value: str, kind: str, place: Path, before: Any) -> dict[str, Any]:
    sha = digest(place, kind)
    if isinstance(before, dict) and before.get("sha256") == sha:
        return {**before, "keys": [key]}
    copy = None
    if kind == "code" or (kind == "data" and _size(place) <= COPY_BYTES):
        copy = f"{COPIES}/{sha[:8]}/{place.name}"
        _copy(place, folder / copy, kind)
    return {
        "keys": [key],
        "kind": kind,
        "sha256": sha,
        "absolute": str(place.resolve()),
        "relative": os.path.relpath(place.resolve(), folder.resolve()),
        "copy": copy,
    }


def references(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(key, value, kind) of every path in a recipe, hub ids included; kind is data, model or code."""
    for key, value in _leaves(config):
        if not isinstance(value, str) or not value or "://" in value or value.startswith("stages."):
            continue
        if key in ("task.source", "sft.data") or key.endswith("_file"):
            yield key, value, "data"
        elif key in ("model.path", "teacher", "lora.path", "reward.perplexity.answerer") and value != "tiny":
            yield key, value, "model"
    for key, word in _program_words(config):
        if Path(word).expanduser().is_file() or is_known(word):
            yield key, word, "code"
    for key, target in _targets(config):
        if key.startswith(("tools.search:", "environment.name.harbor:")):
            yield key, target.partition(":")[2], "data"
            continue
        place, colon, _ = target.rpartition(":")
        if colon and "://" not in target and (place.endswith(".py") or "/" in place):
            yield key, place, "code"


def _targets(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, target) of the functions and classes that a recipe names."""
    yield from ((f"reward.parts.{target}", str(target)) for target in (config.get("reward") or {}).get("parts") or {})
    yield from ((f"tools.{target}", str(target)) for target in config.get("tools") or ())
    name = (config.get("environment") or {}).get("name") or {}
    yield from ((f"environment.name.{t}", str(t)) for t in (name.values() if isinstance(name, Mapping) else [name]))


def _program_words(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, word) of the words of an agent program that may be files; the first one is on the PATH."""
    words = (config.get("environment") or {}).get("program") or ()
    yield from ((f"environment.program.{word}", str(word)) for word in words[1:])


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def digest(place: Path, kind: str) -> str:
    """sha256 of a file, of a folder's names and contents, or of code with its imports from its own folder."""
    whole = hashlib.sha256()
    if kind == "code":
        files = [(str(p.relative_to(place.parent)), p) for p in sources(place)]
    elif place.is_dir():
        paths = (p for p in place.rglob("*") if p.is_file())
        files = sorted((str(p.relative_to(place)), p) for p in paths)
        files = [one for one in files if not any(part.startswith(".") for part in Path(one[0]).parts)]
    else:
        files = [("", place)]
    for name, path in files:
        size = path.stat().st_size
        contents = f"{size} bytes" if kind == "model" and size > SMALL else checksums.sha256_of(path)
        whole.update(f"{name} {contents}\n".encode(errors="surrogateescape"))
    return whole.hexdigest()


def sources(file: Path) -> list[Path]:
    """A Python file, then by name those below its folder that it imports, directly or indirectly."""
    seen, waiting = {file}, [file]
    while waiting:
        try:
            tree = ast.parse(waiting.pop().read_bytes())
        except (SyntaxError, ValueError):  # importing it will report the error
            continue
        for name in _imported(tree):
            stem = file.parent.joinpath(*name.split("."))
            imported = [stem.with_suffix(".py")] if stem.with_suffix(".py").is_file() else []
            imported += sorted(stem.rglob("*.py")) if stem.is_dir() else []
            waiting += [path for path in imported if path not in seen]
            seen.update(imported)
    return [file, *sorted(seen - {file})]


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _size(place: Path) -> int:
    return sum(p.stat().st_size for p in (place.rglob("*") if place.is_dir() else (place,)) if p.is_file())


def _copy(place: Path, to: Path, kind: str) -> None:
    """Copy atomically: an existing copy is complete."""
    if to.exists():
        return
    aside = to.parent.with_name(to.parent.name + ".writing")
    checksums.remove(aside)
    aside.mkdir(parents=True)
    if kind == "code":
        for path in sources(place):
            target = aside / path.relative_to(place.parent)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    elif place.is_dir():
        shutil.copytree(place, aside / to.name)
    else:
        shutil.copyfile(place, aside / to.name)
    checksums.remove(to.parent)
    os.replace(aside, to.parent)


def _read(file: Path) -> dict[str, Any]:
    values: dict[str, Any] = checksums.read_json(file, dict, _REMEDY)
    inputs, folders = values.get("inputs"), values.get("folders")
    whole = isinstance(inputs, dict) and isinstance(folders, list)
    entries = inputs.values() if isinstance(inputs, dict) else ()
    if not whole or not all(isinstance(e, dict) and isinstance(e.get("sha256"), str) for e in entries):
        raise UserError(f"{file} is damaged; {_REMEDY}")
    return values
