"""Which answer a text gives: one reader for training and evaluation."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.grade.extract import boxed, extract


@pytest.mark.parametrize(
    "text, flexible, strict",
    [
        ("72", "72", None),
        ("\\frac{14}{3}", "\\frac{14}{3}", None),
        ("\\cot x", "\\cot x", None),
        ("Evelyn", "Evelyn", None),
        ("She sold 72 clips.", "72", None),
        ("First 48 and then 24, which makes 72 clips altogether.", "72", None),
        ("From 3 and 4 we get $\\$32,\\!348$.", "\\$32,\\!348", None),
        ("It costs $18.", "$18", None),
        ("It is -7.5% lower than before", "-7.5%", None),
        ("The answer is $\\frac{1}{2}$.", "$\\frac{1}{2}$", None),
        ("The answer is 3.5 cm. That is all.", "3.5 cm", None),
        ("The answer is 5 because 2 + 3 is 5, not 6", "5", None),
        ("The answer is 3. No, the answer is 4.", "4", None),
        ("Answer: 5", "5", "5"),
        ("**Answer:** 5", "5", "5"),
        ("**Final Answer: 5**", "5", "5"),
        ("Answer:\n5", "5", "5"),
        ("Answer: \\boxed{7}", "7", "7"),
        ("so \\boxed{6} and later Answer: 7", "6", "6"),  # a box is the clearer mark
        ("Answer: 7. Or rather \\boxed{6}", "6", "6"),
        ("#### 1,000\n", "1,000", "1,000"),
        ("#### 5\n#### 6", "6", "6"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", "\\frac{1}{2}"),
        ("\\boxed{1} \\boxed{2}", "2", "2"),
        ("\\box{5}", "5", "5"),
        ("\\boxed {5}", "5", "5"),
        ("\\boxed{\\boxed{5}}", "5", "5"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}", "\\{1,2\\}"),
        ("\\boxed{3} then \\boxed{4", "3", "3"),  # the last is not closed
        ("<answer>5</answer>", "5", "5"),
        ("<answer>5</answer> \\boxed{6} <answer>7</answer>", "7", "7"),
        ("<answer>The answer is \\boxed{7}.</answer>", "7", "7"),
        ("<think>\\boxed{3}</think> the answer is 4.", "4", None),
        ("<think>\\boxed{3}</think>", None, None),
        ("<think>\\boxed{3}</think><answer></answer>", None, None),
        ("<think>3 + 4 = 7", None, None),  # cut off: thoughts are no answer
        ("<think>so \\boxed{7}", "7", "7"),
        ("", None, None),
        ("\\boxed{}", None, None),
        ("Answer:", None, None),
        ("I do not know how to solve this one.", None, None),
        ("Final Answer: The final answer is $42$. I hope it is correct.", "$42$", "$42$"),
        ("Answer: There are 42 apples.", "42", "42"),
        ("Answer \\( (9+1) \\)", "\\( (9+1) \\)", "\\( (9+1) \\)"),
        ("\\boxed{44}. We may check our answer: $4 \\cdot 11 = 44$.", "44", "44"),
        ("<answer>2^{2005}</answer>", "2^{2005}", "2^{2005}"),
        ("<answer>She sold 72 clips.</answer>", "72", "72"),
        ("\\boxed{2} and \\boxed{3}", "2, 3", "2, 3"),
        ("$x = \\boxed{2}$ or $x = \\boxed{3}$", "2, 3", "2, 3"),
        ("\\boxed{2} and \\boxed{2}", "2", "2"),
        ("\\boxed{2}, and then \\boxed{3}", "3", "3"),
        ("Put it in \\boxed{}. The answer is 5.", "5", None),
        ("Her password is AZYUK2A.", None, None),
        ("It costs $5 and $7.", "$7", None),
        ("#### 5\n#### Explanation\nBy 2 + 3.", "5", "5"),
    ],
)
def test_answers(text, flexible, strict):
    assert extract(text) == flexible
    assert extract(text, strict=True) == strict


def test_role_words_of_a_conversation_change_nothing():
    assert extract("Assistant: User: Answer: 5") == "5"


@given(st.text(alphabet="ab{}\\", max_size=30))
def test_what_stands_in_a_box_is_balanced(text):
    inside = boxed("\\boxed{" + text + "}")
    if inside is not None:
        plain = inside.replace("\\\\", "").replace("\\{", "").replace("\\}", "")
        assert plain.count("{") == plain.count("}")


PIECES = (
    *("<think>", "</think>", "<answer>", "</answer>", "\\boxed{", "}", "{", "####", "Answer:", "answer is ", "5", "$"),
    *(" ", "\n", ".", "\\(", "so "),
)


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_any_text_is_read(text):
    for strict in (False, True):
        answer = extract(text, strict)
        assert answer is None or (answer and answer == answer.strip())
    if extract(text, strict=True) is not None:
        assert extract(text) is not None


@pytest.mark.parametrize("text", ["\u0130+\u0130", "so \u017f = \u212a", "on \u017fep 5", "5 of \u017fept, 2\u0131+3"])
def test_letters_that_match_in_any_case_are_no_letters_of_a_formula(text):
    """Where case is ignored, [a-z] matches four letters more; reading them once raised StopIteration."""
    for wrapped in (text, f"The answer is {text}.", f"\\boxed{{{text}}}", f"<answer>{text}</answer>"):
        extract(wrapped)
        extract(wrapped, strict=True)
    assert extract("First we add 3 and 5, and then there is \u0130+\u0130 to see.") == "5"


REPEATED = (
    *("\\boxed{", "}", "#### ", "Answer: ", "the answer is ", "<answer>", "$", "1", "\\(", "\\boxed{2} "),
    *("\\boxed{2}, ", "$5 ", "1,", "10:", "x+", "-", "\\sqrt", "\\frac{", "\n", "and ", "may ", "three "),
    *("1 May ", "(A) ", "#", "\u7b54\u6848"),
)


@pytest.mark.parametrize("piece", REPEATED)
def test_long_texts_are_quick(piece):
    text = piece * (200_000 // len(piece))
    extract("5")
    took = []
    for _ in range(3):
        start = time.process_time()
        extract(text)
        took.append(time.process_time() - start)
    assert min(took) < 0.2


@pytest.mark.parametrize(
    "opening, inside", [("\\boxed{", "2"), ("\\boxed{x = ", "x = 2"), ("\\text{\\boxed{", "2"), ("\\boxed{{", "{2}")]
)
@pytest.mark.parametrize("depth", [1000, 20_000])
def test_nested_boxes_are_read_at_once(opening, inside, depth):
    """Once a box in a box was searched again from its beginning, and every level was a call."""
    text = opening * depth + "2" + "}" * (depth * opening.count("{"))
    start = time.process_time()
    assert extract(text) == boxed(text) == inside
    assert time.process_time() - start < 1.5


def test_of_boxes_in_a_box_the_last_innermost_counts():
    assert boxed("\\boxed{1 + \\boxed{2 + \\boxed{3}} + \\boxed{4 + \\boxed{5}}}") == "5"
    assert boxed("\\boxed{1} \\boxed{\\boxed{2} + \\frac{3}{4}}") == "2"


def test_time_grows_with_the_length_alone():
    def seconds(boxes: int) -> float:
        text = "\\boxed{" * boxes + "2" + "}" * boxes
        took = []
        for _ in range(3):
            start = time.process_time()
            extract(text)
            took.append(time.process_time() - start)
        return min(took)

    assert seconds(32_000) < 10 * seconds(8_000) + 0.05  # four times as long; quadratic would be sixteen
