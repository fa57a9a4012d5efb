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
    monkeypatch.setitem(TASKS, "reverse", Kind(names["ReverseConfig"], names["ReverseTask"]))
    task: Task = make_task(names["ReverseConfig"]())
    assert not {p.id for p in task.problems("train")} & {p.id for p in task.problems("test")}
    problem = task.problems("train")[0]
    verdicts = [task.grade(problem, text).verdict for text in ("<answer>enots</answer>", "<answer>stone</answer>", "")]
    assert verdicts == ["correct", "wrong", "malformed"]


@pytest.mark.parametrize("name", ["knights", "countdown", "gsm8k", "math", "dataset"])
def test_the_table_names_every_task(name):
    assert name in TASKS
    assert f"| `{name}` |" in TEXT
