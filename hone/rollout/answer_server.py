"""A frozen answerer on a server: any OpenAI-compatible `/completions` that echoes prompts with log-probs, such as vLLM.

One request per group, several groups at a time. The API key comes from the environment (`OPENAI_API_KEY`) and is never
stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from hone.base.http import Http, ServerError, Unreadable
from hone.recipe.sections.prompt import PromptConfig
from hone.rewards.perplexity import Answerer, AnswererError, AnswerRequest, answer_prompt
from hone.types import FloatArray, Problem

TIMEOUT = 120.0  # seconds for a request
TRIES = 4
CONCURRENT = 16  # requests at the same time
ANSWER_BYTES = 256 << 20  # of one response at most: it has a log-prob for each token of all prompts


class AnswerServer(Answerer):
    """Uses the raw `prompt.template`: the interface does not apply chat templates."""

    def __init__(self, address: str, model: str, prompt: PromptConfig, system: str) -> None:
        self.http = Http(address, key_env="OPENAI_API_KEY", most=ANSWER_BYTES, proxies=True)
        self.url = f"{self.http.url}/completions"
        self.model, self.prompt, self.system = model, prompt, prompt.system_prompt(system)

    def logprobs_all(self, requests: Sequence[AnswerRequest], cue: str) -> list[list[FloatArray] | AnswererError]:
        """See `hone.rewards.perplexity.Answerer`."""

        def one(group: AnswerRequest) -> list[FloatArray] | AnswererError:
            try:
                return self._logprobs(group.problem, group.contexts, cue, group.answer)
            except AnswererError as error:
                return error

        with ThreadPoolExecutor(CONCURRENT) as threads:
            return list(threads.map(one, requests))

    def _logprobs(self, problem: Problem, contexts: Sequence[str], cue: str, answer: str) -> list[FloatArray]:
        different = list(dict.fromkeys(contexts))
        question = self.prompt.template.format(system=self.system, user=problem.messages[-1]["content"])
        texts = [answer_prompt(question, context, cue) + answer for context in different]
        body = {"model": self.model, "prompt": texts, "max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 0}
        choices = self._ask(body).get("choices")
        if not isinstance(choices, list) or len(choices) != len(texts):
            raise AnswererError(
                f"{self.url}: {len(texts)} prompts were sent, but the server did not return as many choices"
            )
        by_index = {choice.get("index", i): choice for i, choice in enumerate(choices)}
        by_context = {context: tail(by_index.get(i), answer) for i, context in enumerate(different)}
        return [by_context[context] for context in contexts]

    def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """The server's response. Raises AnswererError."""

        def once() -> dict[str, Any]:
            answer = self.http.post("/completions", body, seconds=TIMEOUT, what=self.model)
            if not isinstance(answer, dict):
                raise Unreadable("not a JSON object")
            return answer

        try:
            return self.http.retrying(once, TRIES)
        except ServerError as error:
            raise AnswererError(f"{self.url}: {error}") from error


def tail(choice: Any, answer: str) -> FloatArray:
    """Log-probs of the last tokens of an echoed prompt, those of the answer.

    Counted from the end: the offsets reported by servers are wrong after characters that span several tokens.
    Raises AnswererError if the tokens do not spell the answer.
    """
    try:
        tokens, values = choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]
        text, n = "", 0
        while len(text) < len(answer) and n < len(tokens):
            n += 1
            text = tokens[-n] + text
        if text.endswith(answer) and n < len(tokens):
            return np.asarray(values[len(values) - n :], np.float32)
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise AnswererError(f"the server's answer has no log-probs of the prompt ({error!r})") from error
    raise AnswererError(f"the echoed tokens do not end in the gold answer {answer[:60]!r}")
