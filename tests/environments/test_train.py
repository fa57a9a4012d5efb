"""Environments in the training loop: warm-up on demonstrated episodes, RL, and the same bits after a kill."""

import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from hone.base import jsonl
from hone.recipe.load import load
from hone.stages import pipeline
from tests.test_end_to_end import bits

RECIPE = """
name: small
runs: {runs}
model: {{path: tiny, tiny: {{vocab_size: 400, hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, mlp_size: 64}}}}
task: {{name: knights, people: [2], quiz: hidden, names: 2, train: 60, validation: 10, test: 20, repeats: true}}
environment: {{name: knights_interrogation, max_turns: 3}}
prompt: {{style: raw, system: "", template: "{{user}}\\n", reply_template: "{{user}}\\n"}}
checkpoint: {{every: 2, keep: 2}}
tokens_per_microbatch: 2048
stages:
  - name: warmup
    stage: sft
    sft: {{examples: 320, examples_per_step: 16, styles: {{hasty: 1.0}}}}
    optim: {{lr: 5.0e-3, decay: cosine}}
  - name: rl
    stage: rl
    steps: 5
    prompts_per_step: 4
    samples_per_prompt: 4
    sampling: {{max_tokens: 64}}
    algo: {{credit: turn, refill_rounds: 1}}
    reward: {{parts: {{outcome: 1.0, well_formed: 0.5}}}}
    optim: {{lr: 1.0e-3}}
    eval: {{problems: 20, every: 2, sampling: {{max_tokens: 64}}}}
"""


@pytest.mark.slow
def test_episodes_in_the_loop_and_the_same_bits_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(runs=tmp_path / "runs"))
    recipe = load(tmp_path / "recipe.yaml")
    run = pipeline.run(recipe)
    expected = bits(run)
    rows = jsonl.read(run / "rl" / "metrics.jsonl")
    assert any(row["grad_norm"] for row in rows)
    assert any(row.get("episode/turns", 1.0) > 1.0 for row in rows)
    said = jsonl.read(run / "rl" / "rollouts" / "step_000000.jsonl")
    tokens = load_file(run / "rl" / "tokens" / "step_000000.safetensors")
    assert tokens["lengths"].tolist() == [row["tokens"] for row in said]
    assert any(row.get("turns", 1) > 1 for row in said)
    (run / "results.json").unlink()
    shutil.rmtree(run / "rl" / "model")
    for newer in ("step_000004", "step_000005"):  # as if it had been killed in step 3
        shutil.rmtree(run / "rl" / "checkpoints" / newer, ignore_errors=True)
    assert pipeline.run(recipe, resume=True) == run
    assert bits(run) == expected
