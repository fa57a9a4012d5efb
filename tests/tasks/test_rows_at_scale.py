"""Rows as mapped tables: the same problems, splits and order as plain lists give; written once; little memory."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.base.settings import UserError
from hone.preflight.plan.batch import TOKENISED, longest_prompt
from hone.tasks.curriculum import Curriculum, CurriculumConfig
from hone.tasks.rows import files, problems
from hone.tasks.rows.corpus import RANK, canonical_text, divide, question_of, rank
from hone.tasks.rows.files import open_rows, read_rows, write_rows
from hone.tasks.rows.problems import Problems, characters
from hone.tasks.rows.task import DatasetConfig, DatasetTask
from hone.types import Problem
from tests.tasks import plainly_divided

ROOT = Path(__file__).resolve().parents[2]


def ranks_of(forms: list[str]) -> np.ndarray:
    """The ranks of canonical forms: [forms] of RANK."""
    joined = b"".join(rank(form)[:16] for form in forms)
    return np.frombuffer(joined, np.dtype([("high", ">u8"), ("low", ">u8")])).astype(RANK)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Every table is a file that processes share, in an empty folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "CACHED_FROM", 0)
    monkeypatch.setattr(problems, "INDEXED_FROM", 0)
    return tmp_path / "cache" / "hone" / "rows"


def mixed(count, seed=0):
    """Rows with duplicates, levels, solutions for some, and cells of several types."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        n = rng.randrange(count)
        row = {"question": f"What is {n} plus {n + 1}?" + " " * rng.randrange(2), "answer": str(2 * n + 1)}
        row |= {"level": rng.choice(["1", "2", "10"]), "note": rng.choice([None, 1, "x", [1, "y"], {"a": 2.5}])}
        if rng.random() < 0.3:
            row["solution"] = f"{n} + {n + 1} = {2 * n + 1}"
        rows.append(row)
    return rows


# --- splits ----------------------------------------------------------------------------------

sizes = st.none() | st.integers(0, 30)
forms = st.lists(st.integers(0, 25).map(str), max_size=40)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["train", "validation", "test", "all"]), forms), sizes, sizes, sizes)
def test_splits_are_those_of_plain_lists(rows, train, validation, test):
    made = {
        split: [Problem(f"{split}{n}", "t", ({"role": "user", "content": f},), "1") for n, f in enumerate(these)]
        for split, these in rows.items()
    }
    named = {  # as in a task, the same question has the same id
        split: [Problem(p.messages[0]["content"], "t", p.messages, p.id) for p in these]
        for split, these in made.items()
    }
    wanted = {"train": train, "validation": validation, "test": test}
    expected, said = plainly_divided.build("t", named, question_of, **wanted)
    places, report = divide("t", {split: ranks_of(these) for split, these in rows.items()}, **wanted)
    every = [p for these in named.values() for p in these]
    assert {split: [every[i] for i in at] for split, at in places.items()} == expected
    assert report == said


def test_sizes_are_numbers_of_problems():
    forms = [str(n) for n in range(50)]
    ranks = ranks_of(forms)
    splits, _ = divide("t", {"train": ranks[:40], "test": ranks[40:]}, train=7, validation=5, test=3)
    assert {split: len(places) for split, places in splits.items()} == {"train": 7, "validation": 5, "test": 3}
    places = splits["train"].tolist()
    assert places == sorted(places) != list(range(7))  # chosen by hash, in the order of the rows
    assert not {*range(40, 50)} & {*places, *splits["validation"].tolist()}  # unused test rows are no training rows


