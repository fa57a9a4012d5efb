"""The interrogation of knights, and worked answers of several turns."""

import re

import numpy as np
import pytest

from hone.base.settings import UserError
from hone.environments.base import Environment, Observation
from hone.environments.calculator import calculator
from hone.environments.demonstrate import demonstrated
from hone.environments.interrogation import KnightsInterrogation
from hone.environments.play import Episodes
from hone.environments.tools import Tool, ToolEnvironment
from hone.learn.samples import to_samples
from hone.recipe.sections.environment import EnvironmentConfig
from hone.recipe.sections.prompt import PromptConfig
from hone.recipe.sections.rollout import SamplingConfig
from hone.rollout.prompts import Renderer
from hone.tasks.countdown.task import CountdownConfig, CountdownTask
from hone.tasks.knights.task import KnightsConfig, KnightsTask
from hone.types import Example, Group, Problem, Reward
from tests.environments.templates import tokenizer_of
from tests.environments.test_play import Scripted

pytest.importorskip("trl", reason="ships the templates")
KNIGHTS = KnightsTask(KnightsConfig(people=(2,), quiz="hidden", names=2, train=8, test=4))
COUNTDOWN = CountdownTask(CountdownConfig(numbers=(3,), max_number=20, quiz="brief", train=8, test=4))


def test_statements_are_heard_only_by_asking():
    brief = KnightsTask(KnightsConfig(people=(2,), quiz="brief", names=2, train=8, test=4))
    for hidden, open_ in zip(KNIGHTS.problems("train"), brief.problems("train"), strict=True):
        assert (hidden.id, hidden.answer) == (open_.id, open_.answer)
        first, second = hidden.answer["names"]
        assert hidden.messages[-1]["content"] == f"People: {first} and {second}."
        environment = KnightsInterrogation()
        environment.reset(hidden, 0)
        heard = [environment.step({"content": f"Ask {name}."}).messages[0]["content"] for name in (first, second)]
        assert " ".join(heard) == open_.messages[-1]["content"]


def test_questions_are_useful_once():
    environment, problem = KnightsInterrogation(), KNIGHTS.problems("train")[0]
    environment.reset(problem, 0)
    first = problem.answer["names"][0]
    useful = [environment.step({"content": text}).parts for text in (f"Ask {first}.", f"Ask {first}", "Ask Nobody.")]
    assert [parts["useful_questions"] for parts in useful] == [1.0, 0.0, 0.0]
    assert environment.step({"content": f"Ask {first}. Ask {first}."}).done
    with pytest.raises(UserError, match="needs problems of the task knights"):
        environment.reset(Problem("p", "t", (), None), 0)


@pytest.mark.parametrize("style", ["careful", "hasty"])
def test_worked_answers_ask_and_are_graded(style):
    for number, problem in enumerate(KNIGHTS.problems("train")):
        example = KNIGHTS.trace(problem, style, seed=number)
        names = [re.fullmatch(r"Ask (\w+)\.", turn)[1] for turn in example.turns]
        assert names == problem.answer["names"][: len(names)]
        if style == "careful":
            assert len(names) == 2
            assert KNIGHTS.grade(problem, example.text).verdict == "correct"


def test_the_calculator_s_last_call_is_right():
    for number, problem in enumerate(COUNTDOWN.problems("train")):
        example = COUNTDOWN.trace(problem, "calculator", seed=number)
        called = [re.search(r'"(.*)"', turn)[1] for turn in example.turns]
        values = [calculator(expression) for expression in called]
        target = str(problem.answer["target"])
        assert values[-1] == target
        assert target not in values[:-1]
        compared = [re.match(r"(\S+) vs (\d+) no\n", turn).groups() for turn in example.turns[1:]]
        assert compared == [(value, target) for value in values[:-1]]
        assert f"{target} vs {target} yes" in example.text
        assert COUNTDOWN.grade(problem, example.text).verdict == "correct"


CALCULATED = COUNTDOWN.trace(COUNTDOWN.problems("train")[0], "calculator", seed=1)
ASKED = KNIGHTS.trace(KNIGHTS.problems("train")[0], "careful", seed=1)


@pytest.mark.parametrize(
    "example, make, style",
    [
        (ASKED, KnightsInterrogation, "raw"),
        (ASKED, KnightsInterrogation, "chat"),
        (CALCULATED, lambda: ToolEnvironment((Tool(calculator),)), "raw"),
    ],
    ids=["knights", "knights in a chat", "countdown"],
)
def test_a_demonstration_has_the_tokens_of_the_same_episode(example, make, style):
    tokenizer = tokenizer_of("SmolLM3" if style == "chat" else "Qwen2.5")
    config = PromptConfig(style=style, system="", **({"reply_template": "{user}\n"} if style == "raw" else {}))
    episodes = Episodes(Renderer(tokenizer, config, ""), make, EnvironmentConfig(max_turns=20))
    samples = demonstrated(example, episodes)
    said = [*example.turns, example.text]
    engine = Scripted(tokenizer, lambda p, g, k: said[k])
    ((rollout,),) = episodes.sample([example.problem], engine, SamplingConfig(max_tokens=9), samples=1, seed=0)
    played = to_samples(Group(example.problem, (rollout,), (Reward(0.0, {}, "wrong"),)))
    assert rollout.episode.end == "done"
    for shown, sampled in zip(samples, played, strict=True):
        assert shown.token_ids.tolist() == sampled.token_ids.tolist()
        assert shown.trained.tolist() == sampled.trained.tolist()
        assert shown.advantages.tolist() == sampled.trained.astype(np.float32).tolist()


def test_an_environment_that_ends_too_early_is_an_error():
    class Over(Environment):
        def step(self, message):
            return Observation(done=True)

    episodes = Episodes(Renderer(tokenizer_of("Qwen2.5"), PromptConfig(style="raw", system=""), ""), Over)
    example = Example(KNIGHTS.problems("train")[0], "end", turns=("first",))
    with pytest.raises(UserError, match="ends the worked answer after 'first'"):
        demonstrated(example, episodes)
