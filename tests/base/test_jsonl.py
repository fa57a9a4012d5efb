"""Rows survive a kill: a torn line is dropped, whole ones are kept, and no number is written that JSON lacks."""

import math

from hone.base import jsonl


def test_a_torn_line_is_dropped_wherever_it_stands(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": 2{"a": 3}\n{"a": 4}\n{"a": 5}')  # the last may be whole or not: nobody knows
    assert jsonl.read(path) == [{"a": 1}, {"a": 4}]
    jsonl.keep(path, lambda row: row["a"] > 1)
    assert path.read_text() == '{"a": 4}\n'


def test_numbers_that_json_has_not_are_null(tmp_path):
    jsonl.append(tmp_path / "x.jsonl", {"a": math.nan, "b": {"x": [math.inf, 1]}, "c": 0.5})
    assert jsonl.read(tmp_path / "x.jsonl") == [{"a": None, "b": {"x": [None, 1]}, "c": 0.5}]


def test_a_line_separator_inside_a_text_is_no_end_of_line(tmp_path):
    rows = [{"text": "a\u2028b\x85c\nd"}]
    jsonl.write(tmp_path / "x.jsonl", rows)
    assert jsonl.read(tmp_path / "x.jsonl") == rows


def test_without_a_file_there_are_no_rows(tmp_path):
    assert jsonl.read(tmp_path / "none.jsonl") == []
    jsonl.keep(tmp_path / "none.jsonl", lambda row: True)
    assert not (tmp_path / "none.jsonl").exists()
