"""Questions to a model behind an OpenAI-compatible endpoint, each answered by one JSON object, or by a `Failure`.

    judge = Judge(JudgeConfig(url="http://127.0.0.1:8000/v1", model="Qwen/Qwen3-8B"))
    judge.ask([Question("Is 7 prime?", YES_NO)])        # [True]

Many at the same time, each tried again after what may pass (429, 5xx, a broken or stalled connection, an answer that
is not the JSON asked for), with growing pauses that are drawn at random, so that waiting clients do not come back all
at once; a Retry-After holds all of them. Answers that could be read are kept on disk by the content of the question:
an interrupted run loses none, and pays for none twice. Every wait is bounded, the whole by `seconds`.
The key is read from the environment when it is sent, and taken out of whatever the server says.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.base.settings import UserError
from hone.grade.workers import Failure
from hone.rewards.judge.config import JudgeConfig

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504, 529)
#: The whole judge is unusable: the key, the address or the model's name is wrong.
REFUSED = (401, 403, 404)
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds; a Retry-After is obeyed up to the longest
SHOWN = 200  # characters of a server's message


@dataclass(frozen=True)
class Schema:
    """The object that an answer must be, as JSON schema, and what it means."""

    name: str
    properties: Mapping[str, Any]  # all required, no others
    read: Callable[[dict[str, Any]], Any]  # of an object with exactly these keys; raises ValueError


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
        try:
            import httpx  # noqa: F401
        except ImportError:
            raise UserError("judge: the package httpx is missing; pip install 'hone-rl[judge]'") from None
        self.config = config
        self.counts: Counter[str] = Counter()  # since the beginning: calls, tokens, cached, failed, retries
        self._told: Counter[str] = Counter()
        if config.key_env and not config.is_local and not os.environ.get(config.key_env):
            raise UserError(f"judge: no key; set the environment variable {config.key_env}")

    def costs(self) -> dict[str, float]:
        """What was used since the last call of this."""
        new = {name: float(self.counts[name] - self._told[name]) for name in sorted(self.counts)}
        self._told = Counter(self.counts)
        return new

    def ask(self, questions: Sequence[Question]) -> list[Any]:
        """What `schema.read` makes of each answer, in order; a `Failure` where there is none in time.

        Raises UserError if the endpoint refuses every question (wrong key, address or model), or if the budget was
        used up before.
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
                raise UserError(f"judge: {over}; raise it and go on with --resume")
            answers.update(asyncio.run(self._ask_all({key: first[key] for key in missing})))
        self.counts["failed"] += sum(isinstance(answers[key], Failure) for key in missing)
        return [answers[self._key(question)] for question in questions]

    # --- asking ---

    async def _ask_all(self, questions: Mapping[str, Question]) -> dict[str, Any]:
        import httpx

        config = self.config
        answers: dict[str, Any] = {}
        gate, limit = _Gate(), asyncio.Semaphore(config.concurrency)
        client = httpx.AsyncClient(
            timeout=config.timeout, limits=httpx.Limits(max_connections=None), trust_env=not config.is_local
        )

        async def one(key: str, question: Question) -> None:
            async with limit:
                answers[key] = await self._answer(client, gate, key, question)

        async with client:
            tasks = [asyncio.create_task(one(key, question)) for key, question in questions.items()]
            done, late = await asyncio.wait(tasks, timeout=config.seconds, return_when=asyncio.FIRST_EXCEPTION)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            refused = [error for task in done if (error := task.exception()) is not None]
        if refused:
            raise refused[0]
        why = Failure("verifier_timeout", f"no answer within {config.seconds:g} s (judge.seconds)")
        return {key: answers.get(key, why) for key in questions}

    async def _answer(self, client: Any, gate: _Gate, key: str, question: Question) -> Any:
        problem = ""
        for attempt in range(self.config.tries):
            if attempt:
                self.counts["retries"] += 1
                await asyncio.sleep(random.uniform(0.5, 1.0) * min(LONGEST_PAUSE, FIRST_PAUSE * 2.0**attempt))
            await gate.wait()
            if over := self._over_budget():
                return Failure("verifier_error", over)
            try:
                status, headers, text = await self._post(client, question)
            except asyncio.TimeoutError:
                problem = f"no answer within {self.config.timeout:g} s (judge.timeout)"
                continue
            except Exception as error:  # of the network, whatever the library calls it
                problem = self._clean(f"{type(error).__name__}: {error}")
                continue
            if status == 200:
                try:
                    return self._read(key, question, text)
                except ValueError as error:
                    problem = self._clean(str(error))
                    continue
            problem = f"HTTP {status}: {self._clean(text) or 'without a word'}"
            if status in REFUSED:
                raise UserError(f"judge {self.config.url}: {problem}; look at judge.url, judge.model and the key")
            if status not in RETRIED:
                return Failure("verifier_error", problem)
            gate.hold(headers.get("retry-after"))
        return Failure("verifier_error", f"{problem} (after {self.config.tries} tries)")

    async def _post(self, client: Any, question: Question) -> tuple[int, Mapping[str, str], str]:
        self.counts["calls"] += 1
        key = os.environ.get(self.config.key_env or "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"{(self.config.url or '').rstrip('/')}/chat/completions"
        # The library's own limits are on each read; a server that sends a byte now and then would pass them for ever.
        answer = await asyncio.wait_for(
            client.post(url, json=self._body(question), headers=headers), self.config.timeout
        )
        return answer.status_code, answer.headers, answer.text

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

    def _read(self, key: str, question: Question, text: str) -> Any:
        """The meaning of a reply, which is kept; raises ValueError if it is not what was asked for."""
        try:
            reply = json.loads(text)
            content = reply["choices"][0]["message"]["content"]
            usage = reply.get("usage") or {}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise ValueError(f"not a chat completion: {text}") from None
        used = usage.get("total_tokens") if isinstance(usage, dict) else None
        # A server that does not count is counted for, at four characters a token.
        self.counts["tokens"] += used if isinstance(used, int) else (len(question.text) + len(str(content))) // 4
        answer = read_object(content, question.schema)
        self._keep(key, content)
        return answer

    def _over_budget(self) -> str | None:
        for name in ("calls", "tokens"):
            most = getattr(self.config, f"max_{name}")
            if most is not None and self.counts[name] >= most:
                return f"the budget of {most} {name} (judge.max_{name}) is used up"
        return None

    def _clean(self, text: str) -> str:
        """What may be shown of a server's message: short, and without the key, which some servers echo."""
        key = os.environ.get(self.config.key_env or "")
        text = text.replace(key, "***") if key else text
        return " ".join(re.sub(r"\b(sk|key|Bearer)[-_ ][\w*.-]{8,}", "***", text).split())[:SHOWN]

    # --- keeping ---

    def _key(self, question: Question) -> str:
        """Everything that decides an answer; the key of the endpoint is no part of it."""
        what = json.dumps([self.config.url, self._body(question)], sort_keys=True)
        return hashlib.sha256(what.encode()).hexdigest()

    def _path(self, key: str) -> Path | None:
        return None if self.config.cache is None else Path(self.config.cache).expanduser() / key[:2] / f"{key}.json"

    def _kept(self, key: str, question: Question) -> tuple[Any] | None:
        path = self._path(key)
        try:
            return None if path is None else (read_object(json.loads(path.read_text())["content"], question.schema),)
        except (OSError, ValueError, LookupError, TypeError):  # not there, or damaged: asked (again)
            return None

    def _keep(self, key: str, content: str) -> None:
        """Written aside and renamed: two runs may share the folder, and a kill leaves nothing half written."""
        path = self._path(key)
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        number, aside = tempfile.mkstemp(dir=path.parent, suffix=".writing")
        with os.fdopen(number, "w") as file:
            json.dump({"model": self.config.model, "content": content}, file)
        os.replace(aside, path)


class _Gate:
    """Holds all requests when the server asks for a pause."""

    def __init__(self) -> None:
        self._until = 0.0

    def hold(self, retry_after: str | None) -> None:
        try:
            seconds = float(retry_after or 0.0)
        except ValueError:  # a date: the usual pause does
            return
        if seconds > 0:
            self._until = max(self._until, time.monotonic() + min(seconds, LONGEST_PAUSE))

    async def wait(self) -> None:
        while (left := self._until - time.monotonic()) > 0:
            await asyncio.sleep(left)


def read_object(content: Any, schema: Schema) -> Any:
    """What one answer means. It must be a JSON object with exactly the asked keys; thinking may stand before it."""
    if not isinstance(content, str):
        raise ValueError(f"the answer is no text: {content!r}")
    text = content.rpartition("</think>")[2].strip()

    def exact(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) < len(pairs):
            raise ValueError(f"a key is given twice: {text}")
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=exact)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(value, dict) or set(value) != set(schema.properties):
        raise ValueError(f"not an object with the keys {', '.join(schema.properties)}: {text}")
    return schema.read(value)


def quoted(text: str, what: str, max_chars: int) -> str:
    """Text of another model as data: between marks that it cannot contain, since they are made from its content."""
    text = text[-max_chars:]
    mark = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
    return f"<{what} {mark}>\n{text}\n</{what} {mark}>"
