"""A closed-loop client: so many requests in flight, each streamed, timed and counted by the server's own usage.

``python client.py URL CLIENTS``: a line in is a list of bodies, a line out what all their answers made together. It
shares the cores with the server, so it does little: a chunk takes `http.client` 0.2 ms, httpx 0.7.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit


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

    @property
    def tpot_ms(self) -> float:
        """Time per output token after the first, ms: prompts are not in it."""
        decoding = sum(answer.seconds - answer.first_s for answer in self.answers)
        return 1e3 * decoding / sum(answer.tokens - 1 for answer in self.answers)


def drive(url: str, bodies: Sequence[Mapping[str, Any]], clients: int) -> Load:
    """Send all bodies to ``/v1/completions``, `clients` at a time."""
    waiting = iter(bodies)

    def client(_: int) -> list[Answered]:
        with closing(HTTPConnection(urlsplit(url).netloc, timeout=600)) as connection:
            return [_ask(connection, body) for body in waiting]

    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = [answer for found in pool.map(client, range(clients)) for answer in found]
    return Load(answers=answers, seconds=time.perf_counter() - began)


def _ask(connection: HTTPConnection, body: Mapping[str, Any]) -> Answered:
    began, first, tokens = time.perf_counter(), 0.0, 0
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{connection.host}: {response.status} {response.read().decode()}")
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line.removeprefix(b"data: "))
        if not first and chunk.get("choices"):
            first = time.perf_counter() - began
        tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    return Answered(tokens=tokens, first_s=first, seconds=time.perf_counter() - began)


if __name__ == "__main__":
    for line in sys.stdin:
        load = drive(sys.argv[1], json.loads(line), int(sys.argv[2]))
        sys.stdout.write(json.dumps({"tokens_per_second": load.tokens_per_second, "first_ms": load.first_ms}) + "\n")
        sys.stdout.flush()
