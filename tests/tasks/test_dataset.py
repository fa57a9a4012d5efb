"""Tasks over rows: sources, columns, splits, grades; gsm8k, math, dataset."""

import json
import random
import sys
import types

import pytest

from hone.base.settings import UserError
from hone.recipe.load import load_for_task
from hone.tasks import make_task
from hone.tasks.base import BatchTask, TracedTask, grade_all
from hone.tasks.rows.columns import recognise
from hone.tasks.rows.corpus import canonical_text, ngrams
from hone.tasks.rows.files import read_rows, write_rows
from hone.tasks.rows.gsm8k import GSM8KConfig, GSM8KTask
from hone.tasks.rows.math import MathConfig, MathTask
from hone.tasks.rows.sources import read_source, split_of_name
from hone.tasks.rows.task import DatasetConfig, DatasetTask, answer_of, canonical
from tests.tasks.test_knights_rows import ROW as KNIGHTS_ROW

GSM8K_ROW = {
    "question": "Ann has 48 clips and sells half. How many are left?",
    "answer": "She sells 48/2 = <<48/2=24>>24 clips.\nSo 48-24 = <<48-24=24>>24 are left.\n#### 24",
}
MATH_ROW = {
    "problem": "What is $1 + \\frac{1}{2}$?",
    "solution": "We have $\\frac{2}{2} + \\frac{1}{2} = \\boxed{\\frac{3}{2}}$.",
    "answer": "\\frac{3}{2}",
    "subject": "Algebra",
    "level": 2,
    "unique_id": "train/1",
}
OLD_MATH_ROW = {
    "problem": MATH_ROW["problem"],
    "level": "Level 2",
    "type": "Algebra",
    "solution": MATH_ROW["solution"],
}
VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "What is 2 + 3? Let's think step by step."}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"split": "train", "index": 0, "question": "What is 2 + 3?", "answer": "2 + 3 = 5\n#### 5"},
}
CHAT_ROW = {"messages": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "It is \\boxed{5}"}]}
SHAREGPT_ROW = {"conversations": [{"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": "2 + 3 is\n#### 5"}]}


def sums(count, start=0):
    return [{"question": f"What is {n} plus {n + 1}?", "answer": str(2 * n + 1)} for n in range(start, start + count)]


def task_of(tmp_path, rows, **config):
    write_rows(tmp_path / "rows.jsonl", rows)
    return DatasetTask(DatasetConfig(source=str(tmp_path / "rows.jsonl"), **{"test": 0, "validation": 0, **config}))


# --- columns ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row, described, answer, level, domain",
    [
        (GSM8K_ROW, "question = question, answer = answer", "24", "", ""),
        (
            MATH_ROW,
            "question = problem, answer = answer, solution = solution, level = level, domain = subject",
            "\\frac{3}{2}",
            "2",
            "Algebra",
        ),
        (
            OLD_MATH_ROW,
            "question = problem, solution = solution, level = level, domain = type",
            "\\frac{3}{2}",
            "2",
            "Algebra",
        ),
        (VERL_ROW, "messages = prompt, answer = reward_model.ground_truth, solution = extra_info.answer", "5", "", ""),
        (CHAT_ROW, "messages = messages", "5", "", ""),
        (SHAREGPT_ROW, "messages = conversations", "5", "", ""),
        ({"prompt": "2 + 3?", "ground_truth": 5}, "question = prompt, answer = ground_truth", "5", "", ""),
        (
            {"query": "2 + 3?", "label": 5.0, "difficulty": "easy"},
            "question = query, answer = label, level = difficulty",
            "5.0",
            "easy",
            "",
        ),
    ],
)  # fmt: skip
def test_usual_columns_are_recognised(tmp_path, capsys, row, described, answer, level, domain):
    (problem,) = task_of(tmp_path, [row]).problems("train")
    assert f"dataset: columns: {described}\n" in capsys.readouterr().err
    assert (problem.answer, problem.level, problem.domain) == (answer, level, domain)
    assert problem.messages[-1]["role"] == "user"


