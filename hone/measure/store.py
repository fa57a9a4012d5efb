"""One evaluation on disk: append-only, so that no sample is ever drawn twice and analysis needs no model.

    OUT/LABEL-1a2b3c4d/     the digest is of everything that decides the samples: weights, task, prompt, sampling, seed
        settings.json       these settings, in full
        problems.jsonl      id, level, domain, answer, prompt
        samples.jsonl       one row per sample: problem_id, index, seed, verdict, extracted, tokens, finish, text
        summary.json        accuracy and pass@k with intervals; written anew after each call

More problems or more samples per problem of the same settings are appended to the same folder. A row of samples.jsonl:
{"problem_id": "knights-test-0003", "index": 5, "seed": 827, "verdict": "correct", "tokens": 112, "text": "..."}
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.base import jsonl
from hone.base.settings import UserError
from hone.measure.stats.measured import Measured, measured

Row = Mapping[str, Any]
#: Settings that name a place and do not affect the samples: a model may be moved.
_NOT_DIGESTED = ("label", "model", "code_version")
GOLD = "gold.jsonl"  # log-probs of gold answers, see hone.measure.gold


class Store:
    """The folder of one evaluation. One process writes it."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder, self.settings = folder, dict(settings)
        self.rows: dict[tuple[str, int], dict[str, Any]] = {}

    @classmethod
    def open(cls, out: Path, settings: Mapping[str, Any]) -> Store:
        """Open the folder of these settings in `out`, or create it."""
        code = digest(settings)
        there = sorted(out.glob(f"*-{code}"))
        folder = there[0] if there else out / f"{slug(str(settings['label']))}-{code}"
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "settings.json").exists():
            jsonl.replace(folder / "settings.json", json.dumps(settings, indent=1, ensure_ascii=False))
        jsonl.keep(folder / "samples.jsonl", lambda row: True)  # a kill may have torn the last line
        store = cls(folder, settings)
        for row in jsonl.read(folder / "samples.jsonl"):
            store.rows.setdefault((row["problem_id"], row["index"]), row)
        return store

    def describe(self, problems: Iterable[Row]) -> None:
        """Add problems that are not in the folder yet. Raises UserError if one exists with another prompt."""
        path = self.folder / "problems.jsonl"
        known = {row["id"]: row for row in jsonl.read(path)}
        new = []
        for problem in problems:
            old = known.get(str(problem["id"]))
            if old is None:
                new.append(problem)
            elif old["prompt"] != problem["prompt"]:
                raise UserError(
                    f"{path}: {problem['id']} exists with another prompt, so its samples answer another question; "
                    "move that folder away, or give another --out"
                )
        self._append(path, new)

    def add(self, rows: Iterable[Row]) -> None:
        """Append the rows that are not there yet; they are on disk when this returns."""
        new = {(row["problem_id"], row["index"]): dict(row) for row in rows}
        new = {key: row for key, row in new.items() if key not in self.rows}
        self._append(self.folder / "samples.jsonl", new.values())
        self.rows.update(new)

    def chosen(self, ids: Sequence[str], samples: int) -> list[dict[str, Any]]:
        """The first `samples` samples of each of the problems."""
        return [self.rows[key] for i in ids for g in range(samples) if (key := (i, g)) in self.rows]

    def _append(self, path: Path, rows: Iterable[Row]) -> None:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        if text:
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())


def digest(settings: Mapping[str, Any]) -> str:
    """Eight characters that differ if any setting that determines the samples differs."""
    kept = {key: value for key, value in settings.items() if key not in _NOT_DIGESTED}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:8]


def slug(label: str) -> str:
    return re.sub(r"[^\w.]+", "-", label).strip("-.")[:60] or "model"


# --- reading, also for the report: needs no model and no torch -----------------------------------


def stored(out: Path) -> list[Path]:
    """Folders of evaluations in `out`, oldest first."""
    folders = [path.parent for path in out.glob("*/settings.json") if (path.parent / "samples.jsonl").exists()]
    return sorted(folders, key=lambda folder: ((folder / "settings.json").stat().st_mtime_ns, folder.name))


def read_measured(folder: Path) -> Measured:
    """The results of the evaluation in this folder. Raises UserError if its files are not those of an evaluation."""
    try:
        settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        problems = {row["id"]: row for row in jsonl.read(folder / "problems.jsonl")}
        return measured(str(settings["label"]), _joined(folder, problems), **about(settings))
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder}: not a complete evaluation ({error}); evaluate again, or move it away") from error


def about(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as the facts of a `Measured`."""
    keys = ("model", "weights", "split", "hosted")
    facts = {key: settings.get(key) for key in keys} | {"task": settings.get("task", {}).get("name", "")}
    return {"sampling": settings.get("sampling", {}), "seed": settings.get("seed"), "facts": facts}


def _joined(folder: Path, problems: Mapping[str, Row]) -> Iterator[dict[str, Any]]:
    seen: set[tuple[str, int]] = set()
    gold = gold_nlls(folder)
    for row in jsonl.read(folder / "samples.jsonl"):
        key = (row["problem_id"], row["index"])
        problem = problems.get(row["problem_id"], {})
        if key not in seen:
            seen.add(key)
            known = {name: problem.get(name) for name in ("level", "domain", "answer")}
            yield {**row, **known, "gold_nll": (gold.get((key[0], None)), gold.get(key))}


def gold_nlls(folder: Path) -> dict[tuple[str, int | None], float]:
    """-mean log p of the tokens of a problem's gold answer: after a sample's reasoning, or (None) without."""
    rows = jsonl.read(folder / GOLD)
    return {(row["problem_id"], row["index"]): -sum(row["logprobs"]) / len(row["logprobs"]) for row in rows}
