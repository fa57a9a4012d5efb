"""Settings of a judge: a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import re
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, model_validator

from hone.base.settings import Section, UserError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class JudgeConfig(Section):
    """The judge's endpoint and budget. The key is read from the environment, never from a recipe."""

    url: str | None = None  # up to /v1, as in https://api.openai.com/v1
    model: str | None = None  # its name at the endpoint
    key_env: str | None = "OPENAI_API_KEY"  # the environment variable that holds the key; null: send no key
    format: Literal["schema", "object", "text"] = "schema"  # the response_format to request; text: not sent
    body: dict[str, Any] = {}  # extra fields of the request; null removes one, as in {temperature: null}
    answer_tokens: PositiveInt = 512  # max_tokens of an answer, thinking included
    max_chars: PositiveInt = 20_000  # a longer text is cut at its beginning
    cache: str | None = "~/.cache/hone/judge"  # folder of answers by content of the question; null: no cache
    concurrency: PositiveInt = 16  # concurrent requests
    timeout: PositiveFloat = 60.0  # seconds for one request
    tries: PositiveInt = 6  # attempts per question
    seconds: PositiveFloat = 600.0  # for all questions of a step; then the rest fail
    max_calls: NonNegativeInt | None = None  # budget of the whole run, requests
    max_tokens: NonNegativeInt | None = None  # budget of the whole run, prompt and answer tokens

    @model_validator(mode="after")
    def _safe(self) -> JudgeConfig:
        # The values stay out of these messages: they may be the key.
        if self.key_env is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.key_env):
            raise ValueError("key_env: give the name of an environment variable, as in OPENAI_API_KEY, not the key")
        if self.url is None:
            return self
        try:
            parts = urlsplit(self.url)
        except ValueError:
            raise ValueError("url: is not an address; give one such as https://api.openai.com/v1") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("url: is not an address; give one such as https://api.openai.com/v1")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("url: contains more than an address; put the key into the environment (key_env)")
        if parts.scheme == "http" and self.key_env and not self.is_local:
            raise ValueError("url: the key would travel unencrypted; use https, or key_env: null if none is needed")
        if not self.model:
            raise ValueError("model: missing; give the name of the model at the endpoint")
        return self

    @classmethod
    def at(cls, target: str, base: JudgeConfig) -> JudgeConfig:
        """The settings of `base` with another endpoint, given as URL#model. Raises UserError."""
        url, _, model = target.partition("#")
        try:
            return cls(**{**base.model_dump(), "url": url, "model": model or None})
        except ValidationError as error:
            problem = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise UserError(f"--judge: {problem}; it reads URL#MODEL") from None

    @property
    def is_local(self) -> bool:
        return urlsplit(self.url or "").hostname in LOOPBACK
