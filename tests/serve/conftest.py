"""A live server on a tiny model, and the official client that talks to it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from openai import OpenAI

from engine.conftest import checkpoint, draft_checkpoint
from forerun import AsyncLLM
from forerun.serve.app import build_app
from forerun.serve.session import Session
from forerun.serve.settings import ServeSettings

__all__ = ["checkpoint", "draft_checkpoint"]
NAME = "tiny"


@dataclass(frozen=True)
class Live:
    """A server that runs."""

    url: str
    session: Session

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=30, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **more)


@contextmanager
def serving(model: Path, *, speculative: dict[str, Any] | None = None, **settings: Any) -> Iterator[Live]:
    """A server in a thread of its own until the block ends."""
    wanted = ServeSettings(model_name=NAME, **settings)
    session = Session(
        wanted,
        lambda: AsyncLLM(
            str(model), speculative_config=speculative, dtype="float32", max_num_seqs=4, max_model_len=200
        ),
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(build_app(session), host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    live = Live(f"http://127.0.0.1:{port}", session)
    _wait_until_ready(live)
    try:
        yield live
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive()


def _wait_until_ready(live: Live) -> None:
    for _ in range(600):
        try:
            if live.get("/health").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    raise AssertionError("the server did not come up")


@pytest.fixture(scope="session")
def live(checkpoint: Path, draft_checkpoint: Path) -> Iterator[Live]:
    """A server with a draft model."""
    drafter = {"method": "draft_model", "model": str(draft_checkpoint), "num_speculative_tokens": 4}
    with serving(checkpoint, speculative=drafter, max_queue=32, max_n=3, max_tokens=64, stream_buffer=64) as running:
        yield running


@pytest.fixture
def client(live: Live) -> OpenAI:
    return live.client()
