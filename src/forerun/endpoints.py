"""An OpenAI-compatible server, as its clients see it: its address, a client, and what it complains of."""

from __future__ import annotations

import json
import os
from typing import Any, Self

from forerun.errors import ArgumentError, ForerunError


class ServerError(ForerunError, ConnectionError):
    """A server is out of reach, refuses everything, or is not OpenAI-compatible."""


class ApiClient:
    """The address of a server with an `httpx.AsyncClient` for it; open it with ``async with``."""

    def __init__(
        self,
        url: str,
        what: str = "a server's address",
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        transport: Any = None,
    ) -> None:
        """Check the address, with or without ``/v1``, which `what` names in an error. Without an `api_key` the one in
        ``OPENAI_API_KEY`` is sent, if it is set; `transport` replaces the network.
        """
        try:
            import httpx
        except ImportError as error:
            raise ArgumentError("asking a server needs httpx: pip install 'forerun[bench]'") from error
        self.url = check_address(url, what).rstrip("/").removesuffix("/v1")
        key = api_key or os.environ.get("OPENAI_API_KEY")
        if key is not None and not key.isascii():
            raise ArgumentError("--api-key goes into a header, which has ASCII characters alone")
        self.http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            timeout=httpx.Timeout(timeout_s, connect=min(30.0, timeout_s)),
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()


def check_address(url: str, what: str) -> str:
    """Return `url` itself; ArgumentError if it is no valid HTTP address."""
    import httpx

    try:
        parsed = httpx.URL(url)
        why = ""
        if parsed.scheme not in ("http", "https") or not parsed.host or not 0 < (parsed.port or 1) < 2**16:
            why = "it lacks http:// or https://, a host, or a port from 1 to 65535"
    except httpx.InvalidURL as error:
        why = str(error)
    if why:
        raise ArgumentError(f"{what} is http://HOST:PORT or https://..., got {url!r}: {why}")
    return url


def read_complaint(text: str) -> str:
    """Return the message in an error's body, in the forms of OpenAI, vLLM, SGLang and llama.cpp."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return text.strip()[:200] or "nothing more"
    inner = content.get("error", content) if isinstance(content, dict) else content
    message = inner.get("message") or inner.get("detail") if isinstance(inner, dict) else inner
    return str(message or content)[:300]
