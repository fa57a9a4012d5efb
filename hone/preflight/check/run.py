"""`hone check RECIPE`: what would go wrong in a run, seen before anything expensive.

hone check recipes/demo/recipe.yaml              # with the model that the first RL stage starts from
hone check recipes/demo/recipe.yaml --no-model   # rewards, template and data only
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.base.settings import UserError
from hone.model import tiny
from hone.model.limits import longest_exact
from hone.model.load import load_model, load_tokenizer, stop_token_ids
from hone.preflight.check import base, probes, template
from hone.preflight.check.findings import Finding, distinct, lines
from hone.recipe.explain_stages import teacher
from hone.recipe.recipe import Pipeline, Recipe
from hone.recipe.schedule import Phases
from hone.rewards import REWARDS, make_reward
from hone.rewards.base import RewardFn
from hone.rewards.gold import gold_text
from hone.rewards.perplexity import Answerer
from hone.rollout.answerer import load_answerer
from hone.rollout.collect import rollouts, score
from hone.rollout.exactness import check_model, check_path
from hone.rollout.native.engine import NativeEngine
from hone.rollout.prompts import Renderer
from hone.stages.pipeline import stages_of, tokenizer_texts
from hone.tasks import make_task
from hone.tasks.base import Task
from hone.tasks.curriculum import Course
from hone.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBED = 3  # problems whose probes are scored
SCANNED = 200  # problems whose gold answer is graded

#: Random numbers of the base model's answers: those of no step and of no evaluation.
CHECK_SEED = 1 << 41


@dataclass
class Result:
    """What `hone check` shows, and with --json prints."""

    findings: list[Finding]
    scores: list[dict[str, Any]]  # the probes of the first problem
    base: dict[str, Any] | None = None  # None: no model was asked

    @property
    def failed(self) -> bool:
        return any(f.level == "fail" for f in self.findings)


def cli_check(
    recipe: Recipe | Pipeline, problems: int, with_model: bool, checkpoint: Path | None, as_json: bool
) -> int:
    """Prints the result; 1 if something failed, else 0."""
    result = check(recipe, problems, with_model, checkpoint)
    if as_json:
        values = {"failed": result.failed, **asdict(result)}
        print(json.dumps(values, indent=1, ensure_ascii=False))
    else:
        print(f"{score_table(result.scores)}\n\n{lines(result.findings)}")
    return int(result.failed)


def check(
    recipe: Recipe | Pipeline, problems: int = 8, with_model: bool = True, checkpoint: Path | None = None
) -> Result:
    """Of the first RL stage (of the first stage, if there is none). Raises UserError for what `train` would refuse."""
    stages = stages_of(recipe)
    place = next((i for i, (stage, _) in enumerate(stages) if stage.stage == "rl"), 0)
    stage = stages[place][0]
    task = make_task(stage.task, stage.seed)
    if not task.problems("train"):
        raise UserError(f"task {task.name}: the train split is empty; give it a size, e.g. task.train=1000")
    if stage.stage == "rl":  # it evaluates hours after it began
        for split in {stage.eval.split, "validation" if stage.eval.every else stage.eval.split}:
            task.problems(split)
    where = model_of(recipe, place, checkpoint) if with_model else None
    findings: list[Finding] = []
    if with_model and where is None:
        folder = Path(recipe.runs) / recipe.name / stage.model.stage if stage.model.stage is not None else None
        why = f"is made by the stages before it ({folder}/model)" if folder else "is made from scratch by the run"
        findings.append(Finding("warn", "model", f"the model of stage {stage.name} {why}; train them, or --checkpoint"))
    model = load_model(stage.model.at(where)) if where else None
    if model is not None:
        check_model(model)
    renderer = Renderer(
        load_tokenizer(stage.model.at(where)) if where else tokenizer_of(stage), stage.prompt, task.system
    )
    frozen = load_answerer(stage.reward, stage.model.at(where), stage.prompt, task.system, model) if where else None
    findings += _data(task)
    findings += _template(stage, task, renderer, model)
    result = Result(findings, [])
    if stage.stage == "rl":
        _rewards(stage, task, renderer, frozen, result)
        if where and model is not None:
            result.base, more = _base(stage, task, renderer, model, make_reward(stage.reward, task, frozen), problems)
            findings += more
    result.findings = distinct(findings)
    return result


def model_of(recipe: Recipe | Pipeline, place: int, checkpoint: Path | None) -> str | None:
    """Where the model is that a stage starts from; None if it has not been made yet."""
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


def tokenizer_of(stage: Recipe) -> Any:
    """The tokenizer that a run would have, without its model."""
    if stage.model.path != "tiny":
        return load_tokenizer(stage.model)
    made = stage.model.tiny
    return tiny.train_tokenizer(tokenizer_texts(stage), made.vocab_size, made.phrases)


# --- the parts -------------------------------------------------------------------------------


def _data(task: Task) -> Iterator[Finding]:
    """Can every gold answer be read by the grader that will judge the model's?"""
    problems = task.problems("train")[:SCANNED]
    if not is_graded(task):
        yield Finding("pass", "data", "task.grading is none: no answer is graded, only your reward judges")
        return
    unread = [(p, why) for p in problems if (why := _unreadable_gold(task, p))]
    if unread:
        problem, why = unread[0]
        more = f"{len(unread)} of {len(problems)} gold answers cannot earn a reward, the first: {problem.id}: {why}"
        level = Finding(
            "fail" if len(unread) > len(problems) / 20 else "warn", "data", f"{more}; remove or repair them"
        )
        yield level
    else:
        yield Finding("pass", "data", f"{len(problems)} gold answers are read and graded correct")


