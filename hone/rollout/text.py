"""Incremental decoding of tokens to text: for stop strings, and for streaming answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decode = Callable[[Sequence[int]], str]

#: Names of special tokens that divide an answer into parts, as in `[THINK]` and gpt-oss's `<|channel|>`: without them
#: thinking and answer could not be separated.
_MEANING = re.compile(r"think|thought|reason|channel|message|constrain|tool|call|answer|solution", re.IGNORECASE)
_MEANING_WHOLE = ("<|start|>",)

_UNFINISHED = "\ufffd"  # what a decoder writes for invalid bytes, perhaps the beginning of a character
_LONGEST = 16  # tokens held back at most for the rest of a character (which has at most 4 bytes)


def decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Decode without special tokens, except those that carry meaning (`meaningful_ids`)."""
    special = special_tokens(tokenizer)
    dropped = special.keys() - meaningful_ids(tokenizer)
    if len(dropped) == len(special):
        return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True))
    return lambda ids: str(tokenizer.decode([i for i in map(int, ids) if i not in dropped], skip_special_tokens=False))


def meaningful_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Special tokens that stay in the text: markers of thinking, channels and tools; never eos, bos or padding."""
    ends = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    return frozenset(
        i
        for i, text in special_tokens(tokenizer).items()
        if i not in ends and (_MEANING.search(text) or text in _MEANING_WHOLE)
    )


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Token id -> text, of all special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {int(i): str(token.content) for i, token in added.items() if token.special}
    return special | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens))


class TextStream:
    """Decodes a growing sequence of tokens; the joined pieces equal the decoded whole.

    A token may hold part of a character, or decode differently at the start of a text than inside it: so the tokens
    since the last complete piece are decoded together with that piece.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []  # tokens of the last complete piece, then those since
        self._known = 0  # how many of them belong to the last complete piece
        self._shown = 0  # characters of their text returned so far

    def push(self, token: int) -> str:
        """The text that this token adds; "" while a character is incomplete."""
        self._ids.append(token)
        text = self._decode(self._ids)
        sure = text.rstrip(_UNFINISHED)
        if len(self._ids) - self._known > _LONGEST:
            sure = text
        new = sure[self._shown :]
        self._shown += len(new)
        if len(sure) == len(text):
            del self._ids[: self._known]
            self._known = len(self._ids)
            self._shown = len(self._decode(self._ids))
        return new

    def rest(self) -> str:
        """The text held back, at the end."""
        return self._decode(self._ids)[self._shown :]


class StopText:
    """Detects the first complete stop string in a text.

    Worked example, stop string "END" and the tokens "the", " EN", "D.": the third completes it.
    """

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = tuple(stops)
        self._stream = TextStream(decode)
        self._keep = max(map(len, self._stops)) - 1  # characters that may begin a stop string
        self._tail = ""

    def push(self, token: int) -> bool:
        """Whether the text now contains a stop string."""
        text = self._tail + self._stream.push(token)
        self._tail = text[len(text) - self._keep :] if self._keep else ""
        return any(stop in text for stop in self._stops)


class ShownText:
    """The text of an answer as shown to clients: without the stop string or any part of it.

    Text that may be the beginning of a stop string is held back until it is known not to be.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._stream = TextStream(decode)
        self._stops = tuple(stops)
        self._held = ""
        self._over = False

    def push(self, token: int) -> str:
        """The text that can be shown now."""
        return self._show(self._stream.push(token), last=False)

    def rest(self) -> str:
        """The text held back, when there are no more tokens."""
        return self._show(self._stream.rest(), last=True)

    def _show(self, text: str, last: bool) -> str:
        if self._over:
            return ""
        text = self._held + text
        places = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if places:
            self._over = True
            return text[: min(places)]
        hold = 0 if last else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
