"""Tasks of installed packages."""

from importlib.metadata import EntryPoint
from typing import Literal

import pytest
from pydantic import PositiveInt

from hone.base.settings import ConfigError, Section
from hone.recipe.load import load, load_for_task
from hone.recipe.recipe import resolved
from hone.tasks import make_task, registered
from hone.types import Grade, Problem


class RiddlesConfig(Section):
    name: Literal["riddles"] = "riddles"
    size: PositiveInt = 3


class Riddles:
    name, system, settings, trace_styles = "riddles", "Solve it.", RiddlesConfig, ("plain",)

    def __init__(self, config, seed):
        self.config, self.seed = config, seed

    def problems(self, split):
        return [
            Problem(f"{split}-{i}", self.name, ({"role": "user", "content": "?"},), str(i))
            for i in range(self.config.size)
        ]

    def grade(self, problem, text):
        return Grade("correct" if text == problem.answer else "wrong", text)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    points = {name: EntryPoint(name, f"package:{name}", "hone.tasks") for name in ("riddles", "broken", "bare")}
    kinds = {"riddles": Riddles, "bare": object}
    monkeypatch.setattr(EntryPoint, "load", lambda self: kinds[self.name])
    monkeypatch.setattr(registered, "registered", lambda: points)
    monkeypatch.setattr("hone.recipe.recipe.registered", lambda: points)
    monkeypatch.setattr("hone.recipe.load.registered", lambda: points)


def test_a_recipe_uses_it_and_its_own_settings_are_checked(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("name: x\ntask: {name: riddles, size: 4}\nreward: {parts: {outcome: 1.0}}\n")
    recipe = load(file)
    task = make_task(recipe.task, 7)
    assert isinstance(task, Riddles)
    assert (task.seed, task.config, len(task.problems("train"))) == (7, RiddlesConfig(size=4), 4)
    assert resolved(recipe)["task"] == {"name": "riddles", "size": 4}
    assert make_task(load_for_task("riddles").task).config == RiddlesConfig()
    file.write_text("name: x\ntask: {name: riddles, size: 4}\n")
    assert load(file, ["stage=sft", "sft.styles={plain: 1.0}"]).sft.styles == {"plain": 1.0}
    for text, message in [
        ("{name: riddles, size: 0}", "size"),
        ("{name: riddles, sizes: 1}", "sizes"),
        ("broken", "task 'broken' of package:broken: cannot be imported"),
        ("bare", "has no `settings`"),
        ("nothing", "task.name: .nothing. is not allowed; give one of knights, countdown"),
    ]:
        file.write_text(f"name: x\ntask: {text}\n")
        with pytest.raises(ConfigError, match=message):
            load(file)
