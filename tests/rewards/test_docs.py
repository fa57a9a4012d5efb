"""The code in docs/rewards.md runs as it stands there, and is short."""

import re
from pathlib import Path

import numpy as np
import pytest

from hone.recipe.load import load
from hone.rewards import REWARDS, make_reward
from hone.tasks.countdown.task import CountdownConfig, CountdownTask
from hone.types import Rollout, Turn

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text()
TASK = CountdownTask(CountdownConfig())
PROBLEM = TASK.problems("train")[0]


def block(heading: str, kind: str) -> str:
    section = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.search(rf"```{kind}\n(.*?)```", section, re.DOTALL)[1]


def rollout(text: str, tokens: int) -> Rollout:
    turn = Turn(np.zeros(1, np.int64), np.zeros(tokens, np.int64), np.zeros(tokens, np.float32), "stop", 0)
    return Rollout(PROBLEM.id, 0, (turn,), text)


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(body: str):
        (tmp_path / "recipe.yaml").write_text(f"name: x\ntask: countdown\n{body}")
        return load("recipe.yaml")

    return make


@pytest.mark.parametrize("heading", ["Your own function", "Add a reward"])
def test_twenty_lines_are_enough(heading):
    assert len(block(heading, "python").splitlines()) <= 20


def test_your_own_function(recipe, tmp_path):
    source = block("Your own function", "python")
    file = tmp_path / re.match(r"# (\S+)", source)[1]
    file.parent.mkdir()
    file.write_text(source)
    config = recipe(TEXT.split("```yaml\n")[1].split("```")[0]).reward
    assert config.parts == {"outcome": 1.0, "well_formed": 0.1, "my/rewards.py:brief": 0.2}
    short, long, none = make_reward(config, TASK)(
        PROBLEM,
        [rollout(f"It is {PROBLEM.answer}", 3), rollout(f"It is {PROBLEM.answer}" + " 1" * 50, 3), rollout("?", 1)],
    )
    assert (short.parts["brief"], long.parts["brief"]) == (1.0, 0.0)
    assert "brief" not in none.parts  # None: not for this sample; the other parts add up
    assert none.verdict == "malformed"


def test_add_a_reward(recipe, monkeypatch):
    space = {}
    exec(block("Add a reward", "python"), space)
    monkeypatch.setitem(REWARDS, "brief", space["Brief"])
    numbers, target = PROBLEM.extra.get("nums"), PROBLEM.answer
    right = TASK.trace(PROBLEM, TASK.trace_styles[0], 0).text if hasattr(TASK, "trace") else f"{numbers} {target}"
    reward = make_reward(recipe("reward: {parts: {brief: 1.0}}\n").reward, TASK)
    short, long = reward(PROBLEM, [rollout(right, 100), rollout(right, 101)])
    assert (short.total, long.total) == (1.0, 0.0)
    assert long.parts["tokens_used"] == 101.0


def test_the_judge(recipe):
    loaded = recipe(block("A judge", "yaml"))
    assert (loaded.reward.judge.max_calls, loaded.eval.judge.model) == (20000, "Qwen/Qwen3-8B")
