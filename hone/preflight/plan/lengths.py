"""The longest prompt and answer of a stage, from the data and the tokenizer if they are available here."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hone.base.settings import UserError
from hone.model.load import load_tokenizer
from hone.preflight.plan import batch as batches
from hone.preflight.plan.memory import ASSUMED_ANSWER, ASSUMED_PROMPT, Lengths
from hone.recipe.recipe import SFTStage
from hone.rollout.prompts import Renderer
from hone.tasks import make_task
from hone.tasks.base import Task, TracedTask

#: Worked answers whose length is measured.
WRITTEN = 64


def lengths_of(stage: SFTStage) -> Lengths:
    """Tokens of the longest training prompt, and of the longest answer that the stage can produce.

    Estimated from characters if no tokenizer is available (`hone.preflight.plan.batch.CHARACTERS_PER_TOKEN`), and
    assumed if the data is not.
    """
    per = batches.CHARACTERS_PER_TOKEN["tiny" if stage.model.path == "tiny" else "other"]
    assumptions: list[str] = []
    try:
        with offline():
            task = make_task(stage.task, stage.seed)
            problems = task.problems("train")
    except UserError as error:
        why = str(error).splitlines()[0]
        assumptions.append(f"prompts of at most {ASSUMED_PROMPT} tokens, since the data cannot be read here: {why}")
        return Lengths(ASSUMED_PROMPT, _answer(stage, None, per, assumptions), tuple(assumptions))
    if Path(stage.model.path).is_dir():
        prompt = batches.longest_prompt(problems, Renderer(load_tokenizer(stage.model), stage.prompt, task.system))
    else:
        prompt = batches.assumed_prompt(stage, problems, task.system)
        assumptions.append(
            f"prompts of at most {prompt} tokens: {per:g} characters per token, since no tokenizer is available"
        )
    return Lengths(prompt, _answer(stage, task, per, assumptions), tuple(assumptions), batches.data_bytes(problems))


@contextmanager
def offline() -> Iterator[None]:
    """Context manager in which the hub's packages use only downloaded files: retries without a network take minutes."""
    modules = [importlib.import_module("huggingface_hub.constants")]
    if importlib.util.find_spec("datasets"):
        modules.append(importlib.import_module("datasets.config"))
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            vars(module)["HF_HUB_OFFLINE"] = True
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            vars(module)["HF_HUB_OFFLINE"] = value


def _answer(stage: SFTStage, task: Task | None, per: float, assumptions: list[str]) -> int:
    """Tokens of the longest answer: in SFT those of the longest example, else `sampling.max_tokens` of every turn."""
    if stage.stage in ("rl", "distil"):
        return stage.rollout_sampling.max_tokens
    if stage.stage != "sft":
        return stage.sampling.max_tokens
    if stage.sft.data is None and isinstance(task, TracedTask):
        chosen = task.problems("train")[:WRITTEN]
        texts = [task.trace(p, style, i).text for i, p in enumerate(chosen) for style in stage.sft.styles]
        return max(1, round(max(map(len, texts)) / per))
    assumptions.append(f"answers of at most {ASSUMED_ANSWER} tokens in stage {stage.name}")
    return ASSUMED_ANSWER
