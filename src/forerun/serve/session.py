"""The engine behind the routes: loading, admission, limits, draining. Knows requests and no HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from forerun import AsyncLLM
from forerun.drafters import DRAFTERS
from forerun.engine.adapting import AdaptationStats
from forerun.engine.llm import Speculative
from forerun.errors import ForerunError, NumericError
from forerun.serve.account import Account
from forerun.serve.adapting import AdaptationMetrics
from forerun.serve.metrics import Metrics
from forerun.serve.protocol.common import Speculation
from forerun.serve.protocol.errors import ApiError, bad_request
from forerun.serve.settings import ServeSettings
from forerun.types import RequestOutput, SamplingParams, StreamChunk

log = logging.getLogger(__name__)


class State(StrEnum):
    """Of a server."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    DRAINING = "draining"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One prompt to answer."""

    prompt: dict[str, Any]
    params: SamplingParams
    speculative: Speculative
    trace: bool = False
    timeout_s: float | None = None
    """From queueing to the end."""
    client: str | None = None
    """Rows are shared evenly among those who are named."""


class Session:
    """One model, served.

    Args:
        load: makes the engine; takes long, so it runs beside the event loop.
    """

    def __init__(self, settings: ServeSettings, load: Callable[[], AsyncLLM]) -> None:
        self.settings, self._load = settings, load
        self.state = State.LOADING
        self.in_flight = 0
        """Answers that wait or run."""
        self.metrics = Metrics(settings.model_name)
        self._engine: AsyncLLM | None = None
        self._watch()

    @property
    def engine(self) -> AsyncLLM:
        """The engine.

        Raises:
            ApiError: 503 while it is not there, or no longer.
        """
        if self._engine is None or self.state is not State.READY:
            raise ApiError(503, f"the server is {self.state.value}", code=self.state.value, retry_after_s=1)
        return self._engine

    async def start(self) -> None:
        """Load the model; `state` tells how it ended."""
        try:
            self._engine = await asyncio.to_thread(self._load)
        except ForerunError as error:
            self.state = State.FAILED
            log.error("%s", error)
            return
        if self.state is State.LOADING:
            self.state = State.READY
            log.info("serving %s", self.settings.model_name)

    async def drain(self) -> None:
        """Take no more requests and wait for the running ones, as long as the settings allow."""
        self.state = State.DRAINING
        end = asyncio.get_running_loop().time() + self.settings.drain_s
        while self.in_flight and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)
        if self.in_flight:
            log.warning("%d answers were cut off at the end of the drain time", self.in_flight)
        if self._engine is not None:
            await self._engine.close()

    @contextmanager
    def admitted(self, answers: int) -> Iterator[None]:
        """Room for so many answers while the block runs.

        Raises:
            ApiError: 429 where the queue is full.
        """
        if self.in_flight + answers > self.settings.max_queue:
            raise ApiError(
                429,
                f"{self.in_flight} answers wait or run, the server takes {self.settings.max_queue}; try again later",
                code="queue_full",
                retry_after_s=1,
            )
        self.in_flight += answers
        try:
            yield
        finally:
            self.in_flight -= answers

    async def answer(self, job: Job) -> AsyncGenerator[StreamChunk]:
        """The chunks of one request; leaving early frees its rows.

        Raises:
            ApiError: 400 for what the engine refuses.
        """
        limit = self.settings.stream_buffer
        stream = self.engine.stream(
            job.prompt,
            job.params,
            speculative=job.speculative,
            trace=job.trace,
            timeout_s=job.timeout_s,
            client=job.client,
            max_unread=limit,
        )
        account = self._account(job)
        begun = False
        try:
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    if chunk.output is not None:
                        account.finished(chunk.output)
                    begun = True
                    yield chunk
        except NumericError as error:
            account.failed(error)
            raise
        except (ForerunError, ValueError) as error:
            if begun:
                account.failed(error)
            else:
                account.refused()
            raise bad_request(str(error)) from error
        except Exception as error:
            account.failed(error)
            if self.state is State.DRAINING:
                raise ApiError(503, "the server was stopped", code=self.state.value) from error
            raise
        finally:
            account.close()

    def _account(self, job: Job) -> Account:
        own = self.engine.llm.speculative
        chosen = job.speculative["method"] if isinstance(job.speculative, dict) else None
        drafter = chosen or (own.method if job.speculative is None and own is not None else None)
        prompt = job.prompt if self.settings.log_prompts else None
        return Account(self.metrics, job.params.n, drafter, prompt)

    def speculation(self, wish: Speculation | None, *, predicted: bool) -> Speculative:
        """What drafts for a request: the server's drafter unless the client asks for another one that it may have.

        Raises:
            ApiError: 400 where the wish goes beyond the operator's limits.
        """
        if wish is None:
            return {"method": "prediction"} if predicted else None
        if not wish.enabled:
            return False
        own = self.engine.llm.speculative
        most = self.settings.max_speculative_tokens
        if wish.num_speculative_tokens is not None and wish.num_speculative_tokens > most:
            raise bad_request(
                f"num_speculative_tokens is at most {most} here, got {wish.num_speculative_tokens}",
                "speculative.num_speculative_tokens",
            )
        name = wish.drafter or (own.method if own is not None else None)
        if name is None:
            raise bad_request(
                "the server has no drafter of its own; name one: " + self._choices(), "speculative.drafter"
            )
        offered = name in self.settings.client_drafters or (own is not None and name == own.method)
        if not offered:
            raise bad_request(f"drafter {name!r} is not offered; offered: {self._choices()}", "speculative.drafter")
        base = own.drafter_options if own is not None and name == own.method else {}
        asked = {"num_speculative_tokens": wish.num_speculative_tokens, "rule": wish.rule}
        return {"method": name, **base, **{key: value for key, value in asked.items() if value is not None}}

    def drafters(self) -> list[str]:
        """What a request may choose from, the server's own drafter first."""
        own = self._engine.llm.speculative if self._engine is not None else None
        mine = [own.method] if own is not None else []
        return list(dict.fromkeys([*mine, *(name for name in self.settings.client_drafters if name in DRAFTERS)]))

    def _choices(self) -> str:
        return ", ".join(self.drafters()) or "none"

    def _watch(self) -> None:
        gauges: dict[str, tuple[str, Callable[[AsyncLLM], float]]] = {
            "num_requests_running": ("Answers that hold a row.", lambda engine: engine.llm.engine.running),
            "num_requests_waiting": ("Answers that wait.", lambda engine: engine.llm.engine.waiting),
            "kv_cache_usage_perc": ("Share of the cache's slots in use.", _cache_use),
        }
        for name, (help_text, read) in gauges.items():
            self.metrics.watch(name, help_text, partial(self._read, read))
        counters: dict[str, tuple[str, Callable[[AsyncLLM], float]]] = {
            "num_preemptions": ("Times an answer gave its row back.", lambda engine: engine.llm.engine.preemptions),
            "prefix_cache_queries": ("Prompt tokens looked up.", lambda engine: engine.llm.engine.prefix_queries),
            "prefix_cache_hits": ("Prompt tokens found in the cache.", lambda engine: engine.llm.engine.prefix_hits),
        }
        for name, (help_text, read) in counters.items():
            self.metrics.watch_counter(name, help_text, partial(self._read, read))
        self.metrics.registry.register(AdaptationMetrics(self.settings.model_name, self._adaptation))

    def _adaptation(self) -> AdaptationStats | None:
        adaptation = self._engine.llm.adaptation if self._engine is not None else None
        return None if adaptation is None else adaptation.stats()

    def _read(self, read: Callable[[AsyncLLM], float]) -> float:
        return read(self._engine) if self._engine is not None else 0.0


def _cache_use(engine: AsyncLLM) -> float:
    target = engine.llm.target
    return sum(target.lengths) / (target.rows * target.slots)


async def collected(chunks: AsyncIterator[StreamChunk]) -> RequestOutput:
    """The whole answer."""
    output = None
    async for chunk in chunks:
        output = chunk.output or output
    assert output is not None, "a stream ends with its output"
    return output
