"""Whole runs of `hone train` with architectures that differ from the tiny one: checks, plan, sampling, updates, export.

The reward is the number of characters, which answers of a random model differ in, so that both steps are updates.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from hone.base import jsonl
from hone.model.tiny import create
from hone.recipe.sections.model import TinyConfig
from tests.tiny_families import make

RECIPE = """
name: run
model: {{path: {folder}/model, dtype: {dtype}}}
task: {{name: knights, people: [2], quiz: brief, names: 4, train: 60, validation: 10, test: 20, repeats: true}}
prompt: {{style: raw, system: "", template: "{{user}}\\n"}}
stage: rl
steps: 2
prompts_per_step: 2
samples_per_prompt: 3
sampling: {{max_tokens: 16}}
lora: {lora}
optim: {{lr: 1.0e-2}}
reward: {{parts: {{"{folder}/reward.py:length": 1.0}}}}
"""
REWARD = """
def length(problem, rollouts):
    return [len(r.text) / 100 for r in rollouts]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "lora"),
    [
        ("qwen3-moe", "float32", "null"),
        ("qwen3-moe", "bfloat16", "null"),
        ("gpt-oss", "float32", "{rank: 2}"),
        ("gemma3", "float32", "{rank: 2}"),
        ("deepseek-v3", "float32", "null"),
    ],
)
def test_a_run(family: str, dtype: str, lora: str, tmp_path: Path) -> None:
    create(tmp_path / "tiny", TinyConfig(vocab_size=300), ["Zoey is a knight."] * 3, seed=0)
    make(family, tmp_path / "model")
    AutoTokenizer.from_pretrained(tmp_path / "tiny").save_pretrained(tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(folder=tmp_path, dtype=dtype, lora=lora))
    (tmp_path / "reward.py").write_text(REWARD)
    command = [sys.executable, "-m", "hone", "train", str(tmp_path / "recipe.yaml"), f"runs={tmp_path}/runs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = jsonl.read(tmp_path / "runs" / "run" / "metrics.jsonl")
    assert len(rows) == 2
    assert all(row["grad_norm"] > 0 for row in rows)
    assert rows[1]["mismatch/mean_abs"] < (0.05 if dtype == "bfloat16" else 1e-4), "sampled from the updated weights"
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "runs/run/model"))
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name].to(weight.dtype))}
    assert len(changed) > 10
    assert any("experts" in name for name in changed) == (family in ("qwen3-moe", "deepseek-v3"))
    events = {row["kind"]: row["message"] for row in jsonl.read(tmp_path / "runs" / "run" / "events.jsonl")}
    assert ("experts" in events) == (family in ("qwen3-moe", "gpt-oss"))
    assert ("lora" in events) == (family == "gpt-oss"), "an adapter that leaves the experts out"
