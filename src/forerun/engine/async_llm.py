"""`AsyncLLM`: the same engine for asyncio. One worker thread steps it; requests join and leave between steps.

A request is prepared (tokenized, its parameters and grammar checked) in other threads (`Lanes`). While the worker runs
a step, the event loop delivers the chunks of the step before.
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
from forerun.engine.llm import LLM, Conversation, take_template_arguments
from forerun.engine.prompts import Lanes, OneThread, Prompt, Speculative, pair_prompts
from forerun.errors import CLOSED, ArgumentError, EngineError, RequestError, SlowReaderError, name_unknown_arguments
from forerun.other_engines import REQUEST_ARGUMENTS
from forerun.types import RequestOutput, SamplingParams, StreamChunk

T = TypeVar("T")
Mode = Literal["wait", "abort"]  # vLLM's names: let running requests finish, or abort them
_Item = StreamChunk | Exception  # An error ends the request

_LOOK_S = 0.2  # Interval at which the worker checks that the event loop that it waits for still runs


class AsyncLLM:
    """An `LLM` with awaitable methods. It takes the same arguments; `max_num_batched_tokens` is None by default, so
    that no request waits long for another one's prompt. Requests of all tasks and event loops share the batch.

    Use as ``async with AsyncLLM(...) as llm`` or call `close` at the end.
    """

    def __init__(self, model: Any, **keywords: Unpack[EngineArguments]) -> None:
        # The worker loads the model, too: OpenMP keeps a pool of threads for every thread that has computed something,
        # and with more threads than cores it puts each of them to sleep between any two operations.
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
        self._drained: Future[None] | None = None  # While admission is paused: done when nothing runs

    @property
    def busy_s(self) -> float:
        """Seconds since the engine began its current step, or began to queue a request; 0 while it is idle. A long
        prompt takes many steps.
        """
        return self._worker.busy_s

    __reduce__ = LLM.__reduce__

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @name_unknown_arguments(REQUEST_ARGUMENTS, "request_id")
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
        prompts = self.llm.chat_prompts(messages, **take_template_arguments(keywords))
        return await self.generate(prompts, sampling_params, **keywords)

    @name_unknown_arguments(REQUEST_ARGUMENTS, "request_id")
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
            timeout_s: see `LLM.generate`; it counts from the call on, tokenization included.
            cache_salt: see `LLM.generate`.
            client, user, priority: see `LLM.submit`.
            max_unread: most unread chunks of each of the `n` completions; with one more the request is aborted and the
                stream ends with an error. None: no limit.

        Raises:
            EngineError: a step failed, or the engine was closed, for all requests.
            NumericError, RequestError: this request failed; the others go on.
            SlowReaderError: more than `max_unread` x `n` chunks were unread.
        """
        params, arrived = sampling_params or SamplingParams(), time.perf_counter()
        reader = self.llm.reader
        options: dict[str, Any] = {"speculative": speculative, "trace": trace, "timeout_s": timeout_s}
        work = partial(_raisable, partial(reader.request, next(reader.numbers), prompt, params, **options))
        loop = asyncio.get_running_loop()
        request = await self._lanes.run(reader.lane(prompt, params), work, client=client)
        request.queued_at = arrived
        request.set_owner(cache_salt=cache_salt, client=client, user=user, priority=priority)
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
        """Build a drafter before a request names it. Blocks until it is built; raises ForerunError if that fails."""
        self._worker.submit(self.llm.engine.drafting.ensure, SpeculativeConfig.parse(speculative)).result()

    async def load_drafter(self, model: str | Path) -> None:
        """Run `LLM.load_drafter` between two steps; running requests wait while the files are read."""
        await asyncio.wrap_future(self._worker.submit(self.llm.load_drafter, model))

    async def update_weights_from_disk(self, model_path: str | Path, *, mode: Mode = "wait") -> None:
        """Run `LLM.update_weights_from_disk` once the present requests have ended. New requests wait, and get the new
        weights, so that every output is from one policy.

        Args:
            mode: ``"wait"`` lets running and waiting requests finish; ``"abort"`` ends them with the finish reason
                ``"abort"``. If the checkpoint does not fit, they are left alone.

        Raises:
            ArgumentError: another update, or `sleep`, is under way.
        """
        folder = Path(model_path).expanduser()
        weights = await self._by_worker(self.llm.target.open_weights, folder, self.llm.tokenizer)
        async with self._between_requests(mode):
            await self._by_worker(self.llm.engine.write_weights, weights, folder)

    async def sleep(self, level: int = 1, *, mode: Mode = "abort") -> None:
        """Run `LLM.sleep` once the present requests have ended, see `update_weights_from_disk`."""
        self.llm.check_sleep(level)  # Before requests end for it
        async with self._between_requests(mode):
            await self._by_worker(self.llm.sleep, level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """`LLM.wake_up`."""
        await self._by_worker(self.llm.wake_up, tags)
        await self._by_worker(self._resume)

    async def close(self) -> None:
        """Finish the step in progress, stop the worker and free the memory, see `LLM.close`. Running
        requests, and all that come later, end with an EngineError.
        """
        self._closed = True
        self._lanes.close()
        if self._drained is not None and not self._drained.done():
            self._drained.set_exception(EngineError(CLOSED))
        for inbox in list(self._inboxes.values()):
            with suppress(RuntimeError):  # Its loop was closed, so no task waits
                inbox.loop.call_soon_threadsafe(inbox.put_nowait, EngineError(CLOSED))
        await asyncio.to_thread(self._worker.shutdown)
        await asyncio.to_thread(self.llm.close)

    def _submit(self, request: Request, inbox: _Inbox) -> str:
        """Queue a request, in the worker. Its inbox is registered before a step can produce chunks for it."""
        request_id = self.llm.queue(request)
        self._inboxes[request_id] = inbox
        if self._closed:  # Perhaps before the inbox was registered
            self._release(request_id)
            raise EngineError(CLOSED)
        self._go_on()
        return request_id

    async def _by_worker(self, task: Callable[..., T], *arguments: Any) -> T:
        """Run a task between two steps."""
        return await asyncio.wrap_future(self._worker.submit(task, *arguments))

    @asynccontextmanager
    async def _between_requests(self, mode: Mode) -> AsyncIterator[None]:
        """Pause admission: the block runs once no request runs, and new requests wait until it ends."""
        drained = Future[None]()
        await self._by_worker(self._begin_pause, mode, drained)  # Raises where another pause has not ended
        try:
            await asyncio.wrap_future(drained)
            yield
        finally:
            with suppress(EngineError):  # It is closed, so nothing runs
                self._worker.submit(self._end_pause)

    def _begin_pause(self, mode: Mode, drained: Future[None]) -> None:
        """Pause admission, in the worker; `drained` is done once nothing runs."""
        if mode not in ("wait", "abort"):
            raise ArgumentError(
                f"mode {mode!r}: running requests finish first ('wait') or are aborted ('abort'); none continues with "
                "other weights than it began with"
            )
        if self._drained is not None:
            raise ArgumentError("an update of the weights, or sleep, is already running; try again when it has ended")
        self._drained = drained
        self.llm.engine.pause_admission(abort=mode == "abort")
        self._go_on()

    def _end_pause(self) -> None:
        """End the pause that `_begin_pause` began, in the worker."""
        self._drained = None
        self._resume()

    def _resume(self) -> None:
        """Resume admission, in the worker, unless the engine sleeps or a pause has not ended."""
        if self._drained is None and not self.llm.is_sleeping:
            self.llm.engine.resume_admission()
            self._go_on()

    def _release(self, request_id: str) -> None:
        del self._inboxes[request_id]
        self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        with suppress(EngineError):  # closed: nothing runs
            self._worker.submit(self.llm.abort, request_id)

    def _abandon(self, submitted: asyncio.Future[str]) -> None:
        """Abort a request whose caller was cancelled while it was being queued."""
        if not submitted.cancelled() and submitted.exception() is None:
            self._release(submitted.result())

    def _go_on(self) -> None:
        """Start stepping, in the worker, unless it is already; it continues while there is work."""
        if not self._stepping:
            self._stepping = True
            self._worker.submit(self._step)

    def _step(self) -> None:
        """Run one step, in the worker, and queue the next one behind the tasks that were submitted meanwhile."""
        self._stepping = False
        try:
            chunks = self.llm.engine.step() if self.llm.engine.busy else []
        except BaseException as error:  # Nothing reads the worker's exceptions: all readers would wait for ever
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
        """Pass each item, with its request's id, from the worker to the event loop of its reader."""
        loops = defaultdict[asyncio.AbstractEventLoop, list[tuple[str, _Item]]](list)
        for request_id, item in items:
            inbox = self._inboxes.get(request_id)
            if inbox is not None:
                loops[inbox.loop].append((request_id, item))
        for loop, of_loop in loops.items():
            self._handover.give(loop, partial(self._deliver, of_loop))

    def _deliver(self, items: Iterable[tuple[str, _Item]]) -> None:
        """Put each item, in the loop, into its reader's inbox."""
        for request_id, item in items:
            inbox = self._inboxes.get(request_id)
            if inbox is not None and not inbox.deliver(item):
                self._abort(request_id)


class _Inbox(asyncio.Queue[_Item]):
    """A queue of chunks for one reader in an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int | None) -> None:
        super().__init__()
        self.loop, self._most, self._cut = loop, most, False

    def deliver(self, item: _Item) -> bool:
        """Add an item. If the reader is too far behind, replace the chunks by an error, drop later items, and return
        False.
        """
        if self._cut:
            return True
        if self._most is None or self.qsize() < self._most or isinstance(item, Exception):
            self.put_nowait(item)
            return True
        while not self.empty():
            self.get_nowait()
        self.put_nowait(SlowReaderError(f"{self._most} chunks were unread; the request was aborted"))
        self._cut = True
        return False


class _Handover:
    """Passes tasks from a thread to event loops, one at a time: the thread is at most one task ahead, so a reader that
    keeps up never gets the chunks of many steps at once.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # The loop that got the latest task
        self._done = threading.Event()  # That task is done; the readers that it woke are scheduled before the next task
        self._done.set()

    def give(self, loop: asyncio.AbstractEventLoop, task: Callable[[], None]) -> None:
        """Run the task in the loop, after the previous task, which may be in another loop. A stopped loop is not waited
        for, and for a closed one nothing happens.
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
    """A worker thread that knows how long its current task has been running."""

    def __init__(self) -> None:
        super().__init__("forerun-engine")
        self._began: float | None = None

    @property
    def busy_s(self) -> float:
        """Seconds since it began its current task; 0 without one."""
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
    """Return the result of `work`. Exceptions that a future cannot carry, or that callers do not expect, are raised as
    errors of the request.
    """
    try:
        return work()
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        raise RequestError.of(error) from error


async def all_or_none(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all awaitables. The first error cancels the others and is raised once they have ended."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def whole_output(chunks: AsyncIterator[StreamChunk]) -> RequestOutput:
    """Read a stream to its end and return the output."""
    output = None
    async for chunk in chunks:
        output = chunk.output or output
    assert output is not None, "a stream ends with its output"
    return output
