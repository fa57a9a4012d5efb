"""The code of docs/environments.md runs as it stands there, and is short."""

import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hone.environments.make import ENVIRONMENTS, TOOLS, environment_of, make_episodes
from hone.environments.play import Episodes
from hone.recipe.load import load
from hone.recipe.sections.environment import BUILT_IN, BUILT_IN_TOOLS
from hone.recipe.sections.prompt import PromptConfig
from hone.recipe.sections.rollout import SamplingConfig
from hone.rewards import make_reward
from hone.rewards.base import reward_groups
from hone.rollout.prompts import Renderer
from hone.types import Problem
from tests.environments.templates import tokenizer_of
from tests.environments.test_play import Graded, Scripted

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "environments.md").read_text()
PROBLEM = Problem("p1", "t", ({"role": "user", "content": "Begin."},), None)


def block(name: str) -> str:
    return re.search(rf"<!-- {name} -->\n```\w+\n(.*?)```", TEXT, re.DOTALL)[1]


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(settings: str, source: str = ""):
        if source:
            (tmp_path / re.match(r"# (\S+)", source)[1]).write_text(source)
        (tmp_path / "recipe.yaml").write_text(f"name: x\ntask: countdown\n{settings}")
        return load("recipe.yaml")

    return make


OPENAI = '''"""As much of the `openai` client as the example uses."""
import json, os, types, urllib.request


class OpenAI:
    def __init__(self):
        self.chat = types.SimpleNamespace(completions=self)

    def create(self, **body):
        head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
        request = urllib.request.Request(
            os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), head
        )
        with urllib.request.urlopen(request) as response:
            return json.load(response, object_hook=lambda found: types.SimpleNamespace(**found))
'''


def play(recipe, *said: str, problem=PROBLEM):
    tokenizer = tokenizer_of("Qwen2.5")
    episodes: Episodes = make_episodes(recipe, Renderer(tokenizer, PromptConfig(), ""))
    engine = Scripted(tokenizer, lambda p, g, k: said[k])
    ((rollout,),) = episodes.sample([problem], engine, SamplingConfig(max_tokens=20), samples=1, seed=0)
    return rollout


def test_a_tool(recipe):
    source = block("tool")
    loaded = recipe(block("tool recipe"), source)
    call = '<tool_call>{"name": "price", "arguments": {"item": "pear"}}</tool_call>'
    other = '<tool_call>{"name": "calculator", "arguments": {"expression": "(1 + 2) / 6"}}</tool_call>'
    rollout = play(loaded, call, other, "It costs 4.")
    assert [step.replies[0]["content"] for step in rollout.episode.steps[:2]] == ["4", "1/2"]
    assert rollout.text == "It costs 4."


def test_an_environment_in_fifteen_lines(recipe):
    source = block("environment")
    assert len([line for line in source.splitlines() if line.strip()]) <= 15
    loaded = recipe(block("environment recipe"), source)
    environment = environment_of(loaded)()
    environment.reset(PROBLEM, 3)
    number = environment.number
    from hone.base import streams

    environment.reset(PROBLEM, streams.environment(0, PROBLEM.id))
    right = str(environment.number)
    wrong = "1" if right != "1" else "2"
    rollout = play(loaded, wrong, right)
    assert 1 <= number <= 9
    assert [step.reward for step in rollout.episode.steps] == [0.0, 1.0]
    assert rollout.episode.steps[0].replies[0]["content"] in ("Higher.", "Lower.")


INCREMENT = '''# increment.py
import random


class IncrementEnv:
    """Of the shape that TRL documents for `environment_factory`: reset, get_reward, and a method that is a tool."""

    def reset(self, **kwargs) -> str | None:
        self.counter, self.target = 0, random.randint(1, 6)
        return f" Increment the counter by {self.target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """
        Increments the counter.

        Args:
            step: How much to add.

        Returns:
            The new value.
        """
        self.counter += step
        return self.counter


class Echo:
    def reset(self, problem_id: str) -> None:
        self.of = problem_id

    def echo(self, text: str) -> str:
        """
        Repeats.

        Args:
            text: What to repeat.
        """
        return f"{self.of}: {text}"
'''


