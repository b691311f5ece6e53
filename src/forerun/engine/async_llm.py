"""`AsyncLLM`: the same engine for asyncio. One worker thread steps it; requests join and leave
between steps.

What a request costs before that (tokens, parameters, grammars) is done in threads of their own (`lanes`).
The worker goes from step to step by itself, and the event loop hands out what a step brought while the next one runs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack

from forerun.control.config import SpeculativeConfig
from forerun.engine.arguments import EngineArguments
from forerun.engine.completion import Request
from forerun.engine.llm import LLM, Conversation
from forerun.engine.prompts import Lanes, OneThread, Prompt, Speculative, pair_prompts
from forerun.errors import CLOSED, ArgumentError, EngineError, RequestError, SlowReaderError
from forerun.types import RequestOutput, SamplingParams, StreamChunk

T = TypeVar("T")
Mode = Literal["wait", "abort"]  # vLLM's names of what becomes of the answers that run
_Item = StreamChunk | Exception  # An error ends the request

_LOOK_S = 0.2  # How often the worker looks whether the event loop that it waits for is still there


class AsyncLLM:
    """An `LLM` with awaitable methods. It takes the same arguments, with `max_num_batched_tokens`
    None unless it is given, so that nobody waits long for a long prompt. Requests of many tasks
    share the batch, also those of several event loops.

    Use as ``async with AsyncLLM(...) as llm`` or call `close` at the end.
    """

    def __init__(self, model: Any, **keywords: Unpack[EngineArguments]) -> None:
        # The worker loads the model, too: OpenMP keeps threads of its own for every thread that computed something,
        # and once there are more of them than cores it puts each to sleep between any two operations.
        self._worker = _Worker()
        try:
            arguments: EngineArguments = {"max_num_batched_tokens": None, **keywords}
            load = partial(LLM, model, **arguments)
            self.llm: LLM = self._worker.submit(load).result()
        except BaseException:
            self._worker.shutdown(wait=False, cancel_futures=True)
            raise
        self._lanes = Lanes("forerun-prepare")
        self._inboxes: dict[str, _Inbox] = {}
        self._handover = _Handover()
        self._stepping = self._closed = False
        self._drained: Future[None] | None = None  # For whom requests are kept waiting; done when nothing runs

    @property
    def busy_s(self) -> float:
        """Seconds that the engine has been at its present step (a long prompt is read in many), or
        at taking in a request; 0 while it does neither.
        """
        return self._worker.busy_s

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
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Run `LLM.generate`; cancelling the task aborts its requests."""
        stream = partial(self.stream, speculative=speculative, trace=trace, timeout_s=timeout_s, cache_salt=cache_salt)
        requests = pair_prompts(prompts, sampling_params)
        return await all_or_none(whole_output(stream(prompt, params)) for prompt, params in requests)

    async def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **keywords: Any,
    ) -> list[RequestOutput]:
        """Run `LLM.chat`."""
        return await self.generate(self.llm.chat_prompts(messages), sampling_params, **keywords)

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        speculative: Speculative = None,
        trace: bool = False,
        timeout_s: float | None = None,
        cache_salt: str | None = None,
        client: str | None = None,
        user: str | None = None,
        priority: int = 0,
        max_unread: int | None = None,
    ) -> AsyncGenerator[StreamChunk]:
        """Run `LLM.stream`; leaving the loop early aborts the request.

        Args:
            timeout_s: see `LLM.generate`; it counts from the call, also while the prompt waits to become tokens.
            cache_salt: see `LLM.generate`.
            client, user, priority: see `LLM.submit`.
            max_unread: chunks of each of the `n` answers kept for a caller who does not read; with one more the request
                is aborted and the stream ends with an error. None keeps them all.

        Raises:
            EngineError: a step failed, or the engine was closed, for all requests.
            NumericError, RequestError: this request's numbers, or something else of it, failed; the others go on.
            SlowReaderError: more than `max_unread` x `n` chunks were waiting.
        """
        params, arrived = sampling_params or SamplingParams(), time.perf_counter()
        reader = self.llm.reader
        options: dict[str, Any] = {"speculative": speculative, "trace": trace, "timeout_s": timeout_s}
        work = partial(_raisable, partial(reader.request, next(reader.numbers), prompt, params, **options))
        loop = asyncio.get_running_loop()
        request = await self._lanes.run(reader.lane(prompt, params), work, client=client)
        request.queued_at = arrived
        request.belong(cache_salt=cache_salt, client=client, user=user, priority=priority)
        inbox = _Inbox(loop, None if max_unread is None else max_unread * request.params.n)
        submitted = loop.run_in_executor(self._worker, partial(_raisable, partial(self._submit, request, inbox)))
        try:
            request_id = await asyncio.shield(submitted)
        except asyncio.CancelledError:
            submitted.add_done_callback(self._abandon)
            raise
        finally:
            # Else an error would hold this frame, and the frame the error: with them the prompt would stay, until
            # Python looks for such circles.
            del submitted
        try:
            while True:
                item = await inbox.get()
                if isinstance(item, Exception):
                    try:
                        raise item
                    finally:
                        del item
                yield item
                if item.output is not None:
                    return
        finally:
            self._release(request_id)

    def offer(self, speculative: Mapping[str, Any]) -> None:
        """Build a drafter before any request asks for it; blocks until it is there or a
        ForerunError says why not.
        """
        self._worker.submit(self.llm.engine.drafting.ensure, SpeculativeConfig.parse(speculative)).result()

    async def load_drafter(self, model: str | Path) -> None:
        """`LLM.load_drafter`, between two steps: answers that run wait while the files are read."""
        await asyncio.wrap_future(self._worker.submit(self.llm.load_drafter, model))

    async def update_weights_from_disk(self, model_path: str | Path, *, mode: Mode = "wait") -> None:
        """`LLM.update_weights_from_disk`, once the answers that run have ended; requests that come meanwhile wait, and
        are answered with the new weights. Every answer is from one policy.

        Args:
            mode: ``"wait"`` lets the answers that run or wait come to their ends, ``"abort"`` ends them where they
                stand, with the finish reason ``"abort"``. Nothing happens to them if the checkpoint does not fit.

        Raises:
            ArgumentError: another update, or `sleep`, is under way.
        """
        opened = await self._by_worker(self.llm.engine.open_weights, model_path, self.llm.tokenizer)
        async with self._between_requests(mode):
            await self._by_worker(self.llm.engine.write_weights, opened)

    async def sleep(self, level: int = 1, *, mode: Mode = "abort") -> None:
        """`LLM.sleep`, once the answers that run have ended, see `update_weights_from_disk`."""
        async with self._between_requests(mode):
            await self._by_worker(self.llm.sleep, level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """`LLM.wake_up`."""
        await self._by_worker(self.llm.wake_up, tags)
        await self._by_worker(self._end_pause)

    async def close(self) -> None:
        """Finish the step in progress, stop the worker and free the memory, see `LLM.close`. Running
        requests, and all that come later, end with an EngineError.
        """
        self._closed = True
        self._lanes.close()
        if self._drained is not None and not self._drained.done():
            self._drained.set_exception(EngineError(CLOSED))
        for inbox in list(self._inboxes.values()):
            with suppress(RuntimeError):  # its loop was closed: nobody waits
                inbox.loop.call_soon_threadsafe(inbox.put_nowait, EngineError(CLOSED))
        await asyncio.to_thread(self._worker.shutdown)
        await asyncio.to_thread(self.llm.close)

    def _submit(self, request: Request, inbox: _Inbox) -> str:
        """Queue a request, in the worker. Its inbox is registered before any step can answer."""
        request_id = self.llm.queue(request)
        self._inboxes[request_id] = inbox
        if self._closed:  # maybe before that
            self._release(request_id)
            raise EngineError(CLOSED)
        self._go_on()
        return request_id

    async def _by_worker(self, task: Callable[..., T], *arguments: Any) -> T:
        """Run a task between two steps."""
        return await asyncio.wrap_future(self._worker.submit(task, *arguments))

    @asynccontextmanager
    async def _between_requests(self, mode: Mode) -> AsyncIterator[None]:
        """Keep new requests waiting while open, which begins when no answer runs any more."""
        drained = Future[None]()
        await self._by_worker(self._begin_pause, mode, drained)
        try:
            await asyncio.wrap_future(drained)
            yield
        finally:
            with suppress(EngineError):  # closed: nothing runs
                self._worker.submit(self._end_pause)

    def _begin_pause(self, mode: Mode, drained: Future[None]) -> None:
        """Keep new requests waiting, in the worker; `drained` is done once nothing runs."""
        if mode not in ("wait", "abort"):
            raise ArgumentError(
                f"mode {mode!r}: the answers that run are waited for ('wait') or end where they stand ('abort'); none "
                "goes on with other weights than it began with"
            )
        if self._drained is not None:
            raise ArgumentError("an update of the weights, or sleep, is under way already; try again when it has ended")
        self._drained = drained
        self.llm.engine.hold(cut=mode == "abort")
        self._go_on()

    def _end_pause(self) -> None:
        """Let go on what waits, in the worker, unless the engine sleeps."""
        self._drained = None
        if not self.llm.is_sleeping:
            self.llm.engine.resume()
            self._go_on()

    def _release(self, request_id: str) -> None:
        del self._inboxes[request_id]
        self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        with suppress(EngineError):  # closed: nothing runs
            self._worker.submit(self.llm.abort, request_id)

    def _abandon(self, submitted: asyncio.Future[str]) -> None:
        """Drop a request that has just been queued and that nobody waits for any longer."""
        if not submitted.cancelled() and submitted.exception() is None:
            self._release(submitted.result())

    def _go_on(self) -> None:
        """Step, in the worker, from now on while there is work."""
        if not self._stepping:
            self._stepping = True
            self._worker.submit(self._step)

    def _step(self) -> None:
        """Run one step, in the worker. The next one waits its turn behind what was asked of the
        worker meanwhile.
        """
        self._stepping = False
        try:
            chunks = self.llm.engine.step() if self.llm.engine.busy else []
        except BaseException as error:  # nobody looks at what the worker raises: all would wait for ever
            failure = EngineError(f"a step of the engine failed: {error}")
            failure.__cause__ = error
            self._hand_over((request_id, failure) for request_id in list(self._inboxes))
            if self._drained is not None and not self._drained.done():
                self._drained.set_exception(failure)
            return
        self._hand_over((chunk.request_id, chunk.error or chunk) for chunk in chunks)
        if self.llm.engine.busy and not self._closed:
            self._go_on()
        elif self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _hand_over(self, items: Iterable[tuple[str, _Item]]) -> None:
        """Pass each item with its request's id, in the worker, to the loop in which it is awaited."""
        loops = defaultdict[asyncio.AbstractEventLoop, list[tuple[str, _Item]]](list)
        for request_id, item in items:
            inbox = self._inboxes.get(request_id)
            if inbox is not None:
                loops[inbox.loop].append((request_id, item))
        for loop, own in loops.items():
            self._handover.give(loop, partial(self._deliver, own))

    def _deliver(self, items: Iterable[tuple[str, _Item]]) -> None:
        """Hand each item, in the loop, to the reader that waits for it."""
        for request_id, item in items:
            inbox = self._inboxes.get(request_id)
            if inbox is not None and not inbox.deliver(item):
                self._abort(request_id)


class _Inbox(asyncio.Queue[_Item]):
    """A queue of chunks that wait for their reader in an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int | None) -> None:
        super().__init__()
        self.loop, self._most, self._cut = loop, most, False

    def deliver(self, item: _Item) -> bool:
        """Add an item. Returns False if the reader has fallen too far behind: an error then
        replaces the chunks, and what is still on its way is dropped.
        """
        if self._cut:
            return True
        if self._most is None or self.qsize() < self._most or isinstance(item, Exception):
            self.put_nowait(item)
            return True
        while not self.empty():
            self.get_nowait()
        self.put_nowait(SlowReaderError(f"{self._most} chunks were waiting to be read; the request was aborted"))
        self._cut = True
        return False


class _Handover:
    """Hands tasks from a thread to event loops, one at a time: the thread is never more than one
    ahead, so a reader in the loop who keeps up never finds the chunks of many steps at once.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # The loop that was last given something
        self._done = threading.Event()  # With that: whoever it woke has a place in the loop before the next task
        self._done.set()

    def give(self, loop: asyncio.AbstractEventLoop, task: Callable[[], None]) -> None:
        """Have the loop do the task, once the one before is done, in whichever loop. A loop that
        has stopped is not waited for, and nothing happens if it has been closed.
        """
        while self._loop is not None and self._loop.is_running() and not self._done.wait(_LOOK_S):
            pass
        self._loop = loop
        self._done.clear()
        try:
            loop.call_soon_threadsafe(self._do, task)
        except RuntimeError:  # closed: nobody waits
            self._done.set()

    def _do(self, task: Callable[[], None]) -> None:
        try:
            task()
        finally:
            self._done.set()


class _Worker(OneThread):
    """A worker thread that knows for how long it has been at its task."""

    def __init__(self) -> None:
        super().__init__("forerun-engine")
        self._began: float | None = None

    @property
    def busy_s(self) -> float:
        """Seconds since it began its present task; 0 without one."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def submit(self, task: Callable[..., T], /, *arguments: Any, **keywords: Any) -> Future[T]:
        return super().submit(self._timed, partial(task, *arguments, **keywords))

    def _timed(self, task: Callable[[], T]) -> T:
        self._began = time.monotonic()
        try:
            return task()
        finally:
            self._began = None


def _raisable(work: Callable[[], T]) -> T:
    """Return the result of `work`. An error that no future carries, or that nobody behind it
    expects, becomes an error of the request.
    """
    try:
        return work()
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        raise RequestError.of(error) from error


async def all_or_none(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all. The first error cancels the others, and is raised when they have
    ended.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def whole_output(chunks: AsyncIterator[StreamChunk]) -> RequestOutput:
    """Read a stream to its end and return the whole output."""
    output = None
    async for chunk in chunks:
        output = chunk.output or output
    assert output is not None, "a stream ends with its output"
    return output
