"""The public rows of knights and knaves: read, written, checked, compared."""

import json

import pytest

from hone.base.settings import UserError
from hone.tasks import make_task
from hone.tasks.knights.logic import Puzzle, canonical_form
from hone.tasks.knights.rows import check_rows, overlap, puzzle_of
from hone.tasks.knights.task import KnightsConfig, KnightsTask, puzzle_of_problem, row_of_problem
from hone.tasks.knights.text import solution_sentence
from hone.tasks.rows.files import read_rows, write_rows

K0, K1, N1 = ("telling-truth", 0), ("telling-truth", 1), ("lying", 1)
PAIR = Puzzle(("Zoey", "Oliver"), (N1, ("and", K0, K1)), (True, False))

ROW = {
    "quiz": "A very special island is inhabited only by knights and knaves. Knights always tell the truth, and knaves "
    'always lie. You meet 2 inhabitants: Zoey, and Oliver. Zoey noted, "Oliver is a knave". According to Oliver, '
    '"Zoey is a knight and Oliver is a knight". So who is a knight and who is a knave?',
    "names": ["Zoey", "Oliver"],
    "knight_knave": {"knight": "knight", "knave": "knave"},
    "solution": [True, False],
    "solution_text": "Zoey is a knight, and Oliver is a knave.",
    "solution_text_format": "(1) Zoey is a knight\n(2) Oliver is a knave",
    "cot_head": "",
    "cot_repeat_steps": [],
    "cot_foot": "",
    "statements": "(('lying', 1), ('and', ('telling-truth', 0), ('telling-truth', 1)))",
    "index": 7,
}


def task(**config):
    return KnightsTask(KnightsConfig(**{"quiz": "brief", **config}))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_public_rows_are_read_and_written(tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    write_rows(path, [ROW])
    made = make_task(KnightsConfig(test_file=str(path)))
    (problem,) = made.problems("test")
    assert problem.messages[0]["content"] == ROW["quiz"]
    assert puzzle_of_problem(problem) == PAIR
    written = row_of_problem(problem, index=7)
    assert list(written) == list(ROW)
    assert {key: written[key] for key in ROW if not key.startswith(("cot", "knight"))} == {
        key: value for key, value in ROW.items() if not key.startswith(("cot", "knight"))
    }
    assert written["cot_repeat_steps"][0] == "Suppose Zoey knight, Oliver knight."
    assert written["cot_foot"] == "Everything fits."
    write_rows(path, [written])
    assert read_rows(path) == [written]


def test_generated_puzzles_survive_a_file(tmp_path):
    made = task(people=(3, 5), train=40, quiz="full")
    problems = made.problems("train")
    path = tmp_path / "rows.jsonl"
    write_rows(path, [row_of_problem(p, i) for i, p in enumerate(problems)])
    assert check_rows(read_rows(path)) == []
    again = task(train_file=str(path), quiz="full").problems("train")
    assert [(p.id, p.answer, p.messages, p.extra) for p in again] == [
        (p.id, p.answer, p.messages, p.extra) for p in problems
    ]


def test_generated_splits_keep_clear_of_a_file(tmp_path):
    held_out = task(people=(2,), test=100).problems("test")
    path = tmp_path / "mine.jsonl"
    write_rows(path, [row_of_problem(p, i) for i, p in enumerate(held_out[:50])])
    made = task(people=(2,), train_file=str(path), test=40)
    forms = [{canonical_form(puzzle_of_problem(p).statements) for p in made.problems(s)} for s in ("train", "test")]
    assert [len(f) for f in forms] == [50, 40]
    assert not forms[0] & forms[1]


def test_files_that_overlap_give_a_warning(tmp_path):
    a, b = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    write_rows(a, [ROW])
    write_rows(b, [ROW, ROW])
    with pytest.warns(UserWarning, match="1 problems of test_file have equivalents in train_file"):
        problems = task(train_file=a, test_file=b).problems("test")
    assert len({p.id for p in problems}) == 2


def test_faulty_files_are_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, "solution": [True, True]}) + "\n")
    with pytest.raises(UserError, match=r"rows\.jsonl: row 2: its statements do not lead"):
        task(test_file=str(path)).problems("test")
    path.write_text(json.dumps({**ROW, "statements": "('xor', 1)"}))
    with pytest.raises(UserError, match=r"rows\.jsonl: row 1: statements: "):
        task(test_file=str(path)).problems("test")
    path.write_text(json.dumps(ROW) + "\nnot json\n")
    with pytest.raises(UserError, match=r"rows\.jsonl:2: not readable as JSON"):
        task(test_file=str(path)).problems("test")
    with pytest.raises(UserError, match="no such data file"):
        task(test_file=str(tmp_path / "none.jsonl")).problems("test")


def test_check_rows_finds_each_fault():
    faults = check_rows(
        [
            ROW,
            {**ROW, "solution": [False, True]},
            {**ROW, "solution_text_format": "(1) Zoey is a knave\n(2) Oliver is a knave"},
            {**ROW, "names": ["Zoey"]},
            {**ROW, "names": ["Zoey", "ZOEY"]},
            {key: value for key, value in ROW.items() if key != "statements"},
            {**ROW, "statements": "(('telling-truth', 0), ('telling-truth', 1))"},
        ]
    )
    assert [fault.split(":")[0] for fault in faults] == [f"row {n}" for n in range(2, 8)]
    assert "recorded (False, True)" in faults[0]
    assert "solution_text_format" in faults[1]
    assert "4 solutions" in faults[5]


def test_overlap_counts_rows_by_people():
    swapped = {
        **ROW,
        "names": ["Emma", "Liam"],
        "solution": [False, True],
        "statements": "(('and', ('telling-truth', 0), ('telling-truth', 1)), ('lying', 0))",
    }
    renamed = {**swapped, "statements": "(('and', ('telling-truth', 1), ('telling-truth', 0)), ('lying', 0))"}
    other = {**ROW, "statements": "(('lying', 1), ('and', ('lying', 0), ('telling-truth', 1)))"}
    three = {**ROW, "names": ["A", "B", "C"], "solution": [True] * 3, "statements": "(('telling-truth', 0),) * 3"}
    three["statements"] = repr((K0, K0, K0))
    (two, more) = overlap([swapped, renamed, other, ROW], [ROW, three])
    assert (two.people, two.rows_a, two.rows_b, two.shared, two.shared_exactly) == (2, 4, 1, 3, 2)
    assert (more.people, more.rows_a, more.rows_b, more.shared) == (3, 0, 1, 0)
    assert puzzle_of(swapped).names == ("Emma", "Liam")


def test_solution_sentence():
    assert solution_sentence("ABC", [True, False, True]) == "A is a knight, B is a knave, and C is a knight."
