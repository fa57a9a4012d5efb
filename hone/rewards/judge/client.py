"""Questions to a model behind an OpenAI-compatible endpoint, each answered by one JSON object, or by a `Failure`.

    judge = Judge(JudgeConfig(url="http://127.0.0.1:8000/v1", model="Qwen/Qwen3-8B"))
    judge.ask([Question("Is 7 prime?", YES_NO)])        # [True]

Questions are sent concurrently. Each is retried after transient errors (see `hone.base.http`), and after an answer that
is not the requested JSON. Readable answers are cached on disk by the content of the question: an interrupted run keeps
them, and pays for none of them twice. Every wait is bounded, the whole by `seconds`.
The key is read from the environment when it is sent, and removed from the server's messages.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.base.http import Http, ServerError, ServerHangs, ServerRefused, Unreadable, clean, may_pass
from hone.base.settings import UserError
from hone.grade.workers import Failure
from hone.rewards.judge.config import JudgeConfig

#: Statuses that make the whole judge unusable: the key, the address or the model's name is wrong.
REFUSED = (401, 403, 404)
MOST_TOKENS = 1 << 30  # larger token counts of one call are not believed


@dataclass(frozen=True)
class Schema:
    """The JSON object expected as answer, and how to read it."""

    name: str
    properties: Mapping[str, Any]  # all required, no others
    read: Callable[[dict[str, Any]], Any]  # takes an object with exactly these keys; raises ValueError


@dataclass(frozen=True)
class Question:
    text: str
    schema: Schema
    system: str = ""


class Judge:
    """One endpoint with its cache and its budget. Raises UserError if the endpoint or the key is missing."""

    def __init__(self, config: JudgeConfig) -> None:
        if config.url is None:
            raise UserError("judge: no endpoint; set judge.url and judge.model, as in https://api.openai.com/v1")
        self.config = config
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()  # since the start: calls, tokens, cached, failed, retries
        self._told: Counter[str] = Counter()
        if config.key_env and not config.is_local and not os.environ.get(config.key_env):
            raise UserError(f"judge: no key; set the environment variable {config.key_env}")

    def costs(self) -> dict[str, float]:
        """Usage since the last call of this method."""
        new = {name: float(self.counts[name] - self._told[name]) for name in sorted(self.counts)}
        self._told = Counter(self.counts)
        return new

    def ask(self, questions: Sequence[Question]) -> list[Any]:
        """The result of `schema.read` for each answer, in order; a `Failure` for each question without one in time.

        Raises UserError if the endpoint refuses every question (wrong key, address or model), or if the budget is
        already used up.
        """
        different = list(dict.fromkeys(self._key(question) for question in questions))
        first = {self._key(question): question for question in reversed(questions)}
        answers: dict[str, Any] = {}
        for key in different:
            if (kept := self._kept(key, first[key])) is not None:
                answers[key] = kept[0]
        self.counts["cached"] += len(answers)
        missing = [key for key in different if key not in answers]
        if missing:
            if over := self._over_budget():
                raise UserError(f"judge: {over}; raise it and continue with --resume")
            answers.update(self._ask_all({key: first[key] for key in missing}))
        self.counts["failed"] += sum(isinstance(answers[key], Failure) for key in missing)
        return [answers[self._key(question)] for question in questions]

    # --- asking ---

    def _ask_all(self, questions: Mapping[str, Question]) -> dict[str, Any]:
        config = self.config
        http = Http(config.url or "", key_env=config.key_env, proxies=True)
        pool = ThreadPoolExecutor(min(config.concurrency, len(questions)), "judge")
        try:
            futures = {pool.submit(self._answer, http, *item): item[0] for item in questions.items()}
            done, _ = wait(futures, timeout=config.seconds, return_when=FIRST_EXCEPTION)
            answers = {futures[future]: future.result() for future in done}
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            http.hang_up()  # ends late requests, also during a pause between retries
            pool.shutdown()
        why = Failure("verifier_timeout", f"no answer within {config.seconds:g} s (judge.seconds)")
        return {key: answers.get(key, why) for key in questions}

    def _answer(self, http: Http, key: str, question: Question) -> Any:
        """The answer as read by the schema, or a Failure. Raises UserError if the judge is unusable."""

        def ask() -> Any:
            if over := self._spend_call():
                return Failure("verifier_error", over)
            reply = http.post("/chat/completions", self._body(question), seconds=self.config.timeout, what="the judge")
            try:
                return self._read(key, question, reply)
            except ValueError as error:
                raise Unreadable(clean(str(error), http.key)) from error

        try:
            return http.retrying(ask, self.config.tries, on_retry=lambda: self._count("retries"))
        except ServerRefused as error:
            problem = f"HTTP {error.status}: {error.message}"
            if error.status in REFUSED:
                reason = f"judge {self.config.url}: {problem}; look at judge.url, judge.model and the key"
                raise UserError(reason) from error
            return Failure("verifier_error", self._after_tries(problem, error))
        except ServerHangs as error:
            problem = f"no answer within {self.config.timeout:g} s (judge.timeout)"
            return Failure("verifier_error", self._after_tries(problem, error))
        except ServerError as error:
            return Failure("verifier_error", self._after_tries(str(error), error))

    def _after_tries(self, problem: str, error: ServerError) -> str:
        return f"{problem} (after {self.config.tries} tries)" if may_pass(error) else problem

    def _count(self, name: str, more: int = 1) -> None:
        with self._lock:
            self.counts[name] += more

    def _spend_call(self) -> str | None:
        """Counts a call; returns a reason instead if the budget is used up."""
        with self._lock:
            over = self._over_budget()
            self.counts["calls"] += over is None
            return over

    def _body(self, question: Question) -> dict[str, Any]:
        schema = question.schema
        shape = {
            "type": "object",
            "properties": dict(schema.properties),
            "required": list(schema.properties),
            "additionalProperties": False,
        }
        formats: dict[str, Any] = {
            "schema": {"type": "json_schema", "json_schema": {"name": schema.name, "strict": True, "schema": shape}},
            "object": {"type": "json_object"},
            "text": None,
        }
        system = [{"role": "system", "content": question.system}] if question.system else []
        body = {
            "model": self.config.model,
            "messages": [*system, {"role": "user", "content": question.text}],
            "temperature": 0,
            "max_tokens": self.config.answer_tokens,
            "response_format": formats[self.config.format],
            **self.config.body,
        }
        return {name: value for name, value in body.items() if value is not None}

    def _read(self, key: str, question: Question, reply: Any) -> Any:
        """Read and cache a reply; raises ValueError if it does not match the schema."""
        try:
            content = reply["choices"][0]["message"]["content"]
            usage = reply.get("usage")
        except (LookupError, TypeError, AttributeError):
            raise ValueError(f"not a chat completion: {reply}") from None
        self._count("tokens", _tokens_used(usage, len(question.text) + len(str(content))))
        answer = read_object(content, question.schema)
        self._keep(key, content)
        return answer

    def _over_budget(self) -> str | None:
        for name in ("calls", "tokens"):
            most = getattr(self.config, f"max_{name}")
            if most is not None and self.counts[name] >= most:
                return f"the budget of {most} {name} (judge.max_{name}) is used up"
        return None

    # --- keeping ---

    def _key(self, question: Question) -> str:
        """Hash of everything that determines an answer; the API key is not part of it."""
        what = json.dumps([self.config.url, self._body(question)], sort_keys=True)
        return hashlib.sha256(what.encode()).hexdigest()

    def _path(self, key: str) -> Path | None:
        return None if self.config.cache is None else Path(self.config.cache).expanduser() / key[:2] / f"{key}.json"

    def _kept(self, key: str, question: Question) -> tuple[Any] | None:
        path = self._path(key)
        try:
            return None if path is None else (read_object(json.loads(path.read_text())["content"], question.schema),)
        except (OSError, ValueError, LookupError, TypeError):  # missing or damaged: ask (again)
            return None

    def _keep(self, key: str, content: str) -> None:
        """Write to a temporary file and rename: runs may share the folder, and a kill leaves no partial file."""
        path = self._path(key)
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        number, aside = tempfile.mkstemp(dir=path.parent, suffix=".writing")
        with os.fdopen(number, "w") as file:
            json.dump({"model": self.config.model, "content": content}, file)
        os.replace(aside, path)


def _tokens_used(usage: Any, characters: int) -> int:
    """The server's count; if it is missing or implausible, an estimate of four characters per token."""
    used = usage.get("total_tokens") if isinstance(usage, Mapping) else None
    return used if type(used) is int and 0 < used < MOST_TOKENS else characters // 4 + 1


def read_object(content: Any, schema: Schema) -> Any:
    """Read one answer: a JSON object with exactly the requested keys, optionally after thinking."""
    if not isinstance(content, str):
        raise ValueError(f"the answer is not text: {content!r}")
    text = content.rpartition("</think>")[2].strip()

    def exact(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) < len(pairs):
            raise ValueError(f"a key occurs twice: {text}")
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=exact)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(value, dict) or set(value) != set(schema.properties):
        raise ValueError(f"not an object with the keys {', '.join(schema.properties)}: {text}")
    return schema.read(value)


def quoted(text: str, what: str, max_chars: int) -> str:
    """Untrusted text as data, between marks that it cannot contain, since they are a hash of its content."""
    text = text[-max_chars:]
    mark = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
    return f"<{what} {mark}>\n{text}\n</{what} {mark}>"
