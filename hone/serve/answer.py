"""From the engine's outputs to the choices of a response: text, log-probs, finish reason.

Log-probs are those of the distribution that was sampled from (see `hone.rollout.native.sampler`): temperature and
filters applied; at temperature 0 the model's own. Those of an echoed prompt are the model's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hone.rollout.native.requests import Output
from hone.rollout.text import Decode, ShownText, TextStream
from hone.types import FloatArray, IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ranked = list[tuple[int, float]]  # token ids with their log-probs, likeliest first


@dataclass(frozen=True, slots=True)
class Scored:
    """A token of the answer or of the echoed prompt."""

    id: int
    logprob: float | None  # None: the first token of a prompt
    top: Ranked
    offset: int  # of its text, in characters


@dataclass
class Answer:
    """One choice while it is generated."""

    decode: Decode
    stops: tuple[str, ...]
    text: str = ""
    scored: list[Scored] = field(default_factory=list)
    tokens: int = 0  # of the completion
    finish: str | None = None
    _shown: ShownText = field(init=False)

    def __post_init__(self) -> None:
        self._shown = ShownText(self.decode, self.stops)

    def begin(self, text: str) -> str:
        """Add text before the completion: the opening tag of the prompt, or an echoed prompt."""
        self.text += text
        return text

    def echo(self, ids: IntArray, logprobs: FloatArray, top_ids: IntArray, top_logprobs: FloatArray) -> str:
        """Add the prompt [Lp] with its log-probs (nan: not defined)."""
        stream, text = TextStream(self.decode), ""
        for i, token in enumerate(ids.tolist()):
            value = float(logprobs[i])
            self._score(token, value, _ranked(top_ids[i], top_logprobs[i]), len(text))
            text += stream.push(token)
        return self.begin(text + stream.rest())

    def push(self, output: Output, keep_scores: bool = False) -> str:
        """Add an output; returns the text that can be shown now."""
        new = ""
        for i, token in enumerate(output.tokens.tolist()):
            if keep_scores:
                top = _ranked(output.top.ids[i], output.top.logprobs[i]) if output.top is not None else []
                self._score(token, float(output.logprobs[i]), top, len(self.text) + len(new))
            new += self._shown.push(token)
        self.tokens += len(output.tokens)
        if output.turn is not None:
            new += self._shown.rest()
            self.finish = output.turn.finish
        self.text += new
        return new

    def _score(self, token: int, logprob: float, top: Ranked, offset: int) -> None:
        self.scored.append(Scored(token, None if math.isnan(logprob) else logprob, top, offset))


def _ranked(ids: IntArray, logprobs: FloatArray) -> Ranked:
    return [(int(i), float(v)) for i, v in zip(ids, logprobs) if np.isfinite(v)]


def token_name(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """The token's text; if it has none, or is only part of a character, its name in the vocabulary."""
    text = str(tokenizer.decode([token]))
    return str(tokenizer.convert_ids_to_tokens(token) or f"token_id:{token}") if not text or "\ufffd" in text else text


def completion_logprobs(tokenizer: PreTrainedTokenizerBase, scored: list[Scored], top: int) -> dict[str, Any]:
    """In the format of /v1/completions."""

    def ranking(token: Scored) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        names: dict[str, float] = {}
        for i, value in token.top[:top]:
            names.setdefault(token_name(tokenizer, i), value)
        return names

    return {
        "tokens": [token_name(tokenizer, token.id) for token in scored],
        "token_logprobs": [token.logprob for token in scored],
        "top_logprobs": [ranking(token) for token in scored] if top else None,
        "text_offset": [token.offset for token in scored],
    }


def chat_logprobs(tokenizer: PreTrainedTokenizerBase, scored: list[Scored], top: int) -> dict[str, Any]:
    """In the format of /v1/chat/completions."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        name = token_name(tokenizer, token)
        return {"token": name, "logprob": logprob, "bytes": list(name.encode())}

    content = [
        {**entry(t.id, t.logprob), "top_logprobs": [entry(i, value) for i, value in t.top[:top]]} for t in scored
    ]
    return {"content": content, "refusal": None}
