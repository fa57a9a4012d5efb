"""`hone data` on tasks, files and folders."""

import json
from pathlib import Path

import pytest

from hone.tasks.rows.files import read_rows, write_rows
from tests.cli.test_cli import folder, run  # noqa: F401
from tests.tasks.test_dataset import MATH_ROW, sums

LONG = "Tom walks {} miles on each day of the week but Sunday, when he walks none at all; how far in a week?"


@pytest.fixture
def data(folder):  # noqa: F811
    """12 rows of train (one twice), 3 of test: one is a row of train, one shares 13 words with one."""
    train = [*sums(10), {"question": LONG.format(2), "answer": "12"}]
    write_rows("train.jsonl", [*train, {**train[0], "question": train[0]["question"].upper()}])
    write_rows("test.jsonl", [train[1], {"question": LONG.format(3), "answer": "18"}, *sums(1, start=50)])
    Path("rows").mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        Path(name).rename(f"rows/{name}")
    return folder


def test_show(data, run):  # noqa: F811
    code, out, err = run("data", "show", "rows", "--problems", "1", "--split", "test")
    assert code == 0
    assert out.startswith("--- dataset-")
    assert "What is 1 plus 2?\nanswer: 3\n\ntest:\n3 problems\nquestion: median 5, 95% 23, most 23 words\n" in out
    assert "columns: question = question, answer = answer" in err
    assert "train: 1 of 12 problems left out" in err
    assert "train: 1 of 11 problems left out, since they are in test" in err


def test_show_counts_tokens_of_a_model(data, run, tmp_path_factory):  # noqa: F811
    from hone.model import tiny

    model = tmp_path_factory.mktemp("model")
    tokenizer = tiny.train_tokenizer(["What is 1 plus 2?"] * 3, 300, 0)
    tokenizer.save_pretrained(model)
    out = run("data", "show", "rows/test.jsonl", "task.test=1", "--split", "test", "--model", str(model))[1]
    assert "tokens" in out
    assert run("data", "show", "rows", "--model", "nowhere/at-all")[0] == 2


def test_check(data, run):  # noqa: F811
    code, out, _ = run("data", "check", "rows")
    assert code == 0
    assert "  test: 3 problems, 0 of them duplicates\n  train: 12 problems, 1 of them duplicates\n" in out
    assert "  train in test: 1 of 12\n  0 faults\n" in out


def test_check_names_rows_that_cannot_be_used(data, run):  # noqa: F811
    rows = [MATH_ROW, {**MATH_ROW, "problem": "b", "answer": "???"}, {**MATH_ROW, "problem": "", "answer": "1"}]
    write_rows("bad.jsonl", rows)
    code, out, _ = run("data", "check", "bad.jsonl")
    assert code == 1
    assert "    row 3: column problem: '' is not a question" in out
    assert "its own answer '???' is wrong" in out
    assert run("data", "check", "countdown", "task.train=5", "task.test=2", "task.validation=2")[0] == 0


def test_check_says_where_equal_problems_are(data, run):  # noqa: F811
    write_rows("gaps.jsonl", [{"question": f"1 + {n}?", "answer": "" if n in (3, 7, 8) else n + 1} for n in range(30)])
    code, out, _ = run("data", "check", "gaps.jsonl")
    assert code == 1
    assert "row 4, row 8, row 9: " in out


def test_check_shows_equal_problems_once(data, run):  # noqa: F811
    write_rows("trl.jsonl", [{"question": f"Sort {n}", "solution": "a b"} for n in range(240)])
    code, out, _ = run("data", "check", "trl.jsonl")
    assert code == 1
    assert "240 faults" in out
    assert out.count("no answer") == 1
    assert "row 19, row 20 and 220 other rows: no answer" in out
    assert "task.columns.answer=solution" in out
    assert "task.grading=none" in out


def test_overlap(data, run):  # noqa: F811
    lines = run("data", "overlap", "rows")[1].splitlines()
    assert lines[1].split() == ["train", "in", "test", "12", "3", "1", "1"]
    lines = run("data", "overlap", "rows/train.jsonl", "rows/test.jsonl", "--ngram", "40")[1].splitlines()
    assert lines[1].split() == ["12", "3", "1", "0"]
    code, _, err = run("data", "overlap", "rows/train.jsonl")
    assert (code, "give a second source" in err) == (2, True)


def test_dedup_writes_a_new_file(data, run):  # noqa: F811
    code, out, _ = run("data", "dedup", "rows/train.jsonl", "--out", "new.jsonl", "--against", "rows/test.jsonl")
    assert (code, out) == (0, "new.jsonl: 10 of 12 rows; left out: 1 duplicates, 1 in rows/test.jsonl\n")
    kept = read_rows("new.jsonl")
    assert [row["answer"] for row in kept] == ["1", *(str(2 * n + 1) for n in range(2, 10)), "12"]
    against = ("--against", "rows/test.jsonl", "--ngram", "13")
    assert "9 of 12 rows" in run("data", "dedup", "rows", "--split", "train", "--out", "n.jsonl", *against)[1]
    assert run("data", "dedup", "rows", "--out", "new.jsonl") == (
        2,
        "",
        "--out new.jsonl exists already; give another name, or remove it\n",
    )
    assert "no effect without --against" in run("data", "dedup", "rows", "--out", "x.jsonl", "--ngram", "5")[2]
    run("data", "dedup", "countdown", "task.train=5", "--split", "train", "--out", "c.jsonl")
    assert json.loads(Path("c.jsonl").read_text().splitlines()[0])["answer"]["target"]


def test_check_goes_on_after_a_countdown_row_without_a_solution(folder, run):  # noqa: F811
    write_rows("nums.jsonl", [{"nums": [2, 2, 2], "target": 97}, {"nums": [1, 2, 3], "target": 6}])
    code, out, _ = run("data", "check", "nums.jsonl")
    assert code == 1
    assert "all: 2 problems" in out
    assert "  1 faults\n    countdown: found no way to make 97 of [2, 2, 2]" in out


def test_settings_of_columns_count_for_the_source_that_has_them(data, run):  # noqa: F811
    write_rows(
        "mine.jsonl", [{"text": row["question"], "gives": row["answer"]} for row in read_rows("rows/train.jsonl")]
    )
    settings = ("task.columns.question=text", "task.columns.answer=gives")
    code, out, err = run("data", "overlap", "rows/test.jsonl", "mine.jsonl", *settings)
    assert code == 0, err
    assert out.splitlines()[1].split() == ["3", "12", "1", "1"]  # one is there, another shares 13 words
    code, out, err = run("data", "dedup", "rows/test.jsonl", *settings, "--out", "new.jsonl", "--against", "mine.jsonl")
    assert (code, out) == (0, "new.jsonl: 2 of 3 rows; left out: 0 duplicates, 1 in mine.jsonl\n"), err
    code, _, err = run("data", "overlap", "mine.jsonl", "rows", "task.columns.question=txt")
    assert code == 2
    assert "no column 'txt'" in err
    assert run("data", "overlap", "a", "b", "c")[0] == 2
