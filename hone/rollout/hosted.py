"""Answers of a model behind an OpenAI-compatible endpoint (`/chat/completions`): to evaluate it, or to learn from it.

    model = HostedModel(Endpoint.parse("http://127.0.0.1:8000/v1#name"), sampling, system)
    for (p, g), rollout in model.answers(problems, [(0, 0), (0, 1)], seed=1): ...

The API key is read from the environment and never written to a file. Requests are retried after transient errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hone.base import streams
from hone.base.http import Http, ServerError, Unreadable, clean, may_pass
from hone.base.settings import UserError
from hone.recipe.sections.rollout import SamplingConfig
from hone.rollout.prompts import with_system
from hone.types import Finish, Problem, Rollout, Turn

Key = tuple[int, int]  # (index of the problem, sample)

KEY = "OPENAI_API_KEY"
TRIES = 6
TIMEOUT = 600.0  # seconds for one answer: reasoning models think for minutes
CONCURRENT = 8  # requests at the same time
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


@dataclass(frozen=True)
class HostedModel:
    """Samples answers from an endpoint, several at a time; the endpoint renders the messages with its own template."""

    endpoint: Endpoint
    sampling: SamplingConfig
    system: str  # the system prompt; "": none
    concurrency: int = CONCURRENT

    def messages(self, problem: Problem) -> list[dict[str, str]]:
        return with_system(problem.messages, self.system)

    def prompt_text(self, problem: Problem) -> str:
        """The messages as a string, for people to read."""
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in self.messages(problem))

    def answers(self, problems: Sequence[Problem], wanted: Sequence[Key], seed: int) -> Iterator[tuple[Key, Rollout]]:
        """The wanted samples, each as soon as it arrives. Raises UserError as `complete` does."""

        def answer(key: Key) -> tuple[Key, Rollout]:
            p, g = key
            messages = self.messages(problems[p])
            completion = complete(self.endpoint, messages, self.sampling, streams.endpoint(seed, p, g))
            unknown = np.zeros(completion.tokens, np.int64)  # an endpoint returns no token ids, only their number
            turn = Turn(np.zeros(1, np.int64), unknown, unknown.astype(np.float32), completion.finish, 0)
            return key, Rollout(problems[p].id, g, (turn,), completion.text)

        with ThreadPoolExecutor(self.concurrency) as pool:
            futures = [pool.submit(answer, key) for key in wanted]
            try:
                for future in as_completed(futures):
                    yield future.result()
            finally:
                for future in futures:  # after an error, do not pay for the rest
                    future.cancel()


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
    """The answer in a response. Raises Unreadable if it has an unexpected form."""
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
