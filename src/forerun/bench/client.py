"""One streamed request to an OpenAI-compatible server, timed chunk by chunk."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.bench.counters import Samples, Speculation, parse, told
from forerun.bench.workloads import Task
from forerun.errors import ArgumentError, ForerunError
from forerun.training.data.records import Message


class ServerError(ForerunError, ConnectionError):
    """A server cannot be measured: it is not there, refuses everything, or is no OpenAI-compatible one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What became of one question."""

    task: str
    category: str
    sent_s: float
    """When it was sent, since the measurement began."""
    ttft_s: float | None = None
    """Until the first text; None: there was none."""
    gaps_s: tuple[float, ...] = ()
    """Between chunks of text that follow each other; a chunk may hold several tokens."""
    seconds: float = 0.0
    """Until the end."""
    prompt_tokens: int = 0
    tokens: int = 0
    """As the server counted them; its chunks, where it does not say."""
    counted: bool = True
    """Whether the server said how many."""
    text: str = ""
    speculation: Speculation | None = None
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token behind the first; None for less than two tokens."""
        if self.ttft_s is None or self.tokens < 2:
            return None
        return (self.seconds - self.ttft_s) / (self.tokens - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asking:
    """How every request is made."""

    endpoint: str = "auto"
    """``chat``, ``completions``, or what a task calls for."""
    max_tokens: int = 256
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the body: temperature, top_p, seed, ..."""
    timeout_s: float = 600.0


class Server:
    """A server's address, and what is asked of it; open it with ``async with``."""

    def __init__(
        self, url: str, *, model: str | None = None, api_key: str | None = None, metrics_url: str | None = None
    ) -> None:
        try:
            import httpx
        except ImportError as error:
            raise ArgumentError("forerun bench needs httpx: pip install 'forerun[bench]'") from error
        if not url.startswith(("http://", "https://")):
            raise ArgumentError(f"a server's address begins with http:// or https://, got {url!r}")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model, self.metrics_url = model, metrics_url or f"{self.url}/metrics"
        self.engine = ""
        """Who made the model list: vllm, sglang, llamacpp, forerun, ...; empty before the server was opened."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=30.0)

    async def __aenter__(self) -> Server:
        """Ask which models there are. ServerError: nobody answers there, or not as OpenAI does; ArgumentError: not the
        model that was asked for, or several and none was."""
        try:
            models = await self._models()
            if self.model is None and len(models) > 1:
                raise ArgumentError(f"{self.url} serves {', '.join(models)}; say which with --model")
            self.model = self.model or next(iter(models), None)
            if self.model not in models:
                raise ArgumentError(f"{self.url} serves {', '.join(models) or 'no model'}, not {self.model}")
            self.engine = models[self.model]
        except BaseException:
            await self._client.aclose()
            raise
        return self

    async def _models(self) -> dict[str, str]:
        """Each with who made it."""
        import httpx

        try:
            response = await self._client.get(f"{self.url}/v1/models")
        except httpx.HTTPError as error:
            raise ServerError(
                f"no server answers at {self.url} ({error or type(error).__name__}); is it up?"
            ) from error
        if response.status_code != 200:
            raise ServerError(f"{self.url}/v1/models answered {response.status_code}: {complaint(response.text)}")
        try:
            return {str(one["id"]): str(one.get("owned_by", "")) for one in response.json()["data"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ServerError(f"{self.url}/v1/models answered what is no model list: {response.text[:200]}") from error

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def metrics(self) -> Samples:
        """What the server counts, now; nothing where it has no metrics."""
        import httpx

        try:
            response = await self._client.get(self.metrics_url, follow_redirects=True)
            return parse(response.text) if response.status_code == 200 else {}
        except (httpx.HTTPError, ValueError):
            return {}

    async def ask(
        self, task: Task, asking: Asking, began: float, before: Sequence[Message] = (), question: Sequence[Message] = ()
    ) -> Answer:
        """Send one question behind the conversation `before`, at a clock that `began` then; whatever goes wrong is in
        the answer. A task without questions is a text to be continued."""
        import httpx

        chat = asking.endpoint == "chat" or (asking.endpoint == "auto" and bool(question))
        if chat:
            asked: dict[str, Any] = {"messages": [*before, *question] or [{"role": "user", "content": task.text}]}
        else:
            asked = {"prompt": task.prompt()}
        body = {"model": self.model, **asked, "max_tokens": asking.max_tokens, **asking.sampling}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        path = f"{self.url}/v1/{'chat/completions' if chat else 'completions'}"
        started = time.perf_counter()
        heard = _Heard(started)
        try:
            timeout = httpx.Timeout(asking.timeout_s, connect=30.0)
            async with self._client.stream("POST", path, json=body, timeout=timeout) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode("utf-8", "replace")
                    heard.error = f"status {response.status_code}: {complaint(text)}"
                else:
                    await heard.listen(response.aiter_lines())
        except httpx.TimeoutException:
            heard.error = f"no answer for {asking.timeout_s:g} s"
        except httpx.HTTPError as error:
            heard.error = f"the connection broke: {error or type(error).__name__}"
        return heard.answer(task, started - began)


class _Heard:
    """What a stream said so far."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.error: str | None = None
        self.times: list[float] = []
        self.texts: list[str] = []
        self.usage: Mapping[str, Any] = {}
        self.last: dict[str, Any] = {}
        self.ended = False

    async def listen(self, lines: AsyncIterator[str]) -> None:
        async for line in lines:
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                self.ended = True
                return
            try:
                chunk = json.loads(data)
            except ValueError:
                self.error = f"a chunk is no JSON: {data[:100]}"
                return
            if "error" in chunk:
                self.error = complaint(data)
                return
            self.hear(chunk)

    def hear(self, chunk: Mapping[str, Any]) -> None:
        """Note a chunk's text and time, and what it counts."""
        self.usage = chunk.get("usage") or self.usage
        self.last |= {key: chunk[key] for key in ("metrics", "timings") if chunk.get(key)}
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            said = (
                delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or choice.get("text")
            )
            if said:
                self.times.append(time.perf_counter() - self.started)
                self.texts.append(said)

    def answer(self, task: Task, sent: float) -> Answer:
        seconds = time.perf_counter() - self.started
        if self.error is None and not self.ended:
            self.error = "the stream ended before [DONE]"
        tokens = self.usage.get("completion_tokens")
        found = int(len(self.times) if tokens is None else tokens)
        return Answer(
            task=task.id,
            category=task.category,
            sent_s=sent,
            ttft_s=self.times[0] if self.times else None,
            gaps_s=tuple(later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)),
            seconds=seconds,
            prompt_tokens=int(self.usage.get("prompt_tokens") or 0),
            tokens=found,
            counted=tokens is not None,
            text="".join(self.texts),
            speculation=told(self.last, found),
            error=self.error,
        )


def complaint(text: str) -> str:
    """What an error's body says, as OpenAI, vLLM, SGLang and llama.cpp spell it."""
    try:
        said = json.loads(text)
    except ValueError:
        return text.strip()[:200] or "nothing more"
    inner = said.get("error", said) if isinstance(said, dict) else said
    message = inner.get("message") or inner.get("detail") if isinstance(inner, dict) else inner
    return str(message or said)[:300]
