"""Loading, limits, disconnects, draining and metrics."""

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun import AsyncLLM
from forerun.errors import CheckpointError
from forerun.serve import guards
from forerun.serve.session import Session, State
from forerun.serve.settings import ServeSettings
from serve.conftest import NAME, Live, counters, serving, wait_for


def test_the_counters_add_up(live: Live) -> None:
    before = counters(live)
    body = {"prompt": "the cat", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    stats = live.post("/v1/completions", body).json()["metrics"]["speculative_decoding"]
    after = counters(live)

    def grown(name: str, labels: str = "") -> float:
        return after[f"vllm:{name}{{{labels}}}"] - before.get(f"vllm:{name}{{{labels}}}", 0.0)

    assert grown("generation_tokens_total") == 12
    assert grown("request_success_total", 'finished_reason="length"') == 1
    assert grown("spec_decode_num_drafts_total") == stats["num_spec_steps"]
    assert grown("spec_decode_num_draft_tokens_total") == stats["num_draft_tokens"]
    assert grown("spec_decode_num_accepted_tokens_total") == stats["num_accepted_draft_tokens"]
    positions = [name for name in after if name.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total")]
    assert positions and grown("time_to_first_token_seconds_count") == 1
    assert after["vllm:num_requests_running{}"] == 0


def test_a_full_queue_is_a_429(checkpoint: Path) -> None:
    with serving(checkpoint, max_queue=2) as small:
        guards.CLIENT.set(guards.Client(name="somebody", domain=None))
        with small.session.admitted(1):
            answer = small.post("/v1/completions", {"prompt": "x", "n": 2})
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "queue_full"


def test_what_no_queue_could_ever_hold_is_a_400(checkpoint: Path) -> None:
    """A 429 would invite to try again."""
    messages = [{"role": "user", "content": "x"}]
    with serving(checkpoint, max_queue=2) as small:
        assert small.post("/v1/completions", {"prompt": "x", "n": 3}).json()["error"]["param"] == "prompt"
        assert small.post("/v1/completions", {"prompt": ["x"] * 3}).json()["error"]["param"] == "prompt"
        assert small.post("/v1/chat/completions", {"messages": messages, "n": 3}).json()["error"]["param"] == "n"
        assert small.post("/v1/completions", {"prompt": "x", "n": 2, "max_tokens": 1}).status_code == 200
    for keys, most in (((), 30), (("one",), 30), (("one", "two"), 15)):
        assert ServeSettings(max_queue=40, api_keys=keys).most_answers == most


def test_not_ready_is_a_503(checkpoint: Path) -> None:
    session = Session(ServeSettings(model_names=(NAME,)), lambda: AsyncLLM(str(checkpoint / "nothing")))
    with pytest.raises(Exception, match="loading"):
        _ = session.engine
    asyncio.run(session.start())
    assert session.state is State.FAILED
    with pytest.raises(Exception, match="failed") as caught:
        _ = session.engine
    assert caught.value.status == 503
    assert issubclass(CheckpointError, Exception)


def test_a_frozen_engine_is_not_ready(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is frozen at: a step, or a request that it takes in; and until that ends."""
    with serving(checkpoint, step_timeout_s=0.2) as live:
        for where in ("step", "add"):
            thawed, answers, engine = threading.Event(), list[httpx.Response](), live.llm.engine
            real = getattr(engine, where)

            def frozen(*given: Any, thawed: threading.Event = thawed, real: Callable[..., Any] = real) -> Any:
                thawed.wait(20)
                return real(*given)

            monkeypatch.setattr(engine, where, frozen)
            ask = partial(live.post, "/v1/completions", {"prompt": "the", "max_tokens": 3, "ignore_eos": True})
            thread = threading.Thread(target=lambda ask=ask, answers=answers: answers.append(ask()))
            thread.start()
            wait_for(lambda: live.get("/health").status_code == 503)
            assert live.get("/health").json() == {"status": "frozen"}
            refused = live.post("/v1/completions", {"prompt": "the"})
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "frozen"
            monkeypatch.setattr(engine, where, real)
            thawed.set()
            thread.join()
            assert answers[0].status_code == 200
            wait_for(lambda: live.get("/health").status_code == 200)


def test_a_long_prompt_is_not_frozen(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps together take longer than one may."""

    def in_pieces() -> AsyncLLM:
        return AsyncLLM(str(checkpoint), dtype="float32", max_model_len=200, max_num_batched_tokens=32)

    with serving(in_pieces, step_timeout_s=1.5) as live:
        engine, seen = live.llm.engine, set[str]()
        real = engine.step

        def slow() -> Any:
            time.sleep(0.3)
            seen.add(live.session.health.value)
            return real()

        monkeypatch.setattr(engine, "step", slow)
        answer = live.post("/v1/completions", {"prompt": [7] * 190, "max_tokens": 3, "ignore_eos": True})
        assert answer.status_code == 200 and seen == {"ready"}