def _unreadable_gold(task: Task, problem: Problem) -> str | None:
    try:
        fits = probes.worked(task, problem) is not None or probes.writer_of(task, problem) is not None
    except UserError as error:
        return str(error)
    return None if fits else f"{gold_text(problem)[:60]!r} is graded correct in no shape"


def _template(stage: Recipe, task: Task, renderer: Renderer, model: PreTrainedModel | None) -> Iterator[Finding]:
    problems = task.problems("train")[:50]
    solutions = [text for p in problems if (text := probes.worked(task, p))]
    if model is not None:
        longest = longest_exact(model.config)
    else:
        longest = stage.model.tiny.max_positions if stage.model.path == "tiny" else None
    yield from template.check_template(renderer, problems, stage.sampling.max_tokens, solutions, longest)
    if model is not None:
        stops = stop_token_ids(model, renderer.tokenizer)
        if renderer.tokenizer.pad_token_id in stops and len(stops) == 1:
            yield Finding(
                "pass", "pad", "the padding token is the end-of-text token; hone masks by position, not by token"
            )


def _rewards(stage: Recipe, task: Task, renderer: Renderer, frozen: Answerer | None, result: Result) -> None:
    """Probes through the reward; without the model that a part asks, through the other parts."""
    asks = {name for name in stage.reward.parts if not getattr(REWARDS.get(name), "offline", True)}
    parts = dict(stage.reward.parts)
    if asks and frozen is None:
        parts = {name: weight for name, weight in parts.items() if name not in asks}
        said = f"reward {', '.join(sorted(asks))} asks a model and was not checked"
        result.findings.append(Finding("warn", "reward", f"{said}; run without --no-model once there is one"))
    if not parts:
        return
    reward = make_reward(stage.reward.model_copy(update={"parts": parts}), task, frozen)
    findings: list[Finding] = []
    count = counter(renderer)
    for n, problem in enumerate(task.problems("train")[:PROBED]):
        try:
            write = None if is_graded(task) else probes.best_paid(problem, reward, count)
            chosen = probes.probes(task, problem, task.problems("train")[1:], write)
        except UserError as error:
            findings.append(Finding("fail" if is_graded(task) else "warn", "gold", str(error)))
            continue
        rows = probes.score(problem, chosen, reward, count)
        by_model = bool(asks) and frozen is not None
        findings += probes.judge_scores(rows, by_model, is_graded(task))
        if n == 0:
            result.scores = [_row(row) for row in rows]
    result.findings += findings


def is_graded(task: Task) -> bool:
    """Whether the task has a grader: rows with `grading: none` have only the user's reward."""
    return getattr(task, "grading", "") != "none"


def counter(renderer: Renderer) -> Callable[[str], int]:
    return lambda text: len(renderer.tokenizer.encode(text, add_special_tokens=False))


def _row(row: probes.Probed) -> dict[str, Any]:
    r = row.reward
    return {
        "probe": row.probe.name,
        "kind": row.probe.kind,
        "total": r.total,
        "verdict": r.verdict,
        "milliseconds": round(row.seconds * 1000, 2),
        "parts": dict(r.parts),
    }


