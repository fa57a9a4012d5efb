"""OpenAI's API over one model: /v1/models, /v1/completions, /v1/chat/completions, /health.

hone serve runs/demo
curl localhost:8000/v1/completions -d '{"model": "demo", "prompt": "Puzzle: ", "max_tokens": 20}'

Nothing slow runs in the event loop: reading and rendering requests, decoding tokens and encoding JSON happen in other
threads, in small pieces, so that other clients are served meanwhile.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from hone.base.guard import Guard
from hone.base.settings import UserError
from hone.base.web import ApiError
from hone.rollout.native.requests import Output, Request
from hone.serve.answer import Answer, chat_logprobs, completion_logprobs
from hone.serve.engine_thread import EngineThread
from hone.serve.model import ServedModel
from hone.serve.protocol import ChatRequest, CompletionRequest, check_amount, parse, refused, to_json
from hone.types import IntArray

_POLL = 0.5  # seconds between two checks whether the client is still connected

#: (index, answer, new text, is it the first piece, is it the last) -> one entry of `choices`
Choice = Callable[[int, Answer, str, bool, bool], dict[str, Any]]


@dataclass(frozen=True)
class GenerationJob:
    """A validated API request with its engine requests."""

    kind: str  # `object` of the response
    prefix: str  # of the response's id
    requests: list[Request]
    answers: list[Answer]  # [P * n]
    scores: bool  # keep log-probs
    answer: Choice  # makes a complete choice
    piece: Choice  # makes a piece of a stream
    drop: bool = False  # drop the token: none was requested, but the engine samples at least one


class Api:
    def __init__(self, model: ServedModel, thread: EngineThread) -> None:
        self.model, self.thread, self.started = model, thread, int(time.time())

    async def models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._about()]})

    async def one_model(self, http: HttpRequest) -> Response:
        self._check_name(http.path_params["name"])
        return JSONResponse(self._about())

    def _about(self) -> dict[str, Any]:
        about = {"id": self.model.name, "object": "model", "created": self.started, "owned_by": "hone"}
        return {**about, "max_model_len": self.model.context}

    async def health(self, _: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def completions(self, http: HttpRequest) -> Response:
        return await self._respond(http, *await run_in_threadpool(self._read_completion, await http.body()))

    async def chat(self, http: HttpRequest) -> Response:
        return await self._respond(http, *await run_in_threadpool(self._read_chat, await http.body()))

    def _read_completion(self, body: bytes) -> tuple[Any, GenerationJob]:
        params = parse(CompletionRequest, body)
        return params, self._completion_job(params)

    def _read_chat(self, body: bytes) -> tuple[Any, GenerationJob]:
        params = parse(ChatRequest, body)
        return params, self._chat_job(params)

    # --- from API requests to engine requests ---

    def _completion_job(self, params: CompletionRequest) -> GenerationJob:
        self._check_name(params.model)
        if params.max_tokens == 0 and not params.echo:
            raise ApiError("max_tokens is 0: without echo the answer would be empty", param="max_tokens")
        if params.echo and params.stream:
            raise ApiError("echo is not supported in a stream: leave one of them out", param="echo")
        if not params.prompts:
            raise ApiError("prompt: give at least one", param="prompt")
        check_amount(params, len(params.prompts), 0, 0, 0)
        prompts = [self._prompt(prompt) for prompt in params.prompts]
        top = params.logprobs or 0
        echoed = sum(map(len, prompts)) if params.echo else 0
        most = sum(self._limit(ids, params.max_tokens) for ids in prompts)
        check_amount(params, len(prompts), echoed, most, 0 if params.logprobs is None else 1 + top)
        requests = [
            self._request(
                params, ids, stream, self._limit(ids, params.max_tokens), params.logprobs is not None, top, params.echo
            )
            for stream, ids in enumerate(prompts)
        ]
        answers = [Answer(self.model.decode, r.sampling.stop) for r in requests for _ in range(params.n)]

        def whole(i: int, answer: Answer, new: str, first: bool, last: bool) -> dict[str, Any]:
            scores = None
            if params.logprobs is not None:
                scores = completion_logprobs(self.model.tokenizer, answer.scored, top)
            return {"index": i, "text": new, "logprobs": scores, "finish_reason": answer.finish if last else None}

        return GenerationJob(
            "text_completion",
            "cmpl",
            requests,
            answers,
            params.logprobs is not None,
            whole,
            whole,
            params.max_tokens == 0,
        )

    def _chat_job(self, params: ChatRequest) -> GenerationJob:
        self._check_name(params.model)
        messages = [message.plain() for message in params.messages]
        if messages[-1]["role"] != "user":
            raise ApiError("messages: the last one must be the user's", param="messages")
        if self.model.renderer.is_raw and sum(m["role"] != "system" for m in messages) > 1:
            raise ApiError("messages: this model has no chat template; give one user message", param="messages")
        self._check_length(sum(len(message["content"]) for message in messages), "messages")
        try:
            ids = self.model.renderer.messages_ids(messages)
        except UserError as error:  # the model's template refuses this order of roles
            raise ApiError(f"messages: {error}", param="messages") from None
        max_tokens = params.max_completion_tokens if params.max_completion_tokens is not None else params.max_tokens
        top = (params.top_logprobs or 0) if params.logprobs else 0
        check_amount(params, 1, 0, self._limit(ids, max_tokens), 1 + top if params.logprobs else 0)
        request = self._request(params, ids, 0, self._limit(ids, max_tokens), params.logprobs, top, False)
        answers = [Answer(self.model.decode, request.sampling.stop) for _ in range(params.n)]
        for answer in answers:
            answer.begin(self.model.renderer.prefix)

        def scores(answer: Answer) -> dict[str, Any] | None:
            return chat_logprobs(self.model.tokenizer, answer.scored, top) if params.logprobs else None

        def whole(i: int, answer: Answer, new: str, first: bool, last: bool) -> dict[str, Any]:
            message = {"role": "assistant", "content": new, "refusal": None}
            return {"index": i, "message": message, "logprobs": scores(answer), "finish_reason": answer.finish}

        def piece(i: int, answer: Answer, new: str, first: bool, last: bool) -> dict[str, Any]:
            delta = {"role": "assistant", "content": self.model.renderer.prefix + new} if first else {"content": new}
            finish = answer.finish if last else None
            return {"index": i, "delta": delta, "logprobs": scores(answer), "finish_reason": finish}

        return GenerationJob("chat.completion", "chatcmpl", [request], answers, params.logprobs, whole, piece)

    def _check_name(self, name: str) -> None:
        if name != self.model.name:
            message = f"there is no model {name[:200]!r} here; it is called {self.model.name!r}"
            raise ApiError(message, 404, "model", "model_not_found")

    def _prompt(self, prompt: str | list[int]) -> IntArray:
        if isinstance(prompt, str):
            self._check_length(len(prompt), "prompt")
            return self.model.renderer.text_ids(prompt)
        if wrong := [i for i in prompt if not 0 <= i < self.model.vocabulary]:
            raise ApiError(
                f"prompt: {wrong[0]} is not a token id: use 0 to {self.model.vocabulary - 1}", param="prompt"
            )
        return np.asarray(prompt, dtype=np.int64)

    def _check_length(self, characters: int, param: str) -> None:
        """Refuse texts that cannot fit, before the slow tokenisation."""
        most = self.model.most_characters
        if most is not None and characters > most:
            message = f"{param}: {characters} characters do not fit the model's context of {self.model.context} tokens"
            raise ApiError(message, param=param, code="context_length_exceeded")

    def _limit(self, ids: IntArray, max_tokens: int | None) -> int:
        return self.model.room(len(ids)) if max_tokens is None else max(1, max_tokens)

    def _request(
        self, params: Any, ids: IntArray, stream: int, max_tokens: int, logprobs: bool, top: int, echo: bool
    ) -> Request:
        sampling = params.settings(self.model.sampling, max_tokens)
        seed = params.seed_or_any()
        return Request(ids, sampling, seed, stream, params.n, params.stream, top, echo and logprobs)

    # --- from the engine's outputs to the response ---

    async def _respond(self, http: HttpRequest, params: Any, job: GenerationJob) -> Response:
        head = {"id": f"{job.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.model.name}
        if params.stream:
            kind = job.kind + (".chunk" if job.prefix == "chatcmpl" else "")
            events = self._events({**head, "object": kind}, job, params.wants_usage)
            first = await anext(events)  # errors are raised before the response begins
            return StreamingResponse(_chain(first, events), media_type="text/event-stream")
        task = asyncio.ensure_future(self._collect(job, echo=getattr(params, "echo", False)))
        try:
            while not (await asyncio.wait({task}, timeout=_POLL))[0]:
                if await http.is_disconnected():
                    return Response(status_code=499)  # the client has disconnected
            await task
        finally:
            task.cancel()
        body = await run_in_threadpool(self._whole, {**head, "object": job.kind}, job)
        return Response(body, media_type="application/json")

    @staticmethod
    def _whole(head: dict[str, Any], job: GenerationJob) -> bytes:
        choices = [job.answer(i, answer, answer.text, True, True) for i, answer in enumerate(job.answers)]
        return to_json({**head, "choices": choices, "usage": _usage(job)}).encode()

    async def _collect(self, job: GenerationJob, echo: bool) -> None:
        echoed: set[int] = set()
        async with aclosing(self._run(job)) as news:
            async for items in news:
                await run_in_threadpool(self._take, job, items, echoed if echo else None)

    def _take(self, job: GenerationJob, items: Sequence[tuple[int, Output]], echoed: set[int] | None) -> None:
        """Add outputs to the answers. `echoed`: the requests whose prompt has been added; None: no echo."""
        n = job.requests[0].samples
        for which, output in items:
            group = job.answers[which * n : which * n + n]
            if echoed is not None and which not in echoed:
                echoed.add(which)
                self._echo(job.requests[which], group, output)
            if job.drop and output.turn is not None:
                group[output.sample].finish = "length"
            elif not job.drop:
                group[output.sample].push(output, job.scores)

    def _echo(self, request: Request, group: Sequence[Answer], output: Any) -> None:
        """Add the prompt before each answer, with log-probs if requested (then they are in the first output)."""
        for answer in group:
            if output.prompt is None:
                answer.begin(self.model.decode(request.prompt_ids.tolist()))
            else:
                s = output.prompt
                answer.echo(request.prompt_ids, s.logprobs, s.top_ids, s.top_logprobs)

    async def _events(self, head: dict[str, Any], job: GenerationJob, usage: bool) -> AsyncGenerator[str, None]:
        begun = set[int]()
        async with aclosing(self._run(job)) as news:
            async for items in news:
                for event in await run_in_threadpool(self._pieces, head, job, items, begun):
                    yield event
        if usage:
            yield _event({**head, "choices": [], "usage": _usage(job)})
        yield "data: [DONE]\n\n"

    @staticmethod
    def _pieces(
        head: dict[str, Any], job: GenerationJob, items: Sequence[tuple[int, Output]], begun: set[int]
    ) -> list[str]:
        """The stream's events for these outputs. `begun`: the choices that had an event already."""
        n, events = job.requests[0].samples, []
        for which, output in items:
            i = which * n + output.sample
            answer = job.answers[i]
            answer.scored.clear()  # each piece has its own
            new = answer.push(output, job.scores)
            last = output.turn is not None
            if new or answer.scored or last or i not in begun:
                events.append(_event({**head, "choices": [job.piece(i, answer, new, i not in begun, last)]}))
                begun.add(i)
        return events

    async def _run(self, job: GenerationJob) -> AsyncGenerator[Any, None]:
        try:
            async with aclosing(self.thread.run(job.requests)) as news:
                async for item in news:
                    yield item
        except UserError as error:
            raise refused(error) from None
        except RuntimeError as error:
            raise ApiError(str(error), 503) from None


