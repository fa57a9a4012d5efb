"""Environments in the training loop: turns that earn rewards of their own, and the same bits after a kill."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from hone.base import jsonl
from hone.environments.game import Game
from hone.environments.pool import Failed
from hone.recipe.load import load
from hone.stages import pipeline
from hone.stages.record import rollout_metrics
from hone.types import Episode, Group, Problem, Reward, Rollout, Turn
from tests.test_end_to_end import bits

PROBLEM = Problem("p", "t", ({"role": "user", "content": "?"},), None)
RECIPE = """
name: small
runs: {folder}/runs
model: {{path: tiny, tiny: {{vocab_size: 400, hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, mlp_size: 64}}}}
task: {{name: knights, people: [2], quiz: brief, names: 2, train: 60, validation: 10, test: 20, repeats: true}}
environment: {{name: "{folder}/parity.py:Parity", max_turns: 4}}
prompt: {{style: raw, system: "", template: "{{user}}\\n", reply_template: "{{user}}\\n"}}
checkpoint: {{every: 2, keep: 2}}
tokens_per_microbatch: 2048
stages:
  - name: rl
    stage: rl
    steps: 5
    prompts_per_step: 4
    samples_per_prompt: 4
    sampling: {{max_tokens: 64, stop: [a, e]}} # an untrained model hardly ever ends a turn
    algo: {{credit: turn, refill_rounds: 1}}
    reward: {{parts: {{environment: 1.0}}}}
    optim: {{lr: 1.0e-3}}
    eval: {{problems: 20, every: 2}}
"""
#: Two to four turns, as the seed says; each earns whether its length is odd.
PARITY = """
import random
from hone import Environment, Observation


class Parity(Environment):
    def reset(self, problem, seed):
        self.left = random.Random(seed).randint(2, 4)

    def step(self, message):
        self.left -= 1
        odd = len(message["content"]) % 2
        return Observation(({"role": "user", "content": f"{odd}, {self.left} to go"},), self.left == 0, float(odd))
"""


@pytest.mark.slow
def test_episodes_in_the_loop_and_the_same_bits_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(folder=tmp_path))
    (tmp_path / "parity.py").write_text(PARITY)
    recipe = load(tmp_path / "recipe.yaml")
    run = pipeline.run(recipe)
    expected = bits(run)
    rows = jsonl.read(run / "rl" / "metrics.jsonl")
    assert any(row["grad_norm"] for row in rows)
    assert all(1.5 < row["episode/turns"] <= 4.0 for row in rows)
    assert all(row["episode/read_again"] == 0.0 and row["episode/read_tokens"] > 4.0 for row in rows)
    rollouts = jsonl.read(run / "rl" / "rollouts" / "step_000000.jsonl")
    tokens = load_file(run / "rl" / "tokens" / "step_000000.safetensors")
    assert tokens["lengths"].tolist() == [row["tokens"] for row in rollouts]
    assert {len(row["turns"]) if isinstance(row["turns"], list) else row["turns"] for row in rollouts} <= {2, 3, 4}
    (run / "results.json").unlink()
    shutil.rmtree(run / "rl" / "model")
    for newer in ("step_000004", "step_000005"):  # as if it had been killed in step 3
        shutil.rmtree(run / "rl" / "checkpoints" / newer, ignore_errors=True)
    assert pipeline.run(recipe, resume=True) == run
    assert bits(run) == expected


def test_turns_that_were_read_again_are_counted() -> None:
    def turn(prompt: list[int], completion: list[int], read: int | None) -> Turn:
        return Turn(np.asarray(prompt), np.asarray(completion), np.zeros(len(completion), np.float32), "stop", 0, read)

    def reads(*numbers: int | None) -> dict[str, float]:
        turns = (turn([1, 2], [3, 4], numbers[0]), turn([1, 2, 3, 4, 5, 6], [7], numbers[1]))
        rollouts = Rollout("p", 0, turns, "", Episode("done")), failed.rollout(0)
        reward = Reward(1.0, {}, "correct")
        metrics = rollout_metrics([Group(PROBLEM, rollouts, (reward, reward))])
        return {name: metrics[name] for name in ("episode/read_tokens", "episode/read_again") if name in metrics}

    failed = Game(PROBLEM, (0, 1), None)  # before its first turn
    failed.conversation = SimpleNamespace(ids=np.asarray([1, 2]))  # type: ignore[assignment]
    failed.fail(Failed("error", "no board"))
    assert reads(2, 3) == {"episode/read_tokens": 2.5, "episode/read_again": 0.0}  # the reply, and the token before it
    assert reads(2, 6) == {"episode/read_tokens": 4.0, "episode/read_again": 0.5}
    assert reads(2, None) == {}  # a server does not say
