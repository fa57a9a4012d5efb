"""The one parser: blocks, format, junk."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.grade.parse import TAGS, completion, parse

GOOD = "<think>a b</think>\n<answer> c </answer>"


def test_blocks_of_a_good_completion():
    parsed = parse(GOOD)
    assert (parsed.thinking, parsed.answer, parsed.well_formed) == ("a b", "c", True)


@pytest.mark.parametrize(
    "text, answer, well_formed",
    [
        ("", None, False),
        ("just words", None, False),
        ("<think>a</think>", None, False),
        ("<answer>c</answer>", "c", False),
        ("<think>a<answer>c</answer>", "c", False),  # thinking never closed
        ("<answer>c</answer><think>a</think>", "c", False),  # wrong order
        ("<think>a<answer>c</answer></think>", "c", False),  # answer inside the thinking
        ("<think><think>a</think><answer>c</answer>", "c", False),  # a tag twice
        ("<think>a</think><answer>first</answer><answer>last</answer>", "last", False),
        ("<think>say <answer>x</answer> later</think><answer>y</answer>", "y", False),
        ("<think>a</think><answer>done</answer><answer>cut of", "done", False),
        ("<think>a</think><answer>c</answer></answer>", "c", False),
        ("<think>a</think><answer>b<answer>c</answer>", "c", False),
        ("<think>a</think><answer>never closed", None, False),
        ("</answer><answer>", None, False),
        ("</answer>", None, False),
        ("<think></think><answer></answer>", "", True),
        ("so\n<think>a</think> hence <answer>c</answer> bye", "c", True),
        ("<think>User: x\nAssistant: <b></think><answer>Assistant: c</answer>", "Assistant: c", True),
        ("<THINK>a</THINK><answer>c</answer>", "c", False),  # tags are exact
        ("<think>é ∀ 知</think><answer>騎士</answer>", "騎士", True),
    ],
)
def test_answer_and_format(text, answer, well_formed):
    parsed = parse(text)
    assert parsed.answer == answer
    assert parsed.well_formed is well_formed


def test_thinking_without_an_opening_tag_starts_with_the_text():
    assert parse("because</think><answer>c</answer>").thinking == "because"
    assert parse("<think>because").thinking is None


@given(st.text(), st.text())
def test_a_completion_is_read_back(thinking, answer):
    text = completion(thinking, answer)
    parsed = parse(text)
    assert parsed.well_formed is (all(text.count(tag) == 1 for tag in TAGS))
    if parsed.well_formed:
        assert (parsed.thinking, parsed.answer) == (thinking.strip(), answer.strip())


@given(st.lists(st.sampled_from([*TAGS, "x", " ", "<", "answer>"])).map("".join))
def test_any_tag_soup_is_read(text):
    parsed = parse(text)
    if parsed.answer is not None:
        assert text.rindex("<answer>", 0, text.rindex("</answer>")) + len("<answer>") <= text.rindex("</answer>")
        assert "</answer>" not in parsed.answer
    if parsed.well_formed:
        assert parsed.answer is not None
        assert parsed.thinking is not None


@pytest.mark.parametrize("junk", ["x", "<answer>", "</answer>", "<think>", "<", "a <answer"])
def test_a_megabyte_of_junk_is_quick(junk):
    text = junk * (1_000_000 // len(junk)) + GOOD
    start = time.process_time()
    assert parse(text).answer == "c"
    assert time.process_time() - start < 0.5