def _usage(job: GenerationJob) -> dict[str, int]:
    prompt, completion = sum(len(r.prompt_ids) for r in job.requests), sum(answer.tokens for answer in job.answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _event(data: dict[str, Any]) -> str:
    return f"data: {to_json(data)}\n\n"


async def _chain(first: str, rest: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """The events; an error after the response has begun becomes the last event."""
    try:
        yield first
        async for event in rest:
            yield event
    except ApiError as error:
        yield _event(error.body)
    finally:
        await rest.aclose()


def _on_user_error(_: HttpRequest, error: Any) -> Response:
    return JSONResponse(refused(error).body, 400)


def _on_api_error(_: HttpRequest, error: Any) -> Response:
    return JSONResponse(error.body, error.status)


def _on_http_error(_: HttpRequest, error: Any) -> Response:
    return JSONResponse(ApiError(str(error.detail), error.status_code).body, error.status_code)


def make_app(model: ServedModel, thread: EngineThread, hosts: Sequence[str] = ()) -> Starlette:
    """The API as an ASGI application. `hosts`: names that requests may address; empty: any. See `hone.base.guard`."""
    api = Api(model, thread)
    routes = [
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.one_model),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/health", api.health),
    ]
    handlers: Any = {ApiError: _on_api_error, UserError: _on_user_error, HTTPException: _on_http_error}
    return Starlette(routes=routes, exception_handlers=handlers, middleware=[Middleware(Guard, hosts=hosts)])
