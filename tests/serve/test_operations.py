"""Loading, limits, disconnects, draining and metrics."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from forerun import AsyncLLM
from forerun.errors import CheckpointError
from forerun.serve.session import Session, State
from forerun.serve.settings import ServeSettings
from ports import free_ports
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


def test_a_client_that_leaves_frees_its_row(live: Live) -> None:
    body = {"prompt": "the", "max_tokens": 64, "ignore_eos": True, "stream": True, "n": 3}
    with httpx.stream("POST", live.url + "/v1/completions", json=body, timeout=30) as answer:
        next(answer.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(live.url + "/v1/completions", json={**body, "stream": False, "n": 3}, timeout=0.02)
    wait_for(lambda: live.session.in_flight == 0 and not live.session.engine.llm.engine.busy)
    assert live.session.engine.llm.target.lengths == [0] * 4


def test_a_full_queue_is_a_429(checkpoint: Path) -> None:
    with serving(checkpoint, max_queue=2) as small:
        answer = small.post("/v1/completions", {"prompt": "x", "n": 3})
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "queue_full"


def test_running_requests_are_finished_before_the_end(checkpoint: Path) -> None:
    answers = list[httpx.Response]()
    with serving(checkpoint, drain_s=20) as live:
        body = {"prompt": "the", "max_tokens": 150, "ignore_eos": True}
        thread = threading.Thread(target=lambda: answers.append(live.post("/v1/completions", body)))
        thread.start()
        wait_for(lambda: live.session.in_flight > 0)
    thread.join()
    assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 150


def test_not_ready_is_a_503(checkpoint: Path) -> None:
    session = Session(ServeSettings(model_name=NAME), lambda: AsyncLLM(str(checkpoint / "nothing")))
    with pytest.raises(Exception, match="loading"):
        _ = session.engine
    asyncio.run(session.start())
    assert session.state is State.FAILED
    with pytest.raises(Exception, match="failed") as caught:
        _ = session.engine
    assert caught.value.status == 503  # type: ignore[attr-defined]
    assert issubclass(CheckpointError, Exception)


def test_sigterm_drains_and_ends_with_zero(checkpoint: Path) -> None:
    [port] = free_ports(1)
    command = [sys.executable, "-m", "forerun.cli", "serve", str(checkpoint), "--port", str(port)]
    server = subprocess.Popen([*command, "--dtype", "float32"], stderr=subprocess.PIPE, text=True)
    url, answers = f"http://127.0.0.1:{port}", list[httpx.Response]()
    try:
        wait_for(lambda: _health(url) == 200, seconds=60)
        body = {"prompt": "the", "max_tokens": 150, "ignore_eos": True, "n": 4}
        thread = threading.Thread(target=lambda: answers.append(httpx.post(url + "/v1/completions", json=body)))
        thread.start()
        wait_for(lambda: "num_requests_running" in (text := httpx.get(url + "/metrics").text) and "} 4.0" in text)
        server.send_signal(signal.SIGTERM)
        thread.join()
        assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 600
        assert server.wait(timeout=30) == 0
    finally:
        server.kill()
        server.communicate()


def _health(url: str) -> int:
    try:
        return httpx.get(url + "/health").status_code
    except httpx.HTTPError:
        return 0
