"""Middleware before an HTTP service of hone: refuses requests by their headers, and limits bodies.

A web page open on this machine can send requests here, from its own origin or under a host name of its own that
resolves to 127.0.0.1. Both are refused: see `refusal`.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hone.base.web import ApiError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_BODY = 4 << 20  # bytes
BODY_SECONDS = 60.0  # for a body to arrive


def allowed_hosts(host: str) -> tuple[str, ...]:
    """Host names that requests to a server at `host` may address; empty: any."""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    return tuple(dict.fromkeys((*LOOPBACK, host))) if is_loopback else ()


def refusal(headers: Mapping[str, str], hosts: Sequence[str]) -> ApiError | None:
    """The error with which a request is refused because of its headers; None if it is accepted."""
    addressed = headers.get("host", "")
    if hosts and _hostname(addressed) not in hosts:
        return ApiError(f"this server answers only as {', '.join(hosts)}", 400)
    origin = headers.get("origin")
    if origin is not None and _netloc(origin) != addressed.lower():
        return ApiError("requests of web pages from elsewhere are not answered", 403)
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return ApiError("requests of web pages from elsewhere are not answered", 403)
    return None


def _netloc(origin: str) -> str | None:
    """Host and port of an origin; None for `null` and invalid ones."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def _hostname(addressed: str) -> str:
    """The host without port and without the brackets of IPv6."""
    try:
        return urlsplit(f"//{addressed}").hostname or ""
    except ValueError:
        return ""


class Guard:
    """Refuses requests by their headers; bounds the size of bodies and their time to arrive."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str] = (), most: int = MAX_BODY) -> None:
        self.app, self.hosts, self.most = app, hosts, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        error = refusal(headers, self.hosts) or self._too_large(headers.get("content-length", ""))
        if error is not None:
            response = JSONResponse(error.body, error.status, {"Connection": "close"})
            await response(scope, receive, send)
            return
        await self.app(scope, self._bounded(receive), send)

    def _too_large(self, length: str) -> ApiError | None:
        if not length.isdigit() or int(length[:20]) <= self.most:
            return None
        return ApiError(f"the body has {length[:20]} bytes; at most {self.most} are allowed: send less at once", 413)

    def _bounded(self, receive: Receive) -> Receive:
        size, whole = 0, False
        deadline = asyncio.get_running_loop().time() + BODY_SECONDS

        async def bounded() -> Message:
            nonlocal size, whole
            if whole:  # only the disconnect follows
                return await receive()
            try:
                remaining = deadline - asyncio.get_running_loop().time()
                message = await asyncio.wait_for(receive(), max(0.001, remaining))
            except asyncio.TimeoutError:
                raise ApiError(f"the body has not arrived within {BODY_SECONDS:g} s", 408) from None
            size += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if size > self.most:
                raise ApiError(f"the body has more than {self.most} bytes: send less at once", 413)
            return message

        return bounded
