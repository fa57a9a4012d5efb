"""Checks that the Hugging Face hub can be reached, before its own client would retry for a minute.

hub.require("model.path: Qwen/Qwen3-0.6B", "give the folder of a model")
"""

from __future__ import annotations

import functools
import os

from hone.base.http import Http, ServerError, ServerHangs, ServerLost
from hone.base.settings import UserError

SECONDS = 5.0
TRUE = ("1", "ON", "YES", "TRUE")  # as its own client reads them


def endpoint() -> str:
    """The hub's address, or its mirror's."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


@functools.cache
def reachable(address: str) -> bool:
    try:
        Http(address, proxies=True).ask("HEAD", "/", None, seconds=SECONDS, what="the hub")
    except (ServerLost, ServerHangs):
        return False
    except ServerError:  # it answered, even if with a redirect or a refusal
        return True
    return True


def require(what: str, remedy: str) -> None:
    """Raises UserError if the hub cannot be reached. `what`: names what is missing in the cache; `remedy`: an
    alternative to it."""
    variables = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    if offline := next((name for name in variables if os.environ.get(name, "").upper() in TRUE), None):
        raise UserError(f"{what}: is not in the cache, and {offline} forbids asking the hub; unset it, or {remedy}")
    if not reachable(endpoint()):
        raise UserError(
            f"{what}: is not in the cache, and the hub ({endpoint()}) cannot be reached; connect this machine, set "
            f"HF_ENDPOINT to a mirror, or {remedy}"
        )
