"""Distillation, small: a teacher's answers, what is kept of them, a student of another size; cut anywhere."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hone.base import jsonl
from hone.base.settings import ConfigError, UserError
from hone.learn.examples import examples, of_dataset
from hone.preflight.check.run import dry_run
from hone.recipe.explain import explain
from hone.recipe.load import load
from hone.recipe.notes import notices
from hone.recipe.recipe import Pipeline, Recipe, resolved
from hone.recipe.schedule import Phases
from hone.report.build import build
from hone.stages import generate as distil
from hone.stages import pipeline, sft
from hone.tasks import make_task
from hone.tasks.rows.pairs import key_of, pair, read_pairs, split
from tests.rollout.test_hosted import Server, says

RECIPE = """
name: small
runs: {runs}
model: {{path: tiny, tiny: {{vocab_size: 320, hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, mlp_size: 64}}}}
task: {{name: dataset, source: {rows}, grading: exact}}
prompt: {{style: raw, system: "", template: "{{user}}\\n"}}
tokens_per_microbatch: 1024
samples_per_prompt: 3
sampling: {{max_tokens: 12}}
eval: {{problems: 4, sampling: {{max_tokens: 12}}}}
checkpoint: {{every: 2, keep: 2}}
stages:
  - name: teacher
    stage: sft
    sft: {{examples: 480, examples_per_step: 8, styles: {{answer: 1.0}}}}
    optim: {{lr: 1.0e-2}}
  - name: answers
    stage: generate
    generate: {{problems_per_shard: 7}}
  - name: student
    stage: sft
    model: {{path: tiny, tiny: {{layers: 1}}}}
    sft: {{data: stages.answers, epochs: 3, examples_per_step: 4}}
    optim: {{lr: 1.0e-2}}
  - name: cold
    stage: rl
    steps: 2
    prompts_per_step: 2
    optim: {{lr: 1.0e-3}}
  - name: onpolicy
    stage: distil
    teacher: stages.teacher
    steps: 3
    prompts_per_step: 2
    optim: {{lr: 1.0e-3}}
