"""`hone runs show`: the answers of a step as text, and why each got its reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hone.base.settings import UserError
from hone.report.terminal import show
from hone.report.why import groups_of, pieces, weights_of, why_of
from tests.report.live_run import answer, make_run, write_step


def test_the_groups_of_a_step(tmp_path: Path) -> None:
    lines = list(show(make_run(tmp_path / "one"), 1, None, None))
    assert lines[0] == "one, step 1: 3 groups, 12 answers"
    # group 1 has the answers 4 to 7, of which the sixth is right; lengths are 10 + place
    assert lines[3].split() == ["1", "problem-1", "0", "to", "1", "1/4", "14-17"]


def test_one_answer_with_its_reasons_and_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    write_step(run, 4, [answer(4, 0, text="\x1b[2Jgone<answer>\u202e7</answer>", extracted="\u202e7")])
    text = "\n".join(show(run, None, 0, 0))
    assert "⟨U+001B⟩[2Jgone<answer>⟨U+202E⟩7</answer>" in text
    assert "Reward 1 = outcome 1 × 1." in text
    assert "  read as the answer: ⟨U+202E⟩7\n  right answer: 0" in text
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_an_episode_with_its_replies_and_the_times_of_its_turns(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "calculator", "arguments": "1+1"}}],
    }
    steps = [
        {"message": call, "replies": [{"role": "tool", "content": "2\x1b[2J"}]},
        {"message": {"role": "assistant", "content": "So 2."}, "replies": []},
    ]
    write_step(run, 4, [answer(4, 0, text="So 2.") | {"turns": 2, "chains": 1, "end": "done", "steps": steps}])
    turns = [
        {"rollouts": 8, "generation": 0.25, "environment": 0.5, "slowest": 1.0},
        {"rollouts": 3, "generation": 0.125, "environment": 0.0, "slowest": 0.0},
    ]
    with (run / "timings.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "seconds": 2.0, "turns": turns}) + "\n")
    lines = list(show(run, 4, None, None))
    assert [line.split() for line in lines[4:6]] == [
        ["1", "8", "0.250", "0.5000", "1.000"],
        ["2", "3", "0.125", "0.0000", "0.000"],
    ]
    text = "\n".join(show(run, 4, 0, 0))
    assert "[calls calculator 1+1]\n  <tool> 2⟨U+001B⟩[2J\nSo 2." in text


def test_parts_have_the_names_that_rollouts_record() -> None:
    parts = {"a.py:right": 1.0, "b.py:short": 0.5, "c.py:short": 0.25, "d.py:outcome": 2.0, "overlong": 1.0}
    weights = weights_of({"reward": {"parts": parts}})
    assert weights == {"right": 1.0, "b.py:short": 0.5, "c.py:short": 0.25, "d.py:outcome": 2.0, "overlong": 1.0}
    why = why_of(
        {"text": "4", "verdict": "wrong", "total": 1.0, "parts": {"outcome": 0.0, "right": 1.0}}, {"right": 1.0}
    )
    assert "Reward 1 = right 1 × 1." in why.sentences


@pytest.mark.parametrize(
    ("step", "group", "answer", "message"),
    [
        (9, None, None, "no answers of step 9; there are steps 0 to 3"),
        (1, 3, None, "--group 3: step 1 has groups 0 to 2"),
        (1, 0, 4, "--answer 4: the group has answers 0 to 3"),
        (1, None, 0, "--answer 0: give the group too"),
    ],
)
def test_what_is_not_there_is_an_error(
    tmp_path: Path, step: int, group: int | None, answer: int | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        list(show(make_run(tmp_path / "one"), step, group, answer))


def test_a_problem_drawn_twice_in_a_row_makes_two_groups() -> None:
    rows = [{"problem_id": "a", "index": i} for i in (0, 1, 0, 1)]
    assert [len(group) for group in groups_of(rows)] == [2, 2]


def test_pieces_by_hand() -> None:
    assert pieces("<think>a</think>b<answer> 4 </answer>c") == [
        ("<think>", "tag"), ("a", "thinking"), ("</think>", "tag"), ("b", ""), ("<answer>", "tag"),
        (" 4 ", "answer"), ("</answer>", "tag"), ("c", ""),
    ]  # fmt: skip
    # the last complete block counts; without tags, the last place of what was read
    assert ("2", "answer") in pieces("<answer>1</answer><answer>2</answer><answer>3")
    assert pieces("so 4, or \\boxed{4}", "4") == [("so 4, or \\boxed{", ""), ("4", "answer"), ("}", "")]


def test_reasons_by_hand() -> None:
    row = {"text": "<answer>4", "verdict": "malformed", "total": -0.5, "parts": {"outcome": -1.0, "chars": 9.0},
           "advantage": -1.25}  # fmt: skip
    why = why_of(row, {"outcome": 0.5, "judge": 1.0})
    assert why.sentences == [
        "Reward −0.5 = outcome −1 × 0.5.",
        "Not applied to this answer: judge.",
        "No answer could be read from the text.",
        "Of the expected tags, <think> is missing, </think> is missing, </answer> is missing.",
        "Advantage −1.25: the update makes this answer less likely.",
    ]
    assert why.gold is None
    assert [(part.name, part.points) for part in why.parts] == [("outcome", -0.5), ("judge", None), ("chars", None)]
    assert any("do not add up" in sentence for sentence in why_of(row | {"total": 3.0}, {"outcome": 0.5}).sentences)


def test_an_answer_block_that_is_no_answer_is_not_called_missing() -> None:
    text = "<think>guess</think><answer>(1) Zoey is a knight\n(2) Zoey is a knight</answer>"
    row = {"text": text, "verdict": "malformed", "extracted": "(1) Zoey is a knight\n(2) Zoey is a knight"}
    assert why_of(row, {}).sentences == ["An answer was given, but not in the form that the task asks for."]
    long = {"text": "70 vs 15 no", "verdict": "malformed", "end": "max_turns"}
    assert why_of(long, {}).sentences == [
        "No answer could be read from the text.",
        "The episode ended at its limit of turns.",
    ]
    swapped = {"text": "</think><think><answer>4</answer>", "verdict": "malformed"}
    assert why_of(swapped, {}).sentences[1:] == ["The tags are not in order."]
