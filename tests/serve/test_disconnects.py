"""Clients that leave in the middle, many at once: the others notice nothing, and no row stays taken."""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from typing import Any

import httpx

from serve.conftest import Live, counters, wait_for

TEXT = "/v1/completions"
PROMPTS = ("the cat sat on", "the dog", "a log and a mat", "on the mat and")


def body(prompt: str, tokens: int = 40, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def leave(live: Live, seed: int) -> None:
    """Asks in one of several ways and goes at a moment of its own."""
    choose = random.Random(seed)
    chosen = choose.choice(({"enabled": False}, {"drafter": "ngram"}, {"num_speculative_tokens": 2}, None))
    asked = body(choose.choice(PROMPTS), 64, n=choose.randint(1, 3), stream=bool(seed % 2))
    if chosen is not None:
        asked["speculative"] = chosen
    if not asked["stream"]:
        with suppress(httpx.TimeoutException):
            httpx.post(live.url + TEXT, json=asked, timeout=httpx.Timeout(30, read=0.01 + 0.1 * choose.random()))
        return
    with httpx.stream("POST", live.url + TEXT, json=asked, timeout=30) as answer:
        for _, _ in zip(answer.iter_raw(), range(choose.randint(0, 4)), strict=False):
            pass


def test_others_leave_and_nobody_else_notices(live: Live) -> None:
    alone = {prompt: live.post(TEXT, body(prompt)).json()["choices"][0]["text"] for prompt in PROMPTS}
    before = counters(live)
    found = list[tuple[str, str]]()

    def stay(prompt: str) -> None:
        for _ in range(3):
            answer = live.post(TEXT, body(prompt))
            while answer.status_code == 429:
                answer = live.post(TEXT, body(prompt))
            found.append((prompt, answer.json()["choices"][0]["text"]))

    staying = [threading.Thread(target=stay, args=(prompt,)) for prompt in PROMPTS]
    leaving = [threading.Thread(target=leave, args=(live, seed)) for seed in range(16)]
    for thread in (*staying, *leaving):
        thread.start()
    for thread in (*staying, *leaving):
        thread.join(timeout=60)
    assert len(found) == 3 * len(PROMPTS) and all(text == alone[prompt] for prompt, text in found)
    wait_for(lambda: live.session.in_flight == 0 and not live.session.engine.llm.engine.busy)

    def grown(name: str) -> float:
        return sum(value - before.get(key, 0.0) for key, value in counters(live).items() if key.startswith(name))

    assert grown('vllm:request_success_total{finished_reason="abort"') > 0
    wait_for(lambda: grown("forerun:answers_admitted_total") == grown("vllm:request_success_total"))


def test_all_leave_at_once(live: Live) -> None:
    with httpx.Client(timeout=30) as client:
        opened = [
            client.send(client.build_request("POST", live.url + TEXT, json=body("the", 60, stream=True)), stream=True)
            for _ in range(10)
        ]
        for answer in opened:
            answer.close()
    wait_for(lambda: live.session.in_flight == 0 and not live.session.engine.llm.engine.busy)
    assert live.post(TEXT, body("the", 3)).status_code == 200
