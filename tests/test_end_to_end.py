"""The whole way, small: warm-up, RL, evaluation, report; and the same bits after any interruption."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hone.base import jsonl
from hone.base.settings import UserError
from hone.learn.watch import collapse_warnings
from hone.recipe.load import load
from hone.recipe.sections.algo import WatchConfig
from hone.report.build import build
from hone.runs.writer import RunWriter
from hone.stages import pipeline
from hone.tasks import make_task
from hone.tasks.knights.logic import canonical_form
from hone.tasks.knights.task import puzzle_of_problem
from hone.tasks.splits import SHARES

RECIPE = """
name: small
runs: {runs}
model: {{path: tiny, tiny: {{vocab_size: 400, hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, mlp_size: 64}}}}
task: {{name: knights, people: [2], quiz: brief, names: 4, train: 60, validation: 10, test: 20, repeats: true}}
prompt: {{style: raw, system: "", template: "{{user}}\\n"}}
checkpoint: {{every: 2, keep: 2}}
tokens_per_microbatch: 2048
stages:
  - name: warmup
    stage: sft
    sft: {{examples: 48, examples_per_step: 8, styles: {{hasty: 0.9, careful: 0.1}}}}
    optim: {{lr: 5.0e-3, decay: cosine}}
  - name: rl
    stage: rl
    steps: 5
    prompts_per_step: 4
    samples_per_prompt: 4
    sampling: {{max_tokens: 48}}
    optim: {{lr: 1.0e-3}}
    reward: {{parts: {{outcome: 1.0, overlong: 1.0}}, overlong: {{buffer: 40, max_tokens: 48}}}}
    eval: {{problems: 20, every: 2, sampling: {{max_tokens: 48}}}}
"""


def write_recipe(folder: Path, runs: Path) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(runs=runs))
    return path


def start(recipe: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hone", "train", str(recipe), *arguments]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def bits(run: Path) -> dict[str, bytes]:
    """Everything that must not depend on where a run was cut."""
    names = [
        p
        for stage in ("warmup", "rl")
        for pattern in ("metrics.jsonl", "evals.jsonl", "evals/*", "rollouts/*", "tokens/*", "model/model.safetensors")
        for p in sorted((run / stage).glob(pattern))
    ]
    return {str(p.relative_to(run)): p.read_bytes() for p in names}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody interrupted, in a process of its own like the others."""
    folder = tmp_path_factory.mktemp("whole")
    process = start(write_recipe(folder, folder / "runs"))
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    return folder / "runs" / "small"