def test_a_class_for_trl(recipe):
    loaded = recipe("environment: 'increment.py:IncrementEnv'\nreward: {parts: {environment: 1.0}}\n", INCREMENT)
    assert loaded.environment.name == "increment.py:IncrementEnv"
    call = '<tool_call>\n{"name": "increment", "arguments": {"step": 2}}\n</tool_call>'
    tokenizer = tokenizer_of("Qwen2.5")
    episodes = make_episodes(loaded, Renderer(tokenizer, PromptConfig(), ""))
    engine = Scripted(tokenizer, lambda p, g, k: call if k < g else "Done.")
    (group,) = episodes.sample([PROBLEM], engine, SamplingConfig(max_tokens=60), samples=4, seed=0)
    targets = {rollout.episode.environment.target for rollout in group}
    assert len(targets) == 1  # the samples of a problem have one task
    assert [r.episode.environment.counter for r in group] == [0, 2, 4, 6]
    assert [r.episode.reward for r in group] == [float(2 * g in targets) for g in range(4)]
    assert group[1].episode.steps[0].replies[0] == {
        "role": "tool",
        "name": "increment",
        "tool_call_id": "call00000",
        "content": "2",
    }
    assert f"Begin. Increment the counter by {targets.pop()}." in tokenizer.decode(
        group[0].turns[0].prompt_ids.tolist()
    )


def test_several_classes_for_trl(recipe):
    names = "{count: 'increment.py:IncrementEnv', repeat: 'increment.py:Echo'}"
    loaded = recipe(f"environment: {{name: {names}}}\nreward: {{parts: {{environment: 1.0}}}}\n", INCREMENT)
    problems = [
        Problem(f"p{i}", "t", PROBLEM.messages, None, extra={"environment": kind})
        for i, kind in enumerate(("count", "repeat", "other"))
    ]
    call = '<tool_call>{"name": "echo", "arguments": {"text": "hm"}}</tool_call>'
    tokenizer = tokenizer_of("Qwen2.5")
    episodes = make_episodes(loaded, Renderer(tokenizer, PromptConfig(), ""))
    engine = Scripted(tokenizer, lambda p, g, k: call if k == 0 else "Done.")
    groups = episodes.sample(problems, engine, SamplingConfig(max_tokens=60), samples=1, seed=0)
    (count,), (repeat,), (other,) = groups
    assert "there is no tool 'echo'; there are increment" in count.episode.steps[0].error
    assert repeat.episode.steps[0].replies[0]["content"] == "p1: hm"
    assert repeat.episode.reward is None
    assert other.episode.end == "environment_error"
    assert "environment.name has count, repeat" in other.episode.note


def test_reward_functions_take_the_environments(recipe, tmp_path):
    (tmp_path / "score.py").write_text(
        "def counted(completions, environments, **kwargs):\n"
        "    return [e.counter + len(messages) * len(messages[0]['content']) * 0 for e, messages in "
        "zip(environments, completions)]\n"
    )
    loaded = recipe("environment: 'increment.py:IncrementEnv'\nreward: {parts: {'score.py:counted': 1.0}}\n", INCREMENT)
    call = '<tool_call>\n{"name": "increment", "arguments": {"step": 2}}\n</tool_call>'
    tokenizer = tokenizer_of("Qwen2.5")
    episodes = make_episodes(loaded, Renderer(tokenizer, PromptConfig(), ""))
    engine = Scripted(tokenizer, lambda p, g, k: call if k < g else "Done.")
    answers = episodes.sample([PROBLEM], engine, SamplingConfig(max_tokens=60), samples=3, seed=0)
    (group,) = reward_groups([PROBLEM], answers, make_reward(loaded.reward, Graded()))
    assert [reward.total for reward in group.rewards] == [0.0, 2.0, 4.0]
    copy = pickle.loads(pickle.dumps(group))
    assert copy.rollouts[1].episode.environment is None
    assert copy.rollouts[1].episode == group.rollouts[1].episode


def test_the_names_in_recipes_are_those_of_the_code():
    assert set(BUILT_IN) == set(ENVIRONMENTS)
    assert set(BUILT_IN_TOOLS) == set(TOOLS)


def test_a_program(recipe, tmp_path):
    pytest.importorskip("uvicorn")
    settings = block("program recipe").replace("reward: file", "reward: file, runtime: process")
    loaded = recipe(settings, block("program"))
    (tmp_path / "openai.py").write_text(OPENAI)
    rollout = play(loaded, "I think 5.", "It is 42.", problem=replace(PROBLEM, answer="42"))
    assert (rollout.episode.end, rollout.episode.note) == ("done", None)
    assert rollout.episode.reward == 1.0
    assert rollout.episode.steps[1].parts == {"length": 9.0}
    assert rollout.episode.steps[0].replies[0]["content"] == "Check that again."


def test_environments_of_others_are_programs_of_hone(recipe):
    expected = {"verifiers": ("my-taskset", True), "openenv": ("http://127.0.0.1:8000", False)}
    for kind, (target, contained) in expected.items():
        environment = recipe(block(f"{kind} recipe")).environment
        assert environment.adapter == (kind, target)
        assert environment.is_program
        assert environment.scored_by == "file"
        assert environment.contained == contained