def test_worked_solutions_and_other_columns_are_kept(tmp_path):
    (problem,) = task_of(tmp_path, [GSM8K_ROW]).problems("train")
    assert problem.reference == "She sells 48/2 = 24 clips.\nSo 48-24 = 24 are left."
    (problem,) = task_of(tmp_path, [MATH_ROW]).problems("train")
    assert problem.reference == MATH_ROW["solution"]
    assert problem.extra == {"unique_id": "train/1"}
    (problem,) = task_of(tmp_path, [VERL_ROW]).problems("train")
    assert problem.extra["data_source"] == "openai/gsm8k"  # no reward is looked up by it
    assert problem.reference == "2 + 3 = 5"


def test_rows_of_other_tasks_are_graded_by_them(tmp_path):
    made = task_of(tmp_path, [KNIGHTS_ROW])
    (problem,) = made.problems("train")
    assert made.grade(problem, "<answer>(1) Zoey is a knight\n(2) Oliver is a knave</answer>").verdict == "correct"
    assert made.grade(problem, "<answer>(1) Zoey is a knave\n(2) Oliver is a knave</answer>").verdict == "wrong"
    assert "knights" in made.system
    made = task_of(tmp_path, [{"nums": [1, 2, 3], "target": 1, "prompt": "x"}])
    (problem,) = made.problems("train")
    assert made.grade(problem, "<answer>(1 + 2) / 3</answer>").verdict == "correct"
    assert made.grade(problem, "<answer>3 - 2</answer>").verdict == "wrong"


def test_an_ambiguity_lists_the_candidates_and_the_remedy(tmp_path):
    rows = [{"question": "a?", "prompt": "b?", "answer": "1"}]
    with pytest.raises(UserError, match=r"question\? It may be question, prompt; choose with task\.columns\.question="):
        recognise(rows)
    assert recognise(rows, {"question": "prompt"}).of["question"] == "prompt"
    with pytest.raises(UserError, match=r"answer\? It may be answer, label; choose with task\.columns\.answer=answer"):
        recognise([{"question": "a?", "answer": "1", "label": "2"}])
    with pytest.raises(UserError, match=r"question and messages differ"):
        recognise([{"question": "a?", "messages": [{"role": "user", "content": "b?"}], "answer": "1"}])


def test_columns_that_say_the_same_are_no_ambiguity():
    rows = [{"question": "a?", "problem": "a?", "answer": "x\n#### 1,000", "final_answer": "1000"}]
    assert recognise(rows).of == {"question": "question", "answer": "answer"}
    rows = [{"problem": "a?", "messages": [{"role": "user", "content": "Solve: a?"}], "answer": "1"}]
    assert recognise(rows).of == {"question": "problem", "answer": "answer"}


def test_what_is_missing_is_named():
    with pytest.raises(
        UserError, match=r"(?s)no column is known to be the question .*\nthere are answer, text\nsay which"
    ):
        recognise([{"text": "a?", "answer": "1"}])
    with pytest.raises(
        UserError, match=r"(?s)to be the answer .*task\.columns\.answer=NAME\nor give task\.grading=none"
    ):
        recognise([{"question": "a?", "note": "1"}])
    with pytest.raises(UserError, match=r"task\.columns\.answer: no column 'anser'; there are answer, question"):
        recognise([{"question": "a?", "answer": "1"}], {"answer": "anser"})
    assert recognise([{"question": "a?"}], need_answer=False).of == {"question": "question"}
    with pytest.raises(UserError, match=r"task\.columns\.question=NAME task\.columns\.answer=NAME"):
        recognise([{"text": "a?", "gives": "1"}])