def test_the_run_folder_holds_what_it_promises(whole: Path) -> None:
    results = json.loads((whole / "results.json").read_text())
    assert results["seconds"] > 0
    assert results["peak_rss_bytes"] > 1e8
    for label in ("before", "after"):
        accuracy = results[label]["accuracy"]
        assert 0 <= accuracy["low"] <= accuracy["value"] <= accuracy["high"] <= 1
        assert accuracy["n"] == 20
        assert results[label]["response_tokens"] > 0
        assert 0 <= results[label]["reflection_rate"] <= 1
    rows = [json.loads(line) for line in (whole / "rl" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    # Sampler and trainer are the same weights in the same precision: on-policy, their log-probs agree.
    assert all(row.get("mismatch/mean_abs", 0.0) < 1e-5 for row in rows)
    assert any(row["grad_norm"] > 0 for row in rows), "no step of the test's run had any gradient"
    evals = [json.loads(line) for line in (whole / "rl" / "evals.jsonl").read_text().splitlines()]
    assert [(row["label"], row["step"]) for row in evals] == [
        ("before", 0),
        ("validation", 0),
        ("validation", 2),
        ("validation", 4),
        ("after", 5),
    ]
    rollouts = [json.loads(line) for line in (whole / "rl" / "rollouts" / "step_000003.jsonl").read_text().splitlines()]
    assert len(rollouts) == 16
    assert {row["policy_version"] for row in rollouts} == {3}
    events = [json.loads(line)["kind"] for line in (whole / "rl" / "events.jsonl").read_text().splitlines()]
    assert events[-1] == "finished"
    assert "checkpoint" in events


def test_the_model_says_what_it_is(whole: Path) -> None:
    from huggingface_hub import ModelCard

    results = json.loads((whole / "results.json").read_text())
    (found,) = ModelCard.load(whole / "rl" / "model" / "README.md").data.eval_results
    assert found.metric_value == results["after"]["accuracy"]["value"]
    warmup = (whole / "warmup" / "model" / "README.md").read_text()
    assert "Not evaluated." in warmup
    assert "stage rl" not in warmup


def test_the_results_of_each_stage_are_there(whole: Path) -> None:
    results = json.loads((whole / "results.json").read_text())
    assert results["stages"] == {
        "rl": {"before": results["before"], "after": results["after"], "collapse": {}},
    }  # the warm-up was not evaluated
    assert results["cpu_seconds"] > 0
    assert 0 <= results["after"]["well_formed_rate"] <= 1


def test_results_name_the_first_step_of_each_collapse(tmp_path: Path) -> None:
    """From the very events that the loop writes."""
    start, end = {"length/mean": 60.0}, {"length/mean": 20.0}
    history = [{"step": step, **(start if step < 6 or 12 <= step < 18 else end)} for step in range(25)]
    writer = RunWriter.open(tmp_path, {}, seed=0)
    for step in range(len(history)):
        for warning in collapse_warnings(history[: step + 1], WatchConfig()):
            writer.event("collapse", str(warning), step, name=warning.name)
    writer.event("checkpoint", "saved before step 25")
    steps = [e["step"] for e in jsonl.read(tmp_path / "events.jsonl") if e["kind"] == "collapse"]
    assert steps == [10, 22]  # the mean of five steps is below 24 when all five are short, and again later
    assert pipeline.collapses(tmp_path) == {"length_collapse": 10}


def test_validation_is_not_cut_from_the_test_and_no_checkpoint_is_chosen(whole: Path) -> None:
    """The puzzles that a run trains on, watches and is judged by share no canonical form."""
    task = make_task(load(whole).stages[-1].task)
    known = {p.id: canonical_form(puzzle_of_problem(p).statements) for s in SHARES for p in task.problems(s)}

    def forms(pattern: str) -> set[str]:
        files = sorted((whole / "rl").glob(pattern))
        return {known[row["problem_id"]] for file in files for row in jsonl.read(file)}

    trained, watched, judged = forms("rollouts/*"), forms("evals/validation_*"), forms("evals/[ab]*.jsonl")
    assert (len(watched), len(judged)) == (10, 20)
    assert not trained & watched
    assert not trained & judged
    assert not watched & judged
    assert {(row["label"], row["split"]) for row in jsonl.read(whole / "rl" / "evals.jsonl")} == {
        ("before", "test"), ("after", "test"), ("validation", "validation"),
    }  # fmt: skip
    assert "No checkpoint is chosen by its score, on any split" in build(whole).read_text()


def test_the_report_is_built_from_a_real_run(whole: Path) -> None:
    page = build(whole).read_text()
    assert "<script" not in page
    assert "</html>" in page
    accuracy = json.loads((whole / "results.json").read_text())["after"]["accuracy"]["value"]
    assert f"{100 * accuracy:.0f}%" in page


def test_two_runs_with_one_seed_are_the_same_bits(whole: Path, tmp_path: Path) -> None:
    process = start(write_recipe(tmp_path, tmp_path / "runs"))
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    assert bits(tmp_path / "runs" / "small") == bits(whole)


def test_another_seed_is_another_run(whole: Path, tmp_path: Path) -> None:
    run = pipeline.run(load(write_recipe(tmp_path, tmp_path / "runs"), ["seed=1", "stages.rl.steps=1"]))
    other = (run / "warmup" / "metrics.jsonl").read_text()
    assert other.splitlines()[-1] != (whole / "warmup" / "metrics.jsonl").read_text().splitlines()[-1]


@pytest.mark.parametrize(
    ("how", "stage", "step"),
    [
        (signal.SIGINT, "rl", 1),
        (signal.SIGKILL, "rl", 3),
        (signal.SIGKILL, "warmup", 3),
        (signal.SIGINT, "warmup", 1),
    ],
)
def test_interrupted_and_resumed_is_the_same_bits(
    whole: Path, tmp_path: Path, how: signal.Signals, stage: str, step: int
) -> None:
    recipe = write_recipe(tmp_path, tmp_path / "runs")
    run = tmp_path / "runs" / "small"
    process = start(recipe)
    metrics = run / stage / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") <= step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(how)
    out, _ = process.communicate(timeout=120)
    assert not (run / "results.json").exists(), "the run was over before it could be interrupted"
    if how == signal.SIGINT:
        assert process.returncode == 130, out
        assert "--resume" in out
    process = start(recipe, "--resume")
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    assert bits(run) == bits(whole)


@pytest.mark.parametrize(
    "settings",
    [
        {
            "algo": "{advantage: gae, updates_per_rollout: 2, kl: {coef: 0.01, place: reward}, value: {lr: 0.01}}",
            "model.dtype": "bfloat16",
        },
        {"algo": "{refill_rounds: 2, entropy_coef: 0.001}", "model.recompute_activations": "true"},
    ],
    ids=["ppo in bfloat16", "refill and recompute"],
)
def test_resumed_in_the_middle_is_the_same_bits(tmp_path: Path, settings: dict[str, str]) -> None:
    """Value head, master weights and refilled groups go on as if nothing had happened."""
    overrides = [f"stages.rl.{key}={value}" for key, value in settings.items()]
    recipe = load(write_recipe(tmp_path, tmp_path / "runs"), [*overrides, "stages.warmup.sft.examples=16"])
    run = pipeline.run(recipe)
    expected = bits(run)
    rows = jsonl.read(run / "rl" / "metrics.jsonl")
    assert any(row["grad_norm"] for row in rows)
    assert not any(row["skipped"] for row in rows)
    (run / "results.json").unlink()
    shutil.rmtree(run / "rl" / "model")
    for newer in ("step_000004", "step_000005"):  # as if it had been killed in step 3
        shutil.rmtree(run / "rl" / "checkpoints" / newer, ignore_errors=True)
    assert [p.name for p in (run / "rl" / "checkpoints").iterdir()] == ["step_000002"]
    assert pipeline.run(recipe, resume=True) == run
    assert bits(run) == expected


def test_a_second_run_sets_the_first_aside(tmp_path: Path) -> None:
    recipe = load(write_recipe(tmp_path, tmp_path / "runs"), ["stages.rl.steps=1", "stages.warmup.sft.examples=8"])
    first = pipeline.run(recipe)
    marker = (first / "results.json").read_text()
    assert pipeline.run(recipe, resume=True) == first  # finished: nothing to do
    assert (first / "results.json").read_text() == marker
    pipeline.run(recipe)
    (aside,) = [p for p in first.parent.iterdir() if p != first]
    assert (aside / "results.json").read_text() == marker


def test_a_finished_stage_counts_for_its_own_settings_only(whole: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(whole, moved)
    (moved / "results.json").unlink()
    with pytest.raises(UserError, match=r"moved/warmup is finished, but with other settings:\n  optim.lr"):
        pipeline.run(load(moved, ["stages.warmup.optim.lr=1e-4"]), resume=True)
    assert pipeline.run(load(moved), resume=True) == moved  # as it was: nothing left to do but to sum up
    assert json.loads((moved / "results.json").read_text())["after"]


def test_a_sitting_that_was_killed_lasted_until_its_last_row(tmp_path: Path) -> None:
    with pipeline.session(tmp_path):
        (row,) = jsonl.read(tmp_path / "sessions.jsonl")
        killed = {**row, "started": row["started"] - 1000}
    jsonl.write(tmp_path / "sessions.jsonl", [killed])
    (tmp_path / "rl").mkdir()
    jsonl.append(tmp_path / "rl" / "metrics.jsonl", {"step": 0})
    os.utime(tmp_path / "rl" / "metrics.jsonl", (killed["started"] + 70, killed["started"] + 70))
    os.utime(tmp_path / "sessions.jsonl", (killed["started"], killed["started"]))
    with pipeline.session(tmp_path):
        pass
    first, second = jsonl.read(tmp_path / "sessions.jsonl")
    assert first["seconds"] == pytest.approx(70, abs=0.1)
    assert 0 <= second["seconds"] < 5
    assert second["peak_rss_bytes"] > 1e7