"""


def write_recipe(folder: Path, runs: Path | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    rows = [{"question": f"What is {i} modulo 3?", "answer": str(i % 3), "level": str(i % 2)} for i in range(24)]
    jsonl.write(folder / "rows.jsonl", rows)
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(runs=runs or folder / "runs", rows=folder / "rows.jsonl"))
    return path


def bits(run: Path) -> dict[str, bytes]:
    """Everything that must not depend on where a run was cut."""
    names = ["metrics.jsonl", "evals.jsonl", "rollouts/*", "tokens/*", "samples/*", "*.jsonl", "counts.json"]
    names += ["model/model.safetensors"]
    skipped = ("events.jsonl", "timings.jsonl", "sessions.jsonl")
    found = [p for stage in sorted(run.iterdir()) if stage.is_dir() for n in names for p in sorted(stage.glob(n))]
    return {str(p.relative_to(run)): p.read_bytes() for p in found if p.name not in skipped}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipeline.run(load(write_recipe(tmp_path_factory.mktemp("whole"))))


# --- the whole way ----------------------------------------------------------------------------------------------------


def test_what_the_stages_leave(whole: Path) -> None:
    shards = [jsonl.read(p) for p in sorted((whole / "answers" / "samples").iterdir())]
    rows = [row for shard in shards for row in shard]
    train = json.loads((whole / "answers" / "counts.json").read_text())["all"]["problems"]
    assert [len(shard) for shard in shards] == [21] * (train // 7) + ([3 * (train % 7)] if train % 7 else [])
    assert [(row["number"], row["index"]) for row in rows] == [(i, g) for i in range(train) for g in range(3)]
    assert {row["teacher"] for row in rows} == {"stages.teacher"}
    assert {row["sampling"]["temperature"] for row in rows} == {1.0}
    assert all(row["text"] and row["tokens"] > 0 for row in rows)
    kept = jsonl.read(whole / "answers" / "dataset.jsonl")
    assert 4 <= len(kept) < train
    right = {row["problem_id"] for row in rows if row["verdict"] == "correct" and row["finish"] == "stop"}
    first = dict.fromkeys(row["problem_id"] for row in rows)
    assert [row["problem_id"] for row in kept] == [i for i in first if i in right]
    # Trained on, and held out: a student of another size, in which both losses fall.
    metrics = jsonl.read(whole / "student" / "metrics.jsonl")
    held_out = [row["validation_loss"] for row in metrics if "validation_loss" in row]
    assert len(held_out) == 3
    assert held_out[-1] < held_out[0]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    layers = {s: json.loads((whole / s / "model" / "config.json").read_text())["num_hidden_layers"]
              for s in ("teacher", "student", "cold", "onpolicy")}  # fmt: skip
    assert layers == {"teacher": 2, "student": 1, "cold": 1, "onpolicy": 1}
    rows = jsonl.read(whole / "onpolicy" / "metrics.jsonl")
    assert [row["phase"] for row in rows] == ["distil"] * 3
    assert all(math.isfinite(row["teacher/kl"]) and row["grad_norm"] > 0 for row in rows)
    assert {row["mismatch/max"] < 1e-4 for row in rows} == {True}
    results = json.loads((whole / "results.json").read_text())
    assert results["after"]["accuracy"]["n"] > 0


def test_the_report_shows_the_student(whole: Path, tmp_path: Path) -> None:
    page = build(whole, tmp_path / "report").read_text()
    assert "validation" in page
    assert "KL to the teacher" in page


def test_a_finished_run_loads_as_it_was(whole: Path) -> None:
    again = load(whole)
    assert isinstance(again, Pipeline)
    starts = [(s.model.path, s.model.stage, s.model.tiny.layers) for s in again.stages]
    assert starts == [
        ("tiny", None, 2),
        ("tiny", "teacher", 2),
        ("tiny", None, 1),
        ("tiny", "student", 1),
        ("tiny", "cold", 1),
    ]
    assert json.loads((whole / "config.resolved.json").read_text())["stages"] == resolved(again)["stages"]


def shards_of(run: Path) -> list[Path]:
    return sorted((run / "answers" / "samples").iterdir())


class Killed(Exception):
    pass


def kill(patch: pytest.MonkeyPatch, where: str) -> None:
    """Let a run die in the middle of what it writes."""
    calls = iter(range(1000))
    if where.startswith("in the middle of a shard"):
        judge_all, after = distil.judge_all, int(where.split()[-1])

        def judged(*arguments: Any) -> Any:
            if next(calls) >= after:
                raise Killed
            return judge_all(*arguments)

        patch.setattr(distil, "judge_all", judged)
    elif where == "before a shard is put in order":
        patch.setattr(distil, "tidy", raises)
    elif where == "before the dataset":
        patch.setattr(distil, "finish", raises)
    else:
        patch.setitem(pipeline.STAGES, where.split()[-1], raises)


def raises(*_: Any) -> Any:
    raise Killed


@pytest.mark.parametrize(
    "where",
    [
        *("in the middle of a shard 1", "in the middle of a shard 2", "before a shard is put in order"),
        *("before the dataset", "between stages, before rl"),
    ],
)
def test_cut_and_resumed_is_the_same_bits(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The stages before the cut are taken from the whole run; those after it are trained again."""
    recipe = load(write_recipe(whole.parent.parent), [f"runs={tmp_path}"])
    run = tmp_path / "small"
    run.mkdir()
    for stage in ("teacher", *(("answers", "student") if "rl" in where else ())):
        shutil.copytree(whole / stage, run / stage)
    with monkeypatch.context() as patch:
        kill(patch, where)
        with pytest.raises(Killed):
            pipeline.run(recipe, resume=True)
    asked: list[Any] = []
    if "middle" in where:
        paths = shards_of(run)
        there, every = (sum(len(jsonl.read(p)) for p in files) for files in (paths, shards_of(whole)))
        assert 0 < there < every
        with paths[-1].open("a") as file:
            file.write('{"number": 1, "ind')  # what a kill tears
        fill = distil.fill

        def noted(rows: Iterator[Any]) -> Iterator[Any]:
            for row in rows:
                asked.append(row)
                yield row

        monkeypatch.setattr(distil, "fill", lambda path, rows, progress: fill(path, noted(rows), progress))
    assert pipeline.run(recipe, resume=True) == run
    assert "middle" not in where or len(asked) == every - there
    expected = bits(whole)
    assert bits(run).keys() == expected.keys()
    assert [name for name, value in bits(run).items() if value != expected[name]] == []