@pytest.mark.parametrize("cell", [["1", "2"], {"value": "1"}, [{"value": "1"}, 2]])
def test_a_column_with_a_usual_name_that_does_not_do_is_shown(cell):
    """Not "no column is known to be the answer; there are answer, question"."""
    with pytest.raises(UserError) as caught:
        recognise([{"question": "a?", "answer": cell}] * 3)
    assert f"answer is there, but an answer is text, a number or a list of one of them; it holds {cell!r}" in str(
        caught.value
    )
    with pytest.raises(UserError, match=r"question is there, but a question is text.*it holds 7"):
        recognise([{"question": 7, "answer": "1"}])


def test_messages_in_parts_are_read_and_images_are_not(tmp_path):
    text = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 3?"}]
    rows = [{"prompt": [{"role": "user", "content": text}], "answer": 5}]
    assert task_of(tmp_path, rows).problems("train")[0].messages == ({"role": "user", "content": "What is 2 + 3?"},)
    rows[0]["prompt"][0]["content"] = [*text, {"type": "image", "url": "x.png"}]
    with pytest.raises(UserError, match=r"row 1: a message holds \{'type': 'image'.*only text can be read"):
        task_of(tmp_path, rows).problems("train")


def test_brackets_tell_problems_apart(tmp_path):
    rows = [{"question": f"What is {q}?", "answer": a} for q, a in (("(1+2)*3", 9), ("1+(2*3)", 7), ("(4)!+1", 25))]
    rows.append({"question": "what is ( 1 + 2 ) * 3", "answer": 9})
    assert [p.answer for p in task_of(tmp_path, rows).problems("train")] == ["9", "7", "25"]
    assert canonical_text("3! + 1") != canonical_text("3 + 1")
    assert canonical_text("So many!") == canonical_text("so many")
    assert ngrams("f (a) + b", 2) == {("f", "a"), ("a", "+"), ("+", "b")}  # of words, brackets or not


def test_faulty_rows_are_counted_and_named(tmp_path):
    bad = [(" ", "1"), ("x?", None), ("y?", "")]
    rows = [*sums(2), *({"question": question, "answer": answer} for question, answer in bad)]
    with pytest.raises(
        UserError,
        match=r"jsonl row 3: column question: ' ' is not a question; repair or remove it\n\(and 2 more rows; hone",
    ):
        task_of(tmp_path, rows).problems("train")


def test_solutions_that_are_answers_have_a_remedy(tmp_path):
    """TRL's usual rows: a prompt of messages, and the answer in a column named solution."""
    ask = [[{"role": "user", "content": f"Sort {n}"}] for n in ("b a", "d c", "f e")]
    rows = [{"prompt": messages, "solution": "a b"} for messages in ask]
    with pytest.raises(UserError) as error:
        task_of(tmp_path, rows).problems("train")
    assert "row 1 and 2 other rows: no answer: the solution has neither #### nor" in str(error.value)
    assert "set task.columns.answer=solution if solution is the answer itself, or set task.grading=none" in str(
        error.value
    )
    for remedy in ({"columns": {"answer": "solution"}}, {"grading": "none"}):
        assert len(task_of(tmp_path, rows, **remedy).problems("train"))


@pytest.mark.parametrize(
    "recorded, solution, expected",
    [
        ("5", None, ("5", None)),
        (5, None, ("5", None)),
        (["5"], None, ("5", None)),
        ("2 + 3\n#### 5", None, ("5", "2 + 3")),
        ("thus \\boxed{5}.", None, ("5", "thus \\boxed{5}.")),
        (None, "thus \\boxed{5}.", ("5", "thus \\boxed{5}.")),
    ],
)
def test_answers_of_rows(recorded, solution, expected):
    assert answer_of(recorded, solution) == expected


@pytest.mark.parametrize("recorded", [True, None, {"a": 1}, float("nan"), float("inf"), "", " #### "])
def test_what_is_no_answer(recorded):
    with pytest.raises(ValueError, match=r"the answer is"):
        answer_of(recorded)


