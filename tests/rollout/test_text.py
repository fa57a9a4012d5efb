"""The oracle is the tokenizer: pieces joined are the decoded whole, and a stop string is where the text has it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.rollout.text import ShownText, StopText, TextStream


def _bytes(ids: Sequence[int]) -> str:
    """One token per byte, as the smallest pieces of byte-level tokenizers are; 256 and above are special."""
    return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def _words(ids: Sequence[int]) -> str:
    """Tokens that lose their space at the start of a text, as those of sentencepiece do."""
    return "".join([" the", " END", "ab", "c", " d"][i] for i in ids).lstrip()


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=12), st.lists(st.integers(0, 300), max_size=6))
def test_pieces_joined_are_the_whole(text: str, junk: list[int]) -> None:
    for ids in ([*text.encode()], [*text.encode(), 300, *"é🙂".encode()], [*"🙂".encode(), *junk, *text.encode()]):
        stream = TextStream(_bytes)
        assert "".join([*(stream.push(i) for i in ids), stream.rest()]) == _bytes(ids)


def test_a_character_comes_when_it_is_complete() -> None:
    stream = TextStream(_bytes)
    assert [stream.push(i) for i in "aé🙂b".encode()] == ["a", "", "é", "", "", "", "🙂", "b"]
    assert stream.rest() == ""
    assert [stream.push(i) for i in "é".encode()[:1]] == [""]
    assert stream.rest() == "\ufffd"


def test_bytes_that_never_become_a_character_do_not_wait_forever() -> None:
    stream = TextStream(_bytes)
    assert "".join(stream.push(0xFF) for _ in range(100)).count("\ufffd") > 80


def test_spaces_between_pieces_stay() -> None:
    stream = TextStream(_words)
    assert [stream.push(i) for i in (0, 4, 2, 0)] == ["the", " d", "ab", " the"]


@pytest.mark.parametrize(
    ("stops", "ids", "at"),
    [
        (("END",), [0, 1, 2], 1),
        (("he E",), [0, 1, 2], 1),  # across two tokens
        (("dabc",), [4, 2, 3], 2),  # across three
        (("bc", "ab"), [4, 2, 3], 1),  # whichever comes first
        (("c d",), [3, 2, 3, 4], 3),
        ((" the",), [0, 0], 1),  # the first one has lost its space
        (("x",), [0, 1, 2, 3, 4], None),
        (("cc",), [3, 2, 3], None),
    ],
)
def test_the_token_that_completes_a_stop_string(stops: tuple[str, ...], ids: list[int], at: int | None) -> None:
    watch = StopText(stops, _words)
    hits = [watch.push(i) for i in ids]
    assert (hits.index(True) if True in hits else None) == at


def test_a_stop_string_in_random_bytes_is_found_where_the_whole_text_first_has_it() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        ids = rng.choice([*b"ab", *"é".encode(), 300], 40).tolist()
        watch = StopText(("aé", "bb"), _bytes)
        hit = next((i for i, token in enumerate(ids) if watch.push(token)), None)
        whole = [i for i in range(40) if any(s in _bytes(ids[: i + 1]) for s in ("aé", "bb"))]
        assert hit == (whole[0] if whole else None)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="abéc", max_size=20), st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3))
def test_what_is_shown_is_the_text_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    # The engine ends an answer with the token that completes a stop string; here tokens go on after it, as on a GPU.
    shown = ShownText(_bytes, stops)
    pieces = [shown.push(i) for i in text.encode()]
    stopped = next((text[:n] for n in range(len(text) + 1) if any(stop in text[:n] for stop in stops)), text)
    cut = min((stopped.find(stop) for stop in stops if stop in stopped), default=len(text))
    assert "".join([*pieces, shown.rest()]) == text[:cut]
    assert all(text[:cut].startswith("".join(pieces[:n])) for n in range(len(pieces)))


def test_text_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    shown = ShownText(_bytes, ["END", "\n\n"])
    assert [shown.push(i) for i in b"aENE\nEN\nb"] == ["a", "", "", "EN", "E", "\n", "", "EN", "\nb"]
    assert shown.rest() == ""
    assert [shown.push(i) for i in b"EN"] == ["", ""]
    assert shown.rest() == "EN"
