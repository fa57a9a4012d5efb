"""Answers of a model behind an OpenAI-compatible endpoint (`/chat/completions`), as rows beside our own models.

The key is read from the environment and stands in no file. Requests are retried where trying again can help.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from hone.base.settings import UserError
from hone.recipe.sections.rollout import SamplingConfig
from hone.types import Finish

KEY = "OPENAI_API_KEY"
TRIES = 6
TIMEOUT = 600.0  # seconds for one answer: reasoning models think for minutes
_AGAIN = (408, 409, 429, 500, 502, 503, 504, 529)
_FINISH: dict[str, Finish] = {"stop": "stop", "length": "length"}


@dataclass(frozen=True, slots=True)
class Completion:
    text: str  # thinking that the endpoint returns apart stands in <think> tags before the answer
    tokens: int  # as counted by the endpoint
    finish: Finish


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`URL#model`, such as https://api.openai.com/v1#gpt-4.1-mini."""

    url: str
    model: str

    @classmethod
    def parse(cls, target: str) -> Endpoint:
        url, _, model = target.partition("#")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not model:
            raise UserError(
                f"{target}: give a hosted model as URL#model, e.g. http://127.0.0.1:8000/v1#Qwen/Qwen3-0.6B"
            )
        if parts.username or parts.password or parts.query:
            raise UserError(f"{parts.hostname}: no key or password in the URL; set {KEY} in the environment")
        if parts.scheme == "http" and parts.hostname not in ("127.0.0.1", "localhost", "::1") and os.environ.get(KEY):
            raise UserError(f"{url}: {KEY} would travel unencrypted; use https, or unset it")
        return cls(url.rstrip("/"), model)


def complete(
    endpoint: Endpoint, messages: list[dict[str, str]], sampling: SamplingConfig, seed: int, tries: int = TRIES
) -> Completion:
    """One sampled answer. Raises UserError when the endpoint refuses, or does not answer after `tries`."""
    body = {
        "model": endpoint.model, "messages": messages, "temperature": sampling.temperature, "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens, "seed": seed,
        **{name: value for name in ("top_k", "min_p") if (value := getattr(sampling, name))},
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(f"{endpoint.url}/chat/completions", json.dumps(body).encode(), headers)
    problem = ""
    for attempt in range(tries):
        wait = min(60.0, 2.0**attempt)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                return _completion(json.loads(answer.read()))
        except urllib.error.HTTPError as error:  # the network and its far end are not ours
            problem = f"HTTP {error.code}: {error.read(300).decode(errors='replace')}"
            if error.code not in _AGAIN:
                raise UserError(f"{endpoint.url} ({endpoint.model}): {problem}") from error
            wait = _retry_after(error, wait)
        except (OSError, ValueError) as error:  # no connection, cut off, not JSON
            problem = str(error)
        if attempt + 1 < tries:
            time.sleep(wait)
    raise UserError(
        f"{endpoint.url} ({endpoint.model}): no answer after {tries} tries: {problem}. What was sampled is kept; run "
        "the same command to go on"
    )


def _retry_after(error: urllib.error.HTTPError, otherwise: float) -> float:
    asked = error.headers.get("Retry-After", "")
    return min(120.0, float(asked)) if asked.isdigit() else otherwise


def _completion(answer: Mapping[str, Any]) -> Completion:
    """Raises ValueError if the answer has another form than it should."""
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        text = str(message.get("content") or "")
        thinking = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(thinking, str) and thinking:
            text = f"<think>{thinking}</think>{text}"
        tokens = int((answer.get("usage") or {}).get("completion_tokens") or 0)
        return Completion(text, tokens, _FINISH.get(str(choice.get("finish_reason")), "abort"))
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"unexpected answer {str(answer)[:200]}") from error