def test_answers_of_another_teacher_are_not_mixed(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "answers" / "samples", tmp_path / "answers" / "samples")
    recipe = load(write_recipe(whole.parent.parent))
    stage = recipe.stages[1].model_copy(update={"teacher": str(whole / "student" / "model")})
    with pytest.raises(
        UserError, match=r"shard_00000.jsonl holds answers of stages.teacher to other problems, or of an"
    ):
        distil.train(stage, tmp_path / "answers", stage.model.at(str(whole / "student" / "model")))


# --- rejection --------------------------------------------------------------------------------------------------------


def answer(number: int, index: int, text: str, tokens: int, verdict: str = "correct", **more: str) -> dict[str, Any]:
    row = {"number": number, "index": index, "text": text, "tokens": tokens, "verdict": verdict, "finish": "stop"}
    return {**row, "level": str(number), **more}


ANSWERS = [
    answer(0, 0, "wrong", 1, "wrong"),
    answer(0, 2, "b  b", 5),
    answer(0, 1, "a", 7),
    answer(0, 3, "b b", 4),
    answer(0, 4, "cut", 2, finish="length"),
    answer(1, 0, "no", 3, "malformed"),
    answer(2, 0, "c", 9),
    answer(2, 1, "?", 9, "verifier_timeout"),
]


@pytest.mark.parametrize(
    ("keep", "texts"),
    [("first", ["a", "c"]), ("shortest", ["b b", "c"]), ("all", ["a", "b  b", "c"])],
)
def test_rejection(keep: str, texts: list[str]) -> None:
    """Never a wrong answer, and none that was cut: its end would be taught where there is none."""
    assert [row["text"] for row in distil.reject(ANSWERS, keep, seed=0)] == texts


def test_random_rejection_is_by_seed_and_reaches_every_right_answer() -> None:
    drawn = [[row["text"] for row in distil.reject(ANSWERS, "random", seed)] for seed in range(30)]
    assert {texts[0] for texts in drawn} == {"a", "b  b", "b b"}
    assert drawn == [[row["text"] for row in distil.reject(ANSWERS[::-1], "random", seed)] for seed in range(30)]


def test_counts_by_level() -> None:
    found = distil.counts(ANSWERS, distil.reject(ANSWERS, "all", 0))
    keys = ("problems", "solved", "answers", "correct", "correct_but_cut", "ungraded", "kept")
    assert [found["0"][k] for k in keys] == [1, 1, 5, 4, 1, 0, 2]
    assert [found["1"][k] for k in keys] == [1, 0, 1, 0, 0, 0, 0]
    assert [found["all"][k] for k in keys] == [3, 2, 8, 5, 1, 1, 3]


