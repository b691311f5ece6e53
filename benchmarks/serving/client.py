"""A closed-loop client: so many requests in flight, each streamed, timed and counted by the server's own usage.

``python client.py URL CLIENTS``: a line in is a list of bodies, a line out what all their answers made together.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """One request."""

    tokens: int
    """As the server counted them."""
    first_s: float
    """Until the first text."""
    seconds: float
    """Until the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a number of clients got."""

    answers: Sequence[Answered]
    seconds: float
    """From the first request to the last answer."""

    @property
    def tokens_per_second(self) -> float:
        """Of all clients together, prompts included in the time."""
        return sum(answer.tokens for answer in self.answers) / self.seconds

    @property
    def first_ms(self) -> float:
        """Median time to the first text, ms."""
        found = sorted(answer.first_s for answer in self.answers)
        return 1e3 * found[len(found) // 2]


def drive(url: str, bodies: Sequence[Mapping[str, Any]], clients: int) -> Load:
    """Send all bodies to ``/v1/completions``, `clients` at a time."""
    return asyncio.run(_drive(url, bodies, clients))


async def _drive(url: str, bodies: Sequence[Mapping[str, Any]], clients: int) -> Load:
    waiting, answers = list(reversed(bodies)), list[Answered]()
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:

        async def client() -> None:
            while waiting:
                answers.append(await _ask(http, waiting.pop()))

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        return Load(answers=answers, seconds=time.perf_counter() - began)


async def _ask(http: httpx.AsyncClient, body: Mapping[str, Any]) -> Answered:
    began, first, tokens = time.perf_counter(), 0.0, 0
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/completions", json=asked) as response:
        if response.status_code != 200:
            raise SystemExit(f"{response.url}: {response.status_code} {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if not first and chunk.get("choices"):
                first = time.perf_counter() - began
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    return Answered(tokens=tokens, first_s=first, seconds=time.perf_counter() - began)


if __name__ == "__main__":
    for line in sys.stdin:
        load = drive(sys.argv[1], json.loads(line), int(sys.argv[2]))
        sys.stdout.write(json.dumps({"tokens_per_second": load.tokens_per_second, "first_ms": load.first_ms}) + "\n")
        sys.stdout.flush()
