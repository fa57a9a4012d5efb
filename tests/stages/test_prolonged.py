"""Prolonged training, small: an adapter, hard resets, a schedule; cut anywhere, it goes on as if it had not been."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hone.base import jsonl
from hone.base.settings import ConfigError, UserError
from hone.base.world import ALONE
from hone.learn.checkpoint import read_state
from hone.model.load import load_model
from hone.recipe.explain import explain
from hone.recipe.load import load
from hone.recipe.notes import notices
from hone.recipe.recipe import Recipe
from hone.recipe.sections.model import ModelConfig
from hone.runs import layout
from hone.runs.layout import which_model
from hone.runs.run import Run
from hone.stages import loop as rl
from hone.stages import pipeline
from hone.stages import reset as resets

RECIPE = """
name: small
runs: {runs}
model: {start}
task: {{name: knights, people: [2, 3], quiz: brief, names: 4, train: 40, validation: 6, test: 6, repeats: true}}
prompt: {{style: raw, system: "", template: "{{user}}\\n"}}
checkpoint: {{every: 3, keep: 2}}
steps: 6
prompts_per_step: 2
samples_per_prompt: 3
sampling: {{max_tokens: 32, top_p: 0.9}}
lora: {{rank: 2, targets: [q_proj, k_proj]}}
optim: {{lr: 1.0e-2, warmup_steps: 1}}
algo: {{kl: {{coef: 0.01}}}}
curriculum: {{kind: adaptive}}
reward: {{parts: {{outcome: 1.0, overlong: 1.0}}, overlong: {{buffer: 30, max_tokens: 32}}}}
eval: {{problems: 6, every: 2, sampling: {{max_tokens: 16}}}}
reset: {{at: [2, 4]}}
schedule:
  - {{at: 1, prompts_per_step: 3, optim: {{lr: 2.0e-2}}}}
  - {{at: reset 1, samples_per_prompt: 4, sampling: {{top_p: 1.0}}, lora: {{rank: 4, targets: all}}}}
  - {{at: reset 2, sampling: {{temperature: 1.2, max_tokens: 40}}, curriculum: {{kind: uniform}}}}