def _base(
    stage: Recipe, task: Task, renderer: Renderer, model: PreTrainedModel, reward: RewardFn, count: int
) -> tuple[dict[str, Any], list[Finding]]:
    """Answers to a few training problems, sampled and rewarded as in training."""
    engine = NativeEngine(model, stop_token_ids(model, renderer.tokenizer), stage.rollout)
    chosen = task.problems("train")[:count]
    seed = stage.seed + CHECK_SEED
    answers = rollouts(chosen, renderer, engine, stage.sampling, samples=stage.samples_per_prompt, seed=seed)
    groups = score(chosen, answers, reward)
    return base.measured(groups), list(base.judge_base(groups, refill=bool(stage.algo.refill_rounds)))


def score_table(scores: Sequence[dict[str, Any]]) -> str:
    """One row per probe; the parts that are the same for all are left out."""
    if not scores:
        return "no reward was checked"
    names = list(dict.fromkeys(name for row in scores for name in row["parts"]))
    telling = [n for n in names if len(Counter(row["parts"].get(n) for row in scores)) > 1]
    rows = [["probe", "reward", "verdict", "ms", *telling]]
    for row in scores:
        parts = [f"{row['parts'][n]:g}" if n in row["parts"] else "-" for n in telling]
        rows.append([row["probe"], f"{row['total']:+.3f}", row["verdict"], f"{row['milliseconds']:.1f}", *parts])
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(r, widths)).rstrip() for r in rows)


# --- dry run ---------------------------------------------------------------------------------


def dry_run(recipe: Recipe | Pipeline) -> None:
    """`hone train --dry-run`: what the stages will do, two prompts as the model sees them, `check` without a model."""
    for stage, sub in stages_of(recipe):
        start = stage.model.path if stage.model.stage is None else f"the model of stage {stage.model.stage}"
        start = start if stage.stage != "generate" else ""
        print(f"stage {stage.name} ({stage.stage}) -> {Path(recipe.runs) / recipe.name / sub}")
        print(f"  starts from {start}" if start else "  trains nothing")
        print(f"  {plan(stage)}")
    for place, (other, _) in enumerate(stages_of(recipe)):
        if (where := model_of(recipe, place, None)) is not None and other.stage != "generate":
            check_path(other.model.at(where))
    stage = stages_of(recipe)[-1][0]
    task = make_task(stage.task, stage.seed)
    if stage.stage in ("rl", "distil"):
        phases = Phases(stage)
        for settings in phases.sets():
            Course(task.problems("train"), stage.seed).check(phases.merged(settings).curriculum)
    renderer = Renderer(tokenizer_of(stage), stage.prompt, task.system)
    for problem in task.problems("train")[:2]:
        print(f"\nprompt of {problem.id}, {len(renderer.prompt_ids(problem))} tokens:\n{renderer.prompt_text(problem)}")
    result = check(recipe, with_model=False)
    print(f"\n{score_table(result.scores)}\n\n{lines(result.findings)}")


def plan(stage: Recipe) -> str:
    """What a stage will do, in a line."""
    if stage.stage == "sft" and stage.sft.data is not None:
        return f"{stage.sft.epochs} epoch(s) of {stage.sft.data}, {stage.sft.examples_per_step} examples a step"
    if stage.stage == "sft":
        return f"{stage.sft.num_steps} steps of {stage.sft.examples_per_step} examples"
    if stage.stage == "generate":
        problems = "all" if stage.generate.problems is None else f"the first {stage.generate.problems}"
        return (
            f"{stage.samples_per_prompt} answers of at most {stage.sampling.max_tokens} tokens to {problems} train "
            f"problems, by {teacher(stage)}; of the right ones is kept: {stage.generate.keep}"
        )
    samples = stage.prompts_per_step * stage.samples_per_prompt
    by = f"; the teacher is {teacher(stage)}" if stage.stage == "distil" else ""
    return (
        f"{stage.steps} steps of {stage.prompts_per_step} prompts x {stage.samples_per_prompt} samples = {samples} "
        f"answers of at most {stage.sampling.max_tokens} tokens, {stage.algo.updates_per_rollout} update(s) each; "
        f"evaluation on {stage.eval.problems} {stage.eval.split} problems{by}"
    )
