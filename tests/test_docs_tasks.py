"""docs/tasks.md: its code is run, and is as short as it says."""

import re
from pathlib import Path

import pytest

from hone.tasks import TASKS, Kind, make_task
from hone.tasks.base import Task

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "tasks.md").read_text(encoding="utf-8")


def block(name: str) -> str:
    (code,) = re.findall(rf"<!-- {name} -->\n```python\n(.*?)```", TEXT, re.DOTALL)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 20
    return code


def test_bring_your_dataset(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(block("dataset"), {})
    printed = capsys.readouterr()
    assert printed.out == "correct\n"
    assert f"```\n{printed.err}```" in TEXT


def test_add_a_task(monkeypatch):
    names: dict = {}
    exec(block("task"), names)
    monkeypatch.setitem(TASKS, "sums", Kind(names["SumsConfig"], names["SumsTask"]))
    task: Task = make_task(names["SumsConfig"]())
    ids = [p.id for split in ("train", "validation", "test") for p in task.problems(split)]
    assert len(set(ids)) == len(ids) == 900
    problem = next(p for p in task.problems("validation") if p.messages[0]["content"] == "What is 1 + 2?")
    verdicts = [task.grade(problem, text).verdict for text in ("<answer>3</answer>", "<answer>4</answer>", "")]
    assert verdicts == ["correct", "wrong", "malformed"]


@pytest.mark.parametrize("name", TASKS)
def test_the_table_names_every_task(name):
    table = TEXT.split("\n\n")[2]
    assert re.search(rf"^\| .*`{name}(:NAME)?`", table, re.MULTILINE)