# --- sources ---------------------------------------------------------------------------------


def test_every_kind_of_file_is_read(tmp_path):
    rows = [{"question": 'a, "b"\nc?', "answer": "1"}, {"question": "é?", "answer": "2"}]
    write_rows(tmp_path / "a.jsonl", rows)
    write_rows(tmp_path / "a.parquet", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.csv").write_text('question,answer\n"a, ""b""\nc?",1\né?,2\n', encoding="utf-8-sig")
    (tmp_path / "a.tsv").write_text('question\tanswer\n"a, ""b""\nc?"\t1\né?\t2\n')
    for suffix in ("jsonl", "parquet", "json", "csv", "tsv"):
        assert read_rows(tmp_path / f"a.{suffix}") == rows, suffix


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.csv", "question,answer\na\n", r"a\.csv:2: not as many fields"),
        ("a.csv", "question,answer\na,1,2\n", r"a\.csv:2: not as many fields"),
        ("a.json", '[{"a": 1}, 2]', r"entry 2 of the list is not a JSON object"),
        ("a.json", '[{"a": 1},', r"a\.json:1: not readable as JSON"),
        ("a.jsonl", "{", r"a\.jsonl:1: not readable as JSON"),
        ("a.jsonl", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", r"a\.jsonl:1: not readable as JSON"),
        ("a.jsonl", '{"a": 1}\n{"a": ' + "9" * 5000 + "}", r"a\.jsonl:2: not readable as JSON: Exceeds the limit"),
        (
            "a.json",
            '{\n"data": []}',
            r"a\.json:1: not readable as JSON.*has to be a list of objects, or one object on each",
        ),
        ("a.jsonl", "question,answer\na,1\n", r"one JSON object on each line; a table is read by its ending, \.csv"),
        ("a.csv", "question;answer\na;1\n", r"a\.csv: the columns seem to be separated by ';', not ','; save it"),
        ("a.tsv", "question,answer\na,1\n", r"a\.tsv: the columns seem to be separated by ',', not '\\t'; save it"),
        ("a.parquet", "x", r"not a readable parquet file"),
        ("a.txt", "x", r"expected a \.jsonl"),
    ],
)
def test_broken_files_are_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        read_rows(tmp_path / name)


@pytest.mark.parametrize(("text", "message"), [("", "no rows; write one"), ('{"question": "a?"}\n', "no column is kn")])
def test_rows_that_do_not_do_are_named_by_their_file(tmp_path, text, message):
    (tmp_path / "mine.jsonl").write_text(text)
    with pytest.raises(UserError, match=rf"dataset: .*mine\.jsonl: {message}"):
        DatasetTask(DatasetConfig(source=str(tmp_path / "mine.jsonl"))).problems("train")


def test_cells_that_a_format_cannot_hold_are_said_and_nothing_is_lost(tmp_path):
    from datetime import date

    file = tmp_path / "a.jsonl"
    file.write_text("before\n")
    with pytest.raises(UserError, match=r"a cell cannot be written: .*date.*; write a \.parquet file"):
        write_rows(file, [{"a": 1}, {"a": date(2020, 1, 1)}])
    with pytest.raises(UserError, match=r"a cell cannot be written: .*write a \.jsonl file"):
        write_rows(tmp_path / "a.parquet", [{"a": 1}, {"a": "x"}])
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
    assert file.read_text() == "before\n"
    write_rows(tmp_path / "b.parquet", [{"a": 1}, {"b": 2}])  # no column is lost
    assert read_rows(tmp_path / "b.parquet") == [{"a": 1, "b": None}, {"a": None, "b": 2}]


def test_bytes_before_ends_of_lines_and_capitals(tmp_path):
    text = "".join(json.dumps(row) + "\r\n" for row in sums(3))
    (tmp_path / "ROWS.JSONL").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_rows(tmp_path / "ROWS.JSONL") == sums(3)
    (tmp_path / "a.jsonl").write_bytes(text.encode("utf-16"))
    with pytest.raises(UserError, match=r"a\.jsonl: not UTF-8 text .* at byte 0\); save it as UTF-8"):
        read_rows(tmp_path / "a.jsonl")


