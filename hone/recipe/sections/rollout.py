"""Settings of generation."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from hone.base.settings import Section

#: Lower temperatures put all probability on the likeliest token, and dividing by them overflows.
COLDEST = 1e-5


class SamplingConfig(Section):
    temperature: NonNegativeFloat = 1.0  # 0: greedy
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: NonNegativeInt = 0  # 0: off
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)
    max_tokens: PositiveInt = 256  # completion tokens
    # The completion ends with the token whose text completes one of these; the text includes the whole token.
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()

    @field_validator("temperature")
    @classmethod
    def _divides(cls, value: float) -> float:
        if 0.0 < value < COLDEST:
            raise ValueError(f"{value:g} is too small to divide by; give 0 for greedy answers, or at least {COLDEST:g}")
        return value


class ServerConfig(Section):
    """A generation server: started by hone on this machine, or one that already runs at `url`."""

    url: str | None = None  # http://host:port of a server that already runs; null: hone starts one
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # of a server that hone starts, on loopback; 0: a free one
    python: str | None = None  # the interpreter that runs the server; null: the one that runs hone
    arguments: tuple[str, ...] = ()  # further command-line arguments of the server: ["--enforce-eager"]
    environment: dict[str, str] = {}  # further variables for the server's process
    weights_folder: str | None = None  # where weights are passed on; null: in the run folder. /dev/shm is faster
    start_timeout: PositiveFloat = 900.0  # seconds until it responds
    request_timeout: PositiveFloat = 1800.0  # seconds for the answers to one prompt; longer counts as hanging
    sync_timeout: PositiveFloat = 600.0  # seconds to load new weights
    requests: PositiveInt = 128  # concurrent prompts
    restarts: NonNegativeInt = 3  # restarts in a run of a server that crashed or hangs

    @model_validator(mode="after")
    def _possible(self) -> ServerConfig:
        if self.url is None:
            return self
        parts = urlsplit(self.url)
        if parts.scheme != "http" or not parts.hostname or parts.path.strip("/"):
            raise ValueError(f"url {self.url!r}: give http://host:port, as in http://127.0.0.1:8000")
        return self

    @property
    def serves_adapter(self) -> bool:
        """Whether an adapter is sent separately from its base."""
        return False


#: Adapter ranks that vLLM allocates for (vllm/config/lora.py); others are rounded up.
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


#: Settings that only a server has.
SERVER_ONLY = ("url", "port", "python", "environment", "start_timeout", "request_timeout", "requests", "restarts")


class VLLMConfig(ServerConfig):
    """vLLM's OpenAI-compatible server in development mode, which can load new weights."""

    lora: Literal["merged", "adapter"] = (
        "merged"  # how a recipe's `lora` is sent: as merged weights, or as A and B alone
    )
    in_process: bool = False  # vLLM's `LLM` instead of its server, in the interpreter that runs hone

    @property
    def serves_adapter(self) -> bool:
        return self.lora == "adapter"


class SGLangConfig(ServerConfig):
    """SGLang's HTTP server."""


class IdentityConfig(Section):
    """The check after every sync that the engine serves the policy's weights."""

    tolerance: PositiveFloat | None = None  # mean |log-prob difference| on fixed prompts; null: by model.dtype


class RolloutConfig(Section):
    engine: Literal["native", "vllm", "sglang"] = "native"
    max_sequences: PositiveInt = 512  # sequences decoded at once, at most
    kv_cache_gib: PositiveFloat | None = None  # memory of keys and values; null: a quarter of the device's memory
    compiled: bool = True  # on a CPU: decode attention in C++, if there is a compiler; on a GPU: CUDA graphs
    weights: Literal["policy", "bfloat16", "int8"] = (
        "policy"  # type of linear layers in the sampler; lower precision samples faster
    )
    ahead: bool = (
        False  # sample the next step on the server while the policy learns: `Prefetch` in `hone.stages.source`
    )
    vllm: VLLMConfig = VLLMConfig()
    sglang: SGLangConfig = SGLangConfig()
    identity: IdentityConfig = IdentityConfig()

    @property
    def server(self) -> ServerConfig | None:
        """The settings of the engine's server; None for an engine in the training process."""
        if self.engine == "native" or (self.engine == "vllm" and self.vllm.in_process):
            return None
        settings: ServerConfig = getattr(self, self.engine)
        return settings

    @property
    def starts_server(self) -> bool:
        """Whether a server is started for the run."""
        return self.server is not None and self.server.url is None
