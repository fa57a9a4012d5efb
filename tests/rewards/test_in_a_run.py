"""Verifiers that fail, in a whole run: their samples are left out, counted and shown; nothing else suffers."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hone.base import jsonl
from hone.base.settings import UserError
from hone.cli.app import app
from hone.recipe.load import load
from hone.report.build import build
from hone.stages import pipeline
from tests.rewards.judge_server import says, serving

RECIPE = """
name: small
model: {path: tiny, tiny: {vocab_size: 300, hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, mlp_size: 64}}
task: {name: knights, people: [2], quiz: brief, names: 4, train: 20, validation: 5, test: 5, repeats: true}
prompt: {style: raw, system: "", template: "{user}\\n"}
prompts_per_step: 2
samples_per_prompt: 4
steps: 2
sampling: {max_tokens: 8}
eval: {problems: 4, sampling: {max_tokens: 8}}
"""
FUNCTION = """
import os
def f(solution_str, ground_truth, extra_info):
    size = len(solution_str)
    if size % 3 == 0:
        os.kill(os.getpid(), 9)
    return None if size % 3 == 1 else float(size)
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)
    Path("mine.py").write_text(FUNCTION)
    return Path("recipe.yaml")


def test_failures_are_left_out_counted_and_shown(recipe, tmp_path):
    with serving(lambda body, _: says({"correct": True})) as server:
        judge = f"{{url: {server.url}, model: m, cache: {tmp_path}/cache}}"
        changes = ["reward.parts={mine.py:f: 1.0, judge: 0.5}", "reward.functions.isolate=true",
                   f"reward.judge={judge}", f"eval.judge={judge}"]  # fmt: skip
        folder = pipeline.run(load(recipe, changes))
        assert server.requests
    rows = jsonl.read(folder / "rollouts" / "step_000000.jsonl") + jsonl.read(folder / "rollouts" / "step_000001.jsonl")
    kinds = {0: [], 1: [], 2: []}
    for row in rows:
        kinds[len(row["text"]) % 3].append(row)
    assert all(row["verdict"] == "verifier_error" and row["advantage"] == 0.0 for row in kinds[0])
    assert all("SIGKILL" in row["note"] for row in kinds[0])
    assert all(row["total"] == 0.5 and "mine.py:f" not in row["parts"] for row in kinds[1])  # the judge's part alone
    assert all(row["total"] == len(row["text"]) + 0.5 and "note" not in row for row in kinds[2])
    assert kinds[2]
    assert kinds[0] + kinds[1]
    metrics = jsonl.read(folder / "metrics.jsonl")
    lost = [row["verdict/verifier_error"] for row in metrics]
    assert np.mean(lost) == pytest.approx(len(kinds[0]) / len(rows))
    events = [row for row in jsonl.read(folder / "events.jsonl") if row["kind"] == "verifier"]
    assert len(events) == sum(share > 0 for share in lost)
    assert "samples have no reward and were left out: " in events[0]["message"]
    assert all(np.isfinite(row["reward/f"]) for row in metrics if row["verdict/verifier_error"] < 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"] == {"mine.py:f": hashlib.sha256(FUNCTION.encode()).hexdigest()}
    assert [row["step"] for row in jsonl.read(folder / "costs.jsonl")] == [0, 1]
    assert jsonl.read(folder / "costs.jsonl")[0]["judge/calls"] > 0
    opinion = jsonl.read(folder / "evals.jsonl")[0]["judge"]
    assert opinion["accuracy"]["value"] == 1.0
    assert (opinion["agreement"], len(opinion["differ"]), opinion["failed"]) == (0.0, 4, 0)
    build(folder)


def test_a_run_in_which_nothing_has_a_reward_stops_and_can_go_on(recipe, capsys):
    Path("mine.py").write_text("def f(completions): raise RuntimeError('no licence')")
    changes = ["reward.parts={mine.py:f: 1.0}", "steps=9", "checkpoint.every=1"]
    with pytest.raises(UserError, match=r"no sample had a reward in 3 steps in a row .*RuntimeError: no licence"):
        pipeline.run(load(recipe, changes))
    folder = Path("runs/small")
    assert len(jsonl.read(folder / "metrics.jsonl")) == 3
    Path("mine.py").write_text("def f(completions): return [float(len(c)) for c in completions]")
    pipeline.run(load(recipe, changes), resume=True)
    assert (folder / "model").is_dir()
    events = [row for row in jsonl.read(folder / "events.jsonl") if row["kind"] == "file_changed"]
    assert events[0]["message"] == "resumed with other contents of mine.py:f than at the start of the run"


@pytest.mark.parametrize("flag", [["--dry-run"], []])
def test_a_faulty_function_of_a_later_stage_shows_before_anything_starts(recipe, flag):
    Path("mine.py").write_text("def f(a, b): return 1")
    text = RECIPE + "stages:\n  - {stage: sft, name: one}\n  - {stage: rl, reward: {parts: {mine.py:f: 1.0}}}\n"
    recipe.write_text(text.replace("steps: 2\n", ""))
    done = CliRunner().invoke(app, ["train", "recipe.yaml", *flag])
    assert isinstance(done.exception, UserError)
    assert "mine.py:f: f(a, b) fits no signature" in str(done.exception)
    assert not Path("runs").exists()
