"""The code in docs/rewards.md runs as it stands there, and is short."""

import re
from pathlib import Path

import numpy as np
import pytest

import hone.rewards.config
from hone.recipe.load import load
from hone.rewards import REWARDS, make_reward
from hone.tasks.countdown.task import CountdownConfig, CountdownTask
from hone.types import Rollout, Turn

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "rewards.md").read_text()
TASK = CountdownTask(CountdownConfig())
PROBLEM = TASK.problems("train")[0]


def blocks(heading: str, kind: str) -> list[str]:
    section = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL)


def block(heading: str, kind: str) -> str:
    return blocks(heading, kind)[0]


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
    assert all(len(code.splitlines()) <= 20 for code in blocks(heading, "python"))


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


@pytest.mark.parametrize("name", REWARDS)
def test_the_table_names_every_reward(name):
    assert f"\n| `{name}` |" in (DOCS / "rewards-reference.md").read_text()


def test_add_a_reward(monkeypatch):
    settings, part = blocks("Add a reward", "python")
    settings = settings.replace("class RewardConfig(Section)", "class WithBrief(RewardConfig)")
    space = dict(vars(hone.rewards.config))
    exec(settings, space)
    exec(part, space)
    monkeypatch.setitem(REWARDS, "brief", space["Brief"])
    numbers, target = PROBLEM.extra.get("nums"), PROBLEM.answer
    right = TASK.trace(PROBLEM, TASK.trace_styles[0], 0).text if hasattr(TASK, "trace") else f"{numbers} {target}"
    reward = make_reward(space["WithBrief"](parts={"brief": 1.0}, brief={"max_tokens": 50}), TASK)
    short, long, wrong = reward(PROBLEM, [rollout(right, 50), rollout(right, 51), rollout("", 1)])
    assert (short.total, long.total, wrong.total) == (1.0, 0.0, 0.0)
    assert long.parts["tokens_used"] == 51.0


def test_the_judge(recipe):
    loaded = recipe(block("A judge", "yaml"))
    assert (loaded.reward.judge.max_calls, loaded.eval.judge.model) == (20000, "Qwen/Qwen3-8B")
