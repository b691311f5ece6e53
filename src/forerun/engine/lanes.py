"""Threads for what a request costs before it is queued, so that neither the engine nor an event loop waits for it."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from typing import TypeVar

T = TypeVar("T")

LARGE = 50_000
"""Characters, bytes or tokens from which on something is large: reading it then takes more than some milliseconds."""


class Lane(Enum):
    """Things of one kind wait for each other, and not for those of another kind."""

    SMALL = "small"
    LARGE = "large"
    GRAMMAR = "grammar"
    """Compiled in another process, for which the thread waits."""

    @classmethod
    def of(cls, size: int) -> Lane:
        """For something of so many characters, bytes or tokens."""
        return cls.LARGE if size >= LARGE else cls.SMALL


class Lanes:
    """A thread for each lane.

    What is large rests for as long as it took: while one thread runs Python, each operation of another one waits until
    it is let in, so that the engine would all but stand still under large requests that come one after the other.
    """

    def __init__(self, name: str) -> None:
        self._closed = False
        self._threads = {
            lane: ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{name}-{lane.value}") for lane in Lane
        }

    async def run(self, lane: Lane, task: Callable[[], T]) -> T:
        """What `task` returns; what it raises is raised here. A cancelled task that has begun runs to its end.

        Raises:
            RuntimeError: closed.
        """
        threads, work = self._threads[lane], partial(contextvars.copy_context().run, task)
        loop = asyncio.get_running_loop()
        took: list[float] = []
        done = loop.run_in_executor(threads, partial(_timed, work, took))
        if lane is Lane.LARGE:
            threads.submit(_rest, took)
        try:
            return await done
        except asyncio.CancelledError:
            waiting = asyncio.current_task()
            if self._closed and (waiting is None or not waiting.cancelling()):
                raise RuntimeError("the engine was closed") from None
            raise
        finally:
            del done  # whose error names this frame

    def close(self) -> None:
        """Take no more; what has not begun is dropped."""
        self._closed = True
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)


def _rest(took: list[float]) -> None:
    """For as long as the work before took; then give back its memory, which glibc would keep for the thread."""
    time.sleep(sum(took))
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _timed(work: Callable[[], T], took: list[float]) -> T:
    began = time.thread_time()
    try:
        return work()
    finally:
        took.append(time.thread_time() - began)
