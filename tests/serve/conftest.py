"""A live server on a tiny model, and the official client that talks to it."""

from __future__ import annotations

import json
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
from forerun.types import CompletionOutput, OutputToken, RequestOutput, SpeculationStats, StreamChunk

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
    `also`: aliases of the model."""
    wanted = ServeSettings(model_names=(NAME,), **settings)

    def tiny() -> AsyncLLM:
        return AsyncLLM(str(model), speculative_config=speculative, dtype="float32", max_num_seqs=4, max_model_len=200)

    session = Session(wanted, model if callable(model) else tiny, also)
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


def sent(text: str) -> list[Any]:
    """The events of a stream."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def both(live: Live, **asked: Any) -> Any:
    """A whole answer of a chat; the same was streamed, and said the same in every choice."""
    asked = {"model": NAME, **asked}
    with live.client() as client:
        whole = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    usage = chunks[-1].usage
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.completion_tokens_details == whole.usage.completion_tokens_details
    for choice in whole.choices:
        message, own = choice.message, [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        calls, thoughts = list[Any](), [(one.delta.model_extra or {}).get("reasoning_content", "") for one in own]
        for call in (call for one in own for call in one.delta.tool_calls or []):
            if call.id is not None:
                assert call.index == len(calls) and call.type == "function"
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
        assert calls == [[call.function.name, call.function.arguments] for call in message.tool_calls or []]
        assert "".join(one.delta.content or "" for one in own) == (message.content or "")
        assert "".join(thoughts) == message.model_extra.get("reasoning_content", "")
        assert message.model_extra.get("reasoning_content") == message.model_extra.get("reasoning")
        assert [one.delta.role for one in own if one.delta.role] == ["assistant"]
        assert [one.finish_reason for one in own if one.finish_reason] == [choice.finish_reason]
    return whole


def stream_chunk(text: str = "", **more: Any) -> StreamChunk:
    """What a step added to an answer."""
    nothing = {"request_id": "r", "index": 0, "tokens": [], "trace": None, "finish_reason": None}
    return StreamChunk(text=text, **{**nothing, **more})


def output(*answers: list[OutputToken] | list[int], ended: str = "stop", **stats: Any) -> RequestOutput:
    """The whole result of a request with these answers, of tokens or of their ids alone."""
    made = [
        CompletionOutput(
            **{"index": index, "text": "".join(getattr(token, "text", "") for token in tokens)},
            token_ids=[getattr(token, "id", token) for token in tokens],
            **{"tokens": [token for token in tokens if isinstance(token, OutputToken)], "finish_reason": ended},
            **{"stop_reason": None, "speculation": SpeculationStats(**stats)},
        )
        for index, tokens in enumerate(answers)
    ]
    return RequestOutput(request_id="r", prompt=None, prompt_token_ids=[1, 2, 3], outputs=made, finished=True)


def _wait_until_ready(live: Live) -> None:
    for _ in range(2400):
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


TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{# <tool_call> #}"
    "{% for m in messages %}{{ m.role + ': ' }}"
    "{% if m.reasoning_content %}{{ '(' + m.reasoning_content + ')' }}{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments.unit }}{% endfor %}"
    "{{ '' if loop.last and not add_generation_prompt else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Of a model that calls tools."""
EFFORT = "{% if reasoning_effort %}{{ 'effort ' + reasoning_effort + '\n' }}{% endif %}"


@pytest.fixture(scope="session")
def templated(checkpoint: Path, draft_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with a template that knows tools and efforts, and a draft model."""
    folder = with_template(checkpoint, tmp_path_factory.mktemp("templated"), EFFORT + TEMPLATE)
    drafter = {"method": "draft_model", "model": str(draft_checkpoint), "num_speculative_tokens": 4}
    with serving(folder, speculative=drafter, max_tokens=150, max_n=3) as running:
        yield running


@pytest.fixture
def official(templated: Live) -> Iterator[OpenAI]:
    """OpenAI's client of `templated`."""
    with templated.client() as client:
        yield client


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
