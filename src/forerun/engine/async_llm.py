"""`AsyncLLM`: the same engine for asyncio. One worker thread steps it; requests join and leave between steps.

The worker goes from step to step by itself, and the event loop hands out what a step brought while the next one runs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from forerun.engine.llm import LLM, Speculative, as_list, as_params
from forerun.engine.prompts import Prompt
from forerun.errors import EngineError, SlowReaderError
from forerun.types import RequestOutput, SamplingParams, StreamChunk

_LOOK_S = 0.2
"""How often the worker looks whether the event loop that it waits for is still there."""


class _Inbox(asyncio.Queue[StreamChunk | BaseException]):
    """Chunks that wait for their reader."""

    def __init__(self, most: int | None) -> None:
        super().__init__()
        self._most, self._cut = most, False

    def deliver(self, chunk: StreamChunk) -> bool:
        """Put it in; False where the reader has fallen too far behind: the chunks then give way to an error.

        What is still on its way after that is dropped.
        """
        if self._cut:
            return True
        if self._most is None or self.qsize() < self._most:
            self.put_nowait(chunk)
            return True
        while not self.empty():
            self.get_nowait()
        self.put_nowait(SlowReaderError(f"{self._most} chunks were waiting to be read; the request was aborted"))
        self._cut = True
        return False


class _Handover:
    """From a thread to an event loop, one task at a time, so that the thread is never more than one ahead.

    A reader in the loop who keeps up then never finds the chunks of many steps at once.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        """What was last given something."""
        self._begun = threading.Event()
        """It has begun with that."""
        self._begun.set()

    def give(self, loop: asyncio.AbstractEventLoop, task: Callable[[], None]) -> None:
        """Have the loop do the task, once it has begun with the one before; nothing happens if it has been closed."""
        while not self._begun.wait(_LOOK_S):
            if self._loop is not None and self._loop.is_closed():
                break  # and will never begin
        self._loop = loop
        self._begun.clear()
        try:
            loop.call_soon_threadsafe(self._begin, task)
        except RuntimeError:  # closed: nobody waits
            self._begun.set()

    def _begin(self, task: Callable[[], None]) -> None:
        self._begun.set()
        task()


class AsyncLLM:
    """`LLM` with awaitable methods; takes the same arguments. Requests of many tasks share the batch.

    Use as ``async with AsyncLLM(...) as llm`` or call `close` at the end.
    """

    def __init__(self, model: Any, **keywords: Any) -> None:
        # The worker loads the model, too: OpenMP keeps threads of its own for every thread that computed something,
        # and once there are more of them than cores it puts each to sleep between any two operations.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forerun-engine")
        try:
            self.llm: LLM = self._worker.submit(partial(LLM, model, **keywords)).result()
        except BaseException:
            self._worker.shutdown(wait=False, cancel_futures=True)
            raise
        self._queues: dict[str, _Inbox] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        """Where the requests are waited for."""
        self._handover = _Handover()
        self._stepping = self._closed = False

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculative: Speculative = None,
        trace: bool = False,
        timeout_s: float | None = None,
    ) -> list[RequestOutput]:
        """`LLM.generate`; cancelling the task aborts its requests."""
        many = as_list(prompts)
        params = as_params(sampling_params, len(many))
        answers = (
            self._last(self.stream(prompt, own, speculative=speculative, trace=trace, timeout_s=timeout_s))
            for prompt, own in zip(many, params, strict=True)
        )
        return list(await asyncio.gather(*answers))

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], sampling_params: SamplingParams | None = None, **keywords: Any
    ) -> list[RequestOutput]:
        """`LLM.chat`."""
        return await self.generate(self.llm.chat_prompt(messages), sampling_params, **keywords)

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        speculative: Speculative = None,
        trace: bool = False,
        timeout_s: float | None = None,
        client: str | None = None,
        max_unread: int | None = None,
    ) -> AsyncGenerator[StreamChunk]:
        """`LLM.stream`; leaving the loop early aborts the request.

        Args:
            timeout_s: time from queueing to the end, seconds; see `LLM.generate`.
            client: rows are shared evenly among those who are named.
            max_unread: chunks kept for a caller who does not read; with one more the request is aborted and the
                stream ends with an error. None keeps them all.

        Raises:
            EngineError: a step failed, for all requests.
            NumericError: this request cannot go on; the others do.
            SlowReaderError: more than `max_unread` chunks were waiting.
        """
        params = sampling_params or SamplingParams()
        keywords = {"speculative": speculative, "trace": trace, "timeout_s": timeout_s, "client": client}

        def submit() -> str:
            # Its queue is there before any step can answer: the worker does one thing after the other.
            request_id = self.llm.submit(prompt, params, **keywords)  # type: ignore[arg-type]
            self._queues[request_id] = _Inbox(max_unread)
            self._go_on()
            return request_id

        self._loop = asyncio.get_running_loop()
        submitted = self._loop.run_in_executor(self._worker, submit)
        try:
            request_id = await asyncio.shield(submitted)
        except asyncio.CancelledError:
            submitted.add_done_callback(self._abandon)
            raise
        queue = self._queues[request_id]
        try:
            while True:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if item.output is not None:
                    return
        finally:
            self._leave(request_id)

    async def close(self) -> None:
        """Finish the step in progress and stop the worker; running requests end with an error."""
        self._closed = True
        self._fail(self._queues, RuntimeError("the engine was closed"))
        await asyncio.to_thread(self._worker.shutdown)
        if self.llm.adaptation is not None:
            await asyncio.to_thread(self.llm.adaptation.close)

    def _leave(self, request_id: str) -> None:
        del self._queues[request_id]
        self._worker.submit(self.llm.abort, request_id)

    def _abandon(self, submitted: asyncio.Future[str]) -> None:
        """Nobody waits any longer for a request that has just been queued."""
        if not submitted.cancelled() and submitted.exception() is None:
            self._leave(submitted.result())

    def _go_on(self) -> None:
        """In the worker: from now on step while there is work."""
        if not self._stepping:
            self._stepping = True
            self._worker.submit(self._step)

    def _step(self) -> None:
        """In the worker: one step. The next one waits its turn behind what was asked of the worker meanwhile."""
        self._stepping = False
        try:
            chunks = self.llm.engine.step() if self.llm.engine.busy else []
        except Exception as error:
            failure = EngineError(f"a step of the engine failed: {error}")
            failure.__cause__ = error
            self._hand_over(partial(self._fail, dict(self._queues), failure))
            return
        if chunks:
            self._hand_over(partial(self._deliver, chunks))
        if self.llm.engine.busy and not self._closed:
            self._go_on()

    def _hand_over(self, task: Callable[[], None]) -> None:
        """In the worker: let the loop do something."""
        assert self._loop is not None, "a request came from a loop"
        self._handover.give(self._loop, task)

    def _deliver(self, chunks: Sequence[StreamChunk]) -> None:
        """In the loop: hand each chunk to whoever waits for it."""
        for chunk in chunks:
            queue = self._queues.get(chunk.request_id)
            if queue is not None and chunk.error is not None:
                queue.put_nowait(chunk.error)
            elif queue is not None and not queue.deliver(chunk):
                self._worker.submit(self.llm.abort, chunk.request_id)

    @staticmethod
    def _fail(queues: Mapping[str, _Inbox], error: BaseException) -> None:
        for queue in list(queues.values()):
            queue.put_nowait(error)

    @staticmethod
    async def _last(chunks: AsyncIterator[StreamChunk]) -> RequestOutput:
        async for chunk in chunks:
            if chunk.output is not None:
                return chunk.output
        raise AssertionError("a stream ends with its output")
