"""The user's side of recipes/countdown-mini: the script that makes rows, and the reward."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hone.grade.child import load_target
from hone.grade.targets import read_target
from hone.recipe.load import load
from hone.rewards import make_reward
from hone.rewards.config import RewardConfig
from hone.tasks import make_task
from hone.tasks.countdown import arithmetic
from hone.tasks.rows.task import DatasetConfig
from hone.types import Problem, Rollout, Turn

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "countdown-mini"
REWARD = f"{RECIPE}/reward.py:countdown"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    shutil.copy(RECIPE / "make_rows.py", folder)
    subprocess.run([sys.executable, folder / "make_rows.py"], check=True, timeout=60)
    return folder / "data"


def test_the_rows(data: Path) -> None:
    task = make_task(DatasetConfig(source=str(data / "rows"), validation=50))
    sizes = [len(task.problems(split)) for split in ("train", "validation", "test")]
    assert sizes == [550, 50, 200], "no training puzzle is a test puzzle in another order"
    worked = [
        [m["content"] for m in json.loads(x)["messages"]] for x in (data / "worked.jsonl").read_text().splitlines()
    ]
    assert sum("<think>guess</think>" in said for _, said in worked) == len(worked) / 2
    for asked, said in worked[:300]:
        nums, target = asked.split(" make ")
        problem = Problem("p", "countdown", (), {"nums": [int(n) for n in nums.split()], "target": int(target)})
        thinking = said.split("</think>")[0].removeprefix("<think>")
        if thinking == "guess":
            continue
        assert task.grade(problem, said).verdict == "correct"
        *tried, found = thinking.splitlines()
        for text in [*tried, found]:
            steps, _, beside, verdict = text.split(" ")
            left, *others = steps.split("=")  # 4+5=9*3=27: what is left of a sign makes the number right of it
            for right in others:
                assert int(arithmetic.compute(arithmetic.parse(left))) == int(re.match("[0-9]+", right)[0])
                left = right
            assert beside == target
            assert (left == target) is (verdict == "yes") is (text is found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>3*7=21 25-21=4 yes</think>\n<answer>25-3*7</answer>", 1.0),
        ("<answer>25-7*3</answer>", 1.0),
        ("<answer>25-(7+3)</answer>", 0.0),  # makes 15
        ("<answer>4</answer>", 0.0),  # the target itself, of none of the numbers
        ("<answer>25-21</answer>", 0.0),
        ("<answer>25/(3-3)*7</answer>", 0.0),
        ("<answer>__import__('os').abort()</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("25-3*7", 0.0),
    ],
)
def test_the_reward(text: str, expected: float) -> None:
    score = load_target(REWARD, read_target(REWARD))
    assert score([text], [[25, 7, 3]], [4]) == [expected]


def test_the_reward_is_given_the_columns_of_the_rows(data: Path) -> None:
    task = make_task(DatasetConfig(source=str(data / "rows"), validation=50))
    problem = task.problems("test")[0]
    reward = make_reward(RewardConfig(parts={REWARD: 1.0}), task)
    right = task.trace(problem, "worked", 0).text.split("<answer>")[1].split("</answer>")[0]
    turn = Turn(np.array([1]), np.array([2]), np.array([0.0]), "stop", 0)
    answers = [Rollout(problem.id, i, (turn,), text) for i, text in enumerate((f"<answer>{right}</answer>", "none"))]
    assert [r.total for r in reward(problem, answers)] == [1.0, 0.0]


def test_the_recipe_says_where_the_rows_come_from() -> None:
    recipe = load(RECIPE, check_files=False)
    assert [stage.stage for stage in recipe.stages] == ["sft", "rl"]
    lines = (RECIPE / "reward.py").read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 16, "about ten lines of the user's own, with imports"