# --- rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_problems_are_the_same_from_a_shared_file_as_in_memory(suffix, cache, tmp_path, monkeypatch, capsys):
    rows = mixed(300)
    path = tmp_path / f"rows.{suffix}"
    if suffix == "json":
        monkeypatch.setattr(files, "CHUNK", 97)  # entries lie across the pieces
        path.write_text(json.dumps(rows, indent=1))
    elif suffix == "csv":
        path.write_text(
            "question,answer,level\n" + "".join(f"{r['question']},{r['answer']},{r['level']}\n" for r in rows)
        )
        rows = [{name: row[name] for name in ("question", "answer", "level")} for row in rows]
    elif suffix == "parquet":
        rows = [{key: cell for key, cell in row.items() if key != "note"} for row in rows]
        write_rows(path, rows)
        rows = [{"solution": None, **row} for row in rows]
    else:
        write_rows(path, rows)
    assert read_rows(path) == rows
    config = DatasetConfig(source=str(path), train=40, validation=10)
    first, second = DatasetTask(config), DatasetTask(config)
    mapped = {split: list(first.problems(split)) for split in ("train", "validation", "test")}
    said = capsys.readouterr().err
    assert {p.name.split("-")[0] for p in cache.iterdir()} == {"rows", "index"}
    monkeypatch.setattr(problems, "_walk", None)  # nothing is walked again
    assert {split: list(second.problems(split)) for split in mapped} == mapped
    assert capsys.readouterr().err == said
    monkeypatch.undo()
    third = DatasetTask(config)
    assert {split: list(third.problems(split)) for split in mapped} == mapped
    # and they are those of plain lists
    every = [first._problem(row, first.columns)[0] for row in rows]
    expected, report = plainly_divided.build(
        "dataset", {"all": every}, lambda p: canonical_text(question_of(p)), train=40, validation=10
    )
    assert mapped == expected
    assert said.splitlines()[1:] == list(report)


def test_a_changed_file_or_setting_is_read_anew(cache, tmp_path):
    path = tmp_path / "rows.jsonl"
    write_rows(path, mixed(50))
    before = DatasetTask(DatasetConfig(source=str(path))).problems("train")
    assert {p.level for p in before} == {"1", "2", "10"}
    assert {p.level for p in DatasetTask(DatasetConfig(source=str(path), levels=("2",))).problems("train")} == {"2"}
    write_rows(path, mixed(60, seed=1))
    assert DatasetTask(DatasetConfig(source=str(path))).problems("train") != before


def test_rows_that_are_no_problems_are_named_each_time(cache, tmp_path):
    path = tmp_path / "rows.jsonl"
    write_rows(path, [*mixed(30), {"question": " ", "answer": "1"}, {"question": "a?"}])
    for _ in range(2):
        with pytest.raises(UserError, match=r"row 31: column question: ' ' is not a question.*\n\(and 1 more row;"):
            DatasetTask(DatasetConfig(source=str(path))).problems("train")


def test_a_folder_that_cannot_be_written_to_is_said(cache, tmp_path, capsys):
    cache.parent.mkdir(parents=True)
    cache.write_text("in the way")
    path = tmp_path / "rows.jsonl"
    write_rows(path, mixed(30))
    assert open_rows(path) == read_rows(path)
    assert f"rows cannot be kept in {cache} for other processes: " in capsys.readouterr().err


CHILD = """
import sys
from hone.tasks.rows import files
files.CACHED_FROM = 0
print(len(files.open_rows(sys.argv[1])))
"""


def test_of_two_processes_at_once_one_writes_and_both_read(cache, tmp_path):
    path = tmp_path / "rows.jsonl"
    write_rows(path, mixed(20_000))
    command = [sys.executable, "-c", CHILD, str(path)]
    others = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [other.communicate(timeout=60)[0] for other in others] == ["20000\n"] * 2
    (kept,) = cache.glob("*.arrow")
    assert not list(cache.glob("*.writing"))
    written = kept.stat().st_ino
    open_rows(path)
    assert kept.stat().st_ino == written


def test_a_table_that_nothing_used_for_long_goes(cache, tmp_path):
    cache.mkdir(parents=True)
    old, new = cache / "rows-old.arrow", cache / "rows-new.arrow"
    for file in (old, new):
        file.write_bytes(b"x")
    os.utime(old, (0, 0))
    write_rows(tmp_path / "rows.jsonl", mixed(3))
    open_rows(tmp_path / "rows.jsonl")
    assert not old.exists()
    assert new.exists()