def test_what_describes_a_data_set_is_no_row_of_it(tmp_path):
    write_rows(tmp_path / "train.jsonl", sums(3))
    (tmp_path / "dataset_infos.json").write_text('{"default": {}}')
    assert read_source(str(tmp_path)) == {"train": sums(3)}
    (tmp_path / "train.jsonl").rename(tmp_path / "data-00000-of-00001.arrow")
    with pytest.raises(UserError, match=r"convert \.arrow files with to_parquet or to_json"):
        read_source(str(tmp_path))


def test_a_source_that_is_all_test_says_so(tmp_path, capsys):
    write_rows(tmp_path / "test.jsonl", sums(3))
    assert not DatasetTask(DatasetConfig(source=str(tmp_path / "test.jsonl"))).problems("train")
    assert (
        "by its name, everything is test and nothing is train; rename it, or give task.train_file"
        in capsys.readouterr().err
    )


def test_folders_are_read_by_the_names_of_their_files(tmp_path):
    for name in ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_rows(tmp_path / name, [{"question": name, "answer": "1"}])
    rows = read_source(str(tmp_path))
    assert {split: len(found) for split, found in rows.items()} == {"train": 2, "test": 1}
    write_rows(tmp_path / "more.jsonl", [{"question": "x", "answer": "1"}])
    with pytest.raises(UserError, match=r"to which split do more\.jsonl belong\? Name them"):
        read_source(str(tmp_path))


@pytest.mark.parametrize(
    "stem, split",
    [("train", "train"), ("test_first660", "test"), ("people5_test", "test"), ("dev", "validation"), ("latest", None),
     ("train-00000-of-00002", "train"), ("rows", None), ("validation_v2", "validation"), ("contest", None)],
)  # fmt: skip
def test_splits_of_names(stem, split):
    assert split_of_name(stem) == split


def hub(monkeypatch, answers):
    """A stand-in for the hub: what `load_dataset` returns or raises."""
    monkeypatch.setattr("hone.base.hub.require", lambda what, remedy: None)
    calls = []

    def load_dataset(source, subset):
        calls.append((source, subset))
        if isinstance(answers[source], Exception):
            raise answers[source]
        return answers[source]

    config = types.SimpleNamespace(HF_DATASETS_CACHE="none")
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset, config=config))
    return calls


def test_known_data_sets_come_from_the_hub(monkeypatch, capsys):
    datasets = pytest.importorskip("datasets")
    made = {
        "openai/gsm8k": datasets.DatasetDict(
            train=datasets.Dataset.from_list([{**GSM8K_ROW, "question": f"{n} clips?"} for n in range(30)]),
            test=datasets.Dataset.from_list([GSM8K_ROW]),
        ),
        "DigitalLearningGmbH/MATH-lighteval": {"train": [OLD_MATH_ROW], "test": [OLD_MATH_ROW]},
        "HuggingFaceH4/MATH-500": {"test": [{**MATH_ROW, "problem": "Another?", "level": 5}]},
    }
    calls = hub(monkeypatch, made)
    gsm8k = GSM8KTask(GSM8KConfig())
    assert [len(gsm8k.problems(split)) for split in ("train", "validation", "test")] == [27, 3, 1]
    assert "gsm8k: train 27, validation 3, test 1\n" in capsys.readouterr().err
    math = MathTask(MathConfig())
    assert [p.level for p in math.problems("test")] == ["5"]
    assert [p.level for p in math.problems("train")] == ["2"]
    assert calls == [("openai/gsm8k", "main"), *((name, None) for name in list(made)[1:])]


