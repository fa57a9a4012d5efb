"""Checks that a run folder is complete and undamaged, and exports the model of any checkpoint.

hone runs check runs/demo                     # ledger against curriculum, rollouts, metrics, checksums
hone export runs/demo@20 out/                 # an ordinary Hugging Face folder; also @best, or the end of the run
"""

from __future__ import annotations

import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.base import jsonl, places
from hone.base.settings import UserError
from hone.learn import checkpoint
from hone.recipe.load import load
from hone.recipe.recipe import RLStage, SFTStage
from hone.recipe.schedule import Phases
from hone.runs import card, seal
from hone.runs.layout import at_step, model_folder, rollouts_name
from hone.tasks import make_task
from hone.tasks.curriculum import Curriculum

Rows = Sequence[Mapping[str, Any]]


# --- check ------------------------------------------------------------------------------------------------------------


def check(folder: Path) -> tuple[list[str], int]:
    """Check all stages of a run folder; returns lines to print and the number of faults.

    Raises UserError if no run was started there.
    """
    begun = [sub for sub in seal.stage_folders(folder) if (sub / "manifest.json").is_file()]
    if not begun:
        raise UserError(f"{folder}: no run was started there; give a run folder, such as runs/demo")
    own = [] if folder in begun else [f"{name}: {problem}" for name, problem in seal.faults(folder)]
    lines, count = own, len(own)
    for sub in begun:
        problems = list(faults(sub))
        rows = jsonl.read(sub / "ledger.jsonl")
        prompts = sum(len(row.get("problems", ())) for row in rows)
        steps = len({row.get("step") for row in rows})
        saved = len(checkpoint.saved_steps(sub / "checkpoints"))
        lines.append(f"{sub}: {steps} steps, {prompts} prompts, {saved} checkpoints: {len(problems)} faults")
        lines += [f"  {fault}" for fault in problems]
        count += len(problems)
    return lines, count


def faults(folder: Path) -> Iterator[str]:
    """The faults in the folder of one stage."""
    places.use(folder)  # problems are drawn again, from the run's own data
    damaged = dict(seal.faults(folder))
    yield from (f"{name}: {problem}" for name, problem in damaged.items())
    yield from (f"{name}: {problem}" for name, problem in seal.folder_faults(folder))
    metrics = jsonl.read(folder / "metrics.jsonl")
    if [row.get("step") for row in metrics] != list(range(len(metrics))):
        yield "metrics.jsonl: a step is missing, repeated, or out of order"
    for saved in checkpoint.saved_steps(folder / "checkpoints"):
        if problem := checkpoint.fault(saved):
            yield f"{saved.name}: {problem}"
    if "config.resolved.json" in damaged:
        return  # the checks below draw the problems again with these settings
    yield from _evals_faults(folder)
    ledger = jsonl.read(folder / "ledger.jsonl")
    if not ledger and metrics:
        yield "ledger.jsonl: missing; the run began with a version of hone that did not write it"
        return
    (recipe,) = load(folder / "config.resolved.json", check_files=False).stages
    places.use(folder)  # `load` without a check of files forgets it
    known = {row["step"] for row in metrics}
    ledger = [row for row in ledger if row["step"] in known]  # a resumed run drops rows of an interrupted step
    expected = _examples(recipe, folder, len(metrics)) if recipe.stage == "sft" else _draws(recipe, ledger, metrics)
    yield from differences(ledger, expected)
    if recipe.stage != "sft":
        yield from _unlike_rollouts(folder, ledger, recipe.samples_per_prompt)


def _evals_faults(folder: Path) -> Iterator[str]:
    """Evaluations that are repeated, or whose samples are missing."""
    seen = Counter((row.get("step"), row.get("label")) for row in jsonl.read(folder / "evals.jsonl"))
    yield from (
        f"evals.jsonl: {label} of step {step} is recorded {n} times" for (step, label), n in seen.items() if n > 1
    )
    for row in jsonl.read(folder / "evals.jsonl"):
        name = row.get("samples_file")
        if isinstance(name, str) and not (folder / name).is_file():
            yield f"{name}: the samples of {row.get('label')} of step {row.get('step')} are missing"


def differences(ledger: Rows, expected: Mapping[tuple[int, int], Sequence[str]]) -> Iterator[str]:
    """Differences between the problems in the ledger and the `expected` ones: (step, round) -> ids."""
    recorded: dict[tuple[int, int], list[str]] = {}
    for row in ledger:
        place = (row["step"], row["round"])
        if place in recorded:
            yield f"step {place[0]}, round {place[1]}: repeated in the ledger"
        recorded[place] = row["problems"]
    for place in sorted(recorded.keys() | expected.keys()):
        has, wants = Counter(recorded.get(place, ())), Counter(expected.get(place, ()))
        for what, more in (("is missing", wants - has), ("was not drawn", has - wants)):
            yield from (f"step {place[0]}, round {place[1]}: problem {name} {what}" for name in more)