@pytest.mark.parametrize(
    "text", ["[]", " [ ] ", '[{"a": 1}]', '[{"a": "]"} , {"a": [1, 2]}]\n', '[\n{"a": {"b": "}"}}]']
)
@pytest.mark.parametrize("chunk", [1, 2, 7, 100])
def test_lists_in_pieces_are_lists(text, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", chunk)
    (tmp_path / "a.json").write_text(text)
    is_list = files._read_list(tmp_path / "a.json")
    assert [json.loads(one) for one in is_list] == json.loads(text)


@pytest.mark.parametrize(
    "text", ["[", '[{"a": 1}', '[{"a": 1},]', '[{"a": 1} {"a": 2}]', '[{"a": 1}] x', "[12, 3]", "[}"]
)
@pytest.mark.parametrize("chunk", [1, 100])
def test_broken_lists_in_pieces_are_errors(text, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", chunk)
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=r"a\.json"):
        list(files._read_list(tmp_path / "a.json"))


# --- what walks over all problems ------------------------------------------------------------


def test_a_slice_and_the_end_of_problems(tmp_path):
    write_rows(tmp_path / "rows.jsonl", mixed(60))
    train = DatasetTask(DatasetConfig(source=str(tmp_path / "rows.jsonl"))).problems("train")
    every = list(train)
    assert isinstance(train[:5], Problems)
    assert (train[:5], train[1:][2:4], train[-1]) == (every[:5], every[3:5], every[-1])
    with pytest.raises(IndexError):
        train[len(train)]


@pytest.mark.parametrize("kind", ["uniform", "sequential", "mixture", "adaptive"])
def test_a_curriculum_draws_the_same_from_a_table_as_from_a_list(kind, tmp_path):
    write_rows(tmp_path / "rows.jsonl", mixed(200))
    train = DatasetTask(DatasetConfig(source=str(tmp_path / "rows.jsonl"))).problems("train")
    config = CurriculumConfig(kind=kind, **({"weights": {"1": 0.2, "10": 0.8}} if kind == "mixture" else {}))
    lazy, plain = Curriculum(train, 3, config), Curriculum(list(train), 3, config)
    for step in range(6):
        assert lazy.draw(step, 40) == plain.draw(step, 40)
        without = {p.id for p in train[:50]}
        assert lazy.draw_others(step, 1, 10, without) == plain.draw_others(step, 1, 10, without)
        seen = [("1", 3, 4), ("2", step % 3, 4), ("10", 0, 4)]
        lazy.count(seen)
        plain.count(seen)
        assert lazy.state() == plain.state()


def test_only_the_longest_prompts_are_made(tmp_path, monkeypatch):
    write_rows(tmp_path / "rows.jsonl", mixed(200))
    train = DatasetTask(DatasetConfig(source=str(tmp_path / "rows.jsonl"))).problems("train")
    most = sorted(train, key=characters)[-TOKENISED:]
    asked = []

    class Counts:
        def prompt_ids(self, problem):
            asked.append(problem)
            return problem.messages[0]["content"]

    monkeypatch.setattr(Problems, "__iter__", None)
    assert longest_prompt(train, Counts()) == max(map(characters, most))
    assert asked == most
    Curriculum(train, 0)  # nor does this


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_million_rows_take_at_most_400_megabytes_in_each_process():
    command = [sys.executable, str(ROOT / "benchmarks" / "data_rows.py"), "--rows", "1000000", "--no-file"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert max(row["peak_mb"] for row in result["processes"]) <= 400


def test_places_of_a_table_are_numbers_not_objects(tmp_path):
    write_rows(tmp_path / "rows.jsonl", mixed(60))
    course = Curriculum(DatasetTask(DatasetConfig(source=str(tmp_path / "rows.jsonl"))).problems("train"), 0)
    assert all(isinstance(places, np.ndarray) for places in course._levels.values())