# --- datasets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2?", "completion": "4"},
        {"prompt": [{"role": "user", "content": "2+2?"}], "completion": [{"role": "assistant", "content": "4"}]},
        {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]},
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        {"messages": [{"role": "user", "content": "2+2?"}], "response": "4"},
        {"question": "2+2?", "answer": "4"},
        {"instruction": "2+2?", "input": "", "output": "4"},
    ],
)
def test_usual_columns(row: dict[str, Any]) -> None:
    found = pair(row)
    assert (found.problem.messages[-1]["content"], found.text) == ("2+2?", "4")
    assert [m["role"] for m in found.problem.messages] == ["user"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "2+2?"}, "no completion: none of completion, response"),
        ({"text": "4"}, "no prompt: none of prompt, question"),
        ({"messages": [{"role": "user", "content": "2+2?"}]}, "the last message is not the assistant's"),
        (
            {"messages": [{"role": r, "content": "x"} for r in ("user", "assistant") * 2]},
            "a conversation of several turns",
        ),
    ],
)
def test_rows_that_are_no_pairs(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    jsonl.write(tmp_path / "a.jsonl", [{"prompt": "1", "completion": "2"}, row])
    with pytest.raises(UserError, match=f"a.jsonl: all row 2: {message}"):
        read_pairs(str(tmp_path / "a.jsonl"))


def test_held_out_by_problem() -> None:
    """All answers to a problem are on one side, also those to the same puzzle under other names."""
    pairs = [pair({"prompt": f"Q{i % 10}!", "completion": str(i)}) for i in range(40)]
    pairs += [pair({"prompt": f"N{i}", "completion": "x", "canonical": f"q{i % 10}"}) for i in range(10)]
    train, held_out = split(pairs, 0.2)
    assert {key_of(p.problem) for p in train} & {key_of(p.problem) for p in held_out} == set()
    assert len({key_of(p.problem) for p in held_out}) == 2
    assert len(held_out) == 10
    assert split(pairs[::-1], 0.2)[1] == held_out[::-1], "which ones does not depend on the order of the rows"
    with pytest.raises(UserError, match=r"1 problem\(s\) cannot be divided"):
        split(pairs[:1], 0.2)


def test_training_data_never_holds_what_is_evaluated(tmp_path: Path) -> None:
    """A dataset from elsewhere may contain the test split's questions."""
    recipe = load(write_recipe(tmp_path)).stages[2]
    task = make_task(recipe.task, recipe.seed)
    rows = [
        {"prompt": p.messages[-1]["content"], "completion": "0"} for s in ("train", "test") for p in task.problems(s)
    ]
    jsonl.write(tmp_path / "data.jsonl", rows)
    found = of_dataset(recipe, task, str(tmp_path / "data.jsonl"))
    asked = {p.messages[-1]["content"] for p in task.problems("test")}
    trained = {e.problem.messages[-1]["content"] for e in found.train}
    assert trained
    assert not asked & trained
    assert found.report[0].startswith(f"{len(asked)} of {len(rows)} examples left out: their questions are in the")


@pytest.mark.parametrize(("every", "due"), [(None, [2, 4, 6]), (3, [2, 5, 6]), (0, [])])
def test_when_the_validation_loss_is_measured(tmp_path: Path, every: int | None, due: list[int]) -> None:
    """Steps of 4 of 10 examples, 3 epochs: the epochs end within steps 2, 4 and after 6 (the rest is left over)."""
    stage = load(write_recipe(tmp_path)).stages[2]
    stage = stage.model_copy(update={"sft": stage.sft.model_copy(update={"validate_every": every})})
    assert [step for step in range(7) if sft.validation_due(stage, step, 7, 10)] == due


def test_validation_of_traces(whole: Path, tmp_path: Path) -> None:
    """The loss on the validation split of the task, which is never trained on."""
    recipe = load(write_recipe(tmp_path), ["stages.teacher.sft.validate_every=25", "stages.teacher.sft.examples=480"])
    stage = recipe.stages[0].model_copy(update={"runs": str(tmp_path)})
    task = make_task(stage.task, stage.seed)
    found = examples(stage, task, tmp_path)
    assert [e.problem.id for e in found.validation] == [p.id for p in task.problems("validation")]
    run = pipeline.run(stage)
    rows = jsonl.read(run / "metrics.jsonl")
    assert [row["step"] for row in rows if "validation_loss" in row] == [24, 49, 59]
    plain = jsonl.read(whole / "teacher" / "metrics.jsonl")
    assert [row["loss"] for row in rows] == [row["loss"] for row in plain], "measuring changes nothing"


# --- recipes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("student.sft.data=stages.teacher", "stages.2.sft.data: stages.teacher is not an earlier stage with a dataset"),
        ("onpolicy.teacher=stages.answers", "stages.4.teacher: stages.answers is not an earlier stage with a"),
        ("onpolicy.teacher=http://127.0.0.1/v1#m", "teacher: http://127.0.0.1/v1#m: an endpoint gives no log-probs"),
        ("onpolicy.sampling.top_p=0.9", "sampling.top_p: the KL to the teacher is over the whole distribution"),
        ("onpolicy.algo.kl.coef=0.1", "algo.kl.coef: the advantage is the teacher's log-prob less the student's"),
        ("answers.sampling.temperature=0", "samples_per_prompt: 3 answers at sampling.temperature 0 are all the"),
        ("answers.rollout.engine=vllm", "rollout.engine: a teacher behind vllm is an endpoint: start its server"),
        ("cold.model.tiny.layers=4", "stages.3.model.tiny: cannot differ from that of stage student, whose model"),
        ("teacher.steps=3", "stages.0.steps: a setting of stages of kind rl and distil, and this stage is of kind sft"),
        ("cold.model=stages.answers", "stages.answers is not an earlier stage with a model; those are: teacher,"),
        ("student.sft.data=no/such/file.jsonl", "sft.data: no file no/such/file.jsonl"),
        ("answers.teacher=http://127.0.0.1:8000/v1", "teacher: http://127.0.0.1:8000/v1 names no model; give an"),
        (
            "onpolicy.rollout={engine: vllm, ahead: true}",
            "rollout.ahead: only stage rl corrects for answers of older weights",
        ),
        ("onpolicy.lora={dropout: 0.1}", "lora.dropout: with dropout the trained network differs"),
        ("answers.teacher=./nobody", "teacher: ./nobody is not a folder here"),
    ],
)
def test_what_is_wrong(tmp_path: Path, override: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write_recipe(tmp_path), [f"stages.{override}"])
    assert line in str(caught.value)