def test_what_the_hub_says_is_shown(monkeypatch):
    hub(monkeypatch, {"a/b": ValueError("Config name is missing.\nPlease pick one: ['x', 'y']")})
    with pytest.raises(UserError, match=r"a/b cannot be read from the hub: Config name is missing\. Please pick one"):
        read_source("a/b")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'datasets"):
        read_source("a/b")
    with pytest.raises(UserError, match="no such data file"):
        read_source("a/b.csv")
    with pytest.raises(UserError, match="no such file or folder, nor a hub id"):
        read_source("a b")


# --- splits ----------------------------------------------------------------------------------


def test_validation_is_cut_from_train_and_never_from_test(tmp_path, capsys):
    """Trap: validation cut from test, and the checkpoint chosen on it."""
    write_rows(tmp_path / "train.jsonl", sums(100))
    write_rows(tmp_path / "test.jsonl", sums(50, start=80))  # 20 of them are in train too
    made = DatasetTask(DatasetConfig(source=str(tmp_path)))
    forms = {split: {canonical(p) for p in made.problems(split)} for split in ("train", "validation", "test")}
    assert {split: len(found) for split, found in forms.items()} == {"train": 72, "validation": 8, "test": 50}
    assert not forms["train"] & forms["test"]
    assert not forms["validation"] & (forms["test"] | forms["train"])
    said = capsys.readouterr().err
    assert "dataset: train: 20 of 100 problems left out, since they are in test\n" in said
    assert said.endswith("dataset: validation: 8 problems cut from train\ndataset: train 72, validation 8, test 50\n")


def test_a_source_without_splits_is_cut_by_canonical_form(tmp_path):
    rows = sums(200)
    first = task_of(tmp_path, rows, validation=None, test=None)
    random.Random(1).shuffle(rows)
    second = task_of(tmp_path, rows, validation=None, test=None)
    for split, size in (("train", 162), ("validation", 18), ("test", 20)):
        ids = {problem.id for problem in first.problems(split)}
        assert len(ids) == size
        assert ids == {problem.id for problem in second.problems(split)}  # the order of rows decides nothing


def test_the_same_question_in_another_form_is_the_same_problem(tmp_path):
    rows = [
        {"question": "What is $2 + 3$?", "answer": "5"},
        {"question": "what is 2+3", "answer": "5"},
        {"question": "What is 2 - 3?", "answer": "-1"},
    ]
    made = task_of(tmp_path, rows)
    assert [p.answer for p in made.problems("train")] == ["5", "-1"]
    assert canonical_text("3.5 km") != canonical_text("35 km")


def test_ngrams_by_hand():
    assert ngrams("a B, c. d", 3) == {("a", "b", "c"), ("b", "c", "d")}
    assert ngrams("a b", 3) == set()


# --- grades, traces, settings ----------------------------------------------------------------


def test_grades_at_once_are_the_grades_one_by_one(tmp_path):
    made = task_of(tmp_path, [MATH_ROW])
    (problem,) = made.problems("train")
    texts = [
        "1.5",
        "Answer: \\boxed{3/2}",
        "<think>1</think><answer>$1\\frac{1}{2}$</answer>",
        "2",
        "",
        "\\boxed{\\log_2 8}",
    ]
    assert isinstance(made, BatchTask)
    grades = grade_all(made, [(problem, text) for text in texts])
    assert [g.verdict for g in grades] == ["correct", "correct", "correct", "wrong", "malformed", "wrong"]
    assert grades == [made.grade(problem, text) for text in texts]


def test_an_expression_of_the_question_is_no_answer_to_it(tmp_path):
    made = task_of(tmp_path, [{"question": "What is $3 \\times 4 + 5$?", "answer": "17"}])
    (problem,) = made.problems("train")
    texts = ["\\boxed{17}", "\\boxed{3 \\cdot 4 + 5}", "Answer: 3*4+5", "3*4+5 = 17", "Answer: 12 + 5"]
    verdicts = [made.grade(problem, text).verdict for text in texts]
    assert verdicts == ["correct", "wrong", "wrong", "correct", "correct"]


