"""`hone check RECIPE`: finds what would go wrong in a run, before anything expensive.

hone check recipes/demo/recipe.yaml              # with the model that the first RL stage starts from
hone check recipes/demo/recipe.yaml --no-model   # rewards, template and data only
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.base import streams
from hone.base.settings import UserError
from hone.base.visible import visible
from hone.environments.make import make_episodes
from hone.preflight.check import base
from hone.preflight.check.findings import Finding, distinct, lines
from hone.preflight.check.preflight import preflight
from hone.preflight.check.subject import Subject
from hone.recipe.explain_stages import teacher
from hone.recipe.recipe import LoopStage, Pipeline, Recipe, stages_of
from hone.rewards import make_reward
from hone.rewards.base import RewardFn, reward_groups
from hone.rollout.local import native_engine
from hone.rollout.prompts import Renderer
from hone.tasks import keeping
from hone.tasks.base import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class CheckReport:
    """What `hone check` shows."""

    findings: list[Finding]
    scores: list[dict[str, Any]]  # the probes of the first problem
    base: dict[str, Any] | None = None  # None: the model was not sampled

    @property
    def failed(self) -> bool:
        return any(f.level == "fail" for f in self.findings)


def cli_check(
    recipe: Recipe | Pipeline, problems: int, with_model: bool, checkpoint: Path | None, as_json: bool
) -> int:
    """Print the result. Returns the exit code: 1 if a check failed, else 0."""
    result = check(recipe, problems, with_model, checkpoint)
    if as_json:
        values = {"failed": result.failed, **asdict(result)}
        print(json.dumps(values, indent=1, ensure_ascii=False))
    else:
        print(visible(f"{score_table(result.scores)}\n\n{lines(result.findings)}"))
    return int(result.failed)


def check(
    recipe: Recipe | Pipeline, problems: int = 8, with_model: bool = True, checkpoint: Path | None = None
) -> CheckReport:
    """Run the checks of `hone train`, and sample answers of the model that the first RL stage starts from.

    Without an RL stage it is the model of the first stage. Raises UserError if something cannot be read.
    """
    with keeping():
        return _check(recipe, problems, with_model, checkpoint)


def _check(recipe: Recipe | Pipeline, problems: int, with_model: bool, checkpoint: Path | None) -> CheckReport:
    stages = stages_of(recipe)
    place = next((i for i, (stage, _) in enumerate(stages) if stage.stage == "rl"), 0)
    stage = stages[place][0]
    where = model_of(recipe, place, checkpoint) if with_model else None
    subject = Subject(recipe, stage, where)
    result = CheckReport(list(preflight(recipe, subject).findings), subject.scores)
    if with_model and where is None:
        folder = Path(recipe.runs) / recipe.name / stage.model.stage if stage.model.stage is not None else None
        why = f"is made by the stages before it ({folder}/model)" if folder else "is made from scratch by the run"
        message = f"the model of stage {stage.name} {why}; train them, or --checkpoint"
        result.findings.insert(0, Finding("warn", "model", message))
    if stage.stage == "rl" and subject.model is not None:
        reward = make_reward(stage.reward, subject.task, subject.answerer)
        result.base, findings = _sampled(stage, subject.task, subject.renderer, subject.model, reward, problems)
        result.findings = distinct([*result.findings, *findings])
    return result


def model_of(recipe: Recipe | Pipeline, place: int, checkpoint: Path | None) -> str | None:
    """The path of the model that a stage starts from; None if it does not exist yet."""
    stages = stages_of(recipe)
    stage, folder = stages[place][0], Path(recipe.runs) / recipe.name
    if checkpoint is not None:
        if not (checkpoint / "config.json").exists():
            raise UserError(f"--checkpoint {checkpoint}: no config.json; give the folder of a Hugging Face checkpoint")
        return str(checkpoint)
    if stage.model.stage is not None:
        before = folder / stage.model.stage / "model"
        return str(before) if before.exists() else None
    return None if stage.model.path == "tiny" else stage.model.path


# --- the model --------------------------------------------------------------------------------


def _sampled(
    stage: Recipe, task: Task, renderer: Renderer, model: PreTrainedModel, reward: RewardFn, count: int
) -> tuple[dict[str, Any], list[Finding]]:
    """Sample and reward answers to a few training problems, as training would."""
    engine = native_engine(model, renderer.tokenizer, stage.rollout)
    chosen = task.problems("train")[:count]
    seed = streams.answers("check", stage.seed)
    episodes = make_episodes(stage, renderer)
    answers = episodes.sample(chosen, engine, stage.sampling, samples=stage.samples_per_prompt, seed=seed)
    groups = reward_groups(chosen, answers, reward)
    return base.measured(groups), list(base.judge_base(groups, refill=bool(stage.algo.refill_rounds)))


def score_table(scores: Sequence[dict[str, Any]]) -> str:
    """A table with a row per probe; reward parts that are equal for all probes are left out."""
    if not scores:
        return "no reward was checked"
    names = list(dict.fromkeys(name for row in scores for name in row["parts"]))
    shown = [n for n in names if len(Counter(row["parts"].get(n) for row in scores)) > 1]
    rows = [["probe", "reward", "verdict", "ms", *shown]]
    for row in scores:
        parts = [f"{row['parts'][n]:g}" if n in row["parts"] else "-" for n in shown]
        rows.append([row["probe"], f"{row['total']:+.3f}", row["verdict"], f"{row['milliseconds']:.1f}", *parts])
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(r, widths)).rstrip() for r in rows)


# --- dry run ---------------------------------------------------------------------------------


def dry_run(recipe: Recipe | Pipeline) -> int:
    """`hone train --dry-run`: print what the stages will do, two prompts as the model sees them, and the checks.

    Returns the exit code: 1 if a check failed, else 0.
    """
    with keeping():
        return _dry_run(recipe)


def _dry_run(recipe: Recipe | Pipeline) -> int:
    for stage, sub in stages_of(recipe):
        start = stage.model.path if stage.model.stage is None else f"the model of stage {stage.model.stage}"
        start = start if stage.stage != "generate" else ""
        print(f"stage {stage.name} ({stage.stage}) -> {Path(recipe.runs) / recipe.name / sub}")
        print(f"  starts from {start}" if start else "  trains nothing")
        print(f"  {plan(stage, Subject(recipe, stage).task)}")
    result = preflight(recipe)
    last = Subject(recipe, stages_of(recipe)[-1][0])
    for problem in last.task.problems("train")[:2]:
        prompt = last.renderer.prompt_text(problem)
        print(visible(f"\nprompt of {problem.id}, {len(last.renderer.prompt_ids(problem))} tokens:\n{prompt}"))
    print(visible(f"\n{score_table(result.subject.scores)}\n\n{lines(result.findings)}"))
    return int(any(finding.level == "fail" for finding in result.findings))


def plan(stage: Recipe, task: Task) -> str:
    """One line on what a stage will do with the problems of its task."""
    if stage.stage == "sft" and stage.sft.data is not None:
        return f"{stage.sft.epochs} epoch(s) of {stage.sft.data}, {stage.sft.examples_per_step} examples a step"
    if stage.stage == "sft":
        return f"{stage.sft.num_steps} steps of {stage.sft.examples_per_step} examples"
    if stage.stage == "generate":
        problems = "all" if stage.generate.problems is None else f"the first {stage.generate.problems}"
        return (
            f"{stage.samples_per_prompt} answers of at most {stage.sampling.max_tokens} tokens to {problems} train "
            f"problems, by {teacher(stage)}; of the right answers it keeps: {stage.generate.keep}"
        )
    samples = stage.prompts_per_step * stage.samples_per_prompt
    by = f"; the teacher is {teacher(stage)}" if stage.stage == "distil" else ""
    return (
        f"{stage.steps} steps of {stage.prompts_per_step} prompts x {stage.samples_per_prompt} samples = {samples} "
        f"answers of at most {stage.sampling.max_tokens} tokens, {stage.algo.updates_per_rollout} update(s) each; "
        f"evaluation on {_evaluated(stage, task)}{by}"
    )


def _evaluated(stage: LoopStage, task: Task) -> str:
    """The problems of an evaluation. If there are fewer than wanted, also what so few can tell."""
    wanted, split = stage.eval.problems, stage.eval.split
    there = len(task.problems(split))
    if not 0 < there < wanted:
        return f"{wanted} {split} problems"
    widest = 98 / there**0.5  # 1.96 standard deviations of a share of one half, in percentage points
    return (
        f"{there} {split} problems (eval.problems is {wanted}, but there are no more): an accuracy near 50% is known "
        f"to ±{widest:.0f} percentage points"
    )
