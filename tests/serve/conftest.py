"""A live server on a tiny model, and the official client that talks to it."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from transformers import AutoTokenizer

from engine.conftest import checkpoint, draft_checkpoint
from forerun import LLM, AsyncLLM
from forerun.serve import server as http_server
from forerun.serve.session import Session
from forerun.serve.settings import ServeSettings

if TYPE_CHECKING:
    from openai import OpenAI

__all__ = ["checkpoint", "draft_checkpoint"]
NAME = "tiny"


@dataclass(frozen=True)
class Live:
    """A server that runs."""

    url: str
    session: Session
    verify: ssl.SSLContext | bool = True
    """Whom to trust where the server speaks HTTPS."""

    @property
    def llm(self) -> LLM:
        return self.session.engine.llm

    def client(self, key: str = "none") -> OpenAI:
        from openai import OpenAI  # which tests on a device do without

        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=30, verify=self.verify, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, verify=self.verify, **more)


@contextmanager
def serving(
    model: Path | Callable[[], AsyncLLM],
    *,
    speculative: dict[str, Any] | None = None,
    send_buffer: int | None = None,
    verify: ssl.SSLContext | bool = True,
    also: tuple[str, ...] = (),
    **settings: Any,
) -> Iterator[Live]:
    """A server in a thread of its own until the block ends; `send_buffer`: bytes that the kernel keeps of an answer;
    `also`: further names of the model."""
    wanted = ServeSettings(model_names=(NAME, *also), **settings)

    def tiny() -> AsyncLLM:
        return AsyncLLM(str(model), speculative_config=speculative, dtype="float32", max_num_seqs=4, max_model_len=200)

    session = Session(wanted, model if callable(model) else tiny)
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    port = listener.getsockname()[1]
    server = http_server.server(session, host="127.0.0.1", port=port)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    scheme = "http" if wanted.ssl_certfile is None else "https"
    live = Live(f"{scheme}://127.0.0.1:{port}", session, verify)
    _wait_until_ready(live)
    try:
        yield live
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive()


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Until it holds; an assertion fails where it never does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def counters(live: Live) -> dict[str, float]:
    """Metric with labels but the model's -> value."""
    found = {}
    for line in live.get("/metrics").text.splitlines():
        match = re.fullmatch(r"((?:vllm|forerun):\w+)\{(.*?)\} (\S+)", line)
        if match:
            labels = ",".join(part for part in match[2].split(",") if not part.startswith("model_name"))
            found[f"{match[1]}{{{labels}}}"] = float(match[3])
    return found


def _wait_until_ready(live: Live) -> None:
    for _ in range(600):
        try:
            if live.get("/health").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    raise AssertionError("the server did not come up")


def with_template(checkpoint: Path, folder: Path, template: str) -> Path:
    """A copy of a checkpoint with another chat template."""
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def live(checkpoint: Path, draft_checkpoint: Path) -> Iterator[Live]:
    """A server with a draft model that drafts the same at every step."""
    drafter = {"method": "draft_model", "model": str(draft_checkpoint), "num_speculative_tokens": 4, "adaptive": False}
    limits = {"max_queue": 32, "max_n": 3, "max_tokens": 64, "stream_buffer": 64}
    with serving(checkpoint, speculative=drafter, allow_traces=True, **limits) as running:
        yield running


@pytest.fixture
def client(live: Live) -> OpenAI:
    return live.client()
