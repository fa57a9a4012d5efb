"""The tool `search`: BM25 by hand, and its sources."""

import json
import math

import pytest

from hone.base.places import references
from hone.base.settings import UserError
from hone.environments.make import load_tool
from hone.environments.search import Index


def test_scores_by_hand():
    index = Index([("a", "red apple red"), ("b", "green pear"), ("c", "a pear")])
    (score, place), *others = index.best("RED plum")
    mean = (3 + 2 + 2) / 3
    idf = math.log(1 + (3 - 1 + 0.5) / (1 + 0.5))
    assert score == pytest.approx(idf * 2 * 2.2 / (2 + 1.2 * (0.25 + 0.75 * 3 / mean)))
    assert (place, others) == (0, [])
    assert [number for _, number in index.best("pear")] == [1, 2]
    assert index.best("nothing") == []


def test_a_folder_and_a_file(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "fruit.md").write_text("Apples are red.\n\nPears are green.")
    (tmp_path / "other.py").write_text("pears = 1")
    tool = load_tool(f"search:{tmp_path}")
    assert tool.schema["function"]["name"] == "search"
    assert tool.call({"query": "green pears"}).startswith("[sub/fruit.md] Pears are green.")
    assert tool.call({"query": "plums"}) == "Nothing found."
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": text, "n": 1}) for text in ("A knight.", "A knave lies.")))
    assert load_tool(f"search:{rows}").call({"query": "knave"}) == "[rows.jsonl:2] A knave lies."
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no \.txt or \.md files"):
        load_tool(f"search:{tmp_path / 'empty'}")


def test_the_files_of_tools_and_environments_go_with_the_run():
    config = {"tools": ["a/t.py:f", "calculator", "search:notes"], "environment": {"name": {"x": "e.py:C"}}}
    assert [(value, kind) for _, value, kind in references(config)] == [
        ("a/t.py", "code"),
        ("notes", "data"),
        ("e.py", "code"),
    ]
