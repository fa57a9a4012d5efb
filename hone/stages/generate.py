"""Distillation's first half: a teacher answers the training problems, and its right answers become a dataset.

    hone train RECIPE            with `stage: generate`

    RUN/samples/shard_00000.jsonl   every answer; a row is appended when its answer is complete
    RUN/dataset.jsonl               those that were kept, for `sft.data`; written last, so the stage is then complete
    RUN/counts.json                 problems, right answers and kept ones, by level

A row of a shard: {"problem_id": "knights-train-0003", "index": 2, "verdict": "correct", "tokens": 112, "finish":
"stop", "text": "<think>...", "teacher": "stages.rl", "sampling": {"temperature": 1.0, ...}, "seed": 7, ...}
A row of the dataset: {"prompt": [{"role": "user", ...}], "completion": [{"role": "assistant", ...}], ...}. Its prompt
is the problem alone: the student renders it with its own chat template and system prompt.

Random numbers are keyed by (seed, problem, sample), so that an interrupted stage continues with the missing answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hone.base import jsonl, sealed, streams
from hone.base.progress import Track
from hone.base.settings import UserError
from hone.base.world import World
from hone.recipe.recipe import GenerateStage
from hone.recipe.sections.model import ModelConfig
from hone.recipe.stages import PREFIX
from hone.rewards.base import judge_all
from hone.rollout.engine import Event
from hone.rollout.hosted import Endpoint, HostedModel
from hone.rollout.local import LocalModel, load_local
from hone.rollout.native.requests import Request
from hone.runs.writer import RunWriter
from hone.tasks import make_task
from hone.tasks.base import Task
from hone.tasks.rows.task import canonical
from hone.types import VERIFIER_FAILURES, Problem, Rollout, Turn

Key = tuple[int, int]  # (index of the problem in the split, sample)
Row = Mapping[str, Any]

DATASET = "dataset.jsonl"


class Teacher(Protocol):
    """Something that answers problems."""

    name: str  # its path or address

    def answers(self, wanted: Sequence[Key], problems: Sequence[Problem]) -> Iterator[list[tuple[Key, Rollout]]]:
        """The wanted samples in batches, in the order of completion."""
        ...


def train(recipe: GenerateStage, folder: Path, model: ModelConfig) -> None:
    """Sample answers of `model`, or of the endpoint that the recipe names, and keep those to be imitated.

    Raises UserError if the folder holds answers of another teacher, or if no answer is correct.
    """
    world = World.from_env(recipe.parallel)
    task = make_task(recipe.task, recipe.seed)
    problems = task.problems("train")[: recipe.generate.problems]
    if not problems:
        raise UserError(f"generate: the train split of task {task.name} is empty; give it a size, e.g. 1000")
    writer = RunWriter.open(folder, recipe.model_dump(mode="json"), recipe.seed, world)
    name = teacher_name(recipe)
    per_shard, samples = recipe.generate.problems_per_shard, recipe.samples_per_prompt
    shards = [range(at, min(at + per_shard, len(problems))) for at in range(0, len(problems), per_shard)]
    paths = [writer.path("samples") / f"shard_{i:05d}.jsonl" for i in range(len(shards))]

    def there_already() -> list[set[Key]]:
        paths[0].parent.mkdir(exist_ok=True)
        return [finished(path, name, problems, shard) for path, shard in zip(paths, shards, strict=True)]

    done = world.on_main(there_already, "the answers that exist already")
    total, there = len(problems) * samples, sum(map(len, done))
    if there:
        writer.event("resumed", f"{there} of {total} answers exist already")
    teacher: Teacher | None = None
    with Track("generate", total, there, world.main) as progress:
        for i, (path, shard, have) in enumerate(zip(paths, shards, done, strict=True)):
            if i % world.size == 0:  # each process fills one of the next shards
                world.barrier(f"the shards before {path.name}")
            if i % world.size != world.rank:
                continue
            wanted = [(i, g) for i in shard for g in range(samples) if (i, g) not in have]
            if wanted:
                teacher = teacher or make_teacher(recipe, model, task, writer.event)
                about = {"teacher": name, "sampling": recipe.sampling.model_dump(mode="json"), "seed": recipe.seed}
                fill(path, graded(teacher.answers(wanted, problems), problems, task, about), progress)
            tidy(path)
    world.barrier("the last shards")
    world.on_main(lambda: finish(writer, recipe, [row for path in paths for row in jsonl.read(path)], problems))


def finished(path: Path, teacher: str, problems: Sequence[Problem], shard: range) -> set[Key]:
    """The samples that a shard already holds. Raises UserError for answers of another teacher.

    An incomplete last line, left by an interrupted run, is removed.
    """
    jsonl.keep(path, lambda row: True)
    keys = set()
    for row in jsonl.read(path):
        i = row["number"]
        if i not in shard or row["problem_id"] != problems[i].id or row["teacher"] != teacher:
            raise UserError(
                f"{path} holds answers of {row['teacher']} to other problems, or of another teacher than {teacher}; "
                "move the run away, or give it another name"
            )
        keys.add((i, row["index"]))
    return keys


def graded(
    answers: Iterable[Sequence[tuple[Key, Rollout]]], problems: Sequence[Problem], task: Task, about: Row
) -> Iterator[Row]:
    """Rows of a shard, each as soon as its answer is complete. `about`: teacher, sampling settings and seed."""
    for some in answers:
        judged = judge_all(task, [(problems[i], rollout) for (i, _), rollout in some])
        for ((i, g), rollout), one in zip(some, judged, strict=True):
            yield {
                "number": i,
                "problem_id": problems[i].id,
                "index": g,
                "level": problems[i].level,
                "domain": problems[i].domain,
                "verdict": one.grade.verdict,
                "extracted": one.grade.extracted,
                "tokens": rollout.num_tokens,
                "finish": rollout.finish,
                "text": rollout.text,
                **about,
            }


def fill(path: Path, rows: Iterable[Row], progress: Track) -> None:
    """Append rows to a shard as they arrive."""
    correct = 0
    for row in rows:
        jsonl.append(path, row)
        correct += row["verdict"] == "correct"
        progress.advance(f"{correct} right in {path.stem}")


def tidy(path: Path) -> None:
    """Sort a complete shard by problem and sample; it is not written again."""
    rows = jsonl.read(path)
    rows_in_order = sorted(rows, key=lambda row: (row["number"], row["index"]))
    if rows != rows_in_order:
        jsonl.write(path, rows_in_order)


# --- rejection --------------------------------------------------------------------------------------------------------


def right(row: Row) -> bool:
    """Whether an answer may be imitated: correct, and ended by the teacher, not by the token limit."""
    return bool(row["verdict"] == "correct" and row["finish"] == "stop")


def reject(rows: Sequence[Row], keep: str, seed: int) -> list[Row]:
    """Choose the answers to imitate among the right ones of each problem.

    `first`: the lowest index. `shortest`: in tokens. `random`: drawn with the seed. `all`: every distinct text.
    """
    by_problem: dict[int, list[Row]] = {}
    for row in rows:
        if right(row):
            by_problem.setdefault(row["number"], []).append(row)
    kept: list[Row] = []
    for number, answers in sorted(by_problem.items()):
        answers = sorted(answers, key=lambda row: row["index"])
        if keep == "first":
            kept.append(answers[0])
        elif keep == "shortest":
            kept.append(min(answers, key=lambda row: (row["tokens"], len(row["text"]))))
        elif keep == "random":
            kept.append(answers[streams.generator("kept answer", seed=seed, problem=number).integers(len(answers))])
        else:
            kept += {" ".join(row["text"].split()): row for row in reversed(answers)}.values()
    return sorted(kept, key=lambda row: (row["number"], row["index"]))


def counts(rows: Sequence[Row], kept: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Level (and `all`) -> numbers of problems, solved problems, answers, correct and kept answers."""
    result: dict[str, dict[str, int]] = {}
    for level in [*sorted({row["level"] for row in rows}), "all"]:
        of = [row for row in rows if level in (row["level"], "all")]
        result[level] = {
            "problems": len({row["number"] for row in of}),
            "solved": len({row["number"] for row in of if right(row)}),
            "answers": len(of),
            "correct": sum(row["verdict"] == "correct" for row in of),
            "correct_but_cut": sum(row["verdict"] == "correct" and not right(row) for row in of),
            "ungraded": sum(row["verdict"] in VERIFIER_FAILURES for row in of),
            "kept": sum(level in (row["level"], "all") for row in kept),
        }
    return result


