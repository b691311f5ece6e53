"""Clients that leave in the middle, many at once: the others notice nothing, and no row stays taken."""

import random
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun.engine.prompts import LARGE
from forerun.serve import guards
from serve.conftest import Live, counters, serving, wait_for
from serve.test_connections import connected, posted

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
    wait_for(lambda: live.session.in_flight == 0 and not live.llm.engine.busy)
    assert live.llm.target.lengths == [0] * 4, "the rows are free"

    def grown(name: str) -> float:
        return sum(value - before.get(key, 0.0) for key, value in counters(live).items() if key.startswith(name))

    assert grown('vllm:request_success_total{finished_reason="abort"') > 0
    wait_for(lambda: grown("forerun:answers_admitted_total") == grown("vllm:request_success_total"))


def test_who_leaves_before_the_first_token_gives_the_place_up(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While all rows are busy: nothing has been sent whose failure would tell that nobody is there."""
    messages, release = [{"role": "user", "content": "the cat"}], threading.Event()
    asked: list[tuple[str, dict[str, Any]]] = [
        (TEXT, {"prompt": ["the", "the cat"]}),
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/responses", {"input": "the cat"}),
        ("/v1/messages", {"messages": messages, "max_tokens": 9}),
    ]
    with serving(checkpoint) as live:
        engine = live.llm.engine
        step = engine.step
        monkeypatch.setattr(engine, "step", lambda: (release.wait(30), step())[1])
        for stream in (True, False):
            for path, more in asked:
                with connected(live) as leaving:
                    leaving.sendall(posted({**more, "stream": stream}, path))
                    wait_for(lambda: live.session.in_flight)
                wait_for(lambda: not live.session.in_flight)
        release.set()
        wait_for(lambda: not engine.busy)
        assert live.post(TEXT, body("the", 3)).status_code == 200


def test_what_waits_to_be_read_is_dropped_when_its_client_leaves(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, release, seen = guards.read_json, threading.Event(), list[int]()

    def slow(content: bytes) -> Any:
        seen.append(len(content))
        release.wait(30)
        return read(content)

    def ended() -> float:
        wanted = 'forerun:http_requests_total{route="/tokenize"'
        return sum(count for name, count in counters(live).items() if name.startswith(wanted))

    with serving(checkpoint) as live:
        monkeypatch.setattr(guards, "read_json", slow)
        for _ in range(3):
            with connected(live) as leaving:
                leaving.sendall(posted({"prompt": "the cat " * LARGE}, "/tokenize"))
                wait_for(lambda: seen)
        wait_for(lambda: ended() == 3)
        release.set()
        assert live.post("/tokenize", {"prompt": "the cat " * LARGE}).status_code == 400  # beyond the context
        assert len(seen) == 2, "one was being read, and the last one"
