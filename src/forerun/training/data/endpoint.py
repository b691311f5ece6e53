"""Any OpenAI-compatible endpoint as the one who answers: concurrent, patient with busy servers, clear about refusals.

Knows HTTP and OpenAI's chat and completions requests. Knows no files.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import random
from dataclasses import dataclass, field
from typing import Any

from forerun.errors import ArgumentError, DataError, ForerunError
from forerun.training.data.scripts import Answer, Question

BUSY = frozenset({408, 409, 425, 429})
"""Statuses besides 5xx that a later attempt may cure."""
UNFIT = frozenset({400, 413, 422})
"""Statuses that blame this one request: a conversation too long for the model, for example."""
LONGEST_PAUSE_S = 60.0


class EndpointError(ForerunError, ConnectionError):
    """The endpoint cannot be reached, or refuses requests of this kind altogether."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """How answers are sampled."""

    max_tokens: int = 1024
    """Most tokens of one answer."""
    temperature: float | None = None
    """0 is greedy; None takes the model's or the server's default."""
    top_p: float | None = None
    """Keep the smallest set of tokens whose mass reaches this; None takes the default."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ArgumentError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.temperature is not None and not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ArgumentError(f"temperature must be at least 0, got {self.temperature}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ArgumentError(f"top_p must be in (0, 1], got {self.top_p}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where the target answers and how patient to be with it."""

    url: str
    """Base, with or without ``/v1``."""
    model: str
    """The name under which the server knows the target."""
    generation: Generation = field(default_factory=Generation)
    retries: int = 6
    """Further attempts after the first, for timeouts, 429 and 5xx."""
    first_pause_s: float = 0.5
    """Pause before the second attempt; doubles each time."""
    timeout_s: float = 600.0
    """For one answer."""
    api_key: str | None = None
    """Bearer token; None takes ``OPENAI_API_KEY`` if it is set."""

    def client(self, transport: Any = None, connections: int = 100) -> Any:
        """An `httpx.AsyncClient` for this endpoint, to be closed by the caller; `transport` replaces the network.

        Raises:
            ArgumentError: httpx is not installed, or the URL is none.
        """
        httpx = _httpx()
        key = self.api_key or os.environ.get("OPENAI_API_KEY")
        if not self.url.startswith(("http://", "https://")):
            raise ArgumentError(f"--endpoint must begin with http:// or https://, got {self.url!r}")
        base = self.url.rstrip("/")
        return httpx.AsyncClient(
            base_url=base if base.endswith("/v1") else f"{base}/v1",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(self.timeout_s, connect=min(30.0, self.timeout_s)),
            limits=httpx.Limits(max_connections=connections),
            transport=transport,
        )

    async def ask(self, client: Any, question: Question) -> Answer:
        """One answer.

        Raises:
            DataError: the endpoint refuses this question; others may pass.
            EndpointError: it cannot be reached, stays busy, or refuses all questions.
        """
        path = "/chat/completions" if question.messages else "/completions"
        response = await self._post(client, path, self._body(question))
        try:
            choice = response.json()["choices"][0]
            message = choice["message"] if question.messages else choice
            text = message["content" if question.messages else "text"] or ""
            thought = message.get("reasoning_content") or message.get("reasoning") or ""
            truncated = choice.get("finish_reason") == "length"
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise EndpointError(
                f"{self.url}{path} answered something that is no OpenAI response: {response.text[:200]!r}"
            ) from error
        if question.messages and not text and not truncated:
            raise DataError("the endpoint's answer has no text")
        return Answer(text=text, truncated=truncated, reasoning=thought if isinstance(thought, str) else "")

    def _body(self, question: Question) -> dict[str, Any]:
        generation = self.generation
        wishes: dict[str, Any] = {
            "temperature": generation.temperature,
            "top_p": generation.top_p,
            "seed": question.seed,
            "tools": [dict(tool) for tool in question.tools] or None,
        }
        said: dict[str, Any] = (
            {"messages": list(question.messages)} if question.messages else {"prompt": question.prompt}
        )
        given = {key: value for key, value in wishes.items() if value is not None}
        return {"model": self.model, "max_tokens": generation.max_tokens, **said, **given}

    async def _post(self, client: Any, path: str, body: dict[str, Any]) -> Any:
        httpx = _httpx()
        attempt = 0
        while True:
            response = None
            try:
                response = await client.post(path, json=body)
                trouble = f"status {response.status_code}: {response.text[:300]}"
            except httpx.TransportError as error:
                trouble = f"{type(error).__name__}: {error}"
            if response is not None and response.is_success:
                return response
            if response is not None and response.status_code < 500 and response.status_code not in BUSY:
                kind = DataError if response.status_code in UNFIT else EndpointError
                raise kind(f"{self.url} refused the request with {trouble}")
            if attempt == self.retries:
                raise EndpointError(f"{self.url} failed {attempt + 1} times, the last with {trouble}")
            await asyncio.sleep(self._pause(attempt, response))
            attempt += 1

    def _pause(self, attempt: int, response: Any) -> float:
        """Seconds to wait: what the server asks for, else twice as long each time, not all clients at once."""
        asked = response.headers.get("Retry-After", "") if response is not None else ""
        try:
            wanted = float(asked)
        except ValueError:
            wanted = self.first_pause_s * 2**attempt * random.uniform(0.5, 1.0)
        return min(max(wanted, 0.0), LONGEST_PAUSE_S)


def _httpx() -> Any:
    try:
        return importlib.import_module("httpx")
    except ImportError as error:
        raise ArgumentError("an endpoint needs httpx; install it with: pip install 'forerun[train]'") from error
