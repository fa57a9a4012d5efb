"""Episodes on the live page, and the presets that depend on what an answer did: tool errors, and who pulls hardest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.report.live.index import RolloutIndex
from hone.report.live.query import Browser, Query
from hone.report.live.turns import tool_errors, turns_of
from hone.report.live.views import choices
from tests.report.live_run import GROUP, answer, make_run, write_step

CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "1", "function": {"name": "python", "arguments": '{"code": "1 / 0"}'}}]}  # fmt: skip


def step(*contents: str, **more: Any) -> dict[str, Any]:
    return {"message": CALL, "replies": [{"role": "tool", "name": "python", "content": c} for c in contents], **more}


def test_turns_by_hand() -> None:
    first, second = turns_of({"steps": [step("Error: no", seconds=1.5), {"message": {"content": "4"}, "reward": 1.0}]})
    assert first == {
        "text": "",
        "calls": [{"name": "python", "arguments": "1 / 0"}],
        "replies": [{"role": "tool", "name": "python", "text": "Error: no", "failed": True}],
        "seconds": 1.5,
    }
    assert second == {"text": "4", "calls": [], "replies": [], "reward": 1.0}
    assert turns_of({"text": "an answer in one turn"}) == []


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"expression": "(3 + 4) / 7"}, "(3 + 4) / 7"),  # as hone's own tools are recorded
        ('{"code": "a = 1\\nprint(a)"}', "a = 1\nprint(a)"),
        ({"path": "a.txt", "lines": [1, 2]}, "path: a.txt\nlines: [1, 2]"),
        ('{"code": broken', '{"code": broken'),
        ("[1]", "[1]"),
        (None, ""),
    ],
)
def test_arguments_are_shown_as_text(arguments: object, shown: str) -> None:
    message = {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    assert turns_of({"steps": [{"message": message}]})[0]["calls"] == [{"name": "f", "arguments": shown}]


def test_tool_errors_by_hand() -> None:
    trace = "line 1\nTraceback (most recent call last):\n  ZeroDivisionError"
    assert tool_errors({"steps": [step("4"), step('{"error": "x"}', "5", trace), step("6", error="not JSON")]}) == 3
    # what the model itself or a user says is no result of a tool
    assert tool_errors({"steps": [{"message": CALL, "replies": [{"role": "user", "content": "Error: x"}]}]}) == 0


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.sampled_from(["steps", "message", "replies", "role"]), inner)
        ),
    )
)
def test_rows_of_another_form_are_left_out(value: Any) -> None:
    for row in (value if isinstance(value, dict) else {}, {"steps": value}, {"steps": [{"message": value}]}):
        steps = row.get("steps")
        objects = [one for one in steps if isinstance(one, dict)] if isinstance(steps, list) else []
        assert len(turns_of(row)) == len(objects)
        assert tool_errors(row) >= sum("error" in one for one in objects)


def test_presets_of_pull_and_tool_errors(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", steps=3)
    rows = [answer(5, place) for place in range(GROUP)]
    rows[2] |= {"steps": [step("Error: no")], "turns": 1}
    write_step(run, 5, rows)
    index = RolloutIndex(run)
    index.refresh()

    def places(**parameters: str) -> list[tuple[int, int]]:
        table, selected = Browser(index).rows(Query.of(parameters))
        return [(int(table.columns["step"][at]), int(table.columns["place"][at])) for at in selected]

    assert places(preset="tools") == [(5, 2)]
    # |advantage| x tokens of step 1: 0.75 x 19 of place 9, 0.75 x 16 of place 6, ..., 0.25 x 11 of place 1
    assert places(preset="pull", **{"from": "1", "to": "1"})[:3] == [(1, 9), (1, 6), (1, 3)]
    assert places(preset="pull", **{"from": "1", "to": "1"})[-1] == (1, 1)
    assert places(preset="pull", **{"from": "2", "to": "2"}) == []  # no answer of step 2 has an advantage


def test_presets_are_counted_among_the_filtered_rows(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", steps=3)
    index = RolloutIndex(run)
    index.refresh()

    def counts(**parameters: str) -> dict[str, int]:
        return {one["name"]: one["rows"] for one in choices(index, Query.of(parameters))["presets"]}

    assert counts()["all"] == 36
    assert counts()["same"] == 12  # all of step 2
    step_1 = counts(**{"from": "1", "to": "1"})
    assert (step_1["all"], step_1["same"], step_1["pull"]) == (12, 0, 12)
    assert "tools" not in step_1  # the run has no tools
