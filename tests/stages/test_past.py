"""A step of a real tiny run: its answers under another reward, and sampled again from its checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

import hone
from hone.base import jsonl
from hone.base.settings import UserError
from hone.stages.past import replayed, rescored

RECIPE = """
name: small
runs: {runs}
model: {{path: tiny, tiny: {{vocab_size: 300, hidden_size: 16, layers: 1, heads: 2, kv_heads: 1, mlp_size: 32}}}}
task: {{name: knights, people: [2], quiz: brief, train: 20, validation: 2, test: 2, repeats: true}}
prompt: {{style: raw, system: "", template: "{{user}}\\n"}}
checkpoint: {{every: 1, keep: 5}}
steps: 2
prompts_per_step: 3
samples_per_prompt: 2
sampling: {{max_tokens: 6}}
optim: {{lr: 0.1}}
reward: {{parts: {{outcome: 1.0, "{file}:distinct": 1.0}}}}
eval: {{problems: 2, every: 2, sampling: {{max_tokens: 6}}}}
"""
OTHER = """
task: {{name: knights, people: [2]}}
reward: {{parts: {{outcome: 2.0, "{file}:brief": 0.5}}}}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("past")
    rewards = folder / "rewards.py"  # answers differ in it from the beginning, so that the weights move
    rewards.write_text("def distinct(completion_ids, **_):\n    return [len(set(ids)) / 6 for ids in completion_ids]\n")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(runs=folder / "runs", file=rewards))
    return hone.train(recipe).folder


def test_the_run_s_own_reward_says_what_it_said(run: Path) -> None:
    result = rescored(str(run), ".", 1, None)
    rows = jsonl.read(run / "rollouts" / "step_000001.jsonl")
    assert len(result["answers"]) == len(rows) == 6
    for one, row in zip(result["answers"], rows, strict=True):
        assert one["new"] == one["old"] == pytest.approx(row["total"])
        assert one["new_verdict"] == one["old_verdict"] == row["verdict"]
    assert result["differences"][0] == result["differences"][1]
    assert (result["unknown"], result["left_out"], result["groups"]) == (0, [], 3)


def test_another_reward_is_shown_beside_the_old_one(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def brief(completions, completion_ids, **_):\n    return [len(i) for i in completion_ids]\n"
    )
    (tmp_path / "other.yaml").write_text("name: other\n" + OTHER.format(file=tmp_path / "mine.py"))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    result = rescored(str(run), ".", 1, str(tmp_path / "other.yaml"))
    rows = jsonl.read(run / "rollouts" / "step_000001.jsonl")
    for one, row in zip(result["answers"], rows, strict=True):
        # 2 for a correct answer, and half a point for every token
        assert one["new"] == pytest.approx(2.0 * (row["verdict"] == "correct") + 0.5 * row["tokens"])
        assert one["old"] == row["total"]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before  # nothing was written


def test_a_step_is_sampled_again_with_the_same_tokens(run: Path) -> None:
    for step in (0, 1):  # the first with the model that the run began with
        result = replayed(str(run), ".", step)
        assert (result["identical"], result["answers"], result["of"], result["differences"]) == (6, 6, 6, [])


def test_other_weights_give_other_tokens_and_the_first_difference_is_named(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "small"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step_000001" / "model")
    shutil.copytree(copy / "base", copy / "checkpoints" / "step_000001" / "model")
    result = replayed(str(copy), ".", 1)
    assert result["identical"] < 6
    one = result["differences"][0]
    with safe_open(copy / "tokens" / "step_000001.safetensors", framework="numpy") as file:
        lengths, ids = file.get_tensor("lengths"), file.get_tensor("ids")
        pieces = json.loads(file.metadata()["pieces"])
    start = lengths[: one["place"]].sum()
    assert one["ids"][0] == ids[start + one["position"]] != one["ids"][1]
    assert one["pieces"][0] == pieces[str(one["ids"][0])]


def test_what_cannot_be_repeated_is_an_error_that_says_why(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="step 7 has no recorded answers"):
        rescored(str(run), ".", 7, None)
    copy = tmp_path / "small"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step_000001")
    with pytest.raises(UserError, match="checkpoint of step 1, which sampled these answers, was not kept: there are"):
        replayed(str(copy), ".", 1)
    rows = jsonl.read(copy / "rollouts" / "step_000001.jsonl")
    rows[0]["policy_version"] = 0
    (copy / "rollouts" / "step_000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"weights of several steps: \[0, 1\]"):
        replayed(str(copy), ".", 1)
