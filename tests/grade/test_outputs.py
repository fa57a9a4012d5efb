"""Outputs as models of many families write them, each with a verdict written by hand.

One row of outputs.jsonl:
{"form": "minerva", "gold": "42", "text": "Final Answer: The final answer is $42$. I hope it is correct.",
"verdict": "correct"}
"""

import json
from pathlib import Path

import pytest

from hone.grade.maths import Maths

FILE = Path(__file__).parent / "outputs.jsonl"
ROWS = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
FORMS = sorted({row["form"] for row in ROWS})


@pytest.fixture(scope="module")
def maths():
    with Maths(count=1, deadline=20) as maths:
        yield maths


@pytest.mark.parametrize("form", FORMS)
def test_outputs_are_graded_as_a_reader_would(maths, form):
    rows = [row for row in ROWS if row["form"] == form]
    grades = maths.grades([(row["gold"], row["text"]) for row in rows])
    odd = [
        (row["gold"], row["text"], row["verdict"], grade)
        for row, grade in zip(rows, grades)
        if (grade.verdict == "correct") != (row["verdict"] == "correct") or grade.note
    ]
    assert odd == []


def test_right_and_wrong_outputs_are_both_there():
    verdicts = [row["verdict"] for row in ROWS]
    assert set(verdicts) == {"correct", "wrong"}
    assert min(verdicts.count("correct"), verdicts.count("wrong")) > 80
    assert len({(row["gold"], row["text"]) for row in ROWS}) == len(ROWS)
