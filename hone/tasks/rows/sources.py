"""Reads rows from a file, a folder or the Hugging Face hub, and finds out which split they belong to.

    read_source("data/gsm8k")                  # {"train": [...], "test": [...]}: data/gsm8k/train.jsonl, test.jsonl
    read_source("openai/gsm8k", "main")        # the hub's, through the package datasets

Splits are known by the names of files and folders (`train-00000-of-00002.parquet`, `test_v2.jsonl`); rows without such
a name are the split "all". `dev` and `valid` also mean validation, and `eval` means test.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hone.base import hub
from hone.base.extras import needed
from hone.base.places import locate
from hone.base.settings import UserError
from hone.tasks.rows.files import SUFFIXES, open_rows
from hone.tasks.rows.store import Joined, MadeRows, TableRows

SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval"), "test"),
}

#: Files of the package datasets and of the hub that hold no rows.
DESCRIPTIONS = frozenset({"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"})

Rows = dict[str, Joined]  # split (train, validation, test or all) -> its rows


def read_source(source: str, subset: str | None = None) -> Rows:
    """Split -> its rows. Raises UserError, which lists what is there, if nothing can be read."""
    path = locate(source)
    if path.is_dir():
        return _read_folder(path, subset)
    if path.is_file() or path.suffix.lower() in SUFFIXES or source.startswith((".", "/", "~")):
        if subset is not None:
            raise UserError(f"subset: {subset}: has no effect, since {source} is a file; remove it")
        return {split_of_name(path.stem) or "all": Joined([open_rows(path)])}
    return _read_hub(source, subset)


def split_of_name(stem: str) -> str | None:
    """The split that a file's name states: the last of its words that names one."""
    words = re.findall(r"[a-z]+", stem.lower())
    return next((SPLIT_NAMES[word] for word in reversed(words) if word in SPLIT_NAMES), None)


def _read_folder(folder: Path, subset: str | None) -> Rows:
    place = folder / subset if subset else folder
    files = sorted(p for p in place.rglob("*") if p.suffix.lower() in SUFFIXES and not _hidden(p.relative_to(place)))
    files = [file for file in files if file.name not in DESCRIPTIONS]
    if not files:
        inside = ", ".join(sorted(p.name for p in folder.iterdir())[:10]) or "nothing"
        arrow = next(place.rglob("*.arrow"), None)
        remedy = "; convert .arrow files with to_parquet or to_json of the package datasets" if arrow else ""
        raise UserError(f"{place}: no {', '.join(SUFFIXES)} file below it; {folder} holds {inside}{remedy}")
    rows: dict[str, list[TableRows]] = {}
    for file in files:
        named = split_of_name(file.stem) or split_of_name(file.parent.name if file.parent != place else "") or "all"
        rows.setdefault(named, []).append(open_rows(file))
    if "all" in rows and len(rows) > 1:
        unnamed = [str(f.relative_to(place)) for f in files if split_of_name(f.stem) is None]
        raise UserError(
            f"{place}: to which split do {', '.join(unnamed[:5])} belong? Name them train, validation or test, move "
            f"them away, or give task.train_file, task.validation_file and task.test_file"
        )
    return {split: Joined(parts) for split, parts in rows.items()}


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _read_hub(source: str, subset: str | None) -> Rows:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source):
        raise UserError(f"source: {source}: no such file or folder, nor a hub id (owner/name)")
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(
            f"source: {source}: no such file or folder here; to read it from the hub: {needed('data')}"
        ) from None
    if not _is_cached(source):
        hub.require(f"source: {source}", "give a file or folder of rows")
    try:
        loaded = load_dataset(source, subset)
    except (OSError, ValueError, RuntimeError) as error:  # missing, no access, no network, or a subset is needed
        raise UserError(f"source: {source} cannot be read from the hub: {_first_lines(error)}") from error
    rows: dict[str, list[MadeRows]] = {}
    for name, split in loaded.items():
        named = SPLIT_NAMES.get(str(name))
        if named is not None:
            rows.setdefault(named, []).append(_made(split))
    if not rows:
        only = list(loaded)
        if len(only) > 1:
            raise UserError(f"source: {source} has the splits {', '.join(map(str, only))}, but neither train nor test")
        rows["all"] = [_made(loaded[only[0]])]
    return {split: Joined(parts) for split, parts in rows.items()}


def _is_cached(source: str) -> bool:
    """Whether the package datasets has read this source before: its cache has a folder of that name."""
    from datasets import config

    return (Path(config.HF_DATASETS_CACHE) / source.replace("/", "___")).is_dir()


def _made(split: Any) -> MadeRows:
    """The package keeps its rows in mapped files, which it names after their origin."""
    fingerprint = getattr(split, "_fingerprint", None)
    return MadeRows(split, f"hub-{fingerprint}" if fingerprint else None)


def _first_lines(error: Exception, most: int = 3) -> str:
    """The beginning of a message, long enough for one that lists the subsets."""
    lines: Sequence[str] = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[:most])[:500]
