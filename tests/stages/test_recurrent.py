"""Whole runs of models with recurrent layers: trained, cut, resumed, evaluated, sampled, exported; adapters and resets.

The reward is the share of vowels, which answers of a random model differ in, so that every step is an update.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hone
from hone.base import jsonl
from hone.recipe.load import load
from hone.recipe.recipe import Recipe
from hone.runs.run import Run
from hone.serve.model import load_served
from hone.stages import audit, pipeline

RECIPE = """
name: small
runs: {folder}/runs
model:
  path: tiny
  tiny: {{architecture: {architecture}, vocab_size: 300, hidden_size: 32, heads: 2, kv_heads: 1, mlp_size: 48}}
task: {{name: knights, people: [2], quiz: brief, names: 4, train: 30, validation: 4, test: 4, repeats: true}}
prompt: {{style: raw, system: "", template: "{{user}}\\n"}}
checkpoint: {{every: 2, keep: 2}}
steps: 4
prompts_per_step: 2
samples_per_prompt: 3
sampling: {{max_tokens: 12}}
optim: {{lr: 1.0e-2}}
reward: {{parts: {{"{folder}/reward.py:vowels": 1.0}}}}
eval: {{problems: 4, every: 2, sampling: {{max_tokens: 12}}}}
"""
REWARD = """
def vowels(problem, rollouts):
    return [sum(r.text.count(c) for c in "aeiou") / (1 + len(r.text)) for r in rollouts]
"""
ADAPTER = ("lora={rank: 2}", "reset.at=[2]")


def recipe(folder: Path, architecture: str, *overrides: str) -> Recipe:
    folder.mkdir(exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder, architecture=architecture))
    loaded = load(folder / "recipe.yaml", overrides)
    assert isinstance(loaded, Recipe)
    return loaded


def bits(run: Path) -> dict[str, bytes]:
    """Everything that must not depend on where a run was cut."""
    names = ["metrics.jsonl", "evals.jsonl", "rollouts/*", "tokens/*", "model/model.safetensors", "resets/*/model.s*"]
    names += ["adapter/adapter_model.safetensors"]
    return {str(p.relative_to(run)): p.read_bytes() for name in names for p in sorted(run.glob(name))}


def check_updates(run: Path) -> None:
    """Every step has changed the weights, and the engine has sampled from the weights of the policy."""
    rows = jsonl.read(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["grad_norm"] > 0 for row in rows)
    assert all(row["mismatch/mean_abs"] < 1e-5 for row in rows)
    assert [row["identity/gap"] < 1e-5 for row in rows if "identity/gap" in row] == [True]


class Killed(Exception):
    pass


@pytest.mark.parametrize("architecture", ["qwen3_5", pytest.param("lfm2", marks=pytest.mark.slow)])
def test_a_run_cut_and_resumed_is_the_same_bits_and_its_model_works(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = pipeline.run(recipe(tmp_path / "whole", architecture))
    check_updates(run)
    cut = recipe(tmp_path / "cut", architecture)
    save = Run.checkpoint

    def dies(run: Run, step: int, *arguments: Any, **named: Any) -> None:
        save(run, step, *arguments, **named)
        if step == 3:  # a step behind the last checkpoint
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Run, "checkpoint", dies)
        with pytest.raises(Killed):
            pipeline.run(cut)
    assert bits(pipeline.run(cut, resume=True)) == bits(run)
    check_model(run, tmp_path)


def check_model(run: Path, folder: Path) -> None:
    """`hone eval`, `hone export`, and what `hone sample` and `hone serve` load, which answers as transformers does."""
    (measured,) = hone.evaluate(run, samples=2).models
    assert measured.drawn.tolist() == [2] * 4
    audit.export(str(run), folder / "exported")
    model = AutoModelForCausalLM.from_pretrained(folder / "exported")
    tokenizer = AutoTokenizer.from_pretrained(folder / "exported")
    served = load_served(str(run), ["sampling.max_tokens=12"])
    ids = served.renderer.messages_ids([{"role": "user", "content": "Zoey says"}])
    assert ids.tolist() == tokenizer("Zoey says\n").input_ids
    greedy = served.sampling.model_copy(update={"temperature": 0.0})
    ((turn,),) = served.engine.generate([ids], greedy, samples=1, seed=0)
    expected = model.generate(torch.as_tensor(ids)[None], max_new_tokens=12, do_sample=False)[0, len(ids) :]
    assert turn.completion_ids.tolist() == expected.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3_5", "lfm2"])
@pytest.mark.parametrize("overrides", [(), ADAPTER], ids=["all weights", "adapter"])
def test_killed_and_resumed_is_the_same_bits(architecture: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    whole = pipeline.run(recipe(tmp_path / "whole", architecture, *overrides))
    check_updates(whole)
    recipe(tmp_path / "cut", architecture)
    run = tmp_path / "cut" / "runs" / "small"
    command = [sys.executable, "-m", "hone", "train", str(tmp_path / "cut" / "recipe.yaml"), *overrides]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env={**os.environ})
    while len(jsonl.read(run / "metrics.jsonl")) < 3:
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    subprocess.run([*command, "--resume"], check=True, capture_output=True, timeout=300)
    assert bits(run) == bits(whole)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3_5", "lfm2"])
def test_an_adapter_is_merged_at_a_reset_and_in_the_model(architecture: str, tmp_path: Path) -> None:
    run = pipeline.run(recipe(tmp_path, architecture, *ADAPTER))
    check_updates(run)
    (event,) = [row for row in jsonl.read(run / "events.jsonl") if row["kind"] == "reset"]
    assert event["step"] == 2
    assert event["max_logprob_change"] < 1e-5
    base, merged = (AutoModelForCausalLM.from_pretrained(run / name).state_dict() for name in ("base", "model"))
    changed = {name.split(".")[-2] for name, weight in merged.items() if not torch.equal(weight, base[name])}
    mixer = {"qwen3_5": {"in_proj_qkv", "in_proj_z", "q_proj"}, "lfm2": {"in_proj", "q_proj", "w2"}}[architecture]
    assert changed >= mixer
    assert not changed & {"embed_tokens", "conv", "conv1d", "norm"}
    check_model(run, tmp_path)
