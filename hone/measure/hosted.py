"""Answers of a model behind an OpenAI-compatible endpoint (`/chat/completions`), for comparison with our own models.

The API key is read from the environment and never written to a file. Requests are retried after transient errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hone.base.http import Http, ServerError, Unreadable, clean, may_pass
from hone.base.settings import UserError
from hone.recipe.sections.rollout import SamplingConfig
from hone.types import Finish

KEY = "OPENAI_API_KEY"
TRIES = 6
TIMEOUT = 600.0  # seconds for one answer: reasoning models think for minutes
_FINISH: dict[str, Finish] = {"stop": "stop", "length": "length"}


@dataclass(frozen=True, slots=True)
class Completion:
    text: str  # thinking that the endpoint returns separately is put before the answer, in <think> tags
    tokens: int  # as counted by the endpoint
    finish: Finish


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`URL#model`, such as https://api.openai.com/v1#gpt-4.1-mini."""

    url: str
    model: str
    http: Http = field(compare=False, repr=False)

    @classmethod
    def parse(cls, target: str) -> Endpoint:
        url, _, model = target.partition("#")
        if "://" not in url or not model:
            raise UserError(
                f"{target}: give a hosted model as URL#model, e.g. http://127.0.0.1:8000/v1#Qwen/Qwen3-0.6B"
            )
        http = Http(url, key_env=KEY, proxies=True)
        return cls(http.url, model, http)


def complete(
    endpoint: Endpoint, messages: list[dict[str, str]], sampling: SamplingConfig, seed: int, tries: int = TRIES
) -> Completion:
    """One sampled answer. Raises UserError when the endpoint refuses, or does not answer after `tries`."""
    body = {
        "model": endpoint.model, "messages": messages, "temperature": sampling.temperature, "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens, "seed": seed,
        **{name: value for name in ("top_k", "min_p") if (value := getattr(sampling, name))},
    }  # fmt: skip

    def ask() -> Completion:
        path = "/chat/completions"
        return _completion(endpoint.http.post(path, body, seconds=TIMEOUT, what=endpoint.model), sampling.max_tokens)

    try:
        return endpoint.http.retrying(ask, tries)
    except ServerError as error:
        if not may_pass(error):
            raise UserError(f"{endpoint.url}: {error}") from error
        raise UserError(
            f"{endpoint.url}: no answer after {tries} tries: {error}. Finished samples are kept; run the same command "
            "to continue"
        ) from error


def _completion(answer: Any, max_tokens: int) -> Completion:
    """Raises Unreadable if the response has an unexpected form."""
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        text = str(message.get("content") or "")
        thinking = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(thinking, str) and thinking:
            text = f"<think>{thinking}</think>{text}"
        tokens = _counted(answer.get("usage"), max(max_tokens, 4 * len(text)))
        return Completion(text, tokens, _FINISH.get(str(choice.get("finish_reason")), "abort"))
    except (LookupError, TypeError, AttributeError) as error:
        raise Unreadable(f"unexpected answer {clean(str(answer))[:200]}") from error


def _counted(usage: Any, most: int) -> int:
    """Number of answer tokens according to the endpoint; 0 if it reports no plausible number."""
    tokens = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
    return min(tokens, most) if type(tokens) is int and tokens > 0 else 0
