"""What counts as a reflection phrase, what does not, and where it was first seen."""

import itertools
import time

import pytest

from hone.measure.stats import reflection


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Let me re-evaluate the statements.", "re-evaluate"),
        ("I should reconsider Zoey.", "re-evaluate"),
        ("Wait, that is odd.", "re-evaluate"),
        ("But that's wrong.", "re-evaluate"),
        ("So I go back.", "backtrack"),
        ("We backtrack.", "backtrack"),
        ("This does not work", "backtrack"),
        ("I made a mistake", "backtrack"),
        ("Let me check each one.", "check"),
        ("done\nCheck: Zoey says no", "check"),
        ("<think>check Zoey", "check"),
        ("double-check it", "check"),
        ("This verifies it", "check"),
        ("A CONTRADICTION.", "contradiction"),
        ("which contradicts her", "contradiction"),
        ("That cannot be true.", "contradiction"),
        ("Now suppose the opposite", "alternative"),
        ("Alternatively, 3 + 4", "alternative"),
        ("try another way", "alternative"),
    ],
)
def test_recognised(text: str, kind: str) -> None:
    assert reflection.count(text) == {kind: 1}
    assert reflection.is_reflective(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Zoey is a knight and Ann is a knave.",
        "He wrote a check for 5 dollars at check-in.",
        "She had to wait for the bus and went back home.",
        "Use 3 instead of 4.",
        "Ann says: if Zoey is a knight then Ann is a knave.",
        "await thing",
    ],
)
def test_everyday_words_do_not_count(text: str) -> None:
    assert reflection.count(text) == {}
    assert not reflection.is_reflective(text)


def test_counts_and_spans() -> None:
    text = "Wait. Let me check. Contradiction, so go back. Wait."
    assert reflection.count(text) == {"re-evaluate": 2, "backtrack": 1, "check": 1, "contradiction": 1}
    assert [text[a:b] for a, b, _ in reflection.spans(text)] == [
        "Wait",
        "Let me check",
        "Contradiction",
        "go back",
        "Wait",
    ]
    assert sum(reflection.count(text).values()) == len(reflection.spans(text))


def test_spans_never_overlap() -> None:
    found = reflection.spans(
        "Now let me double-check: that cannot be true, which contradicts it; re-checking. Check it."
    )
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(found))
    assert len(found) >= 4


def test_rate() -> None:
    assert reflection.rate(["wait", "no", "no", "go back"]) == 0.5
    assert reflection.rate([]) == 0.0


def test_first_occurrences() -> None:
    stream = [
        (0, {"problem_id": "p0", "index": 0, "text": "plain"}),
        (3, {"problem_id": "p1", "index": 2, "text": "first\n\nthis. Wait,   really?"}),
        (3, {"problem_id": "p1", "index": 3, "text": "Wait"}),
        (7, {"problem_id": "p2", "index": 1, "text": "go back"}),
    ]
    first = reflection.first_occurrences(stream)
    assert [(o.kind, o.step, o.problem_id, o.index) for o in first] == [
        ("re-evaluate", 3, "p1", 2),
        ("backtrack", 7, "p2", 1),
    ]
    assert (first[0].before, first[0].phrase, first[0].after) == ("first this. ", "Wait", ", really?")


def test_first_occurrences_stops_reading_when_all_are_found() -> None:
    def stream():  # type: ignore[no-untyped-def]
        yield 1, {"text": "Wait. Go back. Let me check. Contradiction. What if so?"}
        raise AssertionError("read on although every kind was found")

    assert len(reflection.first_occurrences(stream())) == len(reflection.KINDS)


def test_duplicate_rate() -> None:
    assert reflection.duplicate_rate(["This is thinking.", "this is  thinking", "other", "more"]) == 0.5
    assert reflection.duplicate_rate(["a", "b"]) == 0.0
    assert reflection.duplicate_rate(["", ""]) == 1.0
    assert reflection.duplicate_rate([]) == 0.0


def test_long_junk_is_quick() -> None:
    start = time.process_time()
    for junk in ("let me " * 50_000, "h" * 300_000, " \n" * 150_000, "re-" * 100_000, "is impossible " * 20_000):
        reflection.spans(junk)
    assert time.process_time() - start < 20  # about 1; quadratic would be minutes