def _draws(recipe: RLStage, ledger: Rows, metrics: Rows) -> dict[tuple[int, int], list[str]]:
    """The problems that the curriculum draws, step by step, given the recorded answers to the earlier ones."""
    rows: dict[int, dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for row in ledger:
        rows[row["step"]][row["round"]] = row
    phases = Phases(recipe) if recipe.stage == "rl" else None
    problems = make_task(recipe.task, recipe.seed).problems("train")
    levels = {problem.id: problem.level for problem in problems}
    course = Curriculum(problems, recipe.seed, recipe.curriculum)
    expected = {}
    for metric in metrics:
        step = metric["step"]
        now = recipe if phases is None else phases.at(step, int(metric.get("reset", 0)))
        course.configure(now.curriculum)
        drawn = [problem.id for problem in course.draw(step, now.prompts_per_step)]
        expected[step, 0] = drawn
        seen = list(drawn)
        for number in range(1, len(rows[step])):
            short = sum(len(row.get("replaced", ())) for n, row in rows[step].items() if n == number - 1)
            more = [problem.id for problem in course.draw_others(step, number, short, without=set(seen))]
            expected[step, number] = more
            seen += more
        course.count(
            (levels.get(name, ""), right, graded)
            for row in rows[step].values()
            for name, right, graded in zip(row["problems"], row.get("correct", ()), row.get("graded", ()))
        )
    return expected


def _examples(recipe: SFTStage, folder: Path, steps: int) -> dict[tuple[int, int], list[str]]:
    """The problems that supervised training draws."""
    from hone.learn.examples import examples
    from hone.stages.sft import draw

    chosen = examples(recipe, make_task(recipe.task, recipe.seed), folder).train
    count = recipe.sft.examples_per_step
    return {
        (step, 0): [chosen[i].problem.id for i in draw(recipe.seed, step, len(chosen), count)] for step in range(steps)
    }


def _unlike_rollouts(folder: Path, ledger: Rows, samples: int) -> Iterator[str]:
    by_step: dict[int, Counter[str]] = defaultdict(Counter)
    for row in ledger:
        by_step[row["step"]].update(row["problems"])
    for step, wanted in by_step.items():
        rows = jsonl.read(folder / rollouts_name(step))
        if Counter(row["problem_id"] for row in rows) != Counter({n: count * samples for n, count in wanted.items()}):
            yield f"{rollouts_name(step)}: not the {samples} answers to each of the ledger's problems"


# --- export -----------------------------------------------------------------------------------------------------------


def export(target: str, out: Path, adapter: bool = False) -> str:
    """Write the model of a run, RUN@STEP or RUN@best as an ordinary Hugging Face folder; returns a message.

    An adapter is merged in; with `adapter` it is written alone, in peft's format. Raises UserError if `out` exists.
    """
    if out.exists():
        raise UserError(f"{out} exists already; give another folder, or remove it")
    chosen = at_step(target)
    if chosen.parent.name == "checkpoints" and (problem := checkpoint.fault(chosen)):
        raise UserError(f"{chosen} is damaged ({problem}); export another step")
    folder = model_folder(chosen)
    aside = out.with_name(f".writing_{out.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.parent.mkdir(parents=True, exist_ok=True)
    what = _export_adapter(folder, aside) if adapter else _export_model(folder, aside)
    card.write_exported(aside, folder, best=target.endswith("@best"))
    checkpoint.sync(aside)
    os.replace(aside, out)
    return f"{out}: {what} of {folder}"


def _export_model(folder: Path, out: Path) -> str:
    from transformers import AutoConfig

    from hone.model import lora
    from hone.model.load import base_of, load_model, load_tokenizer
    from hone.model.saving import save_model
    from hone.recipe.sections.model import ModelConfig

    merged = lora.is_adapter(folder)
    dtype = AutoConfig.from_pretrained(base_of(str(folder)) if merged else folder).dtype
    name = str(dtype).removeprefix("torch.") if dtype is not None else "float32"
    config = ModelConfig(path=str(folder), dtype=name)
    save_model(load_model(config), out)
    load_tokenizer(config).save_pretrained(out)
    return "model, its adapter merged in," if merged else "model"


def _export_adapter(folder: Path, out: Path) -> str:
    from safetensors.torch import save_file

    from hone.model import lora, shards
    from hone.model.saving import CONFIG, add_older_keys

    if not lora.is_adapter(folder) and folder.name == "model":  # a finished run has both
        folder = folder.parent / "adapter"
    if not lora.is_adapter(folder):
        raise UserError(f"{folder}: no adapter there; the run trained all weights, so leave out --adapter")
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(shards.whole(folder), out / lora.WEIGHTS_FILE, metadata={"format": "pt"})
    if (out / CONFIG).exists():  # exported by a version of hone that did not write them
        add_older_keys(out)
    return "adapter"