def test_a_single_stage_refers_to_no_other(tmp_path: Path) -> None:
    for text in ("model: stages.x", "stage: generate\nteacher: stages.x", "stage: sft\nsft: {data: stages.x}"):
        (tmp_path / "r.yaml").write_text(f"name: one\ntask: knights\n{text}\n")
        with pytest.raises(ConfigError, match=r"stages.x: this recipe has no stages"):
            load(tmp_path / "r.yaml")


def test_overrides_of_the_model(tmp_path: Path) -> None:
    """`model=` is where every line of stages begins, and not a new beginning for those that go on."""
    file = write_recipe(tmp_path)
    loaded = load(file, ["model=o/m", "model.dtype=bfloat16"])
    starts = [(s.model.path, s.model.stage) for s in loaded.stages]
    assert starts == [("o/m", None), ("o/m", "teacher"), ("o/m", None), ("o/m", "student"), ("o/m", "cold")]
    assert {s.model.dtype for s in loaded.stages} == {"bfloat16"}
    one = load(file, ["stages.student.model=o/m", "stages.cold.model=stages.teacher"])
    assert [s.model.path for s in one.stages] == ["tiny", "tiny", "o/m", "tiny", "tiny"]
    assert [s.model.stage for s in one.stages] == [None, "teacher", None, "teacher", "cold"]
    assert [s.model.tiny.layers for s in load(file, ["model.tiny.layers=3"]).stages] == [3] * 5


def test_notices_and_explanations(tmp_path: Path) -> None:
    file = write_recipe(tmp_path)
    assert not any("no later stage" in line for line in notices(load(file)))
    unused = notices(load(file, ["stages.student.sft.data=null", "stages.student.sft.styles={answer: 1}"]))
    assert "stage answers: no later stage uses its dataset" in unused
    text = " ".join(explain(load(file)).split())
    for part in (
        "stage answers: answers of a teacher teacher the model of stage teacher",
        "answers 3 to each of all train problems, at temperature 1, of at most 12 tokens",
        "examples the answers that stage answers kept, without those to problems of the task's validation and test",
        "the data's own validation split, or all answers to 10 % of its problems, after each epoch",
        "stage onpolicy: on-policy distillation, 3 steps",
        "A_t = log(teacher_t / old_t)",
    ):
        assert part in text, part
    (tmp_path / "one.yaml").write_text(
        "name: one\ntask: knights\nstage: generate\nteacher: http://127.0.0.1:1/v1#m\nprompt: {style: raw}\n"
    )
    one = load(tmp_path / "one.yaml")
    assert isinstance(one, Recipe)
    assert notices(one) == [
        "prompt.style has no effect while teacher is an endpoint, which has its own template",
    ]