def finish(writer: RunWriter, recipe: GenerateStage, rows: Sequence[Row], problems: Sequence[Problem]) -> None:
    """Write the dataset, and record what it contains."""
    kept = reject(rows, recipe.generate.keep, recipe.seed)
    by_level = counts(rows, kept)
    jsonl.replace(writer.path("counts.json"), json.dumps(by_level, indent=1))
    solved = ", ".join(f"{level}: {c['solved']} of {c['problems']}" for level, c in by_level.items())
    message = f"problems with a right answer: {solved}; {by_level['all']['kept']} answers kept ({recipe.generate.keep})"
    if not kept:
        raise UserError(
            f"{writer.folder}: no answer of the teacher is right, so there is nothing to learn from; {message}"
        )
    writer.event("dataset", message, **by_level["all"])
    lines = [jsonl.line(dataset_row(row, problems[row["number"]])) for row in kept]
    sealed.put(writer.path(DATASET).parent, DATASET, "".join(lines))
    writer.event("finished", f"{len(rows)} answers to {len(problems)} problems")


def dataset_row(row: Row, problem: Problem) -> dict[str, Any]:
    """A row in the format that most supervised trainers read: a conversational prompt with its completion."""
    return {
        "prompt": [dict(message) for message in problem.messages],
        "completion": [{"role": "assistant", "content": row["text"]}],
        **{key: row[key] for key in ("problem_id", "level", "domain", "index", "tokens", "teacher")},
        "canonical": canonical(problem),  # identifies problems to hold out: the same puzzle may occur with other names
    }


