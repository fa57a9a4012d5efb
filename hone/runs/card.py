"""The model card: the README.md of a model's folder, with its training, reward and results.

    runs/demo/rl/model/README.md

Written at the end of a run and by `hone export`, from the run's files alone. With its front matter
(huggingface_hub.ModelCardData), the Hugging Face hub shows the results of an uploaded folder.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCardData

from hone.base import checksums, jsonl, sealed
from hone.base.jsonl import Row
from hone.base.settings import UserError
from hone.base.visible import visible
from hone.recipe.explain import explain
from hone.recipe.load import load
from hone.recipe.recipe import LoopStage
from hone.runs import seal
from hone.runs.layout import label_of
from hone.runs.retention import MEASURES, measured

Rows = Sequence[Mapping[str, Any]]
#: The results file in an evaluation folder of `hone eval`, and what the card needs of it.
SUMMARY = "summary.json"
NEEDED = ("split", "samples", "response_tokens", "sampling")


#: The text on the choice of the weights, if they are simply the last.
LAST = "The last step's weights; no checkpoint was chosen by a score."


class Trained(NamedTuple):
    """A stage that led to the model."""

    settings: LoopStage
    formulas: str  # what it minimised, as `hone explain` prints it
    folder: Path


def write(model: Path, stages: Sequence[Trained]) -> None:
    """Write README.md into the folder `model`, the result of the last of `stages`."""
    jsonl.replace(model / "README.md", card(stages, _evaluated(model, stages[-1].folder)))


def write_exported(out: Path, model: Path, best: bool) -> None:
    """Write the card into `out`, an export of `model`, if `model` belongs to a run.

    `best`: the checkpoint was chosen by its validation.
    """
    folder = next((p for p in model.parents if (p / "manifest.json").is_file()), None)
    if folder is None:
        return
    places = seal.stage_folders(folder.parent) if (folder.parent / "stages.json").is_file() else [folder]
    places = places[: [place.name for place in places].index(folder.name) + 1]
    for place in places:
        seal.require_logs(place, "evals.jsonl", seal.EVENTS)
    # The data may be missing: it is not read.
    recipes = [load(place, check_files=False).stages[0] for place in places]
    stages = [Trained(recipe, explain(recipe), place) for recipe, place in zip(recipes, places)]
    step = int(model.parent.name[5:]) if model.parent.name.startswith("step_") else None
    how = f"A checkpoint: the weights before step {step}." if step is not None else LAST
    if best:
        measures = [measure[0] for row in jsonl.read(folder / "evals.jsonl") if (measure := measured(row))]
        how += f" Chosen by its {measures[-1]} on the validation split."
    jsonl.replace(out / "README.md", card(stages, _evaluated(model, folder), step, how))


def card(stages: Sequence[Trained], evaluated: Rows = (), step: int | None = None, chosen: str = LAST) -> str:
    """The text of the card. `evaluated`: summaries of `hone eval` of this model. `step`: of a checkpoint, if it is one.

    Names and texts of users are escaped. What a damaged manifest said is left out: the run is done, and its weights
    do not depend on it.
    """
    settings, _, folder = stages[-1]
    rows = jsonl.read(folder / "evals.jsonl")
    evals = [row for row in rows if (row["label"] in ("before", "after") if step is None else row["step"] == step)]
    manifest = _manifest(folder)
    parts = [
        f"# {_plain(label_of(folder))}",
        _how(settings),
        "## Evaluation\n\n" + (_evaluation(evals, evaluated, chosen) or "Not evaluated."),
        "## What was trained, and for which reward\n\n" + "\n\n".join(_code(stage.formulas) for stage in stages),
    ]
    if files := manifest.get("files"):
        named = "\n".join(f"- `{_plain(name)}`: sha256 `{digest}`" for name, digest in sorted(files.items()))
        parts.append(f"Functions of the reward, by their source:\n\n{named}")
    if resets := [row for stage in stages for row in _events(stage.folder, "reset")]:
        table = "\n".join(f"| {row['number']} | {row['step']} | {row['why']} |" for row in resets)
        parts.append(
            "## Hard resets\n\nBefore these steps the model became the reference and the base of a new adapter, and "
            f"the optimizer started afresh.\n\n| reset | before step | why |\n|---|---|---|\n{table}"
        )
    if warned := [row for stage in stages for row in _events(stage.folder, "collapse")]:
        warnings = "\n".join(f"- step {row['step']}: {_plain(str(row['message']))}" for row in warned[:20])
        parts.append(f"## Warnings during training\n\n{warnings}")
    parts.append("## Reproduce\n\n" + _reproduce(settings.seed, manifest))
    return f"---\n{_front_matter(settings, folder, evals, evaluated).strip()}\n---\n\n" + "\n\n".join(parts) + "\n"


def _front_matter(settings: LoopStage, folder: Path, evals: Rows, evaluated: Rows) -> str:
    base = settings.model.path
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=settings.task.name,
            dataset_name=settings.task.name,
            dataset_split=row["split"],
            metric_type=measure[0],
            metric_value=measure[1]["value"],
        )
        for row in [*evaluated, *(row for row in evals if row["label"] != "before")][:1]
        if (measure := measured(row)) is not None
    ]
    about = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=base if "/" in base and not Path(base).exists() else None,
        tags=["hone", settings.algo.advantage if settings.stage == "rl" else settings.stage],
        model_name=label_of(folder),
        eval_results=results or None,
    )
    return str(about.to_yaml())


def _how(settings: LoopStage) -> str:
    question = (
        "chat template of the tokenizer" if settings.prompt.style == "chat" else "raw text, without a chat template"
    )
    return (
        f"Trained with hone on the task `{settings.task.name}`. Prompts: {question}.\n\n"
        + _code(
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            'tokenizer = AutoTokenizer.from_pretrained("PATH")\nmodel = AutoModelForCausalLM.from_pretrained("PATH")',
            "python",
        )
        + ("" if settings.prompt.style == "chat" else f"\n\nThe prompt:\n\n{_code(settings.prompt.template)}")
    )


def _evaluation(evals: Rows, evaluated: Rows, chosen: str) -> str:
    names = {"before": "before this stage", "after": "after this stage"}
    rows = [(names.get(row["label"], row["label"]), row) for row in evals] + [("`hone eval`", row) for row in evaluated]
    shown = [name for name in MEASURES if any(name in row for _, row in rows)]
    columns = [column for name in shown for column in (name, "95 %")]
    columns += ["problems", "samples", "tokens", "cut off", "sampling"]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for label, row in rows:
        sampling = row["sampling"]
        how = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in sampling.items() if key != "stop")
        cells = [cell for name in shown for cell in _interval(row.get(name))]
        measure = measured(row)
        cells.append(row["split"] if measure is None else f"{measure[1]['n']} {row['split']}")
        cut = row.get("truncation_rate")  # missing in older rows
        cells += [str(row["samples"]), f"{row['response_tokens']:.0f}", "–" if cut is None else f"{cut:.1%}", how]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    levels = [
        f"By level: {_levels(row['by_level'])} ({label})." for label, row in rows if len(row.get("by_level", ())) > 1
    ]
    return "\n".join([*lines, "", chosen, *levels]).strip() if rows else ""


def _interval(x: Mapping[str, float] | None) -> tuple[str, str]:
    return ("–", "–") if x is None else (f"{x['value']:.3f}", f"{x['low']:.3f} to {x['high']:.3f}")


def _levels(by_level: Mapping[str, Mapping[str, float]]) -> str:
    cells = {_plain(level): f"{a['value']:.3f} [{a['low']:.3f}, {a['high']:.3f}]" for level, a in by_level.items()}
    return ", ".join(f"{level}: {cell}" for level, cell in cells.items())


def _reproduce(seed: int, manifest: Mapping[str, Any]) -> str:
    settings = "Every setting: `config.resolved.json` of the run."
    if not manifest:
        return f"Seed {seed}; the versions and the hardware are not known: manifest.json is damaged. {settings}"
    versions = ", ".join(f"{name} {version}" for name, version in manifest["versions"].items())
    hardware = manifest["hardware"]
    where = hardware["gpu"] or f"{hardware['cpus']} CPUs, {hardware['machine']}"
    return f"hone {manifest['code_version']}, seed {seed}, {versions}; {where}. {settings}"


def _manifest(folder: Path) -> Row:
    """The manifest of a stage; if it is damaged, a message says so, and it counts as empty."""
    if problem := sealed.file_fault(folder, "manifest.json"):
        return _left_out(folder / "manifest.json", problem)
    return _object(folder / "manifest.json")


def _object(path: Path) -> Row:
    """The JSON object of a file; if it is damaged, a message says so, and it counts as empty."""
    try:
        return checksums.read_json(path, dict, "restore it from a copy")
    except UserError as error:
        return _left_out(path, str(error))


def _left_out(path: Path, problem: str) -> Row:
    print(visible(f"{path}: {problem}: the model card leaves out what it says"), file=sys.stderr)
    return {}


def _evaluated(model: Path, folder: Path) -> list[Row]:
    """Summaries of `hone eval` of exactly this model folder, from its run."""
    summaries = []
    for place in (folder, folder.parent):
        for path in sorted((place / "evaluations").glob(f"*/{SUMMARY}")):
            if Path(str(_object(path.parent / "settings.json").get("model"))).resolve() != model.resolve():
                continue
            summary = _object(path)
            if missing := [name for name in NEEDED if summary and name not in summary]:
                summary = _left_out(path, f"it has no {', '.join(missing)}")
            summaries += [summary] if summary else []
    return summaries


def _events(folder: Path, kind: str) -> list[Row]:
    """Events of a kind, without the duplicates that an interrupted run may have."""
    rows = {(row["step"], row["message"]): row for row in jsonl.read(folder / "events.jsonl") if row["kind"] == kind}
    return list(rows.values())


def _code(text: str, language: str = "") -> str:
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))  # longer than any fence in the text
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _plain(text: str) -> str:
    """Text escaped for Markdown and HTML."""
    return re.sub(r"([\\`*_\[\]>|#])", r"\\\1", " ".join(text.split())).replace("<", "&lt;")
