"""Requests in the format of OpenAI's API, and its errors.

https://platform.openai.com/docs/api-reference/completions and /chat. An unknown parameter is an error, since it would
have no effect, unless its value is neutral.
"""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, field_validator

from hone.base.settings import UserError
from hone.base.web import ApiError
from hone.recipe.sections.rollout import COLDEST, SamplingConfig

#: Parameters that do not change the answer.
HARMLESS = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "best_of",
    "eos_string",
}
NEUTRAL: tuple[Any, ...] = (None, 0, False, "", [], {}, {"type": "text"}, "none", "auto")
MAX_TOP = 20
MAX_SAMPLES = 1024  # of one request, over all prompts
MAX_TOKENS = 1 << 22  # of all answers of one request, with echoed prompts
MAX_SCORES = 200_000  # log-probs of one request, with those of the likeliest tokens
MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters


class StreamOptions(BaseModel):
    include_usage: bool = False


class _CommonRequest(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    model: str = Field(max_length=4096)
    n: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    temperature: float | None = Field(default=None, ge=0.0, le=100.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=-1)  # an extension of vLLM and others; -1 and 0: off
    min_p: float | None = Field(default=None, ge=0.0, lt=1.0)
    stop: Annotated[list[str], FailFast()] = []
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        return [] if value is None else [value] if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _something(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("a stop string must have at least one character")
        if len(value) > MAX_STOPS:
            raise ValueError(f"{len(value)} stop strings; at most {MAX_STOPS} are allowed")
        if longest := max((len(stop) for stop in value if len(stop) > MAX_STOP_LENGTH), default=0):
            raise ValueError(f"a stop string of {longest} characters; at most {MAX_STOP_LENGTH} are allowed")
        return value

    def settings(self, default: SamplingConfig, max_tokens: int) -> SamplingConfig:
        values = {key: value for key in ("temperature", "top_p", "min_p") if (value := getattr(self, key)) is not None}
        if values.get("temperature", 1.0) < COLDEST:
            values["temperature"] = 0.0  # greedy
        if self.top_k is not None:
            values["top_k"] = max(0, self.top_k)
        stop = tuple(self.stop) or default.stop
        return SamplingConfig.model_validate({**default.model_dump(), **values, "max_tokens": max_tokens, "stop": stop})

    def seed_or_any(self) -> int:
        return secrets.randbits(63) if self.seed is None else self.seed

    @property
    def wants_usage(self) -> bool:
        """Whether a stream should end with its token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(_CommonRequest):
    prompt: str | list[str] | list[int] | list[list[int]] = "<|endoftext|>"
    max_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKENS)  # 0: score the prompt only, with echo
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP)
    echo: bool = False

    @field_validator("prompt", mode="plain")
    @classmethod
    def _one_kind(cls, value: Any) -> Any:
        """Checked by hand: for a long list pydantic would collect an error per item and type."""
        rows = value if isinstance(value, list) else [value]
        texts = all(type(row) is str for row in rows)
        tokens = isinstance(value, list) and all(type(row) is int for row in rows)
        if texts or tokens or all(type(row) is list and all(type(i) is int for i in row) for row in rows):
            return value
        raise ValueError("give a text, a list of texts, the token ids of one prompt, or a list of such")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        p: Any = self.prompt
        return [p] if isinstance(p, str) or (p and isinstance(p[0], int)) else p


class Message(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in value):
            raise ValueError("content may hold text only")
        return "".join(str(part.get("text", "")) for part in value)

    def plain(self) -> dict[str, str]:
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ChatRequest(_CommonRequest):
    messages: Annotated[list[Message], FailFast()] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP)


def parse(kind: type[CompletionRequest] | type[ChatRequest], body: bytes) -> Any:
    """Validate a request. Raises ApiError with the name of the parameter."""
    try:
        params = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        param = str(first["loc"][0]) if first["loc"] else None
        where = f"{param}: " if param else ""
        raise ApiError(f"{where}{first['msg']}"[:500], param=param) from None
    for name, value in (params.model_extra or {}).items():
        if name not in HARMLESS and value not in NEUTRAL:
            shown = name[:80]
            raise ApiError(f"{shown} is not supported here: leave it out", param=shown, code="unsupported_parameter")
    if (best := (params.model_extra or {}).get("best_of")) not in (None, params.n):
        raise ApiError(f"best_of {str(best)[:40]} is not supported: leave it out, or set it to n", param="best_of")
    return params


def check_amount(
    params: CompletionRequest | ChatRequest, prompts: int, echoed: int, max_tokens: int, scores: int
) -> None:
    """Raises ApiError for a request above the limits: it would occupy memory and processor for too long.

    `echoed`: tokens of the echoed prompts. `max_tokens`: the sum over the prompts. `scores`: log-probs per token.
    """
    if prompts * params.n > MAX_SAMPLES:
        answers = f"{prompts} prompts with n {params.n}: {prompts * params.n} answers"
        message = f"{answers}; at most {MAX_SAMPLES} are allowed"
        raise ApiError(f"{message}: send several requests", param="n")
    tokens = (echoed + max_tokens) * params.n
    if tokens > MAX_TOKENS:
        message = f"up to {tokens} tokens are requested; at most {MAX_TOKENS} are allowed: lower max_tokens or n"
        raise ApiError(message, param="max_tokens")
    if tokens * scores > MAX_SCORES:
        message = f"up to {tokens * scores} log-probs are requested; at most {MAX_SCORES} are allowed"
        raise ApiError(f"{message}: lower logprobs, max_tokens or n", param="logprobs")


def to_json(value: Any) -> str:
    """As `json.dumps`, in small steps: a single step for a large answer would block every other thread."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))}: {to_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list) and len(value) > 64:
        return "[" + ", ".join(map(to_json, value)) + "]"
    return json.dumps(value)


def refused(error: UserError) -> ApiError:
    """The engine's refusal as an ApiError."""
    message = str(error).replace("sampling.max_tokens", "max_tokens")
    code = "context_length_exceeded" if "context" in message else None
    return ApiError(message, code=code)
