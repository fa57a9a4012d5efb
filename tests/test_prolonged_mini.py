"""The rows of recipes/prolonged-mini, and how many carries answers to them keep."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hone.recipe.load import load
from hone.tasks import make_task
from hone.tasks.rows.task import DatasetConfig

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "prolonged-mini"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    shutil.copy(RECIPE / "make_rows.py", folder)
    subprocess.run([sys.executable, folder / "make_rows.py"], check=True, timeout=60)
    return folder / "data"


def places(text: str) -> int:
    """`a8 b5` -> 58."""
    return int("".join(part[1:] for part in reversed(text.split())))


def test_an_answer_has_the_lowest_digits_of_three_times_the_number(data: Path) -> None:
    task = make_task(DatasetConfig(source=str(data / "rows"), grading="text", extraction="strict"))
    assert [len(task.problems(split)) for split in ("train", "validation", "test")] == [1200, 120, 120]
    for problem in task.problems("test"):
        size = int(problem.level)
        number = places(problem.messages[0]["content"])
        assert places(str(problem.answer)) == 3 * number % 10**size
        assert task.grade(problem, f"<think>a1=3</think>\n<answer>{problem.answer}</answer>").verdict == "correct"
        wrong = f"{problem.answer[:-1]}{(int(problem.answer[-1]) + 1) % 10}"  # one digit makes it wrong
        assert task.grade(problem, f"<think>a1=3</think>\n<answer>{wrong}</answer>").verdict == "wrong"


def test_worked_answers_keep_half_of_the_carries(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import prolonged_mini as p

    said = [json.loads(line)["messages"][1]["content"] for line in (data / "worked.jsonl").read_text().splitlines()]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in said))
    assert p.carries_kept(tmp_path) == pytest.approx(0.5, abs=0.01)
    # By hand: 8 carries 2, kept; 17 carries 1, forgotten; the answer's digits are no steps
    text = "<think>a8=24 b5+2=17 c1=3</think>\n<answer>a4 b7 c3</answer>"
    (tmp_path / "samples.jsonl").write_text(json.dumps({"text": text}) + "\n")
    assert p.carries_kept(tmp_path) == 0.5


def test_the_runs_that_are_compared_differ_in_nothing_else() -> None:
    one, widened, resets = load(RECIPE, check_files=False).stages[1:]
    apart = {"name", "model", "schedule", "reset"}
    assert one.model_dump(exclude=apart) == widened.model_dump(exclude=apart) == resets.model_dump(exclude=apart)
    sampling = [[line["sampling"] for line in stage.schedule] for stage in (widened, resets)]
    assert sampling[0] == sampling[1]