"""
WARMUP = """
name: warmup
runs: {runs}
stage: sft
model: {{path: tiny, tiny: {{vocab_size: 400, hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, mlp_size: 64}}}}
task: {{name: knights, people: [2, 3], quiz: brief, names: 4, train: 40, repeats: true}}
prompt: {{style: raw, system: "", template: "{{user}}\\n"}}
sft: {{examples: 96, examples_per_step: 8, styles: {{hasty: 1.0}}}}
optim: {{lr: 1.0e-2}}
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has seen a few answers, so that some are shorter than others: rewards differ."""
    folder = tmp_path_factory.mktemp("start")
    (folder / "recipe.yaml").write_text(WARMUP.format(runs=folder))
    return pipeline.run(load(folder)) / "model"


Make = Callable[..., Recipe]


@pytest.fixture(scope="module")
def recipe(start: Path) -> Make:
    """The recipe in a folder, with overrides."""
    return lambda folder, *overrides: written(start, folder, *overrides)


def written(start: Path, folder: Path, *overrides: str) -> Recipe:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(runs=folder / "runs", start=start))
    loaded = load(path, overrides)
    assert isinstance(loaded, Recipe)
    return loaded


def bits(run: Path) -> dict[str, bytes]:
    """Everything that must not depend on where a run was cut."""
    names = ["metrics.jsonl", "evals.jsonl", "evals/*", "rollouts/*", "tokens/*"]
    names += ["model/model.safetensors", "adapter/adapter_model.safetensors", "resets/*/model.safetensors"]
    return {str(p.relative_to(run)): p.read_bytes() for name in names for p in sorted(run.glob(name))}


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in jsonl.read(run / "events.jsonl") if row["kind"] == kind]


@pytest.fixture(scope="module")
def whole(recipe: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipeline.run(recipe(tmp_path_factory.mktemp("whole")))


def test_what_a_run_with_resets_leaves(whole: Path) -> None:
    rows = jsonl.read(whole / "metrics.jsonl")
    assert [row["reset"] for row in rows] == [0, 0, 1, 1, 2, 2]
    assert [row["lr"] for row in rows] == pytest.approx([0.005, 0.02, 0.01, 0.02, 0.01, 0.02])  # a warm-up after each
    assert ["curriculum/2" in row for row in rows] == [True] * 4 + [False] * 2
    assert [len(jsonl.read(p)) for p in sorted((whole / "rollouts").iterdir())] == [6, 9, 12, 12, 12, 12]
    assert any(row["grad_norm"] > 0 for row in rows[4:])
    # On-policy, in one precision: sampler and trainer agree once nothing is cut from the distribution.
    assert all(row["mismatch/mean_abs"] < 1e-5 for row in rows[2:])
    assert [row["kl"] > 1e-8 for row in rows if row["trained_tokens"]] == [False, True, False, True, False, True]
    assert [(e["step"], e["number"], e["why"]) for e in events(whole, "reset")] == [(2, 1, "step"), (4, 2, "step")]
    assert all(e["max_logprob_change"] < 1e-5 for e in events(whole, "reset"))
    assert [(e["step"], e["line"]) for e in events(whole, "phase")] == [(1, 0), (2, 1), (4, 2)]
    assert events(whole, "phase")[2]["settings"]["sampling"] == {"temperature": 1.2, "max_tokens": 40}


def test_the_adapter_and_its_base_are_the_model(start: Path, whole: Path) -> None:
    """The last reset's model with the exported adapter computes what the exported model does."""
    config = json.loads((whole / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 4
    assert Path(config["base_model_name_or_path"]) == (whole / "resets" / "reset_002").resolve()
    models = [load_model(ModelConfig(path=str(whole / name))).state_dict() for name in ("adapter", "model")]
    for name, weight in models[1].items():
        torch.testing.assert_close(models[0][name], weight, atol=1e-6, rtol=0)
    before, after = (load_file(whole / "resets" / f"reset_00{n}" / "model.safetensors") for n in (1, 2))
    assert not torch.equal(before["model.layers.0.mlp.up_proj.weight"], after["model.layers.0.mlp.up_proj.weight"])
    first = load_file(start / "model.safetensors")  # the first adapter did not touch the MLP
    assert torch.equal(before["model.layers.0.mlp.up_proj.weight"], first["model.layers.0.mlp.up_proj.weight"])


class Killed(Exception):
    pass


def cut(monkeypatch: pytest.MonkeyPatch, where: str, step: int) -> None:
    """Let a run die at a point of `step`, in the middle of what it writes."""

    def dies(after: Callable[..., Any], at: Callable[..., bool]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            result = after(*arguments, **named)
            if at(*arguments):
                raise Killed
            return result

        return call

    if where == "before the reset":
        monkeypatch.setattr(rl, "record", dies(rl.record, lambda run, log, *_: log.sampled.step == step))
    elif where == "inside the reset":  # merged, and the new base written, but no checkpoint yet
        monkeypatch.setattr(resets, "keep_model", dies(resets.keep_model, lambda *_: True))
    else:
        monkeypatch.setattr(Run, "checkpoint", dies(Run.checkpoint, lambda run, now, *_: now == step + 1))


@pytest.mark.parametrize(
    ("where", "step"),
    [("before the reset", 1), ("inside the reset", 1), ("after the reset", 1), ("before the reset", 3), ("after", 4)],
)
def test_cut_and_resumed_is_the_same_bits(
    recipe: Make, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, step: int
) -> None:
    settings = recipe(tmp_path)
    with monkeypatch.context() as patch:
        cut(patch, where, step)
        with pytest.raises(Killed):
            pipeline.run(settings)
    assert pipeline.run(settings, resume=True) == tmp_path / "runs" / "small"
    assert bits(tmp_path / "runs" / "small") == bits(whole)
    assert bits(whole).keys() > {"resets/reset_002/model.safetensors", "adapter/adapter_model.safetensors"}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_killed_and_resumed_is_the_same_bits(recipe: Make, whole: Path, tmp_path: Path, rows: int) -> None:
    """The same with SIGKILL, wherever it happens to strike after so many steps."""
    recipe(tmp_path)
    run = tmp_path / "runs" / "small"
    command = [sys.executable, "-m", "hone", "train", str(tmp_path / "recipe.yaml")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ})
    while len(jsonl.read(run / "metrics.jsonl")) < rows:
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    pipeline.run(recipe(tmp_path), resume=True)
    assert bits(run) == bits(whole)


def test_full_fine_tuning_resets_and_resumes(recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an adapter; the reference is a copy, which a resumed run reads back from the folder of the reset."""
    lines = "schedule=[{at: reset 1, sampling: {top_p: 1.0}, layers: {train: last, count: 1}}]"
    settings = recipe(tmp_path, "lora=null", lines, "steps=5", "eval.every=0")
    expected = bits(pipeline.run(settings))
    rows = jsonl.read(tmp_path / "runs" / "small" / "metrics.jsonl")
    assert [row["reset"] for row in rows] == [0, 0, 1, 1, 2]
    shutil.rmtree(tmp_path / "runs")
    with monkeypatch.context() as patch:
        cut(patch, "after", 3)
        with pytest.raises(Killed):
            pipeline.run(settings)
    assert bits(pipeline.run(settings, resume=True)) == expected


# --- other triggers -------------------------------------------------------------------------------------------------


def test_by_hand_once_also_across_a_resume(recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = recipe(tmp_path, "reset.at=[]", "steps=4", "eval.every=0")
    run = tmp_path / "runs" / "small"
    with pytest.raises(UserError, match="no run was started there"):
        layout.ask(run)
    with monkeypatch.context() as patch:
        cut(patch, "before the reset", 0)
        with pytest.raises(Killed):
            pipeline.run(settings)
    assert "its next step" in layout.ask(run)
    with monkeypatch.context() as patch:
        cut(patch, "before the reset", 2)
        with pytest.raises(Killed):
            pipeline.run(settings, resume=True)
    assert [(e["step"], e["why"]) for e in events(run, "reset")] == [(1, "asked")]
    pipeline.run(settings, resume=True)  # from the checkpoint that the reset made: it is not asked for again
    assert [row["reset"] for row in jsonl.read(run / "metrics.jsonl")] == [0, 1, 1, 1]
    assert len(events(run, "reset")) == 1
    with pytest.raises(UserError, match="the run is finished"):
        layout.ask(run)


def test_a_supervised_stage_has_no_reset(tmp_path: Path) -> None:
    (tmp_path / "config.resolved.json").write_text('{"stage": "sft"}')
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="are for reinforcement learning, but this stage is sft"):
        layout.ask(tmp_path)


def test_on_stagnation_of_validation(recipe: Make, tmp_path: Path) -> None:
    """No rise is more than 1: flat. With window 1 and patience 1 two validations are enough."""
    rule = "reset={at: [], on_stagnation: {window: 1, patience: 1, tolerance: 1.0}, limit: 2}"
    run = pipeline.run(recipe(tmp_path, rule, "eval.every=1"))
    assert [(e["step"], e["why"]) for e in events(run, "reset")] == [(2, "stagnates"), (4, "stagnates")]


def rows_of(*values: tuple[int, str, float]) -> list[dict[str, Any]]:
    return [{"step": s, "label": label, "accuracy": {"value": v}} for s, label, v in values]


def test_only_validation_since_the_last_reset_counts(recipe: Make, tmp_path: Path) -> None:
    """Never the test split: `before` and `after` are not looked at, however they fall."""
    config = recipe(
        tmp_path, "reset={at: [], on_stagnation: {window: 1, patience: 1, tolerance: 0.0}}", "eval.every=1"
    ).reset
    run = type("Run", (), {"folder": tmp_path, "rows": lambda self, name: rows, "world": ALONE})()
    rows = rows_of((0, "before", 0.9), (0, "validation", 0.1), (2, "validation", 0.2))
    assert resets.due(config, 3, 9, run, []) is None
    rows = rows_of((0, "validation", 0.9), (2, "validation", 0.2), (4, "validation", 0.3))
    assert resets.due(config, 5, 9, run, []) == {"why": "declines"}
    assert resets.due(config, 5, 9, run, [{"step": 2, "why": "declines"}]) is None
    assert resets.due(config, 9, 9, run, []) is None, "after the last step there is nothing to reset for"


def test_a_merge_that_goes_wrong_stops_the_run(recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that is dropped instead of merged, so that the sampler would serve another policy."""
    from hone.learn import policy

    monkeypatch.setattr(policy.adapters, "merge", policy.adapters.remove)
    with pytest.raises(RuntimeError, match=r"reset 1 before step 2 changed log-probs by .*: the merge went wrong"):
        pipeline.run(recipe(tmp_path, "optim.lr=0.1"))


# --- checkpoints ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_knows_resets_and_curriculum(whole: Path) -> None:
    state = read_state(whole / "checkpoints" / "step_000004")
    assert [r["step"] for r in state["policy"]["resets"]] == [2, 4]
    assert state["policy"]["lora"]["rank"] == 4
    assert sum(state["course"]["drawn"].values()) == 2 + 3 + 3 + 3


def test_a_checkpoint_of_an_adapter_can_be_evaluated(recipe: Make, whole: Path, tmp_path: Path) -> None:
    settings = recipe(tmp_path)
    _, path = which_model([(settings, Path())], whole, whole / "checkpoints" / "step_000006")
    weights = load_model(ModelConfig(path=str(path))).state_dict()
    final = load_file(whole / "model" / "model.safetensors")
    np.testing.assert_allclose(
        weights["model.layers.1.mlp.up_proj.weight"], final["model.layers.1.mlp.up_proj.weight"], atol=1e-6
    )


# --- documentation --------------------------------------------------------------------------------------------------

DOCS = Path(__file__).resolve().parents[2] / "docs" / "prolonged.md"
EXAMPLES = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.S)


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_of_the_documentation_is_a_recipe(tmp_path: Path, example: str) -> None:
    """On top of defaults; none of its lines is idle."""
    path = tmp_path / "recipe.yaml"
    path.write_text(f"name: x\n{example}" + ("" if "task:" in example else "task: knights\n"))
    loaded = load(path)
    assert isinstance(loaded, Recipe)
    assert [line for line in notices(loaded) if "on_stagnation.tolerance" not in line] == []
    assert explain(loaded)


def test_the_error_of_the_documentation(tmp_path: Path) -> None:
    example = next(text for text in EXAMPLES if "reset 4" in text).replace("max_tokens: 1536", "top_p: 1.5")
    path = tmp_path / "recipe.yaml"
    path.write_text(f"name: x\ntask: knights\n{example}")
    with pytest.raises(ConfigError) as caught:
        load(path)
    (line,) = caught.value.lines
    assert line.replace(str(path), "my/recipe.yaml") in DOCS.read_text()
