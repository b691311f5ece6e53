"""A server that has answered thousands of requests holds no more objects than one that has answered a few."""

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.conftest import Live, serving, wait_for

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": "x", "max_tokens": 4}),
    (TEXT, {"prompt": ["x", "y"], "max_tokens": 3, "n": 2, "temperature": 0.8}),
    (TEXT, {"prompt": "x", "max_tokens": 4, "logprobs": 2, "stop": ["e"], "bad_words": ["a b"]}),
    (TEXT, {"prompt": "x", "max_tokens": 4, "structured_outputs": {"choice": ["yes", "no"]}}),
    (TEXT, {"prompt": "x", "max_tokens": 4, "speculative": {"enabled": False}}),
    (TEXT, {"prompt": "x", "max_tokens": 4, "stream": True}),
    (CHAT, ASK),
    (CHAT, {**ASK, "stream": True, "user": "someone", "logit_bias": {"5": 1}}),
    (TEXT, {"prompt": "x", "frobnicate": 1}),
    (TEXT, {"prompt": "x", "temperature": -1}),
    (TEXT, {"prompt": "x", "structured_outputs": {"regex": "("}}),
    ("/tokenize", {"prompt": "x"}),
    ("/nowhere", {}),
]
KEY = "secret"
ROUNDS = 8
MOST = 60
"""Objects that may be left of `ROUNDS` x `REQUESTS`: half an object for each."""


@pytest.fixture(scope="module")
def own(checkpoint: Path) -> Iterator[Live]:
    """With a key: without one each request is a domain of its own, of which a drafter remembers the last 256."""
    drafter = {"method": "ngram", "num_speculative_tokens": 3}
    with serving(checkpoint, speculative=drafter, max_queue=32, api_keys=(KEY,)) as live:
        yield live


def ask(live: Live, client: httpx.Client, rounds: int) -> None:
    others = cancelled_timers()
    for _ in range(rounds):
        for path, body in REQUESTS:
            assert client.post(path, json=body).status_code in (200, 400, 404)
        with client.stream("POST", TEXT, json={"prompt": "x", "max_tokens": 100, "stream": True}) as left:
            next(left.iter_raw())
    wait_for(lambda: "num_requests_running" in live.get("/metrics").text and not running(live))
    wait_for(lambda: not cancelled_timers() - others, seconds=60)


def running(live: Live) -> float:
    lines = live.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))


def cancelled_timers() -> set[int]:
    """asyncio keeps a cancelled timer, and with it the request that it was set in, until its time has come: each answer
    sets one of some seconds that would close its connection. Servers of other tests in this process may hold theirs for
    longer, so a test waits for those of its own requests."""
    return {id(one) for one in gc.get_objects() if type(one) is asyncio.TimerHandle and one.cancelled()}


def held() -> Counter[str]:
    gc.collect()
    return Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())


def test_requests_leave_nothing_behind(own: Live) -> None:
    with httpx.Client(base_url=own.url, timeout=30, headers={"authorization": f"Bearer {KEY}"}) as client:
        ask(own, client, ROUNDS)
        before = held()
        ask(own, client, ROUNDS)
        after = held()
    more = {name: count - before[name] for name, count in after.items() if abs(count - before[name]) > 3}
    assert sum(after.values()) - sum(before.values()) <= MOST, json.dumps(more, indent=1)