# --- teachers ---------------------------------------------------------------------------------------------------------


def teacher_name(recipe: GenerateStage) -> str:
    """The teacher as the recipe names it, so that a run folder can be moved."""
    start = recipe.model.path if recipe.model.stage is None else f"{PREFIX}{recipe.model.stage}"
    return recipe.teacher or start


def make_teacher(recipe: GenerateStage, model: ModelConfig, task: Task, event: Event) -> Teacher:
    if recipe.teacher is not None and "://" in recipe.teacher:
        return Hosted(recipe, task)
    config = model if recipe.teacher is None else model.model_copy(update={"revision": None})
    return Local(recipe, load_local(config, recipe.rollout, recipe.prompt, task.system, event=event))


class Local:
    """A model in the native engine, which replaces finished answers by waiting ones."""

    def __init__(self, recipe: GenerateStage, local: LocalModel) -> None:
        self.name, self.recipe, self.local = teacher_name(recipe), recipe, local

    def answers(self, wanted: Sequence[Key], problems: Sequence[Problem]) -> Iterator[list[tuple[Key, Rollout]]]:
        most = {i: g + 1 for i, g in wanted}  # in order: the last sample of each
        missing, seed = set(wanted), streams.answers("generation", self.recipe.seed)
        prompt_ids, sampling = self.local.renderer.prompt_ids, self.recipe.sampling
        requests = [Request(prompt_ids(problems[i]), sampling, seed, i, n) for i, n in most.items()]
        with self.local.engine.open() as core:
            place = dict(zip(core.submit(requests), most))
            while core.busy:
                done = [
                    (key, self._rollout(problems[key[0]], key[1], output.turn))
                    for output in core.step()
                    if output.turn is not None and (key := (place[output.request], output.sample)) in missing
                ]
                if done:
                    yield done

    def _rollout(self, problem: Problem, index: int, turn: Turn) -> Rollout:
        return Rollout(problem.id, index, (turn,), self.local.renderer.text(turn.completion_ids))


class Hosted:
    """An OpenAI-compatible endpoint."""

    def __init__(self, recipe: GenerateStage, task: Task) -> None:
        self.name, self.recipe = teacher_name(recipe), recipe
        system = recipe.prompt.system_prompt(task.system)
        self.model = HostedModel(Endpoint.parse(self.name), recipe.sampling, system, recipe.generate.concurrency)

    def answers(self, wanted: Sequence[Key], problems: Sequence[Problem]) -> Iterator[list[tuple[Key, Rollout]]]:
        for answer in self.model.answers(problems, wanted, streams.answers("generation", self.recipe.seed)):
            yield [answer]