def test_an_endpoint_teaches(tmp_path: Path) -> None:
    """Asked with the task's messages; what was answered before a cut is not asked again."""
    server = Server(*[says(f"Answer: {i % 3}") for i in range(4)], (400, "no"))
    try:
        stage = load(write_recipe(tmp_path), ["stages.answers.generate.concurrency=1"]).stages[1]
        changes = {"teacher": server.endpoint, "samples_per_prompt": 2, "stage": "generate"}
        stage = stage.model_copy(update=changes)
        with pytest.raises(UserError, match="answered 400"):
            distil.train(stage, tmp_path / "run", stage.model)
        before, server.got, server.replies = server.got, [], [says("Answer: 1")]
        distil.train(stage, tmp_path / "run", stage.model)
    finally:
        server.shutdown()
    rows = [row for path in sorted((tmp_path / "run" / "samples").iterdir()) for row in jsonl.read(path)]
    assert len(rows) == 40
    assert len(server.got) == 36, "four were answered before"
    assert {row["teacher"] for row in rows} == {server.endpoint}
    assert {row["tokens"] for row in rows} == {5}
    body = server.got[0][2]
    assert [m["role"] for m in body["messages"]] == ["user"]
    assert (body["model"], body["max_tokens"]) == ("big/model", 12)
    seeds = [got[2]["seed"] for got in (*before[:4], *server.got)]
    assert len(set(seeds)) == 40, "a sample is of its own seed, and that of one that failed is asked for again"
    kept = jsonl.read(tmp_path / "run" / "dataset.jsonl")
    assert {row["completion"][0]["content"] for row in kept} <= {"Answer: 0", "Answer: 1", "Answer: 2"}


# --- recipes that come with hone, and the page ------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "distil.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("text", BLOCKS, ids=range(len(BLOCKS)))
def test_the_recipes_of_the_page_load(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    assert explain(load(tmp_path / "r.yaml"))


def test_the_published_settings(tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`knights-distil-full`: every number as published; --dry-run, with a model that is on this disk."""
    recipe = load("knights-distil-full")
    assert isinstance(recipe, Pipeline)
    teacher, answers, student, cold = recipe.stages
    phases = Phases(teacher)
    first, second = phases.at(0, 0), phases.at(100, 0)
    assert (teacher.model.path, student.model.path) == ("Qwen/Qwen2.5-7B-Instruct-1M", "Qwen/Qwen2.5-1.5B-Instruct")
    assert (cold.model.path, cold.model.stage) == ("Qwen/Qwen2.5-1.5B-Instruct", "student")
    assert (teacher.task.people, teacher.task.train, teacher.task.validation) == ((5,), 900, 100)
    assert (teacher.prompts_per_step, teacher.algo.updates_per_rollout, teacher.steps) == (128, 4, 380)
    assert [(p.samples_per_prompt, p.sampling.temperature) for p in (first, second)] == [(8, 1.0), (16, 1.3)]
    assert (teacher.optim.lr, teacher.algo.kl.coef, teacher.algo.entropy_coef) == (1e-6, 1e-3, 1e-3)
    assert (answers.samples_per_prompt, answers.sampling.temperature, answers.model.stage) == (5, 1.0, "teacher")
    assert (student.optim.lr, student.sft.examples_per_step, student.sft.epochs) == (1e-5, 64, 4)
    assert (cold.prompts_per_step, cold.samples_per_prompt, cold.steps) == (32, 32, 360)
    assert cold.algo.updates_per_rollout == 1
    small = ["task.train=20", "task.validation=4", "task.test=4", f"model={whole / 'teacher' / 'model'}"]
    dry_run(load("knights-distil-full", small))
    out = capsys.readouterr().out
    assert "5 answers of at most 2048 tokens to all train problems, by the model of stage teacher; of the right" in out
    assert "4 epoch(s) of stages.answers, 64 examples a step" in out


def test_the_miniature_is_possible() -> None:
    recipe = load("distil-mini")
    begins_with = {stage.name: stage.model.stage for stage in recipe.stages}
    assert (begins_with["student"], begins_with["direct"], begins_with["cold-start"]) == ("weak", "weak", "student")
    assert notices(recipe) == ["stage direct: no later stage uses its model"]  # the control
