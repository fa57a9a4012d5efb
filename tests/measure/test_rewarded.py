"""The training reward of held-out answers: by hand, and from stored text as from the answers themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from hone.measure import run as evals
from hone.measure.evaluate import _main_result
from hone.measure.models import Model
from hone.measure.rewarded import StoredReward, rewarded
from hone.recipe.load import load
from hone.rewards import make_reward
from hone.rewards.base import reward_groups
from hone.tasks import make_task
from hone.types import Group, Problem, Reward, Rollout, Turn, Verdict

RECIPE = """
name: small
runs: {runs}
model: tiny
task: {{name: countdown, train: 20, validation: 5, test: 6, numbers: [3]}}
prompt: {{style: raw, system: "", template: "{{user}}\\n"}}
sampling: {{max_tokens: 8}}
reward: {{parts: {{outcome: 1.0, overlong: 0.5, "{functions}:digits": 2.0}}, overlong: {{buffer: 4, max_tokens: 8}}}}
eval: {{problems: 6, samples: 3}}
"""
FUNCTIONS = """
def digits(completions, **kwargs):
    return [sum(c.isdigit() for c in text) / 100 for text in completions]
def counted(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]
"""


def answer(problem: Problem, g: int) -> Rollout:
    """2 + g tokens, of which the last one's number is 7."""
    ids = np.asarray([*range(1 + g), 7])
    turn = Turn(np.zeros(1, np.int64), ids, np.zeros(len(ids), np.float32), "stop", 0)
    return Rollout(problem.id, g, (turn,), f"{problem.answer} {g}")


class Fixed:
    """Answers with `answer`."""

    def prompt_text(self, problem: Problem) -> str:
        return problem.id

    def answers(
        self, block: Sequence[Problem], samples: int, seed: int, missing: set[tuple[str, int]], progress: object
    ) -> Iterator[tuple[Problem, int, Rollout]]:
        yield from ((problem, g, answer(problem, g)) for problem in block for g in range(samples))


def group(*totals: float, verdict: Verdict = "correct") -> Group:
    problem = Problem("p", "countdown", (), "1", "easy")
    rewards = tuple(Reward(total, {"twice": 2 * total}, verdict) for total in totals)
    return Group(problem, tuple(answer(problem, g) for g in range(len(totals))), rewards)


def test_means_by_hand() -> None:
    row = rewarded([group(1.0, 0.0), group(3.0), group(9.0, verdict="verifier_error")], whole=True)
    assert row["reward"]["value"] == pytest.approx((0.5 + 3.0) / 2)  # over problems
    assert row["reward"]["n"] == 2
    assert row["reward"]["low"] == 0.5  # of two problems, a bootstrap draws one twice
    assert row["reward"]["high"] == 3.0
    assert row["reward/mean"] == pytest.approx(4 / 3)  # over samples
    assert row["reward/twice"] == pytest.approx(8 / 3)
    assert rewarded([group(1.0, 0.0)], whole=False) == {"reward/twice": 1.0}
    assert rewarded([group(9.0, verdict="verifier_error")], whole=True) == {}


@pytest.mark.parametrize("tokens", [False, True])
def test_eval_measures_the_reward_of_stored_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tokens: bool
) -> None:
    functions = tmp_path / "functions.py"
    functions.write_text(FUNCTIONS)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(runs=tmp_path / "runs", functions=functions))
    recipe = load(tmp_path / "recipe.yaml", [f"reward.parts={{{functions}:counted: 1.0}}"] if tokens else [])
    monkeypatch.setattr(evals, "find", lambda *_: Model("m", "somewhere", "abc", False, Fixed))
    folder = evals.cli_eval(recipe, ["m"])
    (summary,) = (json.loads(path.read_text()) for path in folder.glob("*/summary.json"))
    task = make_task(recipe.task, recipe.seed)
    problems = task.problems("test")
    groups = reward_groups(
        problems, [tuple(answer(p, g) for g in range(3)) for p in problems], make_reward(recipe.reward, task)
    )
    expected = rewarded(groups, whole=True)
    assert expected["reward/mean"] != 0
    line = capsys.readouterr().out
    if tokens:  # the function reads token ids, which are not stored
        assert "m: reward not measured (it needs counted: parts that read" in line
        assert not [key for key in summary if key.startswith("reward/counted")]
        assert "reward" not in summary
    else:
        assert {key: value for key, value in summary.items() if key.startswith("reward")} == expected
        assert f"m: reward {expected['reward']['value']:.3f} [" in line
        assert f"overlong {expected['reward/overlong']:.3f}" in line


def test_without_a_reward_of_its_own_a_recipe_has_its_accuracy(tmp_path: Path) -> None:
    lines = RECIPE.format(runs=tmp_path / "runs", functions="").splitlines()
    (tmp_path / "recipe.yaml").write_text("\n".join(line for line in lines if not line.startswith("reward")))
    recipe = load(tmp_path / "recipe.yaml")
    assert StoredReward.of(recipe, make_task(recipe.task, recipe.seed)) is None


def test_the_progress_line_has_the_accuracy_and_the_reward() -> None:
    accuracy, reward = ({"value": v, "low": v - 0.1, "high": v + 0.1, "n": 24} for v in (0.5, 0.25))
    assert _main_result({"accuracy": accuracy, "reward": reward}) == (
        "accuracy 0.500 [0.400, 0.600], reward 0.250 [0.150, 0.350]"
    )
    assert _main_result({"accuracy": accuracy}) == "accuracy 0.500 [0.400, 0.600]"
    assert _main_result({"reward": reward}) == "reward 0.250 [0.150, 0.350]"
    assert _main_result({}) == "not graded (task.grading: none)"