def test_one_reader_for_training_and_evaluation(tmp_path):
    """Trap: training takes the last answer block, evaluation the first, and a right answer anywhere passes."""
    made = task_of(tmp_path, [GSM8K_ROW])
    (problem,) = made.problems("train")
    assert made.grade(problem, "<answer>24</answer> no: <answer>25</answer>").verdict == "wrong"
    assert made.grade(problem, "<answer>25</answer> no: <answer>24</answer>").verdict == "correct"
    assert made.grade(problem, "<answer>24 or 25</answer>").verdict == "wrong"
    assert made.grade(problem, "\\boxed{24} or \\boxed{25}").verdict == "wrong"


def test_traces_are_graded_correct(tmp_path):
    made = task_of(tmp_path, [MATH_ROW])
    (problem,) = made.problems("train")
    assert isinstance(made, TracedTask)
    assert made.trace(problem, "worked", 0).text == MATH_ROW["solution"] + "\nAnswer: \\boxed{\\frac{3}{2}}"
    assert made.trace(problem, "answer", 0).text == "Answer: \\boxed{\\frac{3}{2}}"
    assert made.grade(problem, made.trace(problem, "worked", 0).text).verdict == "correct"
    bare = task_of(tmp_path, sums(1))
    assert bare.problems("train")
    assert bare.trace_styles == ("answer",)
    with pytest.raises(UserError, match=r"no worked solution .* task\.columns\.solution=NAME"):
        bare.trace(bare.problems("train")[0], "worked", 0)


def test_words_and_no_grading(tmp_path):
    rows = [{"question": "Capital of France?", "answer": "Paris"}]
    made = task_of(tmp_path, rows, grading="text")
    (problem,) = made.problems("train")
    assert [made.grade(problem, f"Answer: {a}").verdict for a in ("paris.", "London")] == ["correct", "wrong"]
    rows = [{"question": "Write a poem", "rubric": {"rhymes": True}}]
    (problem,) = task_of(tmp_path, rows, grading="none", columns={"answer": "rubric"}).problems("train")
    assert problem.answer == {"rhymes": True}


def test_labels_from_a_file(tmp_path, capsys):
    rows = sums(2)
    labels = [{"question": rows[0]["question"].lower(), "domain": "sums"}]
    write_rows(tmp_path / "labels.jsonl", labels)
    made = task_of(tmp_path, rows, domain_file=str(tmp_path / "labels.jsonl"))
    assert [p.domain for p in made.problems("train")] == ["sums", ""]
    assert "1 problems have no label" in capsys.readouterr().err


def test_levels_and_subjects(tmp_path):
    kinds = [(n, s) for n in range(1, 6) for s in ("Algebra", "Geometry")]
    rows = [{**MATH_ROW, "problem": f"p {n}", "level": n, "subject": s} for n, s in kinds]
    write_rows(tmp_path / "train.jsonl", rows)
    config = MathConfig(source=str(tmp_path), levels=(4, 5), subjects=("algebra",), test=0, validation=0)
    assert [(p.level, p.domain) for p in MathTask(config).problems("train")] == [("4", "Algebra"), ("5", "Algebra")]


@pytest.mark.parametrize(
    "overrides, message",
    [
        ([], "source: not given"),
        (["task.source=x", "task.columns.anwser=b"], "task.columns.anwser"),
    ],
)
def test_settings_that_cannot_work(overrides, message):
    with pytest.raises(UserError, match=message):
        load_for_task("dataset", overrides)


def test_a_recipe_names_the_task():
    recipe = load_for_task("math", ["task.source=some/folder", "task.levels=[1,2]"])
    assert isinstance(make_task(recipe.task), MathTask)
    assert load_for_task("gsm8k").task.source == "openai/gsm8k"
